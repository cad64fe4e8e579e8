"""Rules that turn results into verdicts; nothing here is decided by hand.

A rule reads `experiments/results/`, computes from shapes, or holds printed figures against each
other (`OfItself`, `Allows`). Without the result it needs, the verdict is "not measured yet".
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import typing
from typing import NamedTuple

from experiments.ledger.results import NoResultError, read
from kvjax.foundation.estimate import Estimate

REPRODUCED, CONTRADICTED, PART = "reproduced", "contradicted", "in part"
UNTOLD, FAR, UNDEFINED = "not told apart", "out of reach", "undefined"
CONSISTENT, INCONSISTENT = "consistent", "inconsistent"
MISSING = "not measured yet"
VERDICTS = {
    REPRODUCED: "ours, rounded to the paper's digits, is its figure; or our difference has the "
    "claimed sign, and its 95 % interval leaves 0 out; or equality is claimed, and the interval "
    "lies within the margin that the row names",
    CONTRADICTED: "it is not; or the interval leaves 0 out on the other side, or lies beyond the "
    "margin",
    PART: "some of several figures agree, or some of several cases hold",
    UNTOLD: "the interval of our difference contains 0, or reaches over the margin; or both "
    "solve the task whole",
    CONSISTENT: "the paper's own figures give it, as far as they are rounded; nothing was measured "
    "or computed from shapes here",
    INCONSISTENT: "they do not, or not in all cases",
    FAR: "of a size that was not trained here, or of weights, data or options that are not at "
    "hand; what would settle it stands there. What was found at demo size or in other models is "
    "said too, and settles nothing",
    UNDEFINED: "the text does not say what it means, or not in a way that can be measured",
    MISSING: "the command has not been run, or not with three seeds",
}
SEEDS = 3  # that a claim between models needs at least


class Found(NamedTuple):
    """What a rule comes to: a verdict, our figures, and what they mean."""

    verdict: str
    ours: str


class Rule(typing.Protocol):
    """What decides a claim."""

    def judge(self) -> Found: ...


def of_all(told: Collection[str]) -> str:
    """One verdict on several cases: in part, if some are as claimed and some are not."""
    if REPRODUCED in told or PART in told:
        return REPRODUCED if set(told) == {REPRODUCED} else PART
    return CONTRADICTED if CONTRADICTED in told else UNTOLD


def of_sign(found: int, claimed: int) -> str:
    """The verdict on a difference, by the sign that its interval leaves it: 1, -1, or 0."""
    if found == 0:
        return UNTOLD
    return REPRODUCED if found == claimed else CONTRADICTED


def _of_case(holds: bool) -> str:
    return REPRODUCED if holds else CONTRADICTED


@dataclasses.dataclass(frozen=True)
class Tabulated:
    """Figures of `paper_tables` under these titles: how many agree, to the printed digit."""

    titles: Sequence[str]
    only: Callable[[str], bool] = lambda _: True  # by their names, which of those figures

    def judge(self) -> Found:
        tables = read("paper_tables")["tables"]
        rows = [row for title in self.titles for row in tables[title] if self.only(row["what"])]
        assert rows, self
        agree = sum(row["agrees"] for row in rows)
        first = next((row for row in rows if not row["agrees"]), None)
        said = f"{agree} of {len(rows)} figures agree"
        if first:
            unit = f" {first['unit']}" if first["unit"] else ""
            ours, why = f"{first['ours']:,.4g}", first["verdict"].removeprefix("differs: ")
            said += f"; {first['what']}: {first['paper']} there, {ours}{unit} here: {why}"
        return Found(of_all([_of_case(row["agrees"]) for row in rows]), said)


@dataclasses.dataclass(frozen=True)
class Computed:
    """One number that follows from shapes, or inside `OfItself` from others that are printed.

    Attributes:
      published: as printed: its decimals are the precision compared.
    """

    published: str
    ours: Callable[[], float]
    why: str = ""

    def judge(self) -> Found:
        decimals = len(self.published.partition(".")[2])
        rounded = f"{self.ours():,.{decimals}f}"
        said = f"{rounded}: {self.why}" if self.why else rounded
        return Found(_of_case(rounded == self.published), said)


@dataclasses.dataclass(frozen=True)
class Differs:
    """A difference that has a sign, with its interval over seeds.

    Attributes:
      of: the difference; raises a NoResultError where there is none.
      sign: that is claimed, 1 or -1.
      scale: what was trained.
    """

    of: Callable[[], tuple[Estimate, int]]
    sign: int
    digits: str
    scale: str

    def judge(self) -> Found:
        found, seeds = self.of()
        said = _over_seeds(found, seeds, self.digits, self.scale)
        if seeds < SEEDS:
            return Found(MISSING, said)
        return Found(of_sign(found.sign, self.sign), said)


@dataclasses.dataclass(frozen=True)
class Same:
    """A difference that is none to speak of: its interval over seeds lies within a margin.

    Attributes:
      of, scale: as of `Differs`.
      margin: what the paper calls the same, in the difference's unit.
    """

    of: Callable[[], tuple[Estimate, int]]
    margin: float
    digits: str
    scale: str

    def judge(self) -> Found:
        found, seeds = self.of()
        said = _over_seeds(found, seeds, self.digits, self.scale)
        said += f", margin {self.margin:g}"
        if seeds < SEEDS or found.half is None:
            return Found(MISSING, said)
        return Found(_of_margin(found, self.margin), said)


def _of_margin(found: Estimate, margin: float) -> str:
    if abs(found.mean) + found.half <= margin:
        return REPRODUCED
    return CONTRADICTED if abs(found.mean) - found.half > margin else UNTOLD


@dataclasses.dataclass(frozen=True)
class AllSame:
    """Several such differences, all within one margin.

    Attributes:
      of: by name, as `Same.of` returns them.
      margin, digits, scale: as of `Same`.
    """

    of: Callable[[], Mapping[str, tuple[Estimate, int]]]
    margin: float
    digits: str
    scale: Callable[[], str]

    def judge(self) -> Found:
        tell = lambda found: _of_margin(found, self.margin)
        told, said, seeds = _several(self.of(), tell, self.digits)
        counts = f"{told.count(REPRODUCED)} of {len(told)} cases, margin {self.margin:g}"
        return Found(of_all(told), f"{counts}: {said} ({self.scale()}, {seeds} seeds)")


def _several(
    found: Mapping[str, tuple[Estimate, int]], tell: Callable[[Estimate], str], digits: str
) -> tuple[list[str], str, int]:
    """The verdict on each of several differences, a text of them all, the fewest seeds of one."""
    if not found or any(n < SEEDS or x.half is None for x, n in found.values()):
        raise NoResultError("differences")
    said = ", ".join(f"{name} {x.shown(digits)}" for name, (x, _) in found.items())
    return [tell(x) for x, _ in found.values()], said, min(n for _, n in found.values())


def _over_seeds(found: Estimate, seeds: int, digits: str, scale: str) -> str:
    so_far = "" if seeds >= SEEDS else "so far "
    return f"{so_far}{found.shown(digits)} ({scale}, {seeds} seed{'s' * (seeds != 1)})"


@dataclasses.dataclass(frozen=True)
class Cases:
    """Several cases that each hold or do not."""

    of: Callable[[], Mapping[str, bool]]
    figures: Callable[[], str]

    def judge(self) -> Found:
        found = self.of()
        if not found:
            raise NoResultError("no cases")
        verdict = of_all([_of_case(holds) for holds in found.values()])
        return Found(verdict, f"{sum(found.values())} of {len(found)} cases; {self.figures()}")


@dataclasses.dataclass(frozen=True)
class Allows:
    """A figure that others of the paper's bear out, as far as they are rounded; as `OfItself`.

    Attributes:
      least, most: what the others allow it to be, as they are printed.
    """

    published: float
    least: Callable[[], float]
    most: Callable[[], float]
    figures: Callable[[], str]

    def judge(self) -> Found:
        inside = self.least() <= self.published <= self.most()
        return Found(CONSISTENT if inside else INCONSISTENT, self.figures())


@dataclasses.dataclass(frozen=True)
class OfItself:
    """A claim that is judged by figures which the paper itself prints, and by arithmetic on them.

    Attributes:
      rule: `Cases` or `Computed`, without a result and without shapes.
    """

    rule: Rule

    def judge(self) -> Found:
        verdict, ours = self.rule.judge()
        return Found(_OF_ITSELF[verdict], ours)


_OF_ITSELF = {
    REPRODUCED: CONSISTENT,
    PART: INCONSISTENT,
    CONTRADICTED: INCONSISTENT,
}


@dataclasses.dataclass(frozen=True)
class Chain:
    """Differences that must all have one sign, each with its interval over seeds.

    Attributes:
      of: by name, as `Differs.of` returns them.
      sign, digits, scale: as of `Differs`.
    """

    of: Callable[[], Mapping[str, tuple[Estimate, int]]]
    sign: int
    digits: str
    scale: str

    def judge(self) -> Found:
        tell = lambda found: of_sign(found.sign, self.sign)
        told, said, seeds = _several(self.of(), tell, self.digits)
        return Found(of_all(told), f"{said} ({self.scale}, {seeds} seeds)")


def within(
    figures: Callable[[], Mapping[str, float]], low: float, high: float, digits: str = "g"
) -> "Cases":
    """Which figures lie in a range that is printed, its ends included."""
    return Cases(
        lambda: {name: low <= figure <= high for name, figure in figures().items()},
        lambda: ", ".join(f"{name} {figure:{digits}}" for name, figure in figures().items()),
    )


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of the ledger.

    Attributes:
      place: tables, figures, sections, as "Table 2" or "Figure 3 (b)"; several by semicolons.
      says: in a sentence.
      published: the figures, as printed.
      command: that makes the result which the rule reads.
    """

    place: str
    says: str
    published: str
    rule: Rule
    command: str = ""

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.place.split(";"))

    def judge(self) -> Found:
        try:
            return self.rule.judge()
        except NoResultError:
            return Found(MISSING, "")
