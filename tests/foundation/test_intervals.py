"""Means over seeds with intervals, and differences seed by seed."""

import pytest
from scipy import stats

from kvjax.foundation.intervals import Estimate, difference, estimate, holm, p_value


def test_an_estimate_is_the_mean_with_students_interval():
    values = [3.0, 5.0, 10.0]
    estimated = estimate(values)
    low, high = stats.t.interval(0.95, 2, loc=6.0, scale=stats.sem(values))
    assert estimated.mean == 6.0 and estimated.half == pytest.approx((high - low) / 2)
    assert estimate([4.0]) == Estimate(4.0, None)
    with pytest.raises(ValueError, match="one seed has no p-value"):
        p_value(Estimate(4.0, None), 1)
    assert p_value(estimated, 3) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert p_value(Estimate(estimated.half, estimated.half), 3) == pytest.approx(0.05)
    assert p_value(Estimate(-1.0, 0.0), 3) == 0 and p_value(Estimate(0.0, 0.0), 3) == 1


def test_the_sign_needs_an_interval_without_zero():
    cases = {1: Estimate(2.0, 1.9), -1: Estimate(-2.0, 1.9), 0: Estimate(2.0, 2.0)}
    assert {sign: case.sign for sign, case in cases.items()} == {1: 1, -1: -1, 0: 0}
    assert Estimate(2.0, None).sign == 0
    assert Estimate(0.0, 0.0).sign == 0
    assert Estimate(-2.0, 0.254).shown("+.1f") == "-2.0 ± 0.3"
    assert Estimate(2.0, 0.254).shown() == "2.00 ± 0.25" and Estimate(2.0, None).shown() == "2.00"


def test_another_unit_is_that_of_the_interval_too():
    assert Estimate(0.25, 0.5).times(100) == Estimate(25.0, 50.0)
    assert Estimate(0.25, None).times(100) == Estimate(25.0, None)


def test_differences_are_taken_seed_by_seed():
    differences = difference({0: 1.0, 1: 5.0, 2: 9.0}, {2: 8.0, 0: 0.0, 7: 3.0})
    assert differences == Estimate(1.0, 0.0)  # seeds 0 and 2 both differ by 1
    assert difference({0: 1.0}, {1: 1.0}) is None


def test_holms_correction():
    """Multiplies the i-th smallest of n p-values (i from 0) by n - i, keeping their order."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0] and holm([0.04]) == [0.04]
