"""What numbers that are printed can be, as they are rounded: for claims about others' figures."""

from collections.abc import Sequence
import statistics
from typing import NamedTuple

from experiments.ledger.verdicts import Cases, OfItself

_EDGE = 1e-9  # a number on the edge rounds either way


class Span(NamedTuple):
    """From the least to the most."""

    least: float
    most: float

    def meets(self, other: "Span") -> bool:
        """Whether some number lies in both."""
        return max(self.least, other.least) <= min(self.most, other.most) + _EDGE


def span(printed: str) -> Span:
    """All numbers that round to what is printed."""
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    figure = float(printed.replace(",", ""))
    return Span(figure - half, figure + half)


def percent_more(printed: str, than: str) -> Span:
    """What one positive number can be more than another, % of the other."""
    one, other = span(printed), span(than)
    return Span(100 * (one.least / other.most - 1), 100 * (one.most / other.least - 1))


def ratio(printed: str, to: str) -> Span:
    """What one positive number can be of another."""
    one, other = span(printed), span(to)
    return Span(one.least / other.most, one.most / other.least)


def less(printed: str, other: str) -> Span:
    """What is left if another number is taken away."""
    one, away = span(printed), span(other)
    return Span(one.least - away.most, one.most - away.least)


def mean(printed: Sequence[str]) -> Span:
    """What the mean of several numbers can be."""
    spans = [span(number) for number in printed]
    return Span(statistics.mean(s.least for s in spans), statistics.mean(s.most for s in spans))


def same(printed: str, elsewhere: str) -> bool:
    """Whether both can be one number."""
    return span(printed).meets(span(elsewhere))


def twice(printed: str, elsewhere: str) -> OfItself:
    """A figure that stands in two places."""
    return OfItself(
        Cases(
            lambda: {"one figure": same(printed, elsewhere)},
            lambda: f"{printed} here, {elsewhere} there",
        )
    )
