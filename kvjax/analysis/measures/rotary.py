"""RoPE's pairs of channels as complex numbers: the first half of the rotated channels is real, the
second imaginary, and a turn is a factor. Channels that it does not turn are left as they are."""

import numpy as np


def rotate_pairs(x: np.ndarray, rotated: slice, factor: np.ndarray) -> np.ndarray:
    """[..., H] queries, keys or weights with each pair of channels by a factor.

    Args:
      factor: complex, [..., F] for F pairs, or what numpy spreads to that.
    """
    real, imaginary = np.split(x[..., rotated], 2, axis=-1)
    z = (real + 1j * imaginary) * factor
    found = x.copy()
    found[..., rotated] = np.concatenate([z.real, z.imag], axis=-1)
    return found


def to_complex_channels(x: np.ndarray, rotated: slice, axis: int = -1) -> np.ndarray:
    """An axis of channels with (x + iy)/√2 and (x - iy)/√2 in place of RoPE's pairs x, y.

    A unitary map, in which turns are diagonal; of the identity and axis 0 it is the map itself.
    """
    x = np.moveaxis(x, axis, -1)
    real, imaginary = np.split(x[..., rotated], 2, axis=-1)
    pairs = [(real + 1j * imaginary) / np.sqrt(2), (real - 1j * imaginary) / np.sqrt(2)]
    z = np.concatenate([x[..., : rotated.start], *pairs, x[..., rotated.stop :]], axis=-1)
    return np.moveaxis(z, -1, axis)


def phases(channels: int, rotated: slice, frequencies_F: np.ndarray) -> np.ndarray:
    """[H] radians per token of each channel of `diagonal`; 0 where nothing turns."""
    phase_H = np.zeros(channels)
    phase_H[rotated] = np.concatenate([frequencies_F, np.negative(frequencies_F)])
    return phase_H
