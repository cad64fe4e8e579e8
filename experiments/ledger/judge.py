"""Turns claims (tables of TOML) into verdicts.

A claim names a rule and the rule's options. A rule reads `experiments/results/`, computes from
shapes, or does arithmetic on the paper's own figures. If it needs a result that is missing, the
verdict is "not measured yet". Rules for the claims of one paper are in `rules_*.py`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import functools
import pathlib
import re
import tomllib
from typing import NamedTuple

from etils import epath

from experiments import record
from experiments.ledger import printed
from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.foundation import json_text
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.intervals import Estimate, difference
from kvjax.hardware import datasheets

REPRODUCED, CONTRADICTED, IN_PART = "reproduced", "contradicted", "in part"
INDISTINCT, OUT_OF_REACH, UNDEFINED = "not distinguishable", "out of reach", "undefined"
CONSISTENT, INCONSISTENT = "consistent", "inconsistent"
MISSING = "not measured yet"
VERDICTS = {
    REPRODUCED: "our figure rounds to the paper's; or our difference has the claimed sign, and its "
    "95 % interval excludes 0; or equality is claimed, and the interval lies within the margin "
    "that the row names",
    CONTRADICTED: "our figure does not round to the paper's; or the interval excludes 0 on the "
    "other side, or lies beyond the margin",
    IN_PART: "some of several figures agree, or some of several cases hold",
    INDISTINCT: "at 95 %: the interval of our difference contains 0, or reaches over the margin; "
    "or both solve the task",
    CONSISTENT: "the claim follows from the paper's own figures, within their rounding; nothing "
    "was measured or computed from shapes here",
    INCONSISTENT: "the claim does not follow from the paper's own figures, or not in all cases",
    OUT_OF_REACH: "the claim needs models of a size that was not trained here, or weights, data or "
    "options that are not available; the row names what would settle it. The row also has results "
    "at demo size or in other models, if there are any; they settle nothing",
    UNDEFINED: "the paper does not define the claim in a way that can be measured",
    MISSING: "the command has not been run, or not with three seeds",
}
SEEDS = 3  # the fewest that settle a claim between models
FOLDER = pathlib.Path(__file__).parent
_FIELDS = ("place", "says", "published", "command")


class Judgement(NamedTuple):
    """A verdict, and a text with our figures."""

    verdict: str
    ours: str


class NoResultError(Exception):
    """A result that a rule needs is missing."""


Difference = tuple[Estimate, int]  # a difference between models, and its number of seeds
RULES: dict[str, Callable[..., Judgement]] = {}
SOURCES: dict[str, Callable[..., Difference]] = {}


def rule(function: Callable[..., Judgement]) -> Callable[..., Judgement]:
    """Registers a rule under its name; a claim names the rule and its options."""
    RULES[function.__name__] = function
    return function


def source(function: Callable[..., Difference]) -> Callable[..., Difference]:
    """Registers a source of differences under its name; a claim names it and its arguments."""
    SOURCES[function.__name__] = function
    return function


def claims(paper: str) -> list[dict]:
    """Returns the claims of FOLDER/<paper>.toml; their text fields default to ""."""
    read = tomllib.loads((FOLDER / f"{paper}.toml").read_text("utf-8"))["claims"]
    return [dict.fromkeys(_FIELDS, "") | claim for claim in read]


def judge(claim: Mapping) -> Judgement:
    """Applies a claim's rule. A claim with `own` is about the paper's printed figures alone."""
    options = {key: x for key, x in claim.items() if key not in (*_FIELDS, "rule", "own")}
    try:
        judgement = RULES[claim["rule"]](**options)
    except NoResultError:
        return Judgement(MISSING, "")
    if claim.get("own"):
        consistent = judgement.verdict == REPRODUCED
        return Judgement(CONSISTENT if consistent else INCONSISTENT, judgement.ours)
    return judgement


def combined(verdicts: Collection[str]) -> str:
    """Returns one verdict on several cases: "in part" if only some are as claimed."""
    if REPRODUCED in verdicts or IN_PART in verdicts:
        return REPRODUCED if set(verdicts) == {REPRODUCED} else IN_PART
    return CONTRADICTED if CONTRADICTED in verdicts else INDISTINCT


def case_verdict(holds: bool) -> str:
    return REPRODUCED if holds else CONTRADICTED


def sign_verdict(sign: int, claimed: int) -> str:
    """Returns the verdict on a difference with an interval above (1), below (-1) or around 0."""
    return case_verdict(sign == claimed) if sign else INDISTINCT


def margin_verdict(difference: float, half: float, margin: float) -> str:
    """Returns the verdict on a claimed equality, whose measured difference is ± `half`."""
    if abs(difference) + half <= margin:
        return REPRODUCED
    return CONTRADICTED if abs(difference) - half > margin else INDISTINCT


# -- results ---------------------------------------------------------------------------------------


def read(name: str) -> dict:
    """Reads a result; raises a NoResultError if it is missing, a UserError if it is damaged."""
    file = record.RESULTS / f"{name}.json"
    if not file.exists():
        raise NoResultError(name)
    return json_text.read_object(epath.Path(file), "restore it, or make it anew")


def paired(first: Mapping, second: Mapping, name: str) -> Difference:
    """Returns first minus second by seed; raises a NoResultError without a common seed."""
    gap = difference(first, second)
    if gap is None:
        raise NoResultError(name)
    return gap, len(first.keys() & second.keys())


@source
def study(name: str, cell: str) -> Difference:
    """Returns a cell's bits per byte minus its baseline's, in a study of language models."""
    for row in read(f"studies/{name}")["rows"]:
        if row["cell"] == cell and row["difference"] is not None:
            return Estimate(row["difference"], row["difference_half_interval"]), len(row["seeds"])
    raise NoResultError(name)


@source
def between(name: str, first: str, second: str) -> Difference:
    """Returns the first cell's bits per byte minus the second's, by seed."""
    runs = read(name)["runs"]
    first_bpb, second_bpb = (
        {seed: run["bpb"] for seed, run in runs.get(cell, {}).items()} for cell in (first, second)
    )
    return paired(first_bpb, second_bpb, name)


@functools.cache
def experiment_of(config: str) -> config_lib.Experiment:
    """Returns the experiment of a config in configs/: "mha_128m", "ranks.py:lrkv_r16_128m"."""
    file = config if ".py:" in config else f"{config}.py"
    return config_lib.resolve(load_config(CONFIGS / file))


@functools.cache
def training_flops(config: str) -> int:
    """Returns the FLOPs of training on one token."""
    experiment = experiment_of(config)
    return formulas.training_flops_per_token(experiment.model, experiment.data.sequence_length)


# -- rules of any paper ----------------------------------------------------------------------------


@rule
def table(title: str, only: str = "") -> Judgement:
    """Counts the figures of a table of `paper_tables` that agree to the printed digit.

    Args:
      only: pattern; only figures whose names match count.
    """
    rows = [r for r in read("paper_tables")["tables"][title] if re.search(only, r["what"])]
    assert rows, title
    ours = f"{sum(row['agrees'] for row in rows)} of {len(rows)} figures agree"
    if first := next((row for row in rows if not row["agrees"]), None):
        unit = f" {first['unit']}" if first["unit"] else ""
        figure, why = f"{first['ours']:,.4g}", first["verdict"].removeprefix("differs: ")
        ours += f"; {first['what']}: {first['paper']} there, {figure}{unit} here: {why}"
    return Judgement(combined([case_verdict(row["agrees"]) for row in rows]), ours)


def cases(holding: Mapping[str, bool], ours: str) -> Judgement:
    """Returns the verdict on cases, each of which holds or does not."""
    if not holding:
        raise NoResultError("cases")
    verdict = combined([case_verdict(holds) for holds in holding.values()])
    return Judgement(verdict, f"{sum(holding.values())} of {len(holding)} cases; {ours}")


def within(figures: Mapping[str, float], low: float, high: float, digits: str = "g") -> Judgement:
    """Checks that figures lie in a printed range, its ends included."""
    ours = ", ".join(f"{name} {figure:{digits}}" for name, figure in figures.items())
    return cases({name: low <= figure <= high for name, figure in figures.items()}, ours)


def rounds_to(figure: str, ours: float, why: str) -> Judgement:
    """Checks that our number, rounded to a printed figure's digits, is that figure."""
    decimals = len(figure.partition(".")[2])
    rounded = f"{ours:,.{decimals}f}"
    return Judgement(case_verdict(rounded == figure), f"{rounded}: {why}" if why else rounded)


