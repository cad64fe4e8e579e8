"""Chart types of the study figures: rows of points with intervals, lines, and panels of curves."""

from collections.abc import Mapping, Sequence
import dataclasses
import math

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.tables import cards
from experiments.tables.cards import GRAY, INK
from kvjax.foundation import theme
from kvjax.foundation.intervals import Estimate


@dataclasses.dataclass(frozen=True)
class Row:
    """A point with its interval.

    Attributes:
      mark: a second value drawn beside the point, such as the paper's.
      off: True (filled): the interval excludes the reference; False (hollow): it does not; None
        (filled): there is no reference.
    """

    label: str
    value: Estimate
    mark: float | None = None
    off: bool | None = None


def difference(label: str, mean: float, half: float | None) -> Row:
    """Returns the row of a difference, filled if its interval excludes 0."""
    value = Estimate(mean, half)
    return Row(label, value, off=bool(value.sign))


@dataclasses.dataclass(frozen=True)
class Panel:
    """Rows under a heading, with an axis of their own.

    Attributes:
      zero: a value marked by a vertical line.
    """

    heading: str
    rows: Sequence[Row]
    form: str
    zero: float | None = None


def rows_of_points(title: str, caption: Sequence[str], panels: Sequence[Panel]) -> Figure:
    """Draws panels one below another; each point's value is printed at the right."""
    count = sum(len(panel.rows) for panel in panels)
    height = 0.75 + 0.17 * len(caption) + 0.26 * count + 0.75 * len(panels)
    figure = cards.card(9.6, height)
    cards.heading(figure, title, *caption)
    top = height - 0.6 - 0.17 * len(caption)
    all_axes = []
    for panel in panels:
        high = 0.26 * len(panel.rows)
        bottom = top - 0.3 - high
        axes = figure.add_axes((0.235, bottom / height, 0.545, high / height))
        _points(axes, panel)
        all_axes.append(axes)
        figure.text(0.034, (top - 0.1) / height, panel.heading, weight="bold", va="center")
        top = bottom - 0.45
    if panels and all(panel.zero is not None for panel in panels):  # differences: one scale for all
        limits = [edge for axes in all_axes for edge in axes.get_xlim()]
        for axes in all_axes:
            axes.set_xlim(min(limits), max(limits))
    return figure


def _points(axes, panel: Panel) -> None:
    cards.plain_axes(axes)
    if panel.zero is not None:
        axes.axvline(panel.zero, color=GRAY, linewidth=0.8, linestyle="--")
    for i, row in enumerate(panel.rows):
        names = (text.partition(",")[0] for text in (row.label, panel.heading))
        color = theme.color(next(filter(theme.mechanism, names), ""))
        x, half = row.value.mean, row.value.half
        inside = "white" if row.off is False else color
        style = dict(color=color, markerfacecolor=inside, capsize=3, markersize=6)
        axes.errorbar(x, i, xerr=half, fmt="o", **style)
        if row.mark is not None:
            axes.plot(row.mark, i, "|", color=INK, markersize=13, markeredgewidth=1.6)
        text = row.value.shown(panel.form)
        axes.annotate(
            text, (1.02, i), xycoords=("axes fraction", "data"), va="center", fontsize=9, color=INK
        )
    axes.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows], color=INK)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)


def lines(
    title: str, caption: Sequence[str], series: Mapping[str, Mapping[int, Estimate]], labels: tuple
) -> Figure:
    """Draws a line with intervals for each series; the x axis is logarithmic.

    Args:
      series: {x: y} by name.
      labels: the labels of both axes.
    """
    figure = cards.card(9.6, 5.0)
    cards.heading(figure, title, *caption)
    axes = figure.add_axes((0.085, 0.125, 0.62, 0.83 - 0.15 - 0.034 * len(caption)))
    colors = theme.colors(list(series))
    for i, (name, points) in enumerate(series.items()):
        xs = sorted(points)
        ys, halves = [points[x].mean for x in xs], [points[x].half or 0.0 for x in xs]
        spread = [x * 1.02 ** (i - len(series) / 2) for x in xs]
        style = dict(fmt=f"{theme.MARKERS[i % 8]}-", capsize=3, markersize=5, linewidth=1.3)
        axes.errorbar(spread, ys, halves, label=name, color=colors[name], **style)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for points in series.values() for x in points})
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel(labels[0], color=GRAY)
    axes.set_ylabel(labels[1], color=GRAY)
    cards.plain_axes(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=9)
    return figure


def curves(
    title: str,
    caption: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    labels: tuple[str, str],
) -> Figure:
    """Draws panels of curves, three in a row, with logarithmic y axes and one legend in the first.

    Args:
      panels: points (x, y) by heading and curve name.
      labels: the labels of both axes.
    """
    columns = 3
    rows = math.ceil(len(panels) / columns)
    width, row = 9.6, 2.5
    height = 0.6 + 0.17 * len(caption) + row * rows
    figure = cards.card(width, height)
    cards.heading(figure, title, *caption)
    colors = theme.colors(list(dict.fromkeys(name for named in panels.values() for name in named)))
    for i, (heading, by_name) in enumerate(panels.items()):
        left = 0.075 + (i % columns) * 0.315
        bottom = row * (rows - 1 - i // columns) + 0.55
        axes = figure.add_axes((left, bottom / height, 0.25, (row - 0.8) / height))
        for j, (name, points) in enumerate(by_name.items()):
            line = dict(color=colors[name], linestyle="-" if j % 3 < 2 else "--")
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.3, **line)
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(heading, loc="left", fontsize=9, weight="bold", color=INK)
        cards.plain_axes(axes)
        if i % columns == 0:
            axes.set_ylabel(labels[1], color=GRAY)
        axes.set_xlabel(labels[0], color=GRAY)
        if i == 0:
            axes.legend(frameon=False, fontsize=9)
    return figure
