"""From verdicts to scores: accuracies with intervals, combined, ChatCORE, pass@k, differences."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

from kvjax.evaluate.task import TASKS

_Z = 1.959963984540054  # of a two-sided interval of 95 %


class Score(NamedTuple):
    """A share, and an interval of 95 % around it."""

    value: float
    low: float
    high: float


def accuracy(right: int, count: int) -> Score:
    """The share of right answers, with Wilson's interval: no bound leaves 0 to 1."""
    share, z2 = right / count, _Z * _Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return Score(share, max(0.0, middle - half), min(1.0, middle + half))


def combined(found: Mapping[str, tuple[int, int]]) -> Score | None:
    """The plain mean of the five accuracies (LRKV, Table 3); None unless all five are there.

    Its interval adds the squares of their distances to their own bounds (Zou and Donner, 2008).

    Args:
      found: by task, right answers and questions.
    """
    if not found.keys() >= TASKS.keys():
        return None
    each = [accuracy(*found[name]) for name in TASKS]
    mean = float(np.mean([score.value for score in each]))
    below = math.hypot(*(score.value - score.low for score in each)) / len(each)
    above = math.hypot(*(score.high - score.value for score in each)) / len(each)
    return Score(mean, mean - below, mean + above)


def chat_core(found: Mapping[str, tuple[int, int]]) -> float | None:
    """nanochat's ChatCORE: the mean of (a - b)/(1 - b), b what guessing scores."""
    if not found.keys() >= TASKS.keys():
        return None
    return float(
        np.mean(
            [centred(right / n, TASKS[t].chance) for t, (right, n) in found.items() if t in TASKS]
        )
    )


def centred(share: float, chance: float) -> float:
    """0 for guessing, 1 for everything right."""
    return (share - chance) / (1 - chance)


class Bootstrap:
    """Differences between two models over drawn questions, of any number of tasks.

    A model's seeds are drawn once for all tasks: a seed that is lucky is lucky in all of them.

    Args:
      one, other: how many seeds each model has.
    """

    def __init__(self, one: int, other: int, *, samples: int = 10_000, seed: int = 0):
        self._rng, self._samples = np.random.default_rng(seed), samples
        self._seeds_SK = [self._rng.integers(K, size=(samples, K)) for K in (one, other)]

    def differences(self, one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> np.ndarray:
        """[S] shares of right answers of the first less those of the second, of one task.

        Questions are drawn anew, for both alike.

        Args:
          one, other: per seed, [Q] verdicts of the same questions, 0 or 1.
        """
        # Questions with the same verdicts are alike: how many of each kind are drawn is enough.
        verdicts_QK = np.stack([*one, *other], axis=1).astype(np.int8)
        kinds_PK, counts_P = np.unique(verdicts_QK, axis=0, return_counts=True)
        Q = len(verdicts_QK)
        drawn_SP = self._rng.multinomial(Q, counts_P / Q, size=self._samples)
        by_seed_SK = drawn_SP @ kinds_PK / Q
        sides = (by_seed_SK[:, : len(one)], by_seed_SK[:, len(one) :])
        first_S, second_S = (
            np.take_along_axis(side_SK, seeds_SK, axis=1).mean(axis=1)
            for side_SK, seeds_SK in zip(sides, self._seeds_SK, strict=True)
        )
        return first_S - second_S


def interval(value: float, samples: np.ndarray) -> Score:
    """A value, and what holds 95 % of the samples of it."""
    low, high = np.quantile(samples, [0.025, 0.975])
    return Score(value, float(low), float(high))
