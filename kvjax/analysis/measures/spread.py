"""How numbers of many heads, layers and texts lie around their median."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spread:
    """Numbers by [layers, texts, heads]: the median of all, and how they lie around it.

    Attributes:
      low, high: quartiles over heads, of all layers and texts.
      between_texts: the standard deviation of each text's median; None of one text.
    """

    median: float
    low: float
    high: float
    between_texts: float | None


def spread(x_LBN: np.ndarray) -> Spread:
    """The spread of numbers by [layers, texts, heads]; nan are left out."""
    low, median, high = np.nanquantile(x_LBN, (0.25, 0.5, 0.75))
    by_text_B = np.nanmedian(x_LBN, axis=(0, 2))
    between = float(np.std(by_text_B)) if len(by_text_B) > 1 else None
    return Spread(float(median), float(low), float(high), between)
