"""Makes tables of the conversion studies, like Tables 5, 6, 7 and 9 of thin keys, from results."""

from collections.abc import Iterable, Iterator
import math
import statistics

from experiments.conversion import records
from experiments.conversion.outcomes import (
    SUBJECTS,
    Outcomes,
    Tuned,
    percent,
    relative,
    variant_label,
)
from kvjax.foundation.output import Table

_PARTS = dict(both="both", key="keys", query="queries", value="values")
_OF_MODE = dict(joint="one latent for all heads", per_head="a latent for each head")


def report() -> list[Table]:
    """Returns the tables that have results, and the failures."""
    tables = []
    for outcomes in map(Outcomes, SUBJECTS):
        if outcomes.original is not None:
            tables += [*_before(outcomes), *_after(outcomes)]
    if failed := records.failed():
        tables.append(Table("Failed tasks", ("result", "error"), sorted(failed.items())))
    return tables


# -- before tuning ---------------------------------------------------------------------------------


def _before(outcomes: Outcomes) -> Iterator[Table]:
    yield from _parts(outcomes)
    yield from _objectives(outcomes)
    yield from _savings(outcomes)
    yield from _of_lrkv(outcomes)


def _parts(outcomes: Outcomes) -> Iterator[Table]:
    """Yields thin keys' Table 5 per mode, for the objectives defined for all parts."""
    for mode, of_mode in _OF_MODE.items():
        for objective in ("weights", "inputs"):
            curves = {
                part: curve
                for part in _PARTS
                if (curve := outcomes.curve(f"{part}_{mode}_{objective}"))
            }
            if len(curves) < 2:
                continue
            rows = _by_rank(outcomes, curves.values())
            title = f"{outcomes.title}, before tuning: low rank, minimal error of the {objective}"
            note = f"{of_mode.capitalize()}. {outcomes.note}"
            header = (outcomes.rank, *(_PARTS[part] for part in curves))
            yield Table(title, header, rows, (note,))


def _objectives(outcomes: Outcomes) -> Iterator[Table]:
    """Yields tables of thin keys by mode and objective (error of weights, inputs or outputs)."""
    for part in ("key", "key_value"):
        curves = {}
        for mode in (*_OF_MODE, "split"):  # "split": joint latents, ranks by output error
            for objective in ("weights", "inputs", "outputs"):
                if curve := outcomes.curve(f"{part}_{mode}_{objective}"):
                    curves[f"{mode.replace('_', ' ')}, {objective}"] = curve
        if not curves:
            continue
        label = "keys alone" if part == "key" else "keys and values"
        title = f"{outcomes.title}, before tuning: {label}, by mode and objective"
        shares = {}
        for curve in curves.values():  # a split has fewer ranks than the others
            shares |= _shares(curve)
        rows = _by_rank(outcomes, curves.values(), shares)
        yield Table(title, (outcomes.rank, "cache", *curves), rows, (outcomes.note,))


def _savings(outcomes: Outcomes) -> Iterator[Table]:
    """Yields thin keys' Table 6: the share of the cache saved by low-rank keys alone."""
    curve = outcomes.curve("key_per_head_outputs")
    if curve is None:
        return
    whole = outcomes.original["cached"]
    rows = []
    for point in curve["points"]:
        saved = 1 - point["share"]
        keys = 2 * saved  # as a share of the keys, half of the cache
        loss = relative(point["perplexity"], outcomes.original["perplexity"])
        shares = (f"{share:.0%}" for share in (keys, saved))
        rows.append((point["rank"], f"{point['cached']:,}", *shares, percent(loss)))
    title = f"{outcomes.title}, before tuning: cache saved by thin keys"
    header = (
        outcomes.rank,
        "elements per token",
        "saved of keys",
        "saved of the cache",
        "perplexity",
    )
    note = f"A latent for each head, minimal error of the outputs; originally {whole:,}."
    yield Table(title, header, rows, (note,))


def _of_lrkv(outcomes: Outcomes) -> Iterator[Table]:
    curves = {}
    for objective in ("weights", "outputs"):
        if curve := outcomes.curve(f"lrkv_{objective}"):
            curves[objective] = curve
    if not curves:
        return
    if curve := outcomes.curve("lrkv_outputs_not_aligned"):
        curves["outputs, without alignment of heads"] = curve
    rows = _by_rank(outcomes, curves.values(), _shares(next(iter(curves.values()))))
    title = f"{outcomes.title}, before tuning: LRKV with one base"
    yield Table(title, ("rank of a residual", "cache", *curves), rows, (outcomes.note,))


def _by_rank(
    outcomes: Outcomes, curves: Iterable[dict], second_column: dict | None = None
) -> list[tuple]:
    """Returns a row per rank: perplexity of every curve, and its relative increase."""
    points = [{point["rank"]: point["perplexity"] for point in curve["points"]} for curve in curves]
    rows = []
    for rank in dict.fromkeys(rank for of_curve in points for rank in of_curve):
        cells = [_loss(of_curve.get(rank), outcomes) for of_curve in points]
        rows.append((rank, *([] if second_column is None else [second_column[rank]]), *cells))
    return rows


def _shares(curve: dict) -> dict[int, str]:
    return {point["rank"]: f"{point['share']:.1%}" for point in curve["points"]}


def _loss(perplexity: float | None, outcomes: Outcomes) -> str:
    if perplexity is None:
        return "-"
    increase = relative(perplexity, outcomes.original["perplexity"])
    return f"{_short(perplexity)} ({percent(increase)})"


# -- after tuning ----------------------------------------------------------------------------------


def _after(outcomes: Outcomes) -> Iterator[Table]:
    """Yields thin keys' Tables 7 and 9: a table per tuning recipe, the control first."""
    for setting in outcomes.settings():
        rows = [_tuned_row(variant, outcomes) for variant in setting.variants]
        seeds = sorted({len(variant.after) for variant in setting.variants})
        title = f"{outcomes.title}, after tuning: {setting.label}"
        header = ("conversion", "cache", "before tuning", "after tuning", "against the control")
        yield Table(title, header, rows, (_seeds_note(seeds), outcomes.note))


def _seeds_note(seeds: list[int]) -> str:
    if seeds == [1]:
        return "One seed: no interval."
    text = " to ".join(map(str, sorted({seeds[0], seeds[-1]})))
    return (
        f"Mean of {text} seeds (orders of rows) and 95 % interval; differences from the control "
        "are taken seed by seed."
    )


def _tuned_row(variant: Tuned, outcomes: Outcomes) -> tuple:
    after = statistics.mean(variant.after.values())
    against = variant.against_control()
    return (
        variant_label(variant.name),
        f"{variant.share:.1%}",
        _loss(variant.before, outcomes),
        f"{_short(after)}{_interval(variant.half_interval(), after)}",
        "" if against is None else f"{percent(against[0])}{_more_or_less(against[1])}",
    )


def _interval(half: float | None, mean: float) -> str:
    return "" if half is None else f" ± {half:.{_digits(mean)}f}"


def _more_or_less(half: float | None) -> str:
    return "" if half is None else f" ± {100 * half:.1f}"


def _digits(perplexity: float) -> int:
    return max(0, 2 - math.floor(math.log10(perplexity))) if perplexity < 1000 else 0


def _short(perplexity: float) -> str:
    return f"{perplexity:,.{_digits(perplexity)}f}"
