"""Figures of all studies that have results: means over seeds with 95 % intervals."""

from collections.abc import Callable, Mapping
import json
import pathlib
import textwrap

from matplotlib.figure import Figure

from experiments.studies import (
    depth_8 as depth_8_study,
    images,
    sequence_tasks as sequence_tasks_study,
    thin_keys_tasks,
    word_models,
)
from experiments.studies.demo_size import STUDIES
from experiments.tables import model_figures
from experiments.tables.panels import Panel, Row, curves, difference, lines, rows_of_points
from experiments.tasks import encoders, sequences
from kvjax.foundation.intervals import Estimate


def language_models(result: Mapping) -> Figure:
    """Draws differences in bits per byte of each model from its reference model."""
    rows = [row for row in result["rows"] if row["difference"] is not None]
    by_reference: dict[str, list[Row]] = {}
    for row in rows:
        name = row.get("before") or row["cell"]  # the panel's heading names the change
        gap = difference(name, row["difference"], row["difference_half_interval"])
        by_reference.setdefault(row["against"], []).append(gap)
    bpb = {row["cell"]: row["bpb"] for row in result["rows"]}
    panels = [
        Panel(f"from {reference} ({bpb[reference]:.4f} bits per byte)", gaps, "+.4f", 0.0)
        for reference, gaps in by_reference.items()
    ]
    seeds = min(len(row["seeds"]) for row in result["rows"])
    caption = (
        f"Difference in held-out bits per byte, seed by seed: lower is better. {seeds} seeds, "
    )
    caption += f"{result['tokens'] / 1e6:.1f}M training tokens. Filled: the interval excludes 0."
    return rows_of_points(result["asks"], textwrap.wrap(caption, 110), panels)


def sequence_tasks(result: Mapping) -> Figure:
    """Draws a panel for each task that at least one variant does not solve."""

    def right(row, task):
        return row["tasks"][task]["right"]

    tasks = [
        task for task in sequences.TASKS if all(task in row["tasks"] for row in result["rows"])
    ]
    solved = [task for task in tasks if all(right(row, task) >= 0.9995 for row in result["rows"])]
    panels = [
        Panel(
            _sizes(task, result["rows"][0]["tasks"][task]),
            [
                Row(
                    encoders.CALLED[row["variant"]],
                    Estimate(right(row, task), row["tasks"][task]["half_interval"]),
                    row["published"][task],
                )
                for row in result["rows"]
            ],
            ".3f",
        )
        for task in tasks
        if task not in solved
    ]
    seeds = min(accuracy["seeds"] for row in result["rows"] for accuracy in row["tasks"].values())
    caption = (
        f"Accuracy over positions, means over cells; {seeds} seeds. Solved "
        f"by all: {', '.join(solved) or 'none'}. Bars: the paper's means over its whole grid."
    )
    title = "Projection sharing's tasks on rows of numbers"
    return rows_of_points(title, textwrap.wrap(caption, 110), panels)


def sequence_task_losses(result: Mapping) -> Figure:
    """Draws a panel per task: the variants' training loss by step."""
    panels: dict[str, dict] = {}
    for row in result["curves"]:
        if row["variant"] in _FIGURE_3:
            points = [(row["every"] * (i + 0.5), loss) for i, loss in enumerate(row["loss"])]
            panels.setdefault(row["task"], {})[encoders.CALLED[row["variant"]]] = points
    row = result["curves"][-1]
    caption = f"Means of {min(curve['seeds'] for curve in result['curves'])} seeds, each point of "
    caption += (
        f"{row['every']} steps; width {row['width']}, {row['layers']} layers, {row['heads']} "
    )
    caption += f"heads, rows of {row['length']} numbers."
    labels = ("steps", "nats per number")
    title = "Training loss of projection sharing's tasks (its Figure 3)"
    return curves(title, [caption], panels, labels)


