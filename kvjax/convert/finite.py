"""Refuses weights that are NaN or infinite, where they are read."""

import numpy as np

from kvjax.foundation.errors import UserError
from kvjax.layers.weight import Axes

HEADS = {"N": "query heads", "K": "KV heads", "J": "bases (KV heads where there are no residuals)"}
_CHUNK = 1 << 18  # values whose copy fits a core's cache


def check_finite(array: np.ndarray, name: str, advice: str, axes: Axes | None = None) -> np.ndarray:
    """Returns the array, or raises a UserError if values of it are not finite.

    Args:
      name: file and weight, the start of the message.
      advice: end of the message.
      axes: of a weight; the message then names the heads or bases affected.
    """
    wrong = _not_finite(array)
    if wrong:
        raise UserError(
            f"{name} has {wrong:,} of {array.size:,} values that are not finite"
            f"{_where(array, axes) if axes else ''}: {advice}"
        )
    return array


def _where(array: np.ndarray, axes: Axes) -> str:
    """Returns the heads or bases that have such values, as ", of KV heads [2]"."""
    wrong = ~np.isfinite(array.astype(np.float32))
    places = []
    for axis, letter in enumerate(axes.names):
        if letter in HEADS:
            others = tuple(i for i in range(array.ndim) if i != axis)
            indices = np.flatnonzero(wrong.any(axis=others)).tolist()
            places.append(f", of {HEADS[letter]} {indices}")
    return "".join(places)


def _not_finite(array: np.ndarray) -> int:
    """Counts NaN and infinite values: all bits of the exponent are set."""
    unsigned = np.dtype(f"u{array.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(unsigned)
    bits = array.reshape(-1).view(unsigned)
    chunks = (bits[i : i + _CHUNK] & exponent for i in range(0, bits.size, _CHUNK))
    return sum(int(np.count_nonzero(chunk == exponent)) for chunk in chunks)
