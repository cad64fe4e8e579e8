"""Weights that are NaN or infinite are refused where they are read."""

import numpy as np

from kvjax.foundation.errors import UserError

_PART = 1 << 18  # values of which a copy stays in a core's cache


def checked(array: np.ndarray, named: str, advice: str) -> np.ndarray:
    """The array.

    Args:
      named: file and name, the start of the error.
      advice: its end.

    Raises:
      UserError: values of it are not finite.
    """
    wrong = _not_finite(array)
    if wrong:
        raise UserError(
            f"{named} has {wrong:,} of {array.size:,} values that are not finite: {advice}"
        )
    return array


def _not_finite(array: np.ndarray) -> int:
    """How many values are NaN or infinite: those that have all bits of the exponent."""
    unsigned = np.dtype(f"u{array.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(unsigned)
    bits = array.reshape(-1).view(unsigned)
    parts = (bits[i : i + _PART] & exponent for i in range(0, bits.size, _PART))
    return sum(int(np.count_nonzero(part == exponent)) for part in parts)