def diagonal(result: Mapping) -> Figure:
    """Draws a panel per task: two remedies beside the unchanged variants."""
    by_task: dict[str, list[Row]] = {}
    for row in sorted(result["rows"], key=lambda row: tuple(_REMEDIES).index(row["remedy"])):
        change = row["change"] is not None and Estimate(row["change"], row["change_half_interval"])
        name = f"{encoders.CALLED[row['variant']]}, {_REMEDIES[row['remedy']]}"
        right = Estimate(row["right"], row["right_half_interval"])
        heading = f"{row['task']}, rows of {row['length']}"
        by_task.setdefault(heading, []).append(Row(name, right, off=bool(change and change.sign)))
    seeds = min(row["seeds"] for row in result["rows"])
    caption = f"Accuracy over positions; {seeds} seeds. Filled: distinguishable from the "
    caption += (
        "unchanged variant, seed by seed. Normalised: the diagonal of K Kᵀ is divided by its mean. "
    )
    caption += f"Annealed: a temperature falls from {result['hottest']:g} to 1 in half the steps."
    panels = [Panel(heading, rows, ".3f") for heading, rows in by_task.items()]
    return rows_of_points(
        "Remedies for variants with tied queries and keys", textwrap.wrap(caption, 110), panels
    )


def rank_by_head(result: Mapping) -> Figure:
    """Draws a panel per mean rank: the effect of unequal ranks."""
    by_rank: dict[int, list[Row]] = {}
    for row in result["rows"]:
        if row["change"] is not None:
            change = difference(row["way"], row["change"], row["change_half_interval"])
            by_rank.setdefault(row["rank"], []).append(change)
    equal = {row["rank"]: row for row in result["rows"] if row["way"] == "equal"}
    heading = "{} ranks a head on average, from {:.4f} bits per byte with {} each"
    panels = [
        Panel(heading.format(rank, equal[rank]["bpb"], rank), rows, ".4f", zero=0.0)
        for rank, rows in by_rank.items()
    ]
    seeds = min(row["seeds"] for row in result["rows"])
    caption = (
        "Trained residuals truncated to fewer ranks at equal bytes: difference in bits per byte "
    )
    caption += f"from equal ranks; lower is better. {seeds} seeds. Filled: distinguishable."
    return rows_of_points("A rank for each head", textwrap.wrap(caption, 110), panels)


def depth_8(result: Mapping) -> Figure:
    """Draws a panel per mechanism: its difference from MHA over training."""
    panels: dict[str, list[Row]] = {}
    for row in result["by_step"]:
        seeds, tokens = len(row["seeds"]), row["step"] * depth_8_study.TOKENS_PER_STEP
        half = row["difference_half_interval"] if seeds >= _SEEDS else None
        label = f"{tokens / 1e6:.1f}M tokens"
        if not half:
            label += f", {seeds} seed{'s'[seeds < 2 :]}"
        gap = difference(label, row["difference"], half)
        panels.setdefault(row["mechanism"], []).append(gap)
    caption = "Difference from MHA in held-out bits per byte, seed by seed: lower is better. "
    caption += f"{_SEEDS} seeds where nothing else is said. Filled: the interval excludes 0."
    drawn = [Panel(f"{name.upper()}, from MHA", rows, "+.4f", 0.0) for name, rows in panels.items()]
    title = f"Depth 8, 33M parameters: {result['tokens'] / 1e6:.1f}M tokens"
    return rows_of_points(title, textwrap.wrap(caption, 110), drawn)


_SEEDS = 3  # fewer give no interval
_FIGURE_3 = ("qkv", "qk_tied", "qk_tied_plus", "qkv_tied")  # variants in the paper's Figure 3
_REMEDIES = {
    "none": "unchanged",
    "normalised": "normalised",
    "annealed": "annealed",
}


def _sizes(task: str, of_task: Mapping) -> str:
    """Returns a heading with the sizes of a task's cells."""

    def joined(key):
        return " and ".join(map(str, of_task[key]))

    shape = f"width {joined('width')}, {joined('layers')} layers, {joined('heads')} heads"
    return f"{task}: {of_task['cells']} cells of {shape}, rows of {joined('length')}"


def _seeds(result: Mapping) -> int:
    return min(len(seeds) for seeds in result["runs"].values())


