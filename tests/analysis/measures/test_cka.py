"""Centred kernel alignment against the estimator's definition, and what it must not see."""

import numpy as np
import pytest

from kvjax.analysis.measures import cka

T = 20


def _features(*widths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(T, D)) + rng.normal(size=D) for D in widths]


def _hsic(x_TD, y_TD):
    """Song et al. 2012, equation 5, on plain Gram matrices without their diagonals."""
    K, L = (x @ x.T for x in (x_TD, y_TD))
    np.fill_diagonal(K, 0)
    np.fill_diagonal(L, 0)
    ones = np.ones(T)
    whole = (ones @ K @ ones) * (ones @ L @ ones) / ((T - 1) * (T - 2))
    return (np.trace(K @ L) + whole - 2 / (T - 2) * ones @ K @ L @ ones) / (T * (T - 3))


@pytest.mark.parametrize("widths", [(3, 5), (3, 50), (40, 60)])
def test_it_is_the_estimator(widths):
    """With Gram matrices of tokens and of channels."""
    x_TD, y_TD = _features(*widths)
    y_TD = y_TD + x_TD @ np.random.default_rng(9).normal(size=(widths[0], widths[1]))
    found_FF = cka.linear_cka([x_TD, y_TD])
    expected = _hsic(x_TD, y_TD) / np.sqrt(_hsic(x_TD, x_TD) * _hsic(y_TD, y_TD))
    assert found_FF[0, 1] == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(np.diagonal(found_FF), 1)
    np.testing.assert_allclose(found_FF, found_FF.T, rtol=1e-12)


@pytest.mark.parametrize("width", [4, 50])
def test_rotations_shifts_and_sizes_change_nothing(width):
    x_TD, y_TD = _features(width, width)
    rng = np.random.default_rng(1)
    turn_DD = np.linalg.qr(rng.normal(size=(width, width)))[0]
    turned_TD = 3 * x_TD @ turn_DD + rng.normal(size=width)
    assert cka.linear_cka([x_TD, turned_TD])[0, 1] == pytest.approx(1)
    before, behind = (cka.linear_cka([one, y_TD])[0, 1] for one in (x_TD, turned_TD))
    assert behind == pytest.approx(before, abs=1e-9)
    if width == 4:
        stretched = cka.linear_cka([x_TD * [9, 1, 1, 1], y_TD])[0, 1]
        assert abs(stretched - before) > 1e-3  # channels of their own size do


def test_unrelated_features_are_zero_on_average():
    """Where the plain estimate would say a half: as many channels as tokens."""
    found = [cka.linear_cka(_features(T, T, seed=seed))[0, 1] for seed in range(100)]
    assert abs(np.mean(found)) < 3 * np.std(found) / 10 + 0.01
    x, y = (one - one.mean(axis=0) for one in _features(T, T))
    plain = np.linalg.norm(x.T @ y) ** 2
    plain /= np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    assert plain > 0.4


def test_features_of_nothing_have_no_number():
    """What is the same of all tokens, up to rounding, is compared with nothing."""
    x_TD, same_TD = _features(4)[0], np.full((T, 4), 0.1)
    found_FF = cka.linear_cka([x_TD, same_TD])
    assert found_FF[0, 0] == pytest.approx(1) and np.isnan(found_FF[[0, 1, 1], [1, 0, 1]]).all()
    with pytest.raises(ValueError, match="3 tokens: at least 4"):
        cka.linear_cka([x_TD[:3]])
