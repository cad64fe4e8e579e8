"""A picture of each study whose result is there: means over seeds with 95 % intervals."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import textwrap

from matplotlib.figure import Figure

from experiments.studies import images
from experiments.studies import thin_keys_tasks
from experiments.studies.demo_size import STUDIES
from experiments.tables import cards
from experiments.tables.cards import FULL
from experiments.tables.cards import GRAY
from experiments.tables.cards import INK
from experiments.tables.cards import RESIDUAL
from experiments.tasks import encoders
from experiments.tasks import sequences
from kvjax.foundation.estimate import Estimate


@dataclasses.dataclass(frozen=True)
class Row:
    """A point with its interval.

    Attributes:
      published: the paper's figure, drawn beside it.
      off: coloured, because its interval leaves out what it is compared with.
    """

    label: str
    value: Estimate
    published: float | None = None
    off: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """Rows under a heading, on an axis of their own.

    Attributes:
      zero: a value that is marked by a line.
    """

    heading: str
    rows: Sequence[Row]
    form: str
    zero: float | None = None


def rows_of_points(title: str, said: Sequence[str], panels: Sequence[Panel]) -> Figure:
    """Panels below one another; a point's figures stand at the right."""
    count = sum(len(panel.rows) for panel in panels)
    height = 0.75 + 0.17 * len(said) + 0.26 * count + 0.75 * len(panels)
    figure = cards.card(9.6, height)
    cards.heading(figure, title, *said)
    top = height - 0.6 - 0.17 * len(said)
    drawn = []
    for panel in panels:
        high = 0.26 * len(panel.rows)
        bottom = top - 0.3 - high
        axes = figure.add_axes((0.235, bottom / height, 0.545, high / height))
        _points(axes, panel)
        drawn.append(axes)
        figure.text(0.034, (top - 0.1) / height, panel.heading, weight="bold", va="center")
        top = bottom - 0.45
    if panels and all(panel.zero is not None for panel in panels):  # differences: one scale for all
        limits = [edge for axes in drawn for edge in axes.get_xlim()]
        for axes in drawn:
            axes.set_xlim(min(limits), max(limits))
    return figure


def _points(axes, panel: Panel) -> None:
    cards.plain_axes(axes)
    if panel.zero is not None:
        axes.axvline(panel.zero, color=GRAY, linewidth=0.8, linestyle="--")
    for i, row in enumerate(panel.rows):
        color = RESIDUAL if row.off else FULL
        x, half = row.value.mean, row.value.half
        axes.errorbar(x, i, xerr=half, fmt="o", color=color, capsize=3, markersize=6)
        if row.published is not None:
            axes.plot(row.published, i, "|", color=INK, markersize=13, markeredgewidth=1.6)
        told = row.value.shown(panel.form)
        axes.annotate(
            told, (1.02, i), xycoords=("axes fraction", "data"), va="center", fontsize=9, color=INK
        )
    axes.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows], color=INK)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)


def lines(
    title: str, said: Sequence[str], series: Mapping[str, Mapping[int, Estimate]], labels: tuple
) -> Figure:
    """A line with intervals for each series, on a logarithmic axis.

    Args:
      series: by name {x: y}.
      labels: of both axes.
    """
    figure = cards.card(9.6, 5.0)
    cards.heading(figure, title, *said)
    axes = figure.add_axes((0.085, 0.125, 0.62, 0.83 - 0.15 - 0.034 * len(said)))
    markers = "os^Dv<>P"
    for i, (name, points) in enumerate(series.items()):
        xs = sorted(points)
        ys, halves = [points[x].mean for x in xs], [points[x].half or 0.0 for x in xs]
        spread = [x * 1.02 ** (i - len(series) / 2) for x in xs]
        how = dict(fmt=f"{markers[i % len(markers)]}-", capsize=3, markersize=5, linewidth=1.3)
        axes.errorbar(spread, ys, halves, label=name, color=f"C{i}", **how)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for points in series.values() for x in points})
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel(labels[0], color=GRAY)
    axes.set_ylabel(labels[1], color=GRAY)
    cards.plain_axes(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=9)
    return figure