_TASKS = {
    "copy_back_l2": "copying",
    "copy_back_l4": "copying, 4 layers",
    "copy_back_periodic_l2": "copying repeated rows",
    "copy_back_periodic_l4": "copying repeated rows, 4 layers",
    "retrieval_8_keys": "one of 8 keys",
    "retrieval": "one of 16 keys",
    "retrieval_32_keys": "one of 32 keys",
    "retrieval_64_keys": "one of 64 keys",
}


def thin_keys(result: Mapping) -> Figure:
    """Draws accuracy by channels of queries and keys, a line for each task and initialisation."""
    series: dict[str, dict[int, Estimate]] = {}
    for task, name in _TASKS.items():
        for row in result["rows"]:
            if row["task"] == task:
                suffix = ", equal start" if row.get("start") == "equal" else ""
                value = Estimate(row["right"], row["right_half_interval"]).times(100)
                series.setdefault(name + suffix, {})[row["channels"]] = value
    caption = [f"Means of {_seeds(result)} seeds or more and 95 % intervals, after the last batch."]
    labels = ("channels of queries and keys, all heads (d_select)", "right, %")
    figure = lines("Thin keys' tasks", caption, series, labels)
    figure.axes[0].set_ylim(-3, 103)  # intervals of three seeds may be wider than 0 to 100 %
    return figure


def image_sets(results: Mapping[str, Mapping]) -> Figure:
    """Draws a panel per data set: test accuracy."""
    panels = []
    for name, result in results.items():
        rows = [
            Row(
                encoders.CALLED[row["variant"]],
                Estimate(row["right"], row["right_half_interval"]).times(100),
                row["published"] and 100 * row["published"],
            )
            for row in result["rows"]
        ]
        grid = result["grid"]
        widths, layers, patches = (
            " and ".join(map(str, grid[key])) for key in ("widths", "layers", "patches")
        )
        shape = f"width {widths}, {layers} layers, squares of {patches}"
        heading = f"{name}: {shape}, {grid['epochs']} epochs, {_seeds(result)} seeds"
        panels.append(Panel(heading, rows, ".2f"))
    caption = "Test accuracy, %. Bars: Table 3, means over sizes and rates."
    return rows_of_points("Projection sharing's images", [caption], panels)


def set_anomaly(result: Mapping) -> Figure:
    """Draws a panel per position of the anomaly."""
    panels = []
    for place, heading in (("drawn", "random position"), ("last", "last position")):
        by_variant = {
            encoders.CALLED[row["variant"]]: row["places"][place]
            for row in result["rows"]
            if place in row["places"]
        }
        rows = [
            Row(name, Estimate(accuracy["right"], accuracy["half_interval"]).times(100))
            for name, accuracy in by_variant.items()
        ]
        if rows:
            panels.append(Panel(heading, rows, ".2f"))
    caption = f"Accuracy on sets of ten, %. {_seeds(result)} seeds."
    return rows_of_points("Anomaly detection in sets of ten", [caption], panels)


_ALONE: Mapping[str, Callable[[Mapping], Figure]] = {
    "sequence_tasks": sequence_tasks,
    thin_keys_tasks.NAME: thin_keys,
    "set_anomaly": set_anomaly,
    "diagonal": diagonal,
    "rank_by_head": rank_by_head,
    depth_8_study.NAME: depth_8,
    **model_figures.ALONE,
} | {f"studies/{name}": language_models for name in STUDIES}


def figures(results: pathlib.Path) -> dict[str, Figure]:
    """Returns the figures of all studies with a result in a folder, by the study's name."""
    by_name = {}
    for name, draw in _ALONE.items():
        file = results / f"{name}.json"
        if file.exists():
            result = json.loads(file.read_text())
            if result.get("rows", True):
                by_name[name.rpartition("/")[2]] = draw(result)
            if name == sequence_tasks_study.NAME and result.get("curves"):
                by_name["sequence_task_losses"] = sequence_task_losses(result)
    for folder, names, draw in (
        (images.FOLDER, images.EPOCHS, image_sets),
        (word_models.FOLDER, word_models.SETS, model_figures.word_models),
    ):
        files = {name: results / folder / f"{name}.json" for name in names}
        read = {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}
        results_of = {name: result for name, result in read.items() if result["rows"]}
        if results_of:
            by_name[folder] = draw(results_of)
    return by_name
