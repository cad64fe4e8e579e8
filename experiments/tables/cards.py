"""Common style of the figures: a white card for light and dark pages, as reproducible SVG."""

import io

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from kvjax.foundation import theme

INK, GRAY, LINE = theme.INK, theme.GRAY, theme.LINE
# Colours of cached arrays: an array has the colour of the mechanism that introduced it.
FULL, RESIDUAL, LATENT = (theme.COLORS[name] for name in ("mha", "lrkv", "mla"))
WEIGHT = theme.FAINT
STYLE = {
    "svg.fonttype": "path",  # glyphs as paths: independent of installed fonts
    "svg.hashsalt": "kvjax",  # reproducible ids
    "font.size": 10,
    "text.color": INK,
}


def svg(figure: Figure) -> str:
    """Returns a figure as SVG text, without date and version: equal figures give equal text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict(Date=None, Creator=None), transparent=True)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def card(width: float, height: float) -> Figure:
    """Returns an empty figure on a card with rounded corners; sizes in inches."""
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
    """Writes a title and lines of explanation at the top of a card."""
    height = figure.get_figheight()
    figure.text(0.034, 1 - 0.33 / height, title, fontsize=13, weight="bold", va="center")
    for i, line in enumerate(lines):
        y = 1 - (0.58 + 0.17 * i) / height
        figure.text(0.034, y, line, fontsize=9.5, color=GRAY, va="center")


def plain_axes(axes) -> None:
    """Keeps the left and bottom spines and draws a grid behind the data."""
    axes.tick_params(colors=GRAY)
    axes.grid(color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for name, spine in axes.spines.items():
        spine.set(visible=name in ("left", "bottom"), color=LINE)
