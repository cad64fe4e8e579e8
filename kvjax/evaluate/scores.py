"""Scores of verdicts: accuracies with intervals, combined accuracy, ChatCORE."""

from collections.abc import Mapping, Sequence
import math
from typing import NamedTuple

import numpy as np

from kvjax.evaluate.task import TASKS

_Z = 1.959963984540054  # normal quantile of a two-sided 95 % interval


class Score(NamedTuple):
    """An accuracy or difference with its 95 % interval."""

    value: float
    low: float
    high: float


def credit(row: Mapping) -> float:
    """Returns what a saved row adds to its task's score: 0, 1, or RULER's share of the answers."""
    return row.get("score", row["right"])


def accuracy(right: float, count: int) -> Score:
    """Returns the share of right answers with Wilson's interval, which stays within 0 to 1.

    For partial credits the interval is conservative, since credits from 0 to 1 vary at most as much
    as verdicts with the same mean.

    Args:
      right: number of right answers, or sum of credits.
    """
    share, z2 = right / count, _Z * _Z
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return Score(share, max(0.0, center - half), min(1.0, center + half))


def combined(counts: Mapping[str, tuple[int, int]]) -> Score | None:
    """Returns the mean of the five accuracies (LRKV, Table 3); None if one of them is missing.

    Args:
      counts: (right answers, questions) by task.
    """
    if not counts.keys() >= TASKS.keys():
        return None
    return mean([accuracy(*counts[name]) for name in TASKS])


def mean(accuracies: Sequence[Score]) -> Score:
    """Returns the mean over tasks; distances to bounds add in quadrature (Zou and Donner, 2008)."""
    value = float(np.mean([score.value for score in accuracies]))
    below = math.hypot(*(score.value - score.low for score in accuracies)) / len(accuracies)
    above = math.hypot(*(score.high - score.value for score in accuracies)) / len(accuracies)
    return Score(value, value - below, value + above)


def chat_core(counts: Mapping[str, tuple[int, int]]) -> float | None:
    """Returns nanochat's ChatCORE: the mean of (accuracy - chance)/(1 - chance)."""
    if not counts.keys() >= TASKS.keys():
        return None
    scores = [
        centred(right / count, TASKS[name].chance)
        for name, (right, count) in counts.items()
        if name in TASKS
    ]
    return float(np.mean(scores))


def centred(share: float | np.ndarray, chance: float) -> float | np.ndarray:
    """Returns (share - chance)/(1 - chance): 0 for guessing, 1 for all right."""
    return (share - chance) / (1 - chance)