# -- the studies -----------------------------------------------------------------------------------


def language_models(found: Mapping) -> Figure:
    """Bits per byte of each model less those of the one that it is compared with."""
    rows = [row for row in found["rows"] if row["difference"] is not None]
    by_other: dict[str, list[Row]] = {}
    for row in rows:
        value = Estimate(row["difference"], row["difference_half_interval"])
        name = row.get("before") or row["cell"]  # the panel's title tells the change
        by_other.setdefault(row["against"], []).append(Row(name, value, off=bool(value.sign)))
    bpb = {row["cell"]: row["bpb"] for row in found["rows"]}
    panels = [
        Panel(f"from {other} ({bpb[other]:.4f} bits per byte)", mine, "+.4f", 0.0)
        for other, mine in by_other.items()
    ]
    seeds = min(len(row["seeds"]) for row in found["rows"])
    said = f"Difference in held-out bits per byte, seed by seed: lower is better. {seeds} seeds, "
    said += f"{found['tokens'] / 1e6:.1f}M training tokens. Orange: the interval leaves 0 out."
    return rows_of_points(found["asks"], textwrap.wrap(said, 110), panels)


def sequence_tasks(found: Mapping) -> Figure:
    """A panel for each task that not every variant solves."""
    right = lambda row, task: row["tasks"][task]["right"]
    there = [task for task in sequences.TASKS if all(task in row["tasks"] for row in found["rows"])]
    solved = [task for task in there if all(right(row, task) >= 0.9995 for row in found["rows"])]
    panels = [
        Panel(
            _sizes(task, found["rows"][0]["tasks"][task]),
            [
                Row(
                    encoders.CALLED[row["variant"]],
                    Estimate(right(row, task), row["tasks"][task]["half_interval"]),
                    row["published"][task],
                )
                for row in found["rows"]
            ],
            ".3f",
        )
        for task in there
        if task not in solved
    ]
    seeds = min(now["seeds"] for row in found["rows"] for now in row["tasks"].values())
    said = (
        f"The share of positions that are right, means over cells; {seeds} seeds. Solved "
        f"by all: {', '.join(solved) or 'none'}. Bars: the paper's means over its whole grid."
    )
    title = "Projection sharing's tasks on rows of numbers"
    return rows_of_points(title, textwrap.wrap(said, 110), panels)


def diagonal(found: Mapping) -> Figure:
    """A panel for each task: two remedies beside what they are for."""
    by_task: dict[str, list[Row]] = {}
    for row in sorted(found["rows"], key=lambda row: tuple(_REMEDIES).index(row["remedy"])):
        change = row["change"] is not None and Estimate(row["change"], row["change_half_interval"])
        name = f"{encoders.CALLED[row['variant']]}, {_REMEDIES[row['remedy']]}"
        right = Estimate(row["right"], row["right_half_interval"])
        heading = f"{row['task']}, rows of {row['length']}"
        by_task.setdefault(heading, []).append(Row(name, right, off=bool(change and change.sign)))
    seeds = min(row["seeds"] for row in found["rows"])
    said = f"The share of positions that are right; {seeds} seeds. Orange: told apart from the "
    said += "variant as it is, seed by seed. Normalised: the diagonal of K Kᵀ is over its mean. "
    said += f"Annealed: a temperature falls from {found['hottest']:g} to 1 in half the steps."
    panels = [Panel(heading, rows, ".3f") for heading, rows in by_task.items()]
    return rows_of_points("Remedies where queries are keys", textwrap.wrap(said, 110), panels)


def rank_by_head(found: Mapping) -> Figure:
    """A panel for each number of ranks: what dividing them changes."""
    by_rank: dict[int, list[Row]] = {}
    for row in found["rows"]:
        if row["change"] is not None:
            change = Estimate(row["change"], row["change_half_interval"])
            of_rank = by_rank.setdefault(row["rank"], [])
            of_rank.append(Row(row["way"], change, off=bool(change.sign)))
    equal = {row["rank"]: row for row in found["rows"] if row["way"] == "equal"}
    heading = "{} ranks a head on average, from {:.4f} bits per byte with {} each"
    panels = [
        Panel(heading.format(rank, equal[rank]["bpb"], rank), rows, ".4f", zero=0.0)
        for rank, rows in by_rank.items()
    ]
    seeds = min(row["seeds"] for row in found["rows"])
    said = "Trained residuals cut to fewer ranks, of the same bytes: bits per byte against equal "
    said += f"ranks, less is better; {seeds} seeds. Orange: told apart."
    return rows_of_points("A rank for each head", textwrap.wrap(said, 110), panels)


