"""Pairs of channels as complex numbers, against rotations of the plane."""

import numpy as np
import pytest

from kvjax.analysis.measures import rotary

H, ROTATED = 8, slice(1, 7)  # channels 1 and 4, 2 and 5, 3 and 6 are pairs
FREQUENCIES_F = np.array([0.3, 1.0, -0.2])


def _rotation(distance):
    """Returns the [H, H] matrix that rotates rows of channels by a distance in tokens."""
    rotation_HH = np.eye(H)
    for real, frequency in zip((1, 2, 3), FREQUENCIES_F, strict=True):
        c, s = np.cos(distance * frequency), np.sin(distance * frequency)
        rotation_HH[np.ix_((real, real + 3), (real, real + 3))] = [[c, s], [-s, c]]
    return rotation_HH


@pytest.mark.parametrize("distance", (1, 5))
def test_turned(distance):
    x_TNH = np.random.default_rng(0).normal(size=(4, 2, H))
    before = x_TNH.copy()
    found = rotary.rotate_pairs(x_TNH, ROTATED, np.exp(1j * distance * FREQUENCIES_F))
    np.testing.assert_allclose(found, x_TNH @ _rotation(distance), atol=1e-14)
    np.testing.assert_array_equal(x_TNH, before)


def test_turned_by_positions():
    x_TNH = np.random.default_rng(0).normal(size=(4, 2, H))
    angles_TF = np.outer(np.arange(4), FREQUENCIES_F)
    found = rotary.rotate_pairs(x_TNH, ROTATED, np.exp(1j * angles_TF)[:, None])
    expected = np.stack([x_TNH[t] @ _rotation(t) for t in range(4)])
    np.testing.assert_allclose(found, expected, atol=1e-14)


def test_turns_are_diagonal():
    """After the unitary map to complex channels, rotations multiply by the phases."""
    to_HH = rotary.to_complex_channels(np.eye(H), ROTATED, 0)
    np.testing.assert_allclose(to_HH @ to_HH.conj().T, np.eye(H), atol=1e-15)
    phase_H = rotary.phases(H, ROTATED, FREQUENCIES_F)
    found = to_HH @ _rotation(5).T @ to_HH.conj().T  # of columns
    np.testing.assert_allclose(found, np.diag(np.exp(5j * phase_H)), atol=1e-14)
    assert phase_H[0] == phase_H[-1] == 0


def test_diagonal_of_an_axis():
    x_HTH = np.random.default_rng(0).normal(size=(H, 3, H))
    to_HH = rotary.to_complex_channels(np.eye(H), ROTATED, 0)
    first, last = (rotary.to_complex_channels(x_HTH, ROTATED, axis) for axis in (0, -1))
    np.testing.assert_allclose(first, np.tensordot(to_HH, x_HTH, 1), atol=1e-14)
    np.testing.assert_allclose(last, x_HTH @ to_HH.T, atol=1e-14)
