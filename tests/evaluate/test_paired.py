"""Differences between models on the same questions: exact tests, and intervals that agree."""

import itertools

import numpy as np
import pytest
import scipy.stats

from kvjax.evaluate import compare, paired
from kvjax.evaluate.task import TASKS
from kvjax.foundation.errors import UserError


def _verdicts(both: int, only_first: int, only_second: int, neither: int) -> np.ndarray:
    """Returns the verdicts [2, 1, questions] of two models of one seed each."""
    kinds, counts = [(1, 1), (1, 0), (0, 1), (0, 0)], (both, only_first, only_second, neither)
    return np.repeat(kinds, counts, axis=0).T[:, None]


def test_intervals_agree_with_mcnemars_test():
    for first, second in itertools.product(range(10), repeat=2):
        low, high = paired.interval(first, second, 48)
        p = paired.p_value(first, second)
        assert (low <= 0 <= high) == (p > 0.05), (first, second)
        if first + second:
            assert p == scipy.stats.binomtest(first, first + second).pvalue
    assert paired.p_value(4, 0) == 0.125 and paired.p_value(0, 0) == 1
    # Without discordant questions: the exact bound of a share whose observed value is 0.
    assert paired.interval(0, 0, 48)[1] == pytest.approx(1 - 0.025 ** (1 / 48))
    assert paired.interval(7, 0, 7)[1] == 1 and paired.interval(0, 7, 7)[0] == -1


def test_partial_credits():
    """Fractions continue the tests of verdicts, and agree with them where credits are 0 or 1."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        first_Q, second_Q = rng.integers(0, 5, (2, 24)) / 4
        ahead, behind = paired.advantages(first_Q, second_Q)
        assert ahead - behind == pytest.approx((first_Q - second_Q).sum())
        low, high = paired.interval(ahead, behind, 24)
        assert (low <= 0 <= high) == (paired.p_value(ahead, behind) > 0.05)
        assert low < (ahead - behind) / 24 < high
        bounds = [paired.p_value(f(ahead), f(behind)) for f in (np.floor, np.ceil)]
        assert 0.5 * min(bounds) < paired.p_value(ahead, behind) < 1.5 * max(bounds)
    assert paired.advantages(np.array([True, False, False]), np.array([False, True, True])) == (
        1,
        2,
    )
    whole, near = paired.p_value(9.0, 2.0), paired.p_value(9.000001, 2.000001)
    assert whole == scipy.stats.binomtest(9, 11).pvalue == pytest.approx(near, rel=1e-5)


def test_interval_coverage():
    """Enumerates the tables of a few questions under many pairs of models."""
    for questions in (5, 12):
        tables = np.array([(b, c) for b in range(questions + 1) for c in range(questions + 1 - b)])
        bounds = np.array([paired.interval(b, c, questions) for b, c in tables])
        cells = np.column_stack([tables, questions - tables.sum(axis=1)])
        coverage = []
        for b, c in itertools.product(np.linspace(0, 1, 14), repeat=2):
            if b + c <= 1:
                chances = scipy.stats.multinomial.pmf(cells, questions, [b, c, max(0, 1 - b - c)])
                inside = (bounds[:, 0] <= b - c + 1e-9) & (bounds[:, 1] >= b - c - 1e-9)
                coverage.append(chances[inside].sum())
        assert 0.95 <= min(coverage) and np.mean(coverage) < 0.995


def test_intervals_over_seeds():
    first, second = _verdicts(10, 9, 2, 9)
    one = paired.difference(first, second)
    low, high = paired.interval(9, 2, 30)
    assert one.score == pytest.approx((7 / 30, low, high))
    alike = paired.difference(np.repeat(first, 3, axis=0), np.repeat(second, 2, axis=0))
    assert alike.score == pytest.approx(one.score)

    shares = np.array([0.2, 0.5, 0.45, 0.6]), np.array([0.3, 0.25, 0.1])
    welch = scipy.stats.ttest_ind(*shares, equal_var=False).confidence_interval()
    found = paired.Difference(*shares, below=0, above=0).score
    assert found[1:] == pytest.approx(tuple(welch))
    both = paired.Difference(*shares, below=0.3, above=0.4).score
    assert (both.value - both.low) ** 2 == pytest.approx(0.3**2 + (found.value - found.low) ** 2)


def test_intervals_stay_within_bounds():
    """For two seeds far apart, Welch's interval alone exceeds [-1, 1]."""
    wild = paired.Difference(np.array([0.0, 0.5]), np.array([0.1, 0.7]), below=0.1, above=0.1)
    assert wild.score[1:] == (-1, 1)
    # A centred score is -chance/(1 - chance) to 1.
    centred = [wild.centred(0.5), wild.centred(0.2)]
    assert [each.score.high for each in centred] == [2, 1.25]
    assert paired.mean(centred).score[1:] == (-1.625, 1.625)


