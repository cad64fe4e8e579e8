"""Shows a comparison as tables in a terminal, sections of a page and panels of a picture."""

from collections.abc import Callable, Mapping, Sequence
import math

import numpy as np

from kvjax.analysis.page import draw, figures
from kvjax.analysis.page.section import Column, Figure, Section, Table
from kvjax.attention import family
from kvjax.compare import downstream
from kvjax.compare.downstream import Scores
from kvjax.compare.groups import Curve, Group
from kvjax.compare.runs import SkippedRun
from kvjax.compare.savings import Saving
from kvjax.foundation import output
from kvjax.foundation.intervals import Estimate, difference, estimate

_MAX_POINTS = 200  # of a drawn curve
_BPB = "validation bits per byte"
# Units of horizontal axes, largest first.
_FLOPS = ((1e18, "exaFLOPs"), (1e15, "petaFLOPs"), (1e12, "teraFLOPs"), (1e9, "gigaFLOPs"))
_TOKENS = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"), (1, "one by one"))
_SECONDS = ((86_400, "days"), (3600, "hours"), (1, "seconds"))
# A horizontal axis: its label, a function that returns its values for a curve, and its units.
Axis = tuple[str, Callable[[Group, Curve], np.ndarray], Sequence[tuple[float, str]]]
AXES: Mapping[str, Axis] = {
    "tokens": ("tokens", lambda _, curve: curve.tokens, _TOKENS),
    "flops": (
        "training compute",
        lambda group, curve: curve.tokens * group.costs["flops"],
        _FLOPS,
    ),
    "six_n": (
        "training compute, 6N per token",
        lambda group, curve: curve.tokens * group.costs["six_n"],
        _FLOPS,
    ),
    "seconds": ("training time", lambda _, curve: curve.seconds, _SECONDS),
}
_CAPTIONS = {
    "tokens": "Loss of each model on the same training tokens.",
    "flops": "FLOPs of the forward and backward pass, computed from shapes: products with weights, "
    "and attention over all keys of a row, without recomputation.",
    "six_n": "6N FLOPs per token, where N counts the weights of matrix products; the input "
    "embedding and attention's products are not counted. LRKV's figure 4 does so: 733 exaFLOPs of "
    "MHA are 6 x 2.444B weights x 50B tokens.",
    "seconds": "Time of training steps, without compilation, evaluation and saving. Not comparable "
    "between machines, or if other programs ran.",
}


def rows(groups: Sequence[Group], reference: Group) -> list[dict]:
    """Returns a row per group: costs, final loss, and the loss minus the reference's.

    The difference is paired by seed; it is None for groups of another length than the reference.
    """
    result = []
    for group in groups:
        final = group.final
        against = None
        if group is not reference and group.tokens == reference.tokens:
            against = difference(group.finals, reference.finals)
        result.append(
            dict(
                name=group.name,
                parameters=group.costs["parameters"],
                cache_bytes=group.costs["cache_bytes"],
                seeds=sorted(group.runs),
                finished=group.finished,
                finished_seeds=sorted(group.finals),
                tokens=group.tokens,
                flops=group.tokens * group.costs["flops"],
                flops_six_n=group.tokens * group.costs["six_n"],
                seconds=group.seconds if math.isfinite(group.seconds) else None,
                **_keys("bpb", final),
                **_keys("against", against),
            )
        )
    return result


def _keys(name: str, value: Estimate | None) -> dict:
    """Returns an estimate as two fields of a row, which `_estimate` reads."""
    return {name: value and value.mean, f"{name}_half_interval": value and value.half}


def _estimate(row: Mapping, name: str) -> Estimate | None:
    return None if row[name] is None else Estimate(row[name], row[f"{name}_half_interval"])


def _shown(row: Mapping, name: str, digits: str) -> str:
    value = _estimate(row, name)
    return "-" if value is None else value.shown(digits)


def _partial_seeds(row: Mapping) -> str:
    """Returns the finished seeds as text if some seeds have not finished; else ""."""
    is_partial = 0 < len(row["finished_seeds"]) < len(row["seeds"])
    return f" (seed {_seeds(row)})" if is_partial else ""


