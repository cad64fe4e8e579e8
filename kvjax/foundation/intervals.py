"""Means over seeds with 95 % intervals of Student's t; Holm's correction for several tests."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math

import numpy as np

LEVEL = 0.05  # significance level, matching 95 % intervals


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of one number per seed.

    Attributes:
      half: half the width of its 95 % interval (Student's t over seeds); None for one seed.
    """

    mean: float
    half: float | None

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def times(self, factor: float) -> "Estimate":
        """Returns the estimate in another unit."""
        return Estimate(factor * self.mean, None if self.half is None else factor * self.half)

    def shown(self, digits: str = ".2f") -> str:
        """Formats the estimate for a table: 98.12 ± 0.40."""
        more = "" if self.half is None else f" ± {self.half:{digits.lstrip('+')}}"
        return f"{self.mean:{digits}}{more}"


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value per seed with its interval; a single value has none."""
    mean, half = over_seeds(np.array(values, float)[:, None])
    return Estimate(float(mean[0]), None if half is None else float(half[0]))


def over_seeds(values_SX: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns means [X] of values [seeds, X] and their intervals' half widths (None: one seed)."""
    count = len(values_SX)
    mean = values_SX.mean(axis=0)
    if count < 2:
        return mean, None
    return mean, _t(count) * values_SX.std(axis=0, ddof=1) / math.sqrt(count)


@functools.cache
def _t(count: int) -> float:
    """Returns the two-sided 95 % quantile of Student's t for `count` samples."""
    from scipy import special

    return float(special.stdtrit(count - 1, 0.975))


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """Returns first minus second over the seeds that both have; None if they share no seed.

    Args:
      first, second: values by seed.
    """
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    return estimate(differences) if differences else None


def p_value(tested: Estimate, count: int) -> float:
    """Returns the two-sided p-value of Student's t test that a mean over `count` seeds is 0."""
    from scipy import special

    if tested.half is None:
        raise ValueError("one seed has no p-value")
    if not tested.half:
        return 0.0 if tested.mean else 1.0
    return float(2 * special.stdtr(count - 1, -abs(tested.mean) / tested.half * _t(count)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted by Holm's step-down method, in the given order."""
    order = np.argsort(p_values)
    remaining = np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.take(p_values, order) * remaining))
    return adjusted.tolist()
