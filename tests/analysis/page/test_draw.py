"""Figures as SVG: legible, small, deterministic."""

import base64
import collections
from collections.abc import Iterable
import concurrent.futures
import io
import re
from xml.etree import ElementTree

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.text import Text
import numpy as np
from PIL import Image
import pytest

from kvjax.analysis.page import draw, svg as svg_lib
from tests import golden
from tests.analysis.page.test_document import drawings

SVG = "{http://www.w3.org/2000/svg}"
# Properties of artists that a golden file keeps.
FACTS = ("text", "fontsize", "fontweight", "color", "edgecolor", "facecolor", "alpha")
FACTS += ("linewidth", "marker", "markersize", "markevery", "data", "array", "segments", "clim")
FACTS += ("extent", "interpolation", "ha", "va", "parse_math")
LEAST_FONT = 11  # of 432 units: 9 pixels on a phone of 350


@pytest.fixture(scope="module")
def drawn():
    return drawings()


def _texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.slow
def test_the_same_numbers_give_the_same_text(drawn):
    assert drawings.__wrapped__() == drawn  # without the cache


def test_text_is_text_of_a_legible_size(drawn):
    for title, svg in drawn.items():
        assert len(_texts(svg)) > 5, title
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert min(sizes) >= LEAST_FONT, title
    assert {"layer", "uncentered", "LRKV in the paper"} <= set(_texts(drawn["Curves over layers"]))
    assert {"64", "256", "1,024"} <= set(_texts(drawn["Curves over lengths"]))
    assert {"1", "0.01", "10⁻⁴"} <= set(_texts(drawn["Spectra"]))
    assert "_measured" in _texts(drawn["Within a decade"])
    assert "-1.0" in [text.replace("−", "-") for text in _texts(drawn["One matrix"])]


def test_drawings_are_as_before(monkeypatch):
    """Compares the Matplotlib artists of each kind of drawing with a file."""
    facts = []

    def savefig(figure, file, **options):
        facts.extend(["", str(options), *_facts(figure)])
        file.write('<svg viewBox="0 0 1 1"></svg>' if options["format"] == "svg" else b"")

    monkeypatch.setattr(Figure, "savefig", savefig)
    long = "0123456789" * 12  # long enough to be wrapped

    def line(xs, ys, **how):
        return draw.lines({"a": (xs, ys)}, x="x", y="y", **how)

    at = np.arange(26.0)
    draw.lines(
        {"many": (at, at**2), "one": ((4.0,), (70.0,)), long: (at[:13], 9 * at[:13] + 5)},
        x=long,
        y=long,
        levels={"many": 300.0, "other": 400.0},
        bands={"many": (at**2 - 9, at**2 + 21), "one": ((50.0,), (80.0,))},
    )
    draw.lines({f"layer {i}": ((0.5, 1.5), (i, i * i)) for i in range(9)}, x="x", y="y")
    line((16, 64, 1024), (3.0, 5.0, 9.0), log_x=True, log_y=True)
    line(2 * at[1:10], np.geomspace(1e-6, 3e5, 9), log_x=True, log_y=True)
    line((1.0, 1e6), (1.0, 50.0), log_y=True)
    signed = np.array([[-1.0, 0.25, np.nan, 3.0, 4.0], [2.0, -0.5, 1.0, 0.0, 2.5]])
    draw.heatmaps({long: signed}, x="x", y=long, color_label="bar")

    def grid(*shape):
        return np.linspace(2, 3, np.prod(shape)).reshape(shape)

    draw.heatmaps({"a": np.full((2, 3), 3.0)}, x="x", y="y")
    draw.heatmaps({"a": grid(9, 3), long: grid(4, 7)}, x="x", y="y", high=5)
    draw.heatmaps({str(i): grid(3, 14) + i for i in range(4)}, x="x", y="y", low=0)
    draw.heatmaps(dict.fromkeys([long, *"bcdefghij"], grid(8, 9)), x=long, y=long)
    panel = dict(series={"a": ((1, 2), (3, 4))}, x="x", y="y")
    panels = [panel, panel | dict(levels={"l": 2.0}, log_y=True)]
    draw.picture([*panels, panel | dict(series={"b": ((1, 2), (5, 6))})])
    golden.check_text("\n".join(facts), "page/drawings", rtol=0.01)


