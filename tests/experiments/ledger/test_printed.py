"""Arithmetic on printed figures, which stand for all numbers that round to them."""

import pytest

from experiments.ledger import printed


@pytest.mark.parametrize(
    "figure, least, most",
    [("5.11", 5.105, 5.115), ("689.", 688.5, 689.5), ("0.0", -0.05, 0.05), ("689", 689, 689)],
)
def test_a_decimal_stands_for_a_span(figure, least, most):
    assert printed.span(figure) == pytest.approx((least, most))


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
    assert printed.Span(*one).meets(printed.Span(*other)) is meet


@pytest.mark.parametrize(
    "text, holds",
    [
        ("98.91 - 98.28 == 0.63", True),
        ("98.91 - 98.28 == 0.65", False),
        ("98.9 - 98.28 == 0.65", True),
        ("94.0 - 98.9 == -4.9", True),
        ("94.0 - 98.9 == -0.9", False),
        ("100 * (5.27 / 5.11 - 1) == 3.1", True),
        ("100 * (5.27 / 5.11 - 1) == 3.5", False),
        ("mean(0.5, 1.00) == 0.72", True),  # as little as 0.7225
        ("mean(0.5, 1.00) == 0.71", False),
        ("exp(1.63) == 5.11", True),
        ("exp(1.63) == 5.29", False),
        ("ceil(100 / (40 // 2.62)) == 7", True),
        ("100 * (1 - 8 / 256) == 97.", True),
        ("100 * (1 - 8 / 256) == 97", False),
        ("1 < 2.0 < 2", False),  # an inequality compares what is printed
        ("2 <= 2.0 <= 2", True),
        ("2.5 > 2 and 3 > 4", False),
    ],
)
def test_comparisons(text, holds):
    assert printed.holds(text) is holds


def test_values_and_what_is_no_arithmetic():
    assert printed.value("100 * (1 - 650 / 689)") == pytest.approx(5.66, abs=0.01)
    for text in ("open('x') == 1", "a == 1", "1 .real == 1"):
        with pytest.raises((ValueError, KeyError)):
            printed.holds(text)
