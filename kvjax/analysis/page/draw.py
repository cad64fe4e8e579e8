"""Draws lines and heatmaps as SVG text.

An SVG needs no other file and uses the page's fonts. Equal arguments give equal bytes. It is
readable at widths from a phone to half a screen. Series differ by marker and dash as well as by
colour. Non-finite numbers are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
import textwrap

import matplotlib
from matplotlib import colors as colors_lib, ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
import numpy as np

from kvjax.analysis.page import point_names, svg
from kvjax.analysis.page.section import Curve
from kvjax.foundation import theme

_WIDTH = 6.0  # inches; an inch is 72 units of the SVG, and fonts have at least 11 units
_SHADES = 255  # with gray for missing cells, a pixel takes one byte
_MAX_MARKERS = 12  # per line
_MAX_VALUE_TICKS = 8  # a logarithmic axis with at most this many values has a tick for each


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    levels: Mapping[str, float] | None = None,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    mechanisms: Mapping[str, str] | None = None,
) -> str:
    """Returns the SVG of curves.

    Args:
      series: (xs, ys) by name.
      x, y: axis labels.
      log_x, log_y: True for a logarithmic axis, if a series has a positive number.
      levels: heights of dashed horizontal lines, by name.
      bands: (lows, highs) by name of a series. For a series of one point, they are an error bar.
      mechanisms: by name of a series, the mechanism that sets its colour; needed only if the name
        does not begin with the mechanism's.
    """
    styles = _line_styles(list(series), mechanisms)
    height = 3.4 + _legend_height([*series, *(levels or {})])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _label(axes, x, y)
        artists = _plot(axes, series, log_x, log_y, levels or {}, bands or {}, styles)
        _legend(figure, artists)

    return svg.text(_WIDTH, draw, height)


def live_lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    names: Sequence[str],
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    mechanisms: Mapping[str, str] | None = None,
) -> tuple[str, list[Curve]]:
    """Returns the SVG of curves without a legend, and the positions of their points.

    It is for a page that shows the numbers at the pointer and has one legend for all figures. If
    each series is a single point, its name is written beside the point.

    Args:
      series, x, y, bands, mechanisms: as in `lines`.
      names: names of the series in all figures of the page, in order.
    """
    styles, bands, curves = _line_styles(names, mechanisms), bands or {}, []

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _label(axes, x, y)
        artists = _plot(axes, series, False, False, {}, bands, styles)
        point_names.write(axes, series, bands)
        figure.draw_without_rendering()  # computes the layout
        scale, height = 72 / figure.dpi, 72 * figure.get_figheight()
        for i, (name, (xs, ys)) in enumerate(series.items()):
            artists[name].set_gid(f"{svg.SERIES}{i}")
            xs, ys = _finite(xs), _finite(ys)
            low, high = map(_finite, bands.get(name, (ys, ys)))
            point_positions = scale * axes.transData.transform(np.stack([xs, ys], axis=1))
            rows = np.stack(
                [point_positions[:, 0], height - point_positions[:, 1], xs, ys, (high - low) / 2],
                axis=1,
            )
            finite = rows[np.isfinite(rows[:, :4]).all(axis=1)]
            style = styles[name]["color"], list(styles).index(name)
            curves.append(Curve(name, *style, np.nan_to_num(finite).tolist()))

    return svg.text(_WIDTH, draw, 3.4), curves


def picture(panels: Sequence[Mapping]) -> bytes:
    """Returns a PNG of panels of curves, two per row, with one legend.

    Args:
      panels: arguments of `lines` or `live_lines`.
    """
    names = list(dict.fromkeys(x for panel in panels for x in panel.get("names", panel["series"])))
    mechanisms = {k: v for panel in panels for k, v in panel.get("mechanisms", {}).items()}
    styles = _line_styles(names, mechanisms)
    columns = 2
    rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        artists = {}
        for axes, panel in zip(grid.flat, panels, strict=False):
            panel = dict(levels={}, bands={}, log_x=False, log_y=False, mechanisms={}) | panel
            _label(axes, panel.pop("x"), panel.pop("y"))
            arguments = {key: panel[key] for key in ("series", "log_x", "log_y", "levels", "bands")}
            artists = _plot(axes, **arguments, styles=styles) | artists
            point_names.write(axes, panel["series"], panel["bands"])
        _legend(figure, {name: artists[name] for name in [*names, *artists] if name in artists})

    return svg.png(_WIDTH * columns, draw, 3.4 * rows + _legend_height(names))


def _plot(axes: Axes, series, log_x, log_y, levels, bands, styles: Mapping[str, dict]) -> dict:
    """Draws lines, bands and levels on axes; returns the artists by name.

    Args:
      styles: styles by name, of all series of the figure or page.
    """
    log_x = log_x and _any_above_zero(xs for xs, _ in series.values())
    log_y = log_y and _any_above_zero(ys for _, ys in series.values())
    # Scales are set before drawing, so that numbers without a logarithm are left out; otherwise
    # they would be drawn at the edge.
    axes.set_xscale("log" if log_x else "linear", **(dict(nonpositive="mask") if log_x else {}))
    axes.set_yscale("log" if log_y else "linear", **(dict(nonpositive="mask") if log_y else {}))
    artists = {}
    for name, (xs, ys) in series.items():
        xs, ys, style = _finite(xs), _finite(ys), styles[name]
        if name in bands:
            low, high = map(_finite, bands[name])
            if len(xs) == 1:
                axes.vlines(xs, low, high, color=style["color"], linewidth=1.2)
            else:
                axes.fill_between(xs, low, high, color=style["color"], alpha=0.16, linewidth=0)
        (artists[name],) = axes.plot(
            xs, ys, markevery=_marker_offset(list(styles).index(name), len(xs)), **style
        )
    for i, (name, height) in enumerate(levels.items()):
        dashes = (0, (4 + 3 * i, 3))
        style = dict(color=theme.GRAY, linewidth=1.2, linestyle=dashes)
        artists[f"{name} "] = axes.axhline(height, **style)  # a series may have the same name
    _set_x_ticks(axes, [value for xs, _ in series.values() for value in xs], log_x)
    if log_y:
        _set_log_ticks(axes.yaxis)
    return artists


def heatmaps(
    matrices: Mapping[str, np.ndarray],
    *,
    x: str,
    y: str,
    low: float | None = None,
    high: float | None = None,
    color_label: str = "",
) -> str:
    """Returns the SVG of matrices side by side, with one colour scale.

    Non-finite cells are gray. If numbers of both signs occur, colours are symmetric about zero.

    Args:
      matrices: [rows, columns] by title.
      x, y: labels of columns and rows.
      low, high: ends of the scale; None: the numbers' range.
      color_label: label of the scale.
    """
    matrices = {name: _finite(matrix) for name, matrix in matrices.items()}
    norm, colors = _scale(matrices.values(), low, high)
    columns = _columns(len(matrices))
    rows = -(-len(matrices) // columns)
    shape = np.max([matrix.shape for matrix in matrices.values()], axis=0)
    aspect = float(np.clip(shape[0] / shape[1], 0.35, 1.5))
    width = min(_WIDTH / columns, 4.2)
    has_numbers = len(matrices) <= 2 and max(shape) <= 8

    same_shape = len({matrix.shape for matrix in matrices.values()}) == 1

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(matrices) :]:
            axes.set_axis_off()
        for i, (axes, (name, matrix)) in enumerate(zip(grid.flat, matrices.items(), strict=False)):
            axes.imshow(matrix, norm=norm, cmap=colors, interpolation="none", aspect="auto")
            axes.set_box_aspect(aspect)
            axes.set_title(_wrapped(name, 56 // columns), fontsize=12 if columns < 4 else 11)
            axes.spines[:].set_visible(False)
            below, left = i + columns >= len(matrices), i % columns == 0
            axes.set_xlabel(_wrapped(x, 56 // columns) if below else "")
            axes.set_ylabel(_wrapped(y, max(8, round(7.6 * width * aspect))) if left else "")
            outer = (below, left) if same_shape else (True, True)
            for axis, count, labelled in zip(
                (axes.xaxis, axes.yaxis), matrix.shape[::-1], outer, strict=True
            ):
                axis.set_ticks(_indices(count, 6 if columns == 1 else 4 if columns == 2 else 2))
                hidden = {} if labelled else dict(length=0, labelbottom=False, labelleft=False)
                axis.set_tick_params(**hidden)
            if has_numbers:
                _write_numbers(axes, matrix, norm, colors)
        _color_bar(figure, norm, colors, color_label)

    title_lines = max(_wrapped(name, 56 // columns).count("\n") + 1 for name in matrices)
    height = (
        rows * (0.9 * width * aspect + 0.2 * title_lines + (0.12 if same_shape else 0.38)) + 1.3
    )
    return svg.text(_WIDTH, draw, height)


# -- parts of a figure -----------------------------------------------------------------------------


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=_wrapped(x, 56), ylabel=_wrapped(y, 28))
    axes.grid()


def _line_styles(names: Sequence[str], mechanisms: Mapping[str, str] | None) -> dict[str, dict]:
    """Returns the style of each series. Neighbours differ by marker and dash, too."""
    colors = theme.colors(names, mechanisms)
    return {
        name: dict(
            color=colors[name],
            linestyle=theme.DASHES[i % len(theme.DASHES)],
            marker=theme.MARKERS[i % len(theme.MARKERS)],
        )
        for i, name in enumerate(names)
    }


def _any_above_zero(values: Iterable[Sequence[float]]) -> bool:
    """Returns True if a logarithmic axis can show at least one number."""
    return any((_finite(numbers) > 0).any() for numbers in values)


def _marker_offset(i: int, count: int) -> tuple[int, int]:
    """Returns (first, every): the points with a marker, offset between series."""
    every = max(1, -(-count // _MAX_MARKERS))
    return i % every, every


def _set_x_ticks(axes: Axes, values: Sequence[float], log: bool) -> None:
    """Sets ticks at integers if all values are; on a logarithmic axis of few values, at each."""
    values = _finite(values)
    values = np.unique(values[np.isfinite(values)])
    if log and len(values) <= _MAX_VALUE_TICKS:
        axes.xaxis.set_major_locator(ticker.FixedLocator(values))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    elif log:
        _set_log_ticks(axes.xaxis)
    elif len(values) and (values == np.round(values)).all():
        axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))


def _set_log_ticks(axis: Axis) -> None:
    """Sets ticks at powers of ten; denser ones if the axis spans less than a factor of 100."""
    low, high = axis.get_view_interval()
    if high < 8 * low:
        axis.set_major_locator(ticker.MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
    else:
        subs = (1, 2, 5) if high < 100 * low else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=8))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(_power))


def _power(value: float, _) -> str:
    """Formats a number as plain text: 0.1, 1, 100, 10⁻⁵."""
    if value <= 0:
        return ""
    if 1e-3 < value < 1e5:
        return f"{value:,.6g}"
    exponent = int(np.floor(np.log10(value) + 1e-9))
    digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = value / 10.0**exponent
    return f"10{digits}" if abs(mantissa - 1) < 1e-6 else f"{mantissa:.2g}·10{digits}"


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False)) or text


def _legend_columns(names: Sequence[str]) -> int:
    longest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), 4, int(58 / (longest + 6))))


def _legend_height(names: Sequence[str]) -> float:
    """Returns the legend's height in inches."""
    lines = max((_wrapped(name, 52).count("\n") + 1 for name in names), default=0)
    return 0.1 + 0.22 * lines * -(-len(names) // _legend_columns(names)) if names else 0.0


def _legend(figure: Figure, artists: Mapping[str, Artist]) -> None:
    """Adds a legend below the axes."""
    if not artists:
        return
    style = dict(handlelength=3.2, columnspacing=1.4, fontsize=11.5)
    style |= dict(loc="outside lower center", ncols=_legend_columns(list(artists)))
    legend = figure.legend(list(artists.values()), [" "] * len(artists), **style)
    for text, name in zip(legend.get_texts(), artists, strict=True):
        text.set_text(_wrapped(name.strip(), 52))  # legend() would hide names that begin with "_"


def _scale(matrices: Iterable[np.ndarray], low: float | None, high: float | None):
    """Returns the norm and colour map shared by all matrices."""
    numbers = np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices] or [np.zeros(1)])
    numbers = numbers if numbers.size else np.zeros(1)
    low = float(numbers.min()) if low is None else low
    high = float(numbers.max()) if high is None else high
    if low < 0 < high:
        most = max(-low, high)
        low, high, name = -most, most, "RdBu_r"
    else:
        name = "viridis"
    high = high if high > low else low + 1.0
    colors = matplotlib.colormaps[name].resampled(_SHADES).with_extremes(bad=theme.MISSING)
    return colors_lib.Normalize(low, high), colors