def test_layout_helpers():
    """Columns of maps and legends, ticks of indices, names of powers, points with a marker."""
    assert [draw._columns(count) for count in range(1, 12)] == [1, 2, 3, 2, 3, 3, 3, 3, 3, 4, 4]
    ends = {(1, 4): (1, 0), (4, 4): (4, 3), (5, 4): (3, 4), (8, 4): (4, 6), (9, 2): (2, 8)}
    ends |= {(20, 4): (4, 15), (21, 4): (3, 20), (40, 4): (4, 30), (41, 4): (3, 40)}
    ends |= {(300, 6): (6, 250), (301, 6): (4, 300), (600, 6): (6, 500)}
    found = {key: draw._indices(*key) for key in ends}
    assert {key: (len(at), at[-1]) for key, at in found.items()} == ends
    named = {0.0: "", -1.0: "", 1e-3: "10⁻³", 2e-3: "0.002", 99999.0: "99,999", 1e5: "10⁵"}
    named |= {2.5e-7: "2.5·10⁻⁷", 3e12: "3·10¹²"}
    assert {value: draw._power(value, None) for value in named} == named
    legends = {(): 1, (8, 8): 2, (1,) * 6: 4, (9,) * 5: 3, (13, 1, 1): 3, (14, 1, 1): 2, (53,): 1}
    names = {lengths: ["n" * length for length in lengths] for lengths in legends}
    assert {key: draw._legend_columns(each) for key, each in names.items()} == legends

    def height(*lengths):
        return round(draw._legend_height(["n" * length for length in lengths]), 2)

    assert [height(), height(1), height(53), height(8, 8, 53, 1, 1)] == [0, 0.32, 0.54, 2.3]
    marked = [(0, 1), (2, 1), (2, 13), (1, 24), (1, 25), (4, 36)]
    expected = [(0, 1), (0, 1), (0, 2), (1, 2), (1, 3), (1, 3)]
    assert [draw._marker_offset(*each) for each in marked] == expected


def _facts(figure: Figure) -> list[str]:
    """Returns lines on a figure, its axes and legends."""
    figure.draw_without_rendering()
    layout = figure.get_layout_engine().get()
    found = [f"figure {_shown(figure.get_size_inches())} laid out in {_shown(layout['rect'])}"]
    for axes in figure.axes:
        found += _facts_of_axes(axes) if axes.axison else ["axes off"]
    for legend in figure.legends:
        of = (legend._ncols, legend._loc, legend.handlelength, legend.columnspacing)
        found += [f"legend {_shown(of)}", *_facts_of(legend.get_texts())]
    return found


def _facts_of_axes(axes: Axes) -> list[str]:
    place = "laid out" if axes.get_in_layout() else _shown(axes.get_position().bounds)
    found = [f"axes {place} {axes.get_box_aspect()} {axes.get_axisbelow()}"]
    found += _facts_of(axes.spines.values())
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        of = (*axis.get_view_interval(), len(axis.get_minorticklocs()), axis.label.get_text())
        ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        named = [f"{tick.get_loc():.3g} {tick.label1.get_text()}" for tick in ticks]
        below = axis.get_transform().transform(np.full(1, -1.0))
        found.append(f" {axis.get_scale()} {_shown(below)} {_shown(of)} {' | '.join(named)}")
        for tick in ticks[:1]:
            found += _facts_of([tick.tick1line, tick.label1, tick.gridline])
    kinds = (Line2D, Collection, AxesImage, Text)
    return found + _facts_of(artist for artist in axes.get_children() if isinstance(artist, kinds))


