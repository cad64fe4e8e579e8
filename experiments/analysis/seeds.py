"""A published ranking of models, compared with paired differences over seeds."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools

from kvjax.foundation.intervals import Estimate, difference


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models in their published order, and the difference measured here.

    Attributes:
      published: first minus second, as published.
      here: first minus second, paired by seed.
      neighbours: no other measured model is between them in the published order.
    """

    first: str
    second: str
    published: float
    here: Estimate
    neighbours: bool

    @property
    def verdict(self) -> str:
        if self.here.sign == 0:
            return "not distinguishable"
        return "as published" if self.here.sign > 0 else "the other way round"


def pairs(
    published: Mapping[str, float], measured: Mapping[str, Mapping[int, float]]
) -> list[Pair]:
    """Returns all pairs of models that are published and measured, in the published order.

    Args:
      measured: values by model and seed.
    """
    order = sorted((name for name in published if name in measured), key=lambda n: -published[n])
    all_pairs = []
    for (i, first), (j, second) in itertools.combinations(enumerate(order), 2):
        here = difference(measured[first], measured[second])
        if here is not None:
            gap = published[first] - published[second]
            all_pairs.append(Pair(first, second, gap, here, neighbours=j == i + 1))
    return all_pairs


def in_words(pairs: Sequence[Pair]) -> str:
    """Returns the verdicts on neighbouring models as one sentence."""
    by_verdict: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.neighbours:
            text = f"{pair.first} over {pair.second} ({pair.here.shown('+.2f')})"
            by_verdict.setdefault(pair.verdict, []).append(text)
    return "; ".join(f"{verdict}: {', '.join(each)}" for verdict, each in by_verdict.items())
