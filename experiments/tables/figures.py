"""Draws the READMEs' figures: cache entries by mechanism, and bits per byte against cache size.

    python -m experiments.tables.figures          # writes experiments/figures/*.svg
    python -m experiments.tables.figures --check  # writes nothing; prints files that would change

idea.svg is drawn from the tiny configs, to scale. results.svg shows
experiments/results/studies/mechanisms.json (experiments/studies/language_models.py), and
small_caches.svg shows results/small_caches.json (experiments/studies/small_caches.py) if that is
complete. `study_figures` draws the other studies into experiments/figures/studies.
"""

import json
import os
import pathlib

import jax.numpy as jnp
import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments import record
from experiments.record import EXPERIMENTS, RESULTS
from experiments.studies.small_caches import EVERY
from experiments.tables import cards, parameter_table, study_figures
from experiments.tables.cards import FULL, GRAY, INK, LATENT, RESIDUAL, WEIGHT
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress, theme
from kvjax.foundation.checkout import CONFIGS, ROOT
from kvjax.foundation.errors import UserError

FOLDER = EXPERIMENTS / "figures"
NAMES = dict(
    mha="MHA", lrkv="LRKV", gqa="GQA", mla="MLA", mqa="MQA", mla_paper="MLA without RoPE key"
)
CACHED = ("mha", "gqa", "mqa", "lrkv", "mla")  # rows of the first picture


# -- the idea --------------------------------------------------------------------------------------


def idea() -> Figure:
    """Draws LRKV's key as base plus residual, and the cache entries of five mechanisms."""
    figure = cards.card(9.6, 5.85)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 960), ylim=(585, 0))
    axes.set_axis_off()
    _equation(axes, top=60)
    _caches(axes, top=246)
    return figure


def _text(axes, x: float, y: float, text: str, **style) -> None:
    axes.text(x, y, text, **dict(va="center") | style)


def _box(axes, x: float, y: float, width: float, height: float, color: str, label="", **style):
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=color, edgecolor="white", linewidth=1.2, **style)
    )
    if label:
        ink = INK if color == WEIGHT else "white"
        _text(axes, x + width / 2, y + height / 2, label, color=ink, ha="center", fontsize=9.5)


def _equation(axes, top: float) -> None:
    """Draws one head's key of one token: the base, plus a latent times the head's weights."""
    title = "LRKV: one base for all heads, and a low-rank residual for each"
    _text(axes, 32, top - 28, title, fontsize=13, weight="bold")
    y, height, channels = top + 34, 26, 190
    middle, below, second = y + height / 2, y + 44, y + 60
    _box(axes, 32, y, channels, height, theme.MIXED, "key of head h")
    _box(axes, 268, y, channels, height, FULL, "base")
    _box(axes, 504, y, channels / 2, height, RESIDUAL, "latent h")
    _box(axes, 645, middle - channels / 4, channels, channels / 2, WEIGHT, "$B_h$")
    for x, sign in {245: "=", 481: "+", 622: "×"}.items():
        _text(axes, x, middle, sign, fontsize=12.5, ha="center")
    style = dict(fontsize=9.5, color=GRAY)
    _text(axes, 127, below, "H channels, not cached", ha="center", **style)
    _text(axes, 363, below, "H channels, cached once", ha="center", **style)
    _text(axes, 363, second, "for all heads", ha="center", **style)
    _text(axes, 551, below, "R channels, cached", ha="center", **style)
    _text(axes, 551, second, "for each head", ha="center", **style)
    _text(axes, 848, middle - 8, "R × H weights", **style)
    _text(axes, 848, middle + 8, "of the model", **style)
    caption = "Values are made in the same way. A decode step reads bases and latents, not keys."
    _text(axes, 32, second + 34, caption, **style)


