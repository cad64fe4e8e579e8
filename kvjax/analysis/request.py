"""The input that all reports share: texts, lengths, and a model to compare with."""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np

from kvjax.convert.model import LazyModel

PAPER_LENGTH = 256  # tokens that logit spectra (arXiv 2604.04384) measures


@dataclasses.dataclass(frozen=True)
class Request:
    """Input of the reports; each uses what it needs.

    Attributes:
      texts: [T] int32 tokens by name, without a BOS token. T is at least the longest of `lengths`.
      lengths: tokens per window of text, ascending.
      beside: another model to compare with, such as one of the same shape with full heads.
      snapshots: (step, model) of a run's snapshots, ascending; may be empty.
      heads: (layer, head) pairs to show as attention maps; empty: the most distinctive heads.
    """

    texts: Mapping[str, np.ndarray]
    lengths: tuple[int, ...]
    beside: LazyModel | None = None
    snapshots: Sequence[tuple[int, LazyModel]] = ()
    heads: tuple[tuple[int, int], ...] = ()
    seed: int = 0


def reference_length(lengths: Sequence[int]) -> int:
    """Returns the length nearest to PAPER_LENGTH, by ratio."""
    return min(lengths, key=lambda length: abs(math.log(length / PAPER_LENGTH)))