def _seeds(row: Mapping) -> str:
    """Returns the finished seeds as text."""
    return ",".join(map(str, row["finished_seeds"]))


def terminal(results: Sequence[Mapping], reference: Group) -> output.Table:
    """Returns the results of `rows` as a table for a terminal, or for Markdown."""
    unit, unit_name = _unit(max(row["flops"] for row in results), _FLOPS)
    header = ("run", "parameters", "cache bytes per token, bfloat16", "seeds", "tokens")
    header += (unit_name, "as 6N", "s", "bits per byte", f"against {reference.name}")
    cells = [
        (
            row["name"] + ("" if row["finished"] else " (running)"),
            f"{row['parameters']:,}",
            f"{row['cache_bytes']:,}",
            ",".join(map(str, row["seeds"])),
            f"{row['tokens']:,}",
            f"{row['flops'] / unit:.4g}",
            f"{row['flops_six_n'] / unit:.4g}",
            f"{row['seconds']:,.0f}" if row["seconds"] else "-",
            _shown(row, "bpb", ".4f") + _partial_seeds(row),
            _shown(row, "against", "+.4f"),
        )
        for row in results
    ]
    notes = ()
    if any(len(row["seeds"]) > 1 for row in results):
        notes = ("± are 95 % intervals, Student's t over seeds; differences are paired by seed",)
    return output.Table("Training runs", header, cells, notes)


def savings_table(saved: Sequence[Saving]) -> output.Table:
    """Returns savings as a table for a terminal."""
    cells = [
        (
            s.leader,
            s.behind,
            f"{s.tokens:,}",
            _percent(s.within_a_run),
            _percent(s.at_equal_horizon),
        )
        for s in saved
    ]
    header = ("leader", "reaches the end of", "tokens", "fewer, within a run", "equal horizon")
    return output.Table("\nFewer tokens to the same bits per byte", header, cells, (_HORIZON,))


_HORIZON = (
    "within a run, as in LRKV's figure 3: from the tokens at which the leader, in the middle of "
    "its schedule, passes the other's final loss. Equal horizon: from final losses of the leader's "
    "config at several lengths; - if these do not enclose the other's final loss"
)


def _percent(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.times(100).shown('.1f')} %"


# -- the page --------------------------------------------------------------------------------------


def sections(
    groups: Sequence[Group],
    reference: Group,
    results: Sequence[Mapping],
    saved: Sequence[Saving],
    left_out: Sequence[SkippedRun],
    lacking: Mapping[str, Sequence[int]],
    scores: Scores,
) -> list[Section]:
    """Returns the sections of the page.

    Args:
      results: result of `rows`.
      lacking: result of `groups.missing_seeds`.
    """
    page = []
    if cache := _cache_points(groups):
        page.append(_ends([cache, *_score_points(groups, scores)]))
    page.append(_results(results, reference, left_out, lacking))
    page.append(
        Section(
            "curves",
            "Curves",
            "Point at a curve or use the arrow keys to read values; the legend's buttons hide "
            "curves. Bands are 95 % intervals over seeds.",
            figures=[_figure(_lines(groups, axis), _CAPTIONS[axis]) for axis in _axes(groups)],
            tables=[],
            data={group.name: _data(group) for group in groups},
        )
    )
    if saved:
        page.append(_savings(saved))
    return page


