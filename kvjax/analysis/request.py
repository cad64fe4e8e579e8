"""The input shared by all reports: texts, lengths, and a model to compare with."""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np

from kvjax.convert.model import LazyModel

PAPER_LENGTH = 256  # of logit spectra (arXiv 2604.04384)


@dataclasses.dataclass(frozen=True)
class Request:
    """Input of the reports; each uses what it needs.

    Attributes:
      texts: [T] int32 tokens by name, without a BOS token; each at least as long as the longest
        length.
      lengths: tokens of the windows that texts are read in, ascending.
      beside: another model to compare with, such as one of the same shape with full heads.
      snapshots: a run's (step, model) pairs, ascending; may be empty.
      heads: (layer, head) pairs whose maps are shown; empty: the most distinctive ones.
    """

    texts: Mapping[str, np.ndarray]
    lengths: tuple[int, ...]
    beside: LazyModel | None = None
    snapshots: Sequence[tuple[int, LazyModel]] = ()
    heads: tuple[tuple[int, int], ...] = ()
    seed: int = 0


def reference_length(lengths: Sequence[int]) -> int:
    """Returns the length nearest to the paper's."""
    return min(lengths, key=lambda length: abs(math.log(length / PAPER_LENGTH)))
