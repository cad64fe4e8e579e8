"""Plots perplexity against cache size, before and after tuning, from saved results."""

import os
import pathlib
import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments import record
from experiments.conversion.outcomes import SUBJECTS, Outcomes, TuningSetting
from kvjax.foundation import command_line, theme

FOLDER = "conversion"  # folder in experiments/results
_KEYS_COLOR, _KEYS_VALUES_COLOR, _LRKV_COLOR = (
    theme.COLORS[name] for name in ("thin_keys", "factored", "lrkv")
)
_WEIGHTS_COLOR = theme.GRAY
_BEFORE = (  # curve, label, colour, style
    ("key_joint_weights", "thin keys, one SVD of the weights", _WEIGHTS_COLOR, "o--"),
    ("key_per_head_weights", "thin keys, an SVD for each head", _WEIGHTS_COLOR, "o--"),
    ("key_joint_outputs", "thin keys, one calibrated latent", _KEYS_COLOR, "^--"),
    ("key_per_head_outputs", "thin keys, calibrated for each head", _KEYS_COLOR, "o-"),
    ("key_value_per_head_outputs", "thin keys and values, calibrated", _KEYS_VALUES_COLOR, "s-"),
    ("key_value_joint_outputs", "thin keys and values, one latent each", _KEYS_VALUES_COLOR, "v--"),
    ("lrkv_outputs", "LRKV, calibrated", _LRKV_COLOR, "D-"),
)
_AFTER = (  # prefix of names, label, colour, style
    ("thin_kv_joint", "thin keys and values, one latent each", _KEYS_VALUES_COLOR, "v--"),
    ("thin_kv", "thin keys and values, a latent for each head", _KEYS_VALUES_COLOR, "s-"),
    ("thin_joint", "thin keys, one latent", _KEYS_COLOR, "^--"),
    ("thin_", "thin keys, a latent for each head", _KEYS_COLOR, "o-"),
    ("lrkv_", "LRKV", _LRKV_COLOR, "D-"),
)


def write() -> list[pathlib.Path]:
    """Writes a figure for each model that was measured; returns the paths."""
    files = []
    record.check_folder("--stage=report", record.RESULTS / FOLDER)
    with theme.styled(font__size=10, axes__labelsize=10):
        for outcomes in map(Outcomes, SUBJECTS):
            if not outcomes.original:
                continue
            path = record.RESULTS / FOLDER / f"{outcomes.name}_cache.png"
            figure = by_cache_size(outcomes)
            figure.savefig(path, dpi=160, metadata=dict(Software=None), facecolor="white")
            command_line.say(f"written: {os.path.relpath(path)}")
            files.append(path)
    return files


def by_cache_size(outcomes: Outcomes) -> Figure:
    """Plots perplexity by the remaining share of the cache, before and after tuning."""
    settings = outcomes.settings()[:1]
    figure = Figure(figsize=(6.2 + 4.6 * len(settings), 5.8), layout="constrained")
    axes = figure.subplots(1, 1 + len(settings), sharey=True, squeeze=False)[0]
    figure.suptitle(f"{outcomes.title}: perplexity by cache size", weight="bold", fontsize=13)
    _not_tuned(axes[0], outcomes)
    for panel, setting in zip(axes[1:], settings, strict=True):
        _tuned(panel, setting)
    axes[0].set_ylabel("perplexity of held-out text (lower is better, log scale)")
    for panel in axes:
        _finish(panel)
    return figure


def _not_tuned(axes: Axes, outcomes: Outcomes) -> None:
    axes.set_title("before tuning", color=theme.GRAY, fontsize=10)
    base = outcomes.original["perplexity"]
    axes.axhline(base, color=theme.INK, linewidth=1)
    axes.annotate(
        f"original {base:.4g}",
        (0.02, base),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )
    # Of the two SVDs of weights one is drawn.
    has_joint = outcomes.curve("key_joint_weights") is not None
    for name, label, color, style in _BEFORE:
        curve = outcomes.curve(name)
        if curve is None or (has_joint and name == "key_per_head_weights"):
            continue
        xs = [point["share"] for point in curve["points"]]
        ys = [point["perplexity"] for point in curve["points"]]
        axes.plot(xs, ys, style, color=color, label=label, markersize=5)


def _tuned(axes: Axes, setting: TuningSetting) -> None:
    *head, tokens, rate = setting.label.split(", ")
    title = f"after tuning: {', '.join(head)},\n{tokens}, {rate}"
    axes.set_title(title, color=theme.GRAY, fontsize=10)
    control = next(iter(setting.variants))
    mean = statistics.mean(control.after.values())
    axes.axhline(mean, color=theme.INK, linewidth=1)
    text = f"control (tuned, not converted) {mean:.4g}"
    units = dict(xycoords=("axes fraction", "data"), textcoords="offset points")
    axes.annotate(text, (0.02, mean), xytext=(0, -4), va="top", fontsize=9, **units)
    remaining = [variant for variant in setting.variants if variant is not control]
    for start, label, color, style in _AFTER:
        chosen = sorted((v for v in remaining if v.name.startswith(start)), key=lambda v: v.share)
        remaining = [variant for variant in remaining if variant not in chosen]
        if not chosen:
            continue
        xs = [variant.share for variant in chosen]
        ys = [statistics.mean(variant.after.values()) for variant in chosen]
        halves = [variant.half_interval() or 0.0 for variant in chosen]
        axes.errorbar(xs, ys, halves, fmt=style, color=color, label=label, capsize=4, markersize=5)


def _finish(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_xlabel("cache size relative to the original")
    axes.grid()
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(-0.02, -0.14))
