"""Weights that are NaN or infinite are refused where they are read."""

import numpy as np

from kvjax.foundation.errors import UserError
from kvjax.layers.weight import Axes

HEADS = dict(N="query heads", K="KV heads", J="bases (KV heads where there are no residuals)")
_PART = 1 << 18  # values of which a copy stays in a core's cache


def check_finite(
    array: np.ndarray, named: str, advice: str, axes: Axes | None = None
) -> np.ndarray:
    """The array.

    Args:
      named: file and name, the start of the error.
      advice: its end.
      axes: of a weight: then the error says of which heads or bases the values are.

    Raises:
      UserError: values of it are not finite.
    """
    wrong = _not_finite(array)
    if wrong:
        raise UserError(
            f"{named} has {wrong:,} of {array.size:,} values that are not finite"
            f"{_where(array, axes) if axes else ''}: {advice}"
        )
    return array


def _where(array: np.ndarray, axes: Axes) -> str:
    """The heads or bases that have such values, as ", of KV heads [2]"."""
    wrong = ~np.isfinite(array.astype(np.float32))
    said = []
    for axis, letter in enumerate(axes.names):
        if letter in HEADS:
            others = tuple(i for i in range(array.ndim) if i != axis)
            indices = np.flatnonzero(wrong.any(axis=others)).tolist()
            said.append(f", of {HEADS[letter]} {indices}")
    return "".join(said)


def _not_finite(array: np.ndarray) -> int:
    """How many values are NaN or infinite: those that have all bits of the exponent."""
    unsigned = np.dtype(f"u{array.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(unsigned)
    bits = array.reshape(-1).view(unsigned)
    parts = (bits[i : i + _PART] & exponent for i in range(0, bits.size, _PART))
    return sum(int(np.count_nonzero(part == exponent)) for part in parts)
