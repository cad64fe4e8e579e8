"""Refuses weights that are NaN or infinite, where they are read."""

import numpy as np

from kvjax.foundation.errors import UserError


def check_finite(array: np.ndarray, name: str, advice: str) -> np.ndarray:
    """Returns the array, or raises a UserError if values of it are not finite.

    Args:
      name: file and weight, the start of the message.
      advice: end of the message.
    """
    wrong = array.size - np.count_nonzero(np.isfinite(array))
    if wrong:
        raise UserError(
            f"{name} has {wrong:,} of {array.size:,} values that are not finite: {advice}"
        )
    return array