def _columns(count: int) -> int:
    """Returns the number of columns of a grid of `count` heatmaps."""
    return count if count <= 3 else 2 if count == 4 else 3 if count <= 9 else 4


def _indices(count: int, most: int) -> list[int]:
    """Returns tick indices at round steps, at most `most`."""
    if count <= most:
        return list(range(count))
    if most <= 2:
        return [0, count - 1]
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if count / (s * 10**e) <= most)
    return list(range(0, count, step))


def _write_numbers(axes: Axes, matrix: np.ndarray, norm, colors) -> None:
    """Writes each number into its cell, in black or white for contrast."""
    for (row, column), value in np.ndenumerate(matrix):
        if np.isfinite(value):
            red, green, blue, _ = colors(norm(value))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            ink = dict(color="white" if dark else theme.INK, fontsize=11)
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", **ink)


def _color_bar(figure: Figure, norm, colors, label: str) -> None:
    """Adds a colour bar as an image; matplotlib's own consists of hundreds of shapes."""
    height = figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0.72 / height, 1, 1 - 0.72 / height))
    axes = figure.add_axes((0.2, 0.47 / height, 0.6, 0.14 / height))
    axes.set_in_layout(False)
    shades = np.linspace(norm.vmin, norm.vmax, _SHADES)[None]
    extent = (norm.vmin, norm.vmax, 0, 1)
    axes.imshow(shades, norm=norm, cmap=colors, aspect="auto", extent=extent, interpolation="none")
    axes.set_yticks([])
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
    axes.spines[:].set_visible(False)
    axes.set_xlabel(label, labelpad=1)


def _finite(values) -> np.ndarray:
    """Returns float64 with nan for non-finite or missing values."""
    numbers = np.array(values, np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)
