"""Writes names of series beside their points."""

from collections.abc import Mapping, Sequence
import textwrap

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

# Places to try for a name: its offset from the point (in 1/72 inch), and its alignment.
_BESIDE = (
    ((8, 0), "left", "center"),
    ((-8, 0), "right", "center"),
    ((0, 9), "center", "bottom"),
    ((0, -9), "center", "top"),
    ((6, 8), "left", "bottom"),
    ((6, -8), "left", "top"),
    ((-6, 8), "right", "bottom"),
    ((-6, -8), "right", "top"),
)
_Points = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def write(axes: Axes, series: _Points, bars: _Points) -> None:
    """Writes the name of each series beside its point, if every series is a single point.

    A name that would overlap another name, a point or an error bar at every place is left out.

    Args:
      bars: (lows, highs) of error bars, by name of a series.
    """
    if not all(len(xs) == 1 for xs, _ in series.values()):
        return
    axes.margins(0.16, 0.14)
    axes.figure.draw_without_rendering()  # computes the layout
    unit = axes.figure.dpi / 72
    points = {name: axes.transData.transform((xs[0], ys[0])) for name, (xs, ys) in series.items()}
    occupied = [
        Bbox.from_extents(*(center - 4 * unit), *(center + 4 * unit)) for center in points.values()
    ]
    for name, bar_ends in bars.items():
        x = [series[name][0][0]]
        (left, low), (right, high) = (axes.transData.transform((*x, *end)) for end in bar_ends)
        occupied.append(Bbox.from_extents(left - unit, low, right + unit, high))
    for name, (xs, ys) in series.items():
        for offset, horizontal, vertical in _BESIDE:
            text = axes.annotate(
                textwrap.fill(name, 24, break_on_hyphens=False),
                (xs[0], ys[0]),
                xytext=offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=11,
            )
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if inside and not any(box.overlaps(other) for other in occupied):
                occupied.append(box.padded(3 * unit))
                break
            text.remove()
