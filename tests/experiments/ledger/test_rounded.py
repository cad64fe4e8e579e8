"""What printed numbers can be."""

import pytest

from experiments.ledger import rounded
from experiments.ledger.rounded import Span


@pytest.mark.parametrize(
    "printed, least, most",
    [
        ("5.11", 5.105, 5.115),
        ("689", 688.5, 689.5),
        ("10,000", 9999.5, 10000.5),
        ("0.0", -0.05, 0.05),
    ],
)
def test_a_printed_number_stands_for_a_span(printed, least, most):
    assert rounded.span(printed) == pytest.approx((least, most))


@pytest.mark.parametrize(
    "one, other, meet",
    [
        ((1, 2), (2, 3), True),  # an edge rounds either way
        ((2, 3), (1, 2), True),
        ((1, 4), (2, 3), True),
        ((1, 2), (2.1, 3), False),
        ((2.1, 3), (1, 2), False),
    ],
)
def test_spans_that_have_a_number_in_common_meet(one, other, meet):
    assert Span(*one).meets(Span(*other)) is meet


def test_percentages_ratios_differences_and_means_of_rounded_numbers():
    assert rounded.percent_more("5.27", "5.11") == pytest.approx(
        (100 * (5.265 / 5.115 - 1), 100 * (5.275 / 5.105 - 1))
    )
    assert rounded.ratio("2.9", "0.8") == pytest.approx((2.85 / 0.85, 2.95 / 0.75))
    assert rounded.less("98.91", "98.28") == pytest.approx((0.62, 0.64))
    assert rounded.mean(("0.5", "1.00")) == pytest.approx((0.7225, 0.7775))
