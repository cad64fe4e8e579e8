"""Means over seeds with intervals, paired differences, and orders held to them."""

import pytest
from scipy import stats

from experiments.analysis import seeds
from experiments.analysis.seeds import Estimate


def test_an_estimate_is_the_mean_with_students_interval():
    values = [3.0, 5.0, 10.0]
    found = seeds.estimate(values)
    low, high = stats.t.interval(0.95, 2, loc=6.0, scale=stats.sem(values))
    assert found.mean == 6.0 and found.half == pytest.approx((high - low) / 2)
    assert seeds.estimate([4.0]) == Estimate(4.0, None)


def test_only_an_interval_without_zero_tells_apart():
    cases = {1: Estimate(2.0, 1.9), -1: Estimate(-2.0, 1.9), 0: Estimate(2.0, 2.0)}
    assert {sign: one.sign for sign, one in cases.items()} == {1: 1, -1: -1, 0: 0}
    assert Estimate(2.0, None).sign == 0  # one seed tells nothing
    assert Estimate(0.0, 0.0).sign == 0
    assert Estimate(-2.0, 0.254).shown("+.1f") == "-2.0 ± 0.3"
    assert Estimate(2.0, None).shown() == "2.00"


def test_differences_are_taken_seed_by_seed():
    found = seeds.difference({0: 1.0, 1: 5.0, 2: 9.0}, {2: 8.0, 0: 0.0, 7: 3.0})
    assert found == Estimate(1.0, 0.0)  # seeds 0 and 2: 1 and 1, whatever the seeds' own spread
    assert seeds.difference({0: 1.0}, {1: 1.0}) is None


MEASURED = {
    "high": {0: 9.0, 1: 9.1, 2: 9.2},
    "middle": {0: 9.1, 1: 9.05, 2: 9.2},
    "low": {0: 4.0, 1: 4.1, 2: 4.3},
    "lowest": {0: 5.0, 1: 5.1, 2: 5.3},
    "unpublished": {0: 1.0},
}
PUBLISHED = dict(low=50.0, high=90.0, lowest=40.0, middle=80.0, unmeasured=95.0)


def test_an_order_is_held_to_every_pair():
    found = {(pair.first, pair.second): pair for pair in seeds.pairs(PUBLISHED, MEASURED)}
    assert list(found) == [
        *(("high", "middle"), ("high", "low"), ("high", "lowest")),
        *(("middle", "low"), ("middle", "lowest"), ("low", "lowest")),
    ]
    neighbours = [names for names, pair in found.items() if pair.neighbours]
    assert neighbours == [("high", "middle"), ("middle", "low"), ("low", "lowest")]
    verdicts = [found[names].verdict for names in neighbours]
    assert verdicts == ["not told apart", "as published", "the other way round"]
    assert found["high", "lowest"].published == 50.0
    assert found["low", "lowest"].here.mean == pytest.approx(-1.0)


def test_neighbours_in_words():
    said = seeds.in_words(seeds.pairs(PUBLISHED, MEASURED))
    assert said == (
        "not told apart: high over middle (-0.02 ± 0.19); as published: middle over low "
        "(+4.98 ± 0.26); the other way round: low over lowest (-1.00 ± 0.00)"
    )
