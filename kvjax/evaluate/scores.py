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


def standard_error(right: int, count: int) -> float:
    share = right / count
    return math.sqrt(share * (1 - share) / count)


def combined(found: Mapping[str, tuple[int, int]]) -> Score | None:
    """The plain mean of the five accuracies (LRKV, Table 3); None unless all five are there.

    Args:
      found: by task, right answers and questions.
    """
    if not found.keys() >= TASKS.keys():
        return None
    shares = [found[name][0] / found[name][1] for name in TASKS]
    error = math.hypot(*(standard_error(*found[name]) for name in TASKS)) / len(TASKS)
    mean = float(np.mean(shares))
    return Score(mean, mean - _Z * error, mean + _Z * error)


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


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that one of k samples is right, from `right` of `count`: 1 - C(n-c,k)/C(n,k).

    As the product that neither overflows nor cancels (Chen et al., 2021, arXiv 2107.03374).
    """
    if not 1 <= k <= count or not 0 <= right <= count:
        raise ValueError(f"k = {k} of {count} samples, {right} right")
    if count - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(count - right + 1, count + 1))


def differences(
    one: Sequence[np.ndarray], other: Sequence[np.ndarray], *, samples: int = 10_000, seed: int = 0
) -> np.ndarray:
    """[samples] shares of right answers of one model less those of another: a paired bootstrap.

    Questions are drawn anew, for both alike; and of several seeds each model's seeds are drawn too.

    Args:
      one, other: per seed, [Q] verdicts of the same questions, 0 or 1.
    """
    # Questions with the same verdicts are alike: how many of each kind are drawn is enough.
    verdicts_QK = np.stack([*one, *other], axis=1).astype(np.int8)
    kinds_PK, counts_P = np.unique(verdicts_QK, axis=0, return_counts=True)
    rng, Q = np.random.default_rng(seed), len(verdicts_QK)
    drawn_SP = rng.multinomial(Q, counts_P / Q, size=samples)
    by_seed_SK = drawn_SP @ kinds_PK / Q
    shares = []
    for seeds_SK in (by_seed_SK[:, : len(one)], by_seed_SK[:, len(one) :]):
        drawn_SK = rng.integers(seeds_SK.shape[1], size=seeds_SK.shape)
        shares.append(np.take_along_axis(seeds_SK, drawn_SK, axis=1).mean(axis=1))
    return shares[0] - shares[1]


def interval(value: float, samples: np.ndarray) -> Score:
    """A value, and what holds 95 % of the samples of it."""
    low, high = np.quantile(samples, [0.025, 0.975])
    return Score(value, float(low), float(high))