def _results(
    results: Sequence[Mapping],
    reference: Group,
    left_out: Sequence[SkippedRun],
    lacking: Mapping[str, Sequence[int]],
) -> Section:
    caption = (
        "Each run, or the mean of runs that differ only in their seed. The last column is the "
        f"difference from {reference.name}, paired by seed, for runs of the same length. ± are "
        "95 % intervals, Student's t over seeds."
    )
    columns = [Column("run"), Column("cache bytes per token, bfloat16", ",d")]
    columns.append(Column("bits per byte", ".4f"))
    columns.append(Column(f"against {reference.name}", "+.4f"))
    cells = [
        [row["name"], row["cache_bytes"], _estimate(row, "bpb"), _estimate(row, "against")]
        for row in results
    ]
    tables = [Table("Training runs", columns, cells, caption, stacks=True)]
    keys = ("name", "parameters", "tokens", "flops", "flops_six_n", "seconds")
    columns = [Column("run"), Column("parameters", ",d"), Column("tokens", ",d")]
    columns += [Column("FLOPs", ".4g"), Column("as 6N", ".4g"), Column("s", ",.0f")]
    columns.append(Column("finished seeds"))
    cells = [[*(row[key] for key in keys), _seeds(row)] for row in results]
    caption = "FLOPs and seconds of training, up to the last evaluation."
    tables.append(Table("Their costs", columns, cells, caption, stacks=True))
    skipped = [(run.name, run.why) for run in left_out]
    skipped += [(name, "has no seed " + ", ".join(map(str, s))) for name, s in lacking.items()]
    if skipped:
        caption = "Runs that are not in the figures, and groups that lack a seed."
        tables.append(Table("Skipped", [Column("run"), Column("why")], skipped, caption))
    finished = [row for row in results if row["bpb"] is not None]
    lead = f"{len(results)} rows of {sum(len(row['seeds']) for row in results)} runs."
    if finished:
        best = min(finished, key=lambda row: row["bpb"])
        lead += f" The best: {best['name']}, {_shown(best, 'bpb', '.4f')} bits per byte"
        lead += f"{_partial_seeds(best)}."
    return Section("results", "Results", lead, [], tables, dict(rows=list(results)))


def _axes(groups: Sequence[Group]) -> list[str]:
    """Returns the names of axes for which there is data."""
    timed = any(np.isfinite(group.curve.seconds).any() for group in groups)
    return [name for name in AXES if name != "seconds" or timed]


def _lines(groups: Sequence[Group], axis: str) -> dict:
    """Returns arguments of `draw.live_lines`."""
    label, values_of, units = AXES[axis]
    series, bands = {}, {}
    values = [values_of(group, group.curve) for group in groups]
    unit, unit_name = _unit(max((float(xs[-1]) for xs in values if len(xs)), default=0.0), units)
    for group in groups:
        curve = _thinned(group.curve)
        xs = values_of(group, curve) / unit
        series[group.name] = (xs, curve.bpb)
        if len(group.runs) > 1:
            bands[group.name] = (curve.bpb - curve.half, curve.bpb + curve.half)
    return dict(series=series, bands=bands, x=f"{label}, {unit_name}", y=_BPB) | _style(groups)


def _style(groups: Sequence[Group]) -> dict:
    """Returns drawing arguments that give each group the same colour in every figure."""
    families = {group.name: family(group.one.experiment.model.mechanisms[0]) for group in groups}
    return dict(names=list(families), mechanisms=families)


def _unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Returns the largest unit that is at most `largest`; else the smallest."""
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def _thinned(curve: Curve) -> Curve:
    """Returns up to _MAX_POINTS points of a curve, denser at its steep beginning."""
    count = len(curve.steps)
    if count <= _MAX_POINTS:
        return curve
    positions = [space(1, count, _MAX_POINTS // 2) for space in (np.geomspace, np.linspace)]
    indices = np.unique(np.round(np.concatenate(positions)).astype(int) - 1)
    return Curve(*(getattr(curve, name)[indices] for name in Curve.__dataclass_fields__))


def panels(groups: Sequence[Group], scores: Scores) -> list[dict]:
    """Returns arguments of `draw.picture`'s panels: final points, then curves."""
    cache = _cache_points(groups)
    points = [cache, *_score_points(groups, scores)] if cache else []
    return points + [_lines(groups, axis) for axis in _axes(groups)]


