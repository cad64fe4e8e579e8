"""Treats RoPE's channel pairs as complex numbers.

The first half of the rotated channels are the real parts, the second half the imaginary parts. A
rotation multiplies them by a complex factor. Other channels do not change.
"""

import numpy as np


def rotate_pairs(x: np.ndarray, rotated: slice, factor: np.ndarray) -> np.ndarray:
    """Multiplies each channel pair of [..., H] queries, keys or weights by a factor.

    Args:
      factor: complex, broadcastable to [..., F] for F pairs.
    """
    real, imaginary = np.split(x[..., rotated], 2, axis=-1)
    z = (real + 1j * imaginary) * factor
    result = x.copy()
    result[..., rotated] = np.concatenate([z.real, z.imag], axis=-1)
    return result


def to_complex_channels(x: np.ndarray, rotated: slice, axis: int = -1) -> np.ndarray:
    """Replaces RoPE's pairs x, y on an axis by (x + iy)/√2 and (x - iy)/√2.

    This map is unitary and makes rotations diagonal. Applied to an identity matrix on axis 0, it
    gives its own matrix.
    """
    x = np.moveaxis(x, axis, -1)
    real, imaginary = np.split(x[..., rotated], 2, axis=-1)
    pairs = [(real + 1j * imaginary) / np.sqrt(2), (real - 1j * imaginary) / np.sqrt(2)]
    z = np.concatenate([x[..., : rotated.start], *pairs, x[..., rotated.stop :]], axis=-1)
    return np.moveaxis(z, -1, axis)


def phases(channels: int, rotated: slice, frequencies_F: np.ndarray) -> np.ndarray:
    """Returns [H] radians per token of each complex channel; 0 for channels without RoPE."""
    phase_H = np.zeros(channels)
    phase_H[rotated] = np.concatenate([frequencies_F, np.negative(frequencies_F)])
    return phase_H
