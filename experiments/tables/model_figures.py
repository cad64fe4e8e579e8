"""Figures of studies of whole models: by position, by layer, by head and by task."""

from collections import Counter
from collections.abc import Callable, Mapping
import textwrap

from matplotlib.figure import Figure

from experiments.studies import (
    linear_attention as linear_attention_study,
    padded_loss as padded_loss_study,
)
from experiments.tables.panels import Panel, Row, difference, lines, rows_of_points
from kvjax.foundation.intervals import Estimate

_FILLED = "Filled: the interval excludes 0."


def long_rows(result: Mapping) -> Figure:
    """Draws a panel per training row length: differences from MHA by position."""
    panels = []
    for length in sorted({row["length"] for row in result["rows"]}):
        rows = [
            difference(
                f"{row['mechanism']}, {place['positions'][0]} to {place['positions'][1] - 1}",
                place["difference"],
                place["difference_half_interval"],
            )
            for row in result["rows"]
            if row["length"] == length
            for place in row["places"]
            if place["difference"] is not None
        ]
        if rows:
            panels.append(Panel(f"trained on rows of {length:,}", rows, "+.4f", 0.0))
    seeds = min(len(row["seeds"]) for row in result["rows"])
    caption = "Held-out bits per byte by position in rows of 1,024, difference from MHA; "
    caption += f"{seeds} seeds, {result['tokens'] / 1e6:.1f}M training tokens. {_FILLED}"
    title = "Bits per byte by position: the gain from distant context"
    return rows_of_points(title, textwrap.wrap(caption, 110), panels)


def rank_allocation(result: Mapping) -> Figure:
    """Draws each layer's effective rank and the rank that it is allocated."""
    rows = [
        Row(
            f"layer {row['layer']}",
            Estimate(row["effective_rank"], row["half_interval"]),
            row["rank"],
        )
        for row in result["rows"]
    ]
    caption = (
        f"Means over heads, and {result['seeds']} seeds, of models with one rank for all. Bars: "
    )
    caption += f"allocated ranks in proportion, {result['rank']} per layer on average."
    heading = "effective rank of the residuals"
    panels = [Panel(heading, rows, ".2f")]
    return rows_of_points("A rank for each layer", textwrap.wrap(caption, 110), panels)


_OF_HEADS = {
    "share": "effective rank of heads, % of their number",
    "centred_share": "the same, centred",
    "mean_similarity": "mean similarity of heads",
}


def head_diversity(result: Mapping) -> Figure:
    """Draws three measures of the diversity of each mechanism's heads."""
    panels = []
    for measure, heading in _OF_HEADS.items():
        rows = []
        for name, measures in result["estimates"].items():
            if measure not in measures:
                continue
            estimate, against = measures[measure], measures[measure].get("against_mha")
            differs = against and Estimate(against["mean"], against["half_interval"]).sign
            value = Estimate(estimate["mean"], estimate["half_interval"])
            rows.append(Row(name, value, off=bool(differs)))
        panels.append(Panel(heading, rows, ".3f" if measure == "mean_similarity" else ".2f"))
    caption = f"{len(result['seeds'])} seeds. Filled: distinguishable from MHA, seed by seed."
    return rows_of_points("Diversity of heads", [caption], panels)


def padded_loss(result: Mapping) -> Figure:
    """Draws a panel per form of training rows: differences from QKV, by evaluation."""
    evaluations = {"counted": "padding counted", "text": "the same text", "packed": "packed rows"}
    panels = []
    for form in padded_loss_study.FORMS:
        rows = [
            difference(
                f"{padded_loss_study.TIES[row['tie']]}, {label}",
                row["against_first"][name]["nats"],
                row["against_first"][name]["half_interval"],
            )
            for row in result["rows"]
            if row["trained"] == form
            for name, label in evaluations.items()
            if name in row["against_first"]
        ]
        if rows:
            panels.append(Panel(f"trained on {form} rows", rows, "+.4f", 0.0))
    seeds = min(row["seeds"] for row in result["rows"])
    caption = f"Nats per target, difference from QKV: lower is better. {seeds} seeds. {_FILLED}"
    return rows_of_points("Differences with and without padding in the loss", [caption], panels)


