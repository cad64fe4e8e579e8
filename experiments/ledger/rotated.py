"""RoPE of one vector in float64, for claims about what it stands between."""

import numpy as np


def rotated(x_H: np.ndarray, position: int) -> np.ndarray:
    """Pairs (i, i + H/2), each by an angle of its own."""
    half = len(x_H) // 2
    z_F = (x_H[:half] + 1j * x_H[half:]) * np.exp(1j * position * 0.1 ** np.arange(half))
    return np.concatenate([z_F.real, z_F.imag])
