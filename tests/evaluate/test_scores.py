"""Scores from verdicts."""

import math

import numpy as np
import pytest
import scipy.stats

from kvjax.evaluate import scores
from kvjax.evaluate.task import TASKS

# LRKV's Table 3, d36, in %: (the five tasks, combined as printed, ChatCORE computed from them).
TABLE_3 = {
    "MHA": ((66.6, 47.1, 39.3, 10.2, 13.4), 35.3, 0.255),
    "GQA-6": ((65.4, 49.6, 40.5, 10.0, 13.4), 35.8, 0.262),
    "MQA": ((65.2, 47.3, 40.2, 10.3, 3.7), 33.3, 0.235),
    "MLA": ((67.5, 51.5, 41.9, 10.8, 12.8), 36.9, 0.276),
    "LRKV-64": ((70.7, 53.8, 42.2, 11.3, 11.7), 37.9, 0.291),
}


def test_intervals_are_wilsons():
    for right, count in ((0, 7), (7, 7), (3, 10), (70, 281)):
        found = scores.accuracy(right, count)
        wilson = scipy.stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
        np.testing.assert_allclose(found[1:], (wilson.low, wilson.high), rtol=1e-12, atol=1e-15)
        assert found.value == right / count


def test_combined_and_chat_core_of_the_papers_table():
    for percents, combined, chat_core in TABLE_3.values():
        found = {
            task.name: (round(p * 10), 1000)
            for task, p in zip(TASKS.values(), percents, strict=True)
        }
        assert 100 * scores.combined(found).value == pytest.approx(combined, abs=0.051)
        assert scores.chat_core(found) == pytest.approx(chat_core, abs=6e-4)


def test_bounds_of_chat_core():
    everything = {name: (task.rows, task.rows) for name, task in TASKS.items()}
    assert scores.chat_core(everything) == 1
    guessed = {name: (task.chance * 4000, 4000) for name, task in TASKS.items()}
    assert scores.chat_core(guessed) == 0
    assert scores.combined({"mmlu": (1, 2)}) is None and scores.chat_core({"mmlu": (1, 2)}) is None


def test_interval_of_combined():
    found = {name: (40, 100) for name in TASKS}
    mean, each = scores.combined(found), scores.accuracy(40, 100)
    assert mean.high - mean.value == pytest.approx((each.high - each.value) / math.sqrt(5))
    none = scores.combined({name: (0, 100) for name in TASKS})
    assert none.low == pytest.approx(0, abs=1e-12) and none.high > 0.01  # as each task's own