def cross_attention(result: Mapping) -> Figure:
    """Draws the steps to 99 % accuracy and the final accuracy of each mechanism."""
    solved = [row for row in result["rows"] if row["steps"]]
    steps = [
        Row(
            f"{row['kind']}, {row['became_right']} of {row['runs']} runs",
            Estimate(row["steps"], row["steps_half_interval"]),
        )
        for row in solved
    ]
    right = [
        Row(row["kind"], Estimate(row["right"], row["right_half_interval"]).times(100))
        for row in result["rows"]
    ]
    panels = [
        Panel("steps to 99 % accuracy, of runs that reach it", steps, ",.0f"),
        Panel("held-out accuracy at the end, %", right, ".1f"),
    ]
    seeds = min(row["runs"] for row in result["rows"])
    return rows_of_points("Cross-attention from small caches", [f"{seeds} seeds."], panels)


def linear_attention(result: Mapping) -> Figure:
    """Draws a panel per task: accuracy or bits per byte of each form of attention."""
    panels = []
    for task in linear_attention_study.TASKS:
        text = task == "language"
        rows = [
            Row(
                row["kind"].replace("_", ", "),
                Estimate(figure["figure"], figure["half_interval"]).times(1 if text else 100),
            )
            for row in result["rows"]
            if (figure := row["tasks"].get(task))
        ]
        unit = "bits per byte of held-out text" if text else "right, %"
        if rows:
            name = task.replace("_", " ")
            panels.append(Panel(f"{name}: {unit}", rows, ".3f" if text else ".1f"))
    seeds = min(figure["seeds"] for row in result["rows"] for figure in row["tasks"].values())
    caption = f"Width 64, 4 heads, 4 layers; {seeds} seeds. Decay: the state is multiplied by 0.9."
    return rows_of_points("Linear attention: accuracy and loss by task", [caption], panels)


def word_models(results: Mapping[str, Mapping]) -> Figure:
    """Draws perplexity by channels of queries and keys, a line per data set."""
    series = {
        name: {
            row["channels"]: Estimate(row["perplexity"], row["perplexity_half_interval"])
            for row in result["rows"]
        }
        for name, result in results.items()
    }
    seeds = min(row["seeds"] for result in results.values() for row in result["rows"])
    labels = ("channels of queries and keys, all heads (d_select)", "test perplexity of words")
    caption = [f"Means of {seeds} seeds and 95 % intervals, after the last epoch."]
    return lines("Thin keys' models of words", caption, series, labels)


def cache_bits(result: Mapping) -> Figure:
    """Draws bits per byte against cache bytes: a line per mechanism, through its precisions."""
    series: dict[str, dict[int, Estimate]] = {}
    configs = {row["mechanism"]: row["kind"] for row in result["rows"]}
    shared = {kind for kind, count in Counter(configs.values()).items() if count > 1}
    for row in result["rows"]:
        kind, value = row["kind"], Estimate(row["bpb"], row["bpb_half_interval"])
        label = f"{kind} ({row['mechanism']})" if kind in shared else kind
        series.setdefault(label, {})[row["cache_bytes"]] = value
    seeds = min(row["seeds"] for row in result["rows"])
    caption = "From right to left: not quantised (float32, bytes of bfloat16), int8, int4. Equal "
    caption += f"parameters, {seeds} seeds, 95 % intervals, {result['tokens'] / 1e6:.1f}M training "
    caption += "tokens. Lower is better."
    labels = ("cache bytes per token, all layers", "held-out bits per byte")
    title = "Fewer heads, a lower rank or fewer bits"
    figure = lines(title, textwrap.wrap(caption, 110), series, labels)
    figure.axes[0].set_xticks([2**n for n in range(6, 12)], [f"{2**n:,}" for n in range(6, 12)])
    return figure


# By name of the result.
ALONE: Mapping[str, Callable[[Mapping], Figure]] = {
    "analysis/head_diversity": head_diversity,
    "cache_bits": cache_bits,
    "cross_attention": cross_attention,
    "linear_attention": linear_attention,
    "long_rows": long_rows,
    "padded_loss": padded_loss,
    "rank_allocation": rank_allocation,
}