@rule
def arithmetic(holds: Mapping[str, str], why: str) -> Judgement:
    """Checks comparisons of printed figures (see `printed`)."""
    return cases({name: printed.holds(text) for name, text in holds.items()}, why)


@rule
def twice(one: str, other: str) -> Judgement:
    """Checks that a figure that the paper prints twice is the same in both places."""
    same = printed.span(one).meets(printed.span(other))
    return cases({"one figure": same}, f"{one} here, {other} there")


@rule
def computed(figure: str, value: str, why: str = "") -> Judgement:
    """Checks a figure against an expression of others, or of a model's sizes."""
    return rounds_to(figure, printed.value(value), why)


@rule
def sign(of: Mapping, sign: int, digits: str, scale: str) -> Judgement:
    """Checks the sign of a difference between models, by its interval over seeds.

    Args:
      of: {source: arguments}.
      sign: claimed, 1 or -1.
      scale: text for the verdict: the unit, and the models that were trained.
    """
    estimate, seeds = difference_of(of)
    ours = _over_seeds(estimate, seeds, digits, scale)
    return Judgement(MISSING if seeds < SEEDS else sign_verdict(estimate.sign, sign), ours)


@rule
def signs(of: Mapping[str, Mapping], sign: int, digits: str, scale: str) -> Judgement:
    """Checks that several differences, by name, have one sign."""
    estimates, ours, seeds = _several(of, digits)
    verdict = combined([sign_verdict(x.sign, sign) for x in estimates])
    return Judgement(verdict, f"{ours} ({scale}, {seeds} seeds)")