def test_independent_seeds_narrow_the_interval():
    """With independent verdicts of four seeds, questions add about half as much."""
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 4, 2000)) < 0.5
    many = paired.difference(first, second)
    one = paired.difference(first[:1], second[:1])
    assert many.below == pytest.approx(one.below / 2, rel=0.1)


def test_means_of_tasks():
    first, second = _verdicts(10, 9, 2, 9)
    task = paired.difference(first, second)
    mean = paired.mean([task] * 4)
    assert mean.score.value == task.score.value and mean.below == pytest.approx(task.below / 2)
    # A seed that is lucky is lucky in all tasks: the interval over seeds is no narrower.
    seeds = paired.Difference(np.array([0.2, 0.6]), np.array([0.3, 0.1]), 0, 0)
    assert paired.mean([seeds] * 4).score == pytest.approx(seeds.score)
    centred = task.centred(0.25)
    np.testing.assert_allclose(centred.score, np.array(task.score) / 0.75)


def _evaluated(right: dict[str, int], questions: int = 48) -> compare.Evaluated:
    """Returns an evaluation with the first `right[task]` questions of each task right."""
    verdicts = {t: {i: i < count for i in range(questions)} for t, count in right.items()}
    chances = {"core_a": 0.25, "core_b": 0.5}
    no_prompts = {task: {} for task in right}
    return compare.Evaluated("runs/x", no_prompts, verdicts, no_prompts, chances)


def test_compare():
    """A task with four discordant questions is not rejected; means over tasks follow."""
    both = dict.fromkeys([*TASKS, "core_a", "core_b"], 24)
    one = _evaluated(both | {"mmlu": 28, "core_a": 36, "gsm8k": 0})
    other = _evaluated(both | {"gsm8k": 6})
    found = compare.compare([one], [other])
    assert found["mmlu"]["p"] == 0.125 and found["mmlu"]["only_one"] == 4
    assert found["mmlu"]["difference"]["low"] < 0 < found["mmlu"]["difference"]["value"]
    assert found["combined"]["difference"]["value"] == pytest.approx((4 - 6) / 48 / 5)
    assert found["core"]["one"] == pytest.approx(((0.75 - 0.25) / 0.75 + 0) / 2)
    assert found["core"]["difference"]["low"] > 0
    # gsm8k, 6 against 0, has p = 0.031: significant alone, not among seven tests.
    assert found["gsm8k"]["p"] < 0.05
    notes = " ".join(compare.table(found, ["a"], ["b"]).notes)
    assert "core_a differs at 5 % after Holm's correction for 7." in notes
    seeds = compare.compare([one, one], [other, other])
    assert "p" not in seeds["mmlu"] and seeds["mmlu"]["difference"] == pytest.approx(
        found["mmlu"]["difference"]
    )
    elsewhere = _evaluated({"mmlu": 3}, questions=1)
    elsewhere.verdicts["mmlu"] = {48: True}
    with pytest.raises(UserError, match="--compare: the two sides have no questions in"):
        compare.compare([one], [elsewhere])
    elsewhere.identities["gsm8k"], elsewhere.verdicts["gsm8k"] = {}, {2: True, 0: False, 50: True}
    (gsm8k,) = compare.compare([one], [elsewhere]).values()
    assert (gsm8k["rows"], gsm8k["one"], gsm8k["other"]) == (2, 0, 0.5)