def _cache_points(groups: Sequence[Group]) -> dict:
    """Returns arguments of `draw.live_lines` for final loss against cache bytes; {} without any."""
    ended = [(group, group.final) for group in groups if group.final]
    if not ended:
        return {}
    return dict(
        series={g.name: ([g.costs["cache_bytes"]], [final.mean]) for g, final in ended},
        bands={g.name: _interval(final) for g, final in ended if final.half is not None},
        x="cache bytes per token, bfloat16",
        y=_BPB,
        **_style(groups),
    )


def _score_points(groups: Sequence[Group], scores: Scores) -> list[dict]:
    """Returns arguments of `draw.live_lines` for each score against bits per byte."""
    panels = []
    by_name = {group.name: group for group in groups}
    for measure, label in downstream.MEASURES.items():
        series, bands = {}, {}
        for name, by_seed in downstream.points(groups, scores, measure).items():
            score = estimate(list(by_seed.values()))
            bpb = estimate([by_name[name].finals[seed] for seed in by_seed])
            series[name] = ([bpb.mean], [score.mean])
            if score.half is not None:
                bands[name] = _interval(score)
        if series:
            panels.append(dict(series=series, bands=bands, x=_BPB, y=label) | _style(groups))
    return panels


def _interval(value: Estimate) -> tuple[list[float], list[float]]:
    return [value.mean - value.half], [value.mean + value.half]


def _ends(panels: Sequence[dict]) -> Section:
    """Returns the section of final results, with a figure per panel."""
    drawn, data = [], {}
    for arguments in panels:
        points = {name: (x[0], y[0]) for name, (x, y) in arguments["series"].items()}
        drawn.append(_figure(arguments, _caption(arguments["x"], points)))
        data[drawn[-1].title] = points
    lead = "Final results of finished runs: a point per run, or the mean over seeds."
    return Section("ends", "Cache and scores", lead, drawn, [], data)


def _caption(x: str, points: Mapping[str, tuple[float, float]]) -> str:
    caption = "Bars are 95 % intervals over seeds."
    if x != _BPB:
        return caption
    xs, ys = np.array(list(points.values())).T
    if len(xs) > 2 and np.ptp(xs) and np.ptp(ys):
        caption += f" R² = {np.corrcoef(xs, ys)[0, 1] ** 2:.3f} over {len(xs)} points."
    return f"{caption} LRKV's figure 5 gives R² = 0.786 over five mechanisms at 2.5B."


def _figure(arguments: dict, caption: str) -> Figure:
    """Returns a figure of `draw.live_lines`, with its points as text."""
    svg, curves = draw.live_lines(**arguments)
    y = arguments["y"]
    title = f"{y[0].upper()}{y[1:]} against {arguments['x']}"
    return Figure(title, svg, figures.describe(arguments["series"], ".4g"), caption, curves)


def _data(group: Group) -> dict:
    """Returns a group's curve, JSON-able."""
    curve = group.curve
    columns = ("steps", "tokens", "seconds", "bpb", "half")
    return {name: getattr(curve, name) for name in columns} | dict(seeds=sorted(group.runs))


def _savings(saved: Sequence[Saving]) -> Section:
    cells, data = [], []
    for saving in saved:
        shares = [x and x.times(100) for x in (saving.within_a_run, saving.at_equal_horizon)]
        names = [saving.leader, saving.behind, saving.tokens]
        cells.append([*names, *shares])
        data.append([*names, *_numbers(shares[0]), *_numbers(shares[1])])
    columns = [Column("leader"), Column("reaches the end of"), Column("tokens", ",d")]
    columns += [Column(f"fewer {way}, %", ".1f") for way in ("within a run", "at equal horizon")]
    caption = (
        f"Share of tokens that the leader saves; {_HORIZON}. LRKV's figure 3 gives 18.7 % fewer "
        "steps than MHA at 2.5B, within a run."
    )
    table = Table("Fewer tokens to the same bits per byte", columns, cells, caption, stacks=True)
    return Section("savings", "Fewer tokens", "", [], [table], dict(rows=data))


def _numbers(value: Estimate | None) -> tuple[float | None, float | None]:
    return (None, None) if value is None else (value.mean, value.half)