def _caches(axes, top: float) -> None:
    """Draws the arrays of each mechanism's cache entry as a strip of boxes, to scale."""
    title = "Cache per token and layer"
    _text(axes, 32, top, title, fontsize=13, weight="bold")
    _text(axes, 32, top + 24, "4 heads of 32 channels, to scale", color=GRAY, fontsize=9.5)
    _text(axes, 790, top + 24, "2.5B model, 18 heads:", color=GRAY, fontsize=9.5, ha="right")
    _text(axes, 790, top + 39, "bytes per token, all layers", color=GRAY, fontsize=9.5, ha="right")
    _text(axes, 920, top + 39, "of MHA", color=GRAY, fontsize=9.5, ha="right")
    scale, height = 580 / 256, 26
    whole = _bytes("mha_2p5b")
    for i, name in enumerate(CACHED):
        y = top + 58 + 44 * i
        _text(axes, 32, y + height / 2, NAMES[name], weight="bold", fontsize=11)
        x = 96.0
        for color, label, width in boxes(name):
            _box(axes, x, y, width * scale, height, color, label)
            x += width * scale
        size = _bytes(f"{name}_2p5b")
        _text(axes, 790, y + height / 2, f"{size:,}", ha="right", fontsize=11)
        _text(axes, 920, y + height / 2, f"{size / whole:.1%}", ha="right", fontsize=11)
    y = top + 58 + 44 * len(CACHED) + 4
    for x, color, text in (
        (96, FULL, "key (K) or value (V), all channels"),
        (362, RESIDUAL, "latent of one head (LRKV)"),
        (576, LATENT, "latent of all keys and values, RoPE key (MLA)"),
    ):
        _box(axes, x, y, 16, 14, color)
        _text(axes, x + 22, y + 7, text, fontsize=9.5, color=GRAY)
    text = "Not drawn: LRKV keeps one more number per head for normed keys. It is in the bytes."
    _text(axes, 96, y + 30, text, fontsize=9.5, color=GRAY)


def boxes(name: str) -> list[tuple[str, str, int]]:
    """Returns colour, label and channels of each array in the cache entry of a tiny config."""
    (mechanism, _), *_ = parameter_table.load(CONFIGS / f"{name}_tiny.py").model.layer_groups
    entry = mechanism.entry()
    if "latent" in entry:
        return [(LATENT, "latent", *entry["latent"].shape), (LATENT, "", *entry["rope_key"].shape)]
    strip = []
    for letter, kind in dict(K="key", V="value").items():
        heads, channels = entry[f"base_{kind}"].shape
        strip += [(FULL, letter, channels)] * heads
        if f"residual_{kind}" in entry:
            heads, rank = entry[f"residual_{kind}"].shape
            strip += [(RESIDUAL, "", rank)] * heads
    return strip


def _bytes(name: str) -> int:
    """Returns cache bytes per token of a config, all layers, in bfloat16."""
    model = parameter_table.load(CONFIGS / f"{name}.py").model
    return formulas.cache_bytes_per_token(model, jnp.dtype(jnp.bfloat16))


# -- results ---------------------------------------------------------------------------------------


def results(comparison: dict) -> Figure:
    """Draws bits per byte against cache bytes per token: means, 95 % intervals, and every seed."""
    rows, runs = comparison["rows"], comparison["runs"]
    figure = cards.card(9.6, 5.0)
    axes = figure.add_axes((0.085, 0.125, 0.885, 0.71))
    for row in rows:
        name, x, y, half = (row[key] for key in ("cell", "cache_bytes", "bpb", "bpb_half_interval"))
        color = theme.color(name)
        axes.errorbar(x, y, half, fmt="o", color=color, capsize=5, markersize=8, linewidth=1.8)
        by_seed = [run["bpb"] for run in runs[name].values()]
        axes.plot([x + 22] * len(by_seed), by_seed, ".", color=GRAY, markersize=4)
        placement = dict(xytext=(12, 0), textcoords="offset points", va="center")
        if name in ("mha", "mla_paper"):
            placement |= dict(xytext=(-10, 0), ha="right")
        axes.annotate(NAMES[name].replace(" without", "\nwithout"), (x, y), **placement)
    axes.set_xlim(0, 2150)
    _quality_against_cache(axes)
    title = "Six mechanisms at demo size: quality against cache"
    figure.text(0.034, 0.935, title, fontsize=13, weight="bold", va="center")
    parameters = sorted(row["parameters"] / 1e6 for row in rows)
    caption = (
        f"4 layers of width 128, {parameters[0]:.1f}M to {parameters[-1]:.1f}M parameters, "
        f"{comparison['tokens'] / 1e6:.2f}M training tokens. Circles: mean of "
        f"{len(rows[0]['seeds'])} seeds; bars: 95 % interval;"
    )
    figure.text(0.034, 0.888, caption, fontsize=9.5, color=GRAY, va="center")
    caption = "small dots: each seed. The vertical axis does not start at zero."
    figure.text(0.034, 0.855, caption, fontsize=9.5, color=GRAY, va="center")
    return figure


