"""How the pictures look: a card that reads on light and dark pages, the same bytes each time."""

import io

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

INK, GRAY, LINE = "#1f2328", "#59636e", "#d1d9e0"
FULL, RESIDUAL, LATENT, WEIGHT = "#4c78a8", "#f58518", "#54a24b", "#d8dce1"
STYLE = {
    "svg.fonttype": "path",  # the same everywhere: no fonts are looked up
    "svg.hashsalt": "kvjax",  # the same bytes every time
    "font.size": 10,
    "text.color": INK,
}


def svg(figure: Figure) -> str:
    """A figure as SVG text, the same for the same figure: no date, no version."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict(Date=None, Creator=None), transparent=True)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def card(width: float, height: float) -> Figure:
    """An empty figure on a card of its own; inches."""
    figure = Figure(figsize=(width, height))
    shape = FancyBboxPatch(
        (0.006, 0.006 * width / height),
        0.988,
        1 - 0.012 * width / height,
        boxstyle=f"round,pad=0,rounding_size={0.012}",
        mutation_aspect=width / height,
        transform=figure.transFigure,
        facecolor="white",
        edgecolor=LINE,
        zorder=-10,
    )
    figure.add_artist(shape)
    return figure


def heading(figure: Figure, title: str, *lines: str) -> None:
    """A title and what is to be known beside it, at the top of a card."""
    height = figure.get_figheight()
    figure.text(0.034, 1 - 0.33 / height, title, fontsize=13, weight="bold", va="center")
    for i, line in enumerate(lines):
        y = 1 - (0.58 + 0.17 * i) / height
        figure.text(0.034, y, line, fontsize=9.5, color=GRAY, va="center")


def plain_axes(axes) -> None:
    """Two quiet spines and a grid behind what is drawn."""
    axes.tick_params(colors=GRAY)
    axes.grid(color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for name, spine in axes.spines.items():
        spine.set(visible=name in ("left", "bottom"), color=LINE)
