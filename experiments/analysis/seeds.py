"""Numbers of several seeds: means with intervals, paired differences, and an order held to them."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import statistics

from experiments.studies.tiny_comparison import half_interval


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of one number for each seed.

    Attributes:
      half: half the width of its 95 % interval, Student's t over seeds; None of one seed.
    """

    mean: float
    half: float | None

    @property
    def sign(self) -> int:
        """1 or -1 where the interval leaves 0 out on one side; 0 where it does not."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def shown(self, digits: str = ".2f") -> str:
        """As cells have it: 98.12 ± 0.40."""
        more = "" if self.half is None else f" ± {self.half:{digits.lstrip('+')}}"
        return f"{self.mean:{digits}}{more}"


def estimate(values: Sequence[float]) -> Estimate:
    return Estimate(statistics.mean(values), half_interval(list(values)))


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """First less second, seed by seed, of the seeds that both have; None where there is none.

    Args:
      first, second: by seed.
    """
    both = [first[seed] - second[seed] for seed in first if seed in second]
    return estimate(both) if both else None


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models in an order that somebody gave, and what is found of it here.

    Attributes:
      published: by how much the first is above the second there.
      here: first less second, seed by seed.
      neighbours: whether no other model stands between them there.
    """

    first: str
    second: str
    published: float
    here: Estimate
    neighbours: bool

    @property
    def verdict(self) -> str:
        if self.here.sign == 0:
            return "not told apart"
        return "as published" if self.here.sign > 0 else "the other way round"


def pairs(
    published: Mapping[str, float], measured: Mapping[str, Mapping[int, float]]
) -> list[Pair]:
    """All pairs of what both have, in the published order, highest first.

    Args:
      measured: by model and seed.
    """
    order = sorted((name for name in published if name in measured), key=lambda n: -published[n])
    found = []
    for (i, first), (j, second) in itertools.combinations(enumerate(order), 2):
        here = difference(measured[first], measured[second])
        if here is not None:
            gap = published[first] - published[second]
            found.append(Pair(first, second, gap, here, neighbours=j == i + 1))
    return found


def in_words(found: Sequence[Pair]) -> str:
    """What holds of the neighbours in an order."""
    by_verdict: dict[str, list[str]] = {}
    for pair in found:
        if pair.neighbours:
            said = f"{pair.first} over {pair.second} ({pair.here.shown('+.2f')})"
            by_verdict.setdefault(pair.verdict, []).append(said)
    return "; ".join(f"{verdict}: {', '.join(each)}" for verdict, each in by_verdict.items())
