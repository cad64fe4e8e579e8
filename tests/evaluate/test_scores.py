"""From verdicts to scores."""

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


@pytest.mark.parametrize(("right", "count"), [(0, 7), (7, 7), (3, 10), (70, 281)])
def test_intervals_are_wilsons(right, count):
    found = scores.accuracy(right, count)
    expected = scipy.stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose(found[1:], (expected.low, expected.high), rtol=1e-12, atol=1e-15)
    assert found.value == right / count


@pytest.mark.parametrize("name", TABLE_3)
def test_combined_and_chat_core_of_the_papers_table(name):
    percents, combined, chat_core = TABLE_3[name]
    found = {
        task.name: (round(p * 10), 1000) for task, p in zip(TASKS.values(), percents, strict=True)
    }
    assert 100 * scores.combined(found).value == pytest.approx(combined, abs=0.051)
    assert scores.chat_core(found) == pytest.approx(chat_core, abs=6e-4)


def test_chat_core_of_who_knows_all_and_of_who_guesses():
    everything = {name: (task.rows, task.rows) for name, task in TASKS.items()}
    assert scores.chat_core(everything) == 1
    guessed = {name: (task.chance * 4000, 4000) for name, task in TASKS.items()}
    assert scores.chat_core(guessed) == 0
    assert scores.combined({"mmlu": (1, 2)}) is None and scores.chat_core({"mmlu": (1, 2)}) is None


def test_the_interval_of_combined_is_that_of_a_mean():
    found = {name: (40, 100) for name in TASKS}
    mean, each = scores.combined(found), scores.accuracy(40, 100)
    assert mean.high - mean.value == pytest.approx((each.high - each.value) / math.sqrt(5))
    none = scores.combined({name: (0, 100) for name in TASKS})
    assert none.low == pytest.approx(0, abs=1e-12) and none.high > 0.01  # as each task's own


def test_differences_are_paired():
    """Two models that differ in 20 of 200 questions: the interval is that of those questions."""
    rng = np.random.default_rng(0)
    one = rng.random(200) < 0.5
    other = one.copy()
    other[np.flatnonzero(one)[:20]] = False
    found = scores.interval(0.1, scores.Bootstrap(1, 1).differences([one], [other]))
    half = 1.96 * math.sqrt(0.1 * 0.9 / 200)
    assert found.low == pytest.approx(0.1 - half, abs=0.01)
    assert found.high == pytest.approx(0.1 + half, abs=0.01)
    assert np.ptp(scores.Bootstrap(1, 1).differences([one], [one])) == 0


def test_seeds_are_drawn_too():
    """Seeds that differ make the interval wider than questions alone do."""
    alike = [np.arange(100) % 2 == 0] * 3
    far = [np.full(100, False), np.arange(100) % 2 == 0, np.full(100, True)]
    narrow, wide = (
        np.ptp(scores.Bootstrap(3, 3).differences(side, alike)) for side in (alike, far)
    )
    assert wide > 2 * narrow


def test_tasks_are_drawn_apart_and_seeds_together():
    """Five tasks alike: their mean varies less by questions, and not less by seeds."""
    rng = np.random.default_rng(1)
    one, other = rng.random(400) < 0.6, rng.random(400) < 0.4
    bootstrap = scores.Bootstrap(1, 1)
    tasks = [bootstrap.differences([one], [other]) for _ in range(5)]
    assert np.std(np.mean(tasks, axis=0)) < 0.55 * np.std(tasks[0])  # 1/sqrt(5) = 0.45
    far = [np.full(400, False), np.full(400, True), np.full(400, True)]
    bootstrap = scores.Bootstrap(3, 3)
    tasks = [bootstrap.differences(far, [one] * 3) for _ in range(5)]
    assert np.std(np.mean(tasks, axis=0)) > 0.9 * np.std(tasks[0])