@rule
def same(of: Mapping, margin: float, digits: str, scale: str) -> Judgement:
    """Checks that a difference, with its interval over seeds, lies within a margin."""
    estimate, seeds = difference_of(of)
    ours = f"{_over_seeds(estimate, seeds, digits, scale)}, margin {margin:g}"
    if seeds < SEEDS or estimate.half is None:
        return Judgement(MISSING, ours)
    return Judgement(margin_verdict(estimate.mean, estimate.half, margin), ours)


def all_same(of: Mapping[str, Mapping], margin: float, digits: str, scale: str) -> Judgement:
    """Checks that several differences, by name, lie within one margin."""
    estimates, ours, seeds = _several(of, digits)
    verdicts = [margin_verdict(x.mean, x.half, margin) for x in estimates]
    count = f"{verdicts.count(REPRODUCED)} of {len(verdicts)} cases, margin {margin:g}"
    return Judgement(combined(verdicts), f"{count}: {ours} ({scale}, {seeds} seeds)")


def difference_of(of: Mapping[str, Sequence]) -> Difference:
    ((name, arguments),) = of.items()
    return SOURCES[name](*arguments)


def _several(of: Mapping[str, Mapping], digits: str) -> tuple[list[Estimate], str, int]:
    """Returns several differences, their text, and the smallest number of seeds."""
    differences = {name: difference_of(source) for name, source in of.items()}
    if any(n < SEEDS or x.half is None for x, n in differences.values()):
        raise NoResultError("differences")
    ours = ", ".join(f"{name} {x.shown(digits)}" for name, (x, _) in differences.items())
    return [x for x, _ in differences.values()], ours, min(n for _, n in differences.values())


def _over_seeds(estimate: Estimate, seeds: int, digits: str, scale: str) -> str:
    so_far = "" if seeds >= SEEDS else "so far "
    return f"{so_far}{estimate.shown(digits)} ({scale}, {seeds} seed{'s' * (seeds != 1)})"


# -- claims that nothing here can settle -----------------------------------------------------------

# Results at another scale settle nothing, so they are not called by the names of verdicts.
_AS = {REPRODUCED: "as claimed", CONTRADICTED: "not as claimed", IN_PART: "in part as claimed"}
_UTILISATION = 0.4  # share of a chip's bfloat16 rate that estimates of days assume
_CHIPS, _KIND = 16, "v5p"


@rule
def at_scale(
    configs: Sequence[str],
    tokens: float | Sequence[float],
    seen: Mapping | None = None,
    why: str = "",
) -> Judgement:
    """States the cost of settling a claim about models larger than any trained here.

    Args:
      configs: names in configs/ of the models that would be trained.
      tokens: training tokens of each config, or one number for all.
      seen: a rule that answers the same question at demo size, or several by name.
    """
    budgets = tokens if isinstance(tokens, Sequence) else [tokens] * len(configs)
    flops = sum(training_flops(config) * n for config, n in zip(configs, budgets, strict=True))
    rate = _CHIPS * datasheets.DEVICES[_KIND].bf16_flops * _UTILISATION
    hours = flops / rate / 3600
    time = f"{hours / 24:,.1f} days" if hours >= 24 else f"{hours:.1f} hours"
    names = ", ".join(f"`{config}`" for config in configs)
    amounts = " and ".join(dict.fromkeys(f"{n / 1e9:g}B" for n in budgets))
    parts = [
        *_seen(seen, "at demo size"),
        *filter(None, [why]),
        f"would take {names} of configs/, {amounts} tokens each: {time} a seed "
        f"on {_CHIPS} {_KIND} chips at {100 * _UTILISATION:.0f} % of their FLOP/s",
    ]
    return Judgement(OUT_OF_REACH, "; ".join(parts))


@rule
def elsewhere(needs: str, seen: Mapping | None = None, where: str = "") -> Judgement:
    """States which models or data a claim needs.

    Args:
      seen: a rule that answers the same question in other models.
      where: text that names these models.
    """
    return Judgement(OUT_OF_REACH, "; ".join([*_seen(seen, where), f"needs {needs}"]))


@rule
def undefined(why: str, seen: Mapping | None = None) -> Judgement:
    """States what a paper's text leaves open.

    Args:
      seen: a rule with figures on the same question.
    """
    ours = judge(seen).ours if seen else ""
    return Judgement(UNDEFINED, "; ".join(filter(None, [why, ours])))


def _seen(seen: Mapping | None, where: str) -> Iterator[str]:
    if seen is None:
        return
    answers = []
    for name, claim in ({"": seen} if "rule" in seen else seen).items():
        judgement = judge(claim)
        answer = _AS.get(judgement.verdict, judgement.verdict)
        if judgement.ours:
            answer += f", {judgement.ours}"
        answers.append(f"{name}: {answer}" if name else answer)
    yield f"{where} {'; '.join(answers)}"
