"""Computes medians and quartiles over heads, layers and texts."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles of numbers over layers, texts and heads.

    Attributes:
      median, low, high: median, lower and upper quartile.
      between_texts: standard deviation of the texts' medians; None for one text.
    """

    median: float
    low: float
    high: float
    between_texts: float | None


def spread(x_LBN: np.ndarray) -> Spread:
    """Returns the spread of numbers [layers, texts, heads], ignoring nan."""
    low, median, high = np.nanquantile(x_LBN, (0.25, 0.5, 0.75))
    by_text_B = np.nanmedian(x_LBN, axis=(0, 2))
    between = float(np.std(by_text_B)) if len(by_text_B) > 1 else None
    return Spread(float(median), float(low), float(high), between)
