"""Figures of studies of whole models: by position, by layer, by head and by task."""

from collections.abc import Callable, Mapping
import textwrap

from matplotlib.figure import Figure

from experiments.studies import (
    linear_attention as linear_attention_study,
    padded_loss as padded_loss_study,
)
from experiments.tables.panels import Panel, Row, difference, lines, rows_of_points
from kvjax.foundation.intervals import Estimate

_TOLD = "Filled: the interval excludes 0."


def long_rows(found: Mapping) -> Figure:
    """Draws a panel per training row length: differences from MHA by position."""
    panels = []
    for length in sorted({row["length"] for row in found["rows"]}):
        rows = [
            difference(
                f"{row['mechanism']}, {place['positions'][0]} to {place['positions'][1] - 1}",
                place["difference"],
                place["difference_half_interval"],
            )
            for row in found["rows"]
            if row["length"] == length
            for place in row["places"]
            if place["difference"] is not None
        ]
        if rows:
            panels.append(Panel(f"trained on rows of {length:,}", rows, "+.4f", 0.0))
    seeds = min(len(row["seeds"]) for row in found["rows"])
    said = "Held-out bits per byte by position in rows of 1,024, difference from MHA; "
    said += f"{seeds} seeds, {found['tokens'] / 1e6:.1f}M training tokens. {_TOLD}"
    title = "Bits per byte by position: the gain from distant context"
    return rows_of_points(title, textwrap.wrap(said, 110), panels)


def rank_allocation(found: Mapping) -> Figure:
    """Draws each layer's effective rank and the rank that it is allocated."""
    rows = [
        Row(
            f"layer {row['layer']}",
            Estimate(row["effective_rank"], row["half_interval"]),
            row["rank"],
        )
        for row in found["rows"]
    ]
    said = f"Means over heads, and {found['seeds']} seeds, of models with one rank for all. Bars: "
    said += f"allocated ranks in proportion, {found['rank']} per layer on average."
    heading = "effective rank of the residuals"
    panels = [Panel(heading, rows, ".2f")]
    return rows_of_points("A rank for each layer", textwrap.wrap(said, 110), panels)


_OF_HEADS = {
    "share": "effective rank of heads, % of their number",
    "centred_share": "the same, centred",
    "mean_similarity": "mean similarity of heads",
}


def head_diversity(found: Mapping) -> Figure:
    """Draws three measures of the diversity of each mechanism's heads."""
    panels = []
    for measure, heading in _OF_HEADS.items():
        rows = []
        for name, measures in found["estimates"].items():
            if measure not in measures:
                continue
            now, against = measures[measure], measures[measure].get("against_mha")
            off = against and Estimate(against["mean"], against["half_interval"]).sign
            value = Estimate(now["mean"], now["half_interval"])
            rows.append(Row(name, value, off=bool(off)))
        panels.append(Panel(heading, rows, ".3f" if measure == "mean_similarity" else ".2f"))
    said = f"{len(found['seeds'])} seeds. Filled: distinguishable from MHA, seed by seed."
    return rows_of_points("Diversity of heads", [said], panels)


def padded_loss(found: Mapping) -> Figure:
    """Draws a panel per form of training rows: differences from QKV, by evaluation."""
    judged = {"counted": "padding counted", "text": "the same text", "packed": "packed rows"}
    panels = []
    for form in padded_loss_study.FORMS:
        rows = [
            difference(
                f"{padded_loss_study.TIES[row['tie']]}, {called}",
                row["against_first"][name]["nats"],
                row["against_first"][name]["half_interval"],
            )
            for row in found["rows"]
            if row["trained"] == form
            for name, called in judged.items()
            if name in row["against_first"]
        ]
        if rows:
            panels.append(Panel(f"trained on {form} rows", rows, "+.4f", 0.0))
    seeds = min(row["seeds"] for row in found["rows"])
    said = f"Nats per target, difference from QKV: lower is better. {seeds} seeds. {_TOLD}"
    return rows_of_points("Differences with and without padding in the loss", [said], panels)


def cross_attention(found: Mapping) -> Figure:
    """Draws the steps to 99 % accuracy and the final accuracy of each mechanism."""
    finished = [row for row in found["rows"] if row["steps"]]
    steps = [
        Row(
            f"{row['kind']}, {row['became_right']} of {row['runs']} runs",
            Estimate(row["steps"], row["steps_half_interval"]),
        )
        for row in finished
    ]
    right = [
        Row(row["kind"], Estimate(row["right"], row["right_half_interval"]).times(100))
        for row in found["rows"]
    ]
    panels = [
        Panel("steps to 99 % accuracy, of runs that reach it", steps, ",.0f"),
        Panel("held-out accuracy at the end, %", right, ".1f"),
    ]
    seeds = min(row["runs"] for row in found["rows"])
    return rows_of_points("Cross-attention from small caches", [f"{seeds} seeds."], panels)


def linear_attention(found: Mapping) -> Figure:
    """Draws a panel per task: accuracy or bits per byte of each form of attention."""
    panels = []
    for task in linear_attention_study.TASKS:
        text = task == "language"
        rows = [
            Row(
                row["kind"].replace("_", ", "),
                Estimate(now["figure"], now["half_interval"]).times(1 if text else 100),
            )
            for row in found["rows"]
            if (now := row["tasks"].get(task))
        ]
        unit = "bits per byte of held-out text" if text else "right, %"
        if rows:
            name = task.replace("_", " ")
            panels.append(Panel(f"{name}: {unit}", rows, ".3f" if text else ".1f"))
    seeds = min(now["seeds"] for row in found["rows"] for now in row["tasks"].values())
    said = f"Width 64, 4 heads, 4 layers; {seeds} seeds. Decay: the state is multiplied by 0.9."
    return rows_of_points("Linear attention: accuracy and loss by task", [said], panels)


def word_models(results: Mapping[str, Mapping]) -> Figure:
    """Draws perplexity by channels of queries and keys, a line per data set."""
    series = {
        name: {
            row["channels"]: Estimate(row["perplexity"], row["perplexity_half_interval"])
            for row in found["rows"]
        }
        for name, found in results.items()
    }
    seeds = min(row["seeds"] for found in results.values() for row in found["rows"])
    labels = ("channels of queries and keys, all heads (d_select)", "test perplexity of words")
    said = [f"Means of {seeds} seeds and 95 % intervals, after the last epoch."]
    return lines("Thin keys' models of words", said, series, labels)


# By name of the result.
ALONE: Mapping[str, Callable[[Mapping], Figure]] = {
    "analysis/head_diversity": head_diversity,
    "cross_attention": cross_attention,
    "linear_attention": linear_attention,
    "long_rows": long_rows,
    "padded_loss": padded_loss,
    "rank_allocation": rank_allocation,
}