def _quality_against_cache(axes) -> None:
    """Labels the axes of `results` and `small_caches`."""
    axes.set_xlabel("cache bytes per token, all layers, bfloat16", color=GRAY)
    axes.set_ylabel("held-out bits per byte (lower is better)", color=GRAY)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    cards.plain_axes(axes)


# -- all mechanisms --------------------------------------------------------------------------------


def small_caches(result: dict) -> Figure:
    """Draws bits per byte against cache bytes of all mechanisms, numbered from the best."""
    rows = sorted(result["rows"], key=lambda row: row["bpb"])
    figure = cards.card(9.6, 6.4)
    axes = figure.add_axes((0.085, 0.105, 0.55, 0.76))
    for number, row in enumerate(rows, 1):
        x, y, color = row["cache_bytes"], row["bpb"], theme.color(row["mechanism"])
        equal_cache = [r["mechanism"] for r in rows if r["cache_bytes"] == x]
        x *= 1.045 ** (equal_cache.index(row["mechanism"]) - (len(equal_cache) - 1) / 2)
        axes.errorbar(x, y, row["bpb_half_interval"], fmt="none", color=color, alpha=0.45)
        axes.plot(x, y, "o", color=color, markersize=13)
        axes.annotate(str(number), (x, y), color="white", ha="center", va="center", fontsize=7.5)
        top, step = 0.845, 0.745 / len(rows)
        height = top - step * (number - 1)
        figure.text(0.672, height, str(number), color=color, ha="right", fontsize=8, weight="bold")
        figure.text(0.68, height, row["mechanism"], fontsize=8)
        figure.text(0.965, height, f"{y:.4f}", fontsize=8, color=GRAY, ha="right")
    axes.set_xscale("log", base=2)
    _quality_against_cache(axes)
    title = (
        f"{len(rows)} mechanisms at demo size, {rows[0]['parameters'] / 1e6:.2f}M parameters each"
    )
    figure.text(0.034, 0.945, title, fontsize=13, weight="bold", va="center")
    seeds, millions = min(len(row["seeds"]) for row in rows), result["tokens"] / 1e6
    caption = f"{millions:.1f}M training tokens; means of {seeds} seeds and 95 % intervals. "
    caption += "A colour per mechanism. Equal caches lie side by side."
    figure.text(0.034, 0.905, caption, fontsize=9.5, color=GRAY, va="center")
    return figure


# -- the command -----------------------------------------------------------------------------------


def figures() -> dict[pathlib.Path, str]:
    """Returns every figure as SVG text, by file.

    Raises:
      UserError: results/studies/mechanisms.json is missing.
    """
    file = RESULTS / "studies" / "mechanisms.json"
    if not file.exists():
        command = "python -m experiments.studies.language_models --study=mechanisms --save"
        raise UserError(f"{file}: is not there; {command}")
    all_mechanisms = RESULTS / "small_caches.json"
    result = json.loads(all_mechanisms.read_text()) if all_mechanisms.exists() else {}
    with matplotlib.rc_context(cards.STYLE):
        texts = dict(
            idea=cards.svg(idea()), results=cards.svg(results(json.loads(file.read_text())))
        )
        if _is_whole(result):
            texts["small_caches"] = cards.svg(small_caches(result))
        studies = study_figures.figures(RESULTS)
        texts |= {f"studies/{name}": cards.svg(figure) for name, figure in studies.items()}
    return {FOLDER / f"{name}.svg": text for name, text in texts.items()}


def _is_whole(result: dict) -> bool:
    """Returns True if the study has at least three seeds of every mechanism."""
    seeds = {row["mechanism"]: len(row["seeds"]) for row in result.get("rows", ())}
    return all(seeds.get(name, 0) >= 3 for name in EVERY)


def main(arguments: list[str]) -> int:
    """Writes or checks the figures; returns 1 if a figure would change under --check."""
    parser = command_line.Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; print changes")
    options = parser.parse(arguments)
    if not options.check:
        record.check_folder("experiments.tables.figures", FOLDER)
    with progress.waiting("drawing"):
        texts = figures()
    before = {path: path.read_text() if path.exists() else None for path in texts}
    changed = [path for path, text in texts.items() if text != before[path]]
    for path in changed:
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path])
        print(f"{'would change' if options.check else 'written'}: {os.path.relpath(path, ROOT)}")
    if not changed:
        print("nothing changes")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    command_line.run(main)
