"""What a report is asked: on which texts, at which lengths, and beside what."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import numpy as np

from kvjax.convert.model import Model


@dataclasses.dataclass(frozen=True)
class Request:
    """What all reports share; each takes of it what it needs.

    Attributes:
      texts: by name the [T] int32 tokens of each, without what opens a text; each is as long as
        the longest length at least.
      lengths: tokens of the windows that texts are read in, ascending.
      beside: another model to compare with, one with the same shape and full heads, say.
      snapshots: a run's (step, model), ascending; there may be none.
      heads: (layer, head) of those whose maps are shown; none: those that stand out.
    """

    texts: Mapping[str, np.ndarray]
    lengths: tuple[int, ...]
    beside: Model | None = None
    snapshots: Sequence[tuple[int, Model]] = ()
    heads: tuple[tuple[int, int], ...] = ()
    seed: int = 0
