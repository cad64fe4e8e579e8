"""Differences between two models on the same questions, with 95 % intervals.

For two models: McNemar's exact test, and the interval of Fay and Lumbard (Statistics in Medicine
40, 2021), which excludes 0 if and only if the test rejects at 5 %. For means over tasks, squared
distances to the bounds are added (Zou and Donner, 2008). For several seeds, the square of Welch's t
interval over seeds is added.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import math

import numpy as np

from kvjax.evaluate import scores
from kvjax.evaluate.scores import Score

_TAIL = 0.025  # on either side of a 95 % interval
_NODES = 500  # quantiles of s, over which `_lower_bound` integrates


def p_value(only_first: float, only_second: float) -> float:
    """Returns the two-sided p-value of McNemar's exact test; 1 without discordant questions.

    Args:
      only_first, only_second: numbers of questions that only the first, and only the second model
        got right. Fractions (see `advantages`) use the binomial distribution's continuous form.
    """
    from scipy import special, stats

    total = only_first + only_second
    if not total:
        return 1.0
    if only_first % 1 or only_second % 1:
        more, fewer = max(only_first, only_second), min(only_first, only_second)
        return min(1.0, 2 * float(special.betainc(more, fewer + 1, 0.5)))
    return float(stats.binomtest(int(only_first), int(total)).pvalue)


def advantages(first_Q: np.ndarray, second_Q: np.ndarray) -> tuple[float, float]:
    """Returns how much more credit each model has than the other, summed over questions.

    For verdicts, these are the numbers of questions that only one model got right. Partial credits
    are treated as verdicts with the same mean difference. Verdicts vary at least as much, so tests
    and intervals are conservative.
    """
    difference_Q = np.subtract(first_Q, second_Q, dtype=float)
    return tuple(round(float(np.maximum(d_Q, 0).sum()), 9) for d_Q in (difference_Q, -difference_Q))


def interval(only_first: float, only_second: float, questions: int) -> tuple[float, float]:
    """Returns the 95 % interval of the first model's accuracy minus the second's."""
    return (
        _lower_bound(only_first, only_second, questions),
        -_lower_bound(only_second, only_first, questions),
    )


def _lower_bound(only_first: float, only_second: float, questions: int) -> float:
    """Returns the 2.5 % quantile of s·(2t - 1), with confidence distributions for s and t.

    t is the first model's share of the discordant questions, with the distribution of its
    Clopper-Pearson lower bound, Beta(only_first, only_second + 1). s is the share of discordant
    questions, with the distribution of its upper bound where the product is negative, and of its
    lower bound where it is positive.
    """
    from scipy import optimize, special

    discordant = only_first + only_second
    levels = (np.arange(_NODES) + 0.5) / _NODES
    concordant = max(0.0, round(questions - discordant, 9))
    if not only_first:  # t = 0
        return (
            -float(special.betaincinv(discordant + 1, concordant, 1 - _TAIL))
            if concordant
            else -1.0
        )
    upper_shares = (
        special.betaincinv(discordant + 1, concordant, levels) if concordant else np.ones(_NODES)
    )
    lower_shares = special.betaincinv(discordant, concordant + 1, levels)

    def excess(bound: float) -> float:
        shares = upper_shares if bound < 0 else lower_shares
        at_most = np.clip((1 + bound / shares) / 2, 0, 1)
        return float(special.betainc(only_first, only_second + 1, at_most).mean()) - _TAIL

    return float(optimize.brentq(excess, -1, 1))


@dataclasses.dataclass(frozen=True)
class Difference:
    """The score of one model minus that of another.

    Attributes:
      first_S, second_S: scores of each model's seeds.
      below, above: distances to the bounds of the interval over questions.
      most: largest possible difference: 1 for accuracies.
    """

    first_S: np.ndarray
    second_S: np.ndarray
    below: float
    above: float
    most: float = 1.0

    @property
    def score(self) -> Score:
        """The difference of means over seeds, with its interval over questions and seeds.

        Bounds are clipped to `most`, because Welch's t of few seeds can exceed it.
        """
        value = float(np.mean(self.first_S) - np.mean(self.second_S))
        seeds = _welch_half(self.first_S, self.second_S)
        low, high = value - math.hypot(self.below, seeds), value + math.hypot(self.above, seeds)
        return Score(value, max(low, -self.most), min(high, self.most))

    def centred(self, chance: float) -> "Difference":
        """Returns the difference of centred scores: 0 is guessing, 1 all right."""
        return Difference(
            scores.centred(self.first_S, chance),
            scores.centred(self.second_S, chance),
            self.below / (1 - chance),
            self.above / (1 - chance),
            self.most / (1 - chance),
        )


def difference(first_SQ: np.ndarray, second_SQ: np.ndarray) -> Difference:
    """Returns the difference of accuracies on one task.

    Distances to the bounds are means over all pairs of seeds, times a ratio of standard deviations
    over questions: that of the difference of seeds' means, divided by the mean one of single pairs.

    Args:
      first_SQ, second_SQ: verdicts or credits, 0 to 1, of each model's seeds on the same questions.
    """
    questions = first_SQ.shape[1]
    distances, deviations = [], []
    for first_Q, second_Q in itertools.product(first_SQ.astype(float), second_SQ.astype(float)):
        difference_Q = first_Q - second_Q
        low, high = interval(*advantages(first_Q, second_Q), questions)
        distances.append((difference_Q.mean() - low, high - difference_Q.mean()))
        deviations.append(difference_Q.std())
    mean_Q = first_SQ.mean(axis=0) - second_SQ.mean(axis=0)
    scale = mean_Q.std() / np.mean(deviations) if np.any(deviations) else 1.0
    below, above = scale * np.mean(distances, axis=0)
    return Difference(first_SQ.mean(axis=1), second_SQ.mean(axis=1), float(below), float(above))


def mean(differences: Sequence[Difference]) -> Difference:
    """Returns the difference of means over tasks.

    Tasks have different questions, so their distances add in quadrature; seeds are paired.
    """
    return Difference(
        np.mean([each.first_S for each in differences], axis=0),
        np.mean([each.second_S for each in differences], axis=0),
        math.hypot(*(each.below for each in differences)) / len(differences),
        math.hypot(*(each.above for each in differences)) / len(differences),
        float(np.mean([each.most for each in differences])),
    )


def _welch_half(first_S: np.ndarray, second_S: np.ndarray) -> float:
    """Returns half the width of Welch's 95 % interval over seeds; 0 for single seeds."""
    from scipy import special

    parts = [
        (np.var(each, ddof=1) / len(each), len(each) - 1)
        for each in (first_S, second_S)
        if len(each) > 1
    ]
    variance = sum(part for part, _ in parts)
    if not variance:
        return 0.0
    freedom = variance**2 / sum(part**2 / count for part, count in parts)
    return float(special.stdtrit(freedom, 1 - _TAIL) * math.sqrt(variance))