def _facts_of(artists: Iterable[Artist]) -> list[str]:
    """Returns a line for each kind of visible artist, with a count."""
    lines = collections.Counter()
    for artist in artists:
        values = [getattr(artist, f"get_{name}", str)() for name in FACTS]
        values.append(getattr(artist, "_unscaled_dash_pattern", ""))
        known = [_shown(value) for value in values if value is not None]
        known = [text for text in known if text not in ("", "[]", "[0 None]", "[None None]")]
        if artist.get_visible() and getattr(artist, "get_text", lambda: "text")():
            lines[f"{type(artist).__name__} {' '.join(known)}"] += 1
    return [f"  {count} x {line}" for line, count in lines.items()]


def _shown(value) -> str:
    if isinstance(value, np.ndarray) and value.size > 12:
        known = (*value.shape, value.flat[0], value.flat[-1], value.mean())
        return f"array{_shown(known)}"
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0):
        return f"[{' '.join(map(_shown, value))}]"
    is_float = isinstance(value, float | np.floating)
    return f"{value:.3g}" if is_float else str(value).replace("\n", " / ")


RAW = """<?xml version="1.0"?>
<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="432pt" viewBox="0 0 432 9.5" version="1.1">
 <!-- a
 comment --><metadata>made
 by</metadata><style type="text/css">*{stroke: round}</style>
 <g id="figure_1"><g id="series-12"><path d="M 1.234 -2.000
L 10.50  3" clip-path="url(#two)" style="stroke-width: 1.2345"/></g>
  <text style="font-size: 11px; font-family: 'A', 'B'; fill: red" transform="rotate(-0 1.2 3)"
   x="1.2345">1.2345</text>
  <text style="font-family: 'A'" transform="rotate(-90 1 2)" y="0.10">x="1"</text>
  <use xlink:href="#one" x="1.999"/><use xlink:href="#two"/>
  <g id="one"/><clipPath id="two"/>
 </g>
</svg>
"""
CLEAN = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 432 9.5" \
font-family="system-ui, sans-serif" style="stroke-linejoin: round">
<g><g data-series="12"><path d="M 1.23 -2 L 10.5 3" clip-path="url(#f7ed52e4d-0)" \
style="stroke-width: 1.2345"/></g>
<text style="font-size: 11px; fill: red"
x="1.23">1.2345</text>
<text style="" transform="rotate(-90 1 2)" y="0.1">x="1"</text>
<use href="#f7ed52e4d-1" x="2"/><use href="#f7ed52e4d-0"/>
<g id="f7ed52e4d-1"/><clipPath id="f7ed52e4d-0"/>
</g>
</svg>"""


def test_svg_is_cleaned():
    """Images of at most 256 opaque colours get a byte per pixel."""
    assert svg_lib._clean(RAW) == CLEAN
    plain = np.stack([np.arange(256), *np.full((3, 256), 255)], axis=-1)[None]
    more = np.concatenate([plain, [[[0, 0, 0, 255]]]], axis=1)
    for pixels, mode in ((plain, "P"), (more, "RGBA"), (plain - [0, 0, 0, 1], "RGBA")):
        buffer = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(buffer, format="png")
        given = base64.b64encode(buffer.getvalue()).decode()
        found = svg_lib._with_palette(re.fullmatch(".*", given))
        picture = Image.open(io.BytesIO(base64.b64decode(found)))
        assert picture.mode == mode and (found == given) == (mode == "RGBA")
        assert (np.asarray(picture.convert("RGBA")) == pixels).all()


@pytest.mark.parametrize("low, high", [(1, 1.1), (0.02, 0.05), (3, 40), (1, 900), (1e-9, 3)])
def test_logarithmic_axes_have_several_ticks(low, high):
    svg = draw.lines({"a": ((1, 2), (low, high))}, x="x", y="y", log_y=True)
    names = set(_texts(svg)[2:]) - {"x", "y", "a"}  # after those of the other axis
    assert 3 <= len(names) <= 9, names


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "numbers",
    [
        (0.0, 0.0),
        *(
            pytest.param(numbers, marks=pytest.mark.slow)
            for numbers in ((-1.0, -2.0), (np.nan, np.nan), ())
        ),
    ],
)
def test_a_logarithmic_axis_without_numbers_above_zero_is_linear(numbers):
    svg = draw.lines({"a": (numbers, numbers)}, x="x", y="y", log_x=True, log_y=True)
    assert svg == draw.lines({"a": (numbers, numbers)}, x="x", y="y")
    level = draw.lines(
        {"a": ((1, 2)[: len(numbers)], numbers)}, x="x", y="y", log_y=True, levels={"b": 10.0}
    )
    assert "b" in _texts(level)


@pytest.mark.slow
def test_styles_are_isolated_from_the_process(drawn):
    """Draws in several threads under other Matplotlib parameters, which stay."""
    with matplotlib.rc_context({"axes.linewidth": 5, "xtick.direction": "in"}):
        before = dict(matplotlib.rcParams)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: drawings(), range(2)))
        assert dict(matplotlib.rcParams) == before
    assert found == [drawn, drawn]


def test_matrices_share_a_colour_scale():
    """Images have a pixel per number; a diverging scale is centred at zero."""
    first, second = np.array([[0.0, 0.5], [1.0, np.nan]]), np.array([[0.5, 0.5], [0.0, 1.0]])
    svg = draw.heatmaps({"a": first, "b": second}, x="x", y="y")
    a, b, scale = _pictures(svg)
    assert a.shape[:2] == b.shape[:2] == (2, 2) and scale.shape[1] == 255
    assert (a[0, 1] == b[0, 0]).all() and (a[0, 0] == b[1, 0]).all() and (a[1, 0] == b[1, 1]).all()
    assert (a[0, 0] == scale[0, 0]).all() and (a[1, 0] == scale[0, -1]).all()
    assert (a[1, 1] == (0xB8, 0xBE, 0xC6)).all()
    (signed, _) = _pictures(draw.heatmaps({"a": np.array([[-1.0, 0.0, 4.0]])}, x="x", y="y"))
    assert signed[0, 1].min() > 240  # white at 0, though 4 is further from it than -1
    assert signed[0, 0].max() > 100 and signed[0, 2].max() < 110


def _pictures(svg: str) -> list[np.ndarray]:
    found = re.findall(r'href="data:image/png;base64,([^"]*)"', svg)
    images = [Image.open(io.BytesIO(base64.b64decode(text))) for text in found]
    assert all(image.mode == "P" for image in images)
    return [np.asarray(image.convert("RGB")) for image in images]


def test_values_that_are_not_finite_are_left_out():
    odd = [1.0, np.nan, np.inf, -np.inf, 0.0, -2.0]
    for svg in (
        draw.lines({"a": (range(6), odd)}, x="x", y="y", log_y=True),
        draw.lines({"a": (odd, odd)}, x="x", y="y", log_x=True, bands={"a": (odd, odd)}),
        draw.lines({"a": ([], [])}, x="x", y="y"),
        draw.lines({}, x="x", y="y"),
        draw.heatmaps({"a": np.full((2, 2), np.nan)}, x="x", y="y"),
        draw.heatmaps({"a": np.full((2, 2), 3.0)}, x="x", y="y"),
    ):
        ElementTree.fromstring(svg)
        assert not {"nan", "inf"} & set(re.findall(r"[a-z]+", " ".join(_texts(svg))))
        assert not re.search(r'd="[^"]*(nan|inf)', svg)


@pytest.mark.slow
def test_names_are_plain_text():
    names = ["$x^2$ & <b>", "_hidden", "文字", "x" * 60, ""]
    for svg in (
        draw.lines({name: ((0, 1), (0, 1)) for name in names}, x=names[0], y=names[0]),
        draw.heatmaps(
            {name: np.eye(2) for name in names}, x=names[1], y=names[2], color_label=names[0]
        ),
    ):
        shown = "".join(_texts(svg))
        for name in names[:-1]:
            assert name.replace(" ", "") in shown.replace(" ", ""), name


def test_a_heatmap_of_attention_is_small():
    found = np.tril(np.random.default_rng(0).random((256, 256)))
    assert len(draw.heatmaps({"head 0": found}, x="key", y="query")) < 100_000