_REMEDIES = {
    "none": "as it is",
    "normalised": "normalised",
    "annealed": "annealed",
}


def _sizes(task: str, of_task: Mapping) -> str:
    """A heading: what the cells of a task have."""
    few = lambda key: " and ".join(map(str, of_task[key]))
    shape = f"width {few('width')}, {few('layers')} layers, {few('heads')} heads"
    return f"{task}: {of_task['cells']} cells of {shape}, rows of {few('length')}"


def _seeds(found: Mapping) -> int:
    return min(len(seeds) for seeds in found["runs"].values())


def thin_keys(found: Mapping) -> Figure:
    """Accuracy by the channels of all queries and keys, a line for each task."""
    series: dict[str, dict[int, Estimate]] = {}
    for row in found["rows"]:
        value = Estimate(row["right"], row["right_half_interval"]).times(100)
        series.setdefault(row["task"], {})[row["channels"]] = value
    said = [f"Means of {_seeds(found)} seeds and 95 % intervals, after the last batch."]
    labels = ("channels of queries and keys, all heads (d_select)", "right, %")
    return lines("Thin keys' tasks", said, series, labels)


def image_sets(results: Mapping[str, Mapping]) -> Figure:
    """A panel for each set of images: the share of test images that are right."""
    panels = []
    for name, found in results.items():
        rows = [
            Row(
                encoders.CALLED[row["variant"]],
                Estimate(row["right"], row["right_half_interval"]).times(100),
                row["published"] and 100 * row["published"],
            )
            for row in found["rows"]
        ]
        grid = found["grid"]
        few = lambda key, grid=grid: " and ".join(map(str, grid[key]))
        shape = f"width {few('widths')}, {few('layers')} layers, squares of {few('patches')}"
        heading = f"{name}: {shape}, {grid['epochs']} epochs, {_seeds(found)} seeds"
        panels.append(Panel(heading, rows, ".2f"))
    said = "Test images that are right, %. Bars: Table 3, means over sizes and rates."
    return rows_of_points("Projection sharing's images", [said], panels)


def set_anomaly(found: Mapping) -> Figure:
    """A panel for each place of the anomaly."""
    panels = []
    for place, heading in (("drawn", "place drawn"), ("last", "always last")):
        by_variant = {
            encoders.CALLED[row["variant"]]: row["places"][place]
            for row in found["rows"]
            if place in row["places"]
        }
        rows = [
            Row(name, Estimate(now["right"], now["half_interval"]).times(100))
            for name, now in by_variant.items()
        ]
        if rows:
            panels.append(Panel(heading, rows, ".2f"))
    said = f"Sets of ten whose odd one is found, %. {_seeds(found)} seeds."
    return rows_of_points("The odd one of ten", [said], panels)


_ALONE: Mapping[str, Callable[[Mapping], Figure]] = {
    "sequence_tasks": sequence_tasks,
    thin_keys_tasks.NAME: thin_keys,
    "set_anomaly": set_anomaly,
    "diagonal": diagonal,
    "rank_by_head": rank_by_head,
} | {f"studies/{name}": language_models for name in STUDIES}


def figures(results: pathlib.Path) -> dict[str, Figure]:
    """Of every study that has a result in a folder, by the study's name."""
    found = {}
    for name, draw in _ALONE.items():
        file = results / f"{name}.json"
        if file.exists():
            result = json.loads(file.read_text())
            if result["rows"]:
                found[name.rpartition("/")[2]] = draw(result)
    files = {name: results / images.FOLDER / f"{name}.json" for name in images.EPOCHS}
    there = {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}
    there = {name: result for name, result in there.items() if result["rows"]}
    if there:
        found[images.FOLDER] = image_sets(there)
    return found
