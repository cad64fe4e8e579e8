"""Figures as text: well-formed, without references, legible, and the same every time."""

import base64
import concurrent.futures
import io
import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
from PIL import Image
import pytest

from kvjax.analysis.page import draw
from tests.analysis.page.test_document import drawings

SVG = "{http://www.w3.org/2000/svg}"
LEAST_FONT = 11  # of 432 units, which are 350 pixels of a phone: 9 pixels


@pytest.fixture(scope="module")
def drawn():
    return drawings()


def _texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.slow
def test_the_same_numbers_give_the_same_text(drawn):
    assert drawings.__wrapped__() == drawn  # drawn anew


def test_it_is_an_element_that_refers_to_nothing_outside(drawn):
    for title, svg in drawn.items():
        assert ElementTree.fromstring(svg).tag == f"{SVG}svg"
        assert svg.startswith("<svg ") and svg.endswith("</svg>")
        head = svg[: svg.index(">")]
        assert re.search(r'viewBox="0 0 432 [\d.]+"', head), title
        assert " width=" not in head and " height=" not in head
        assert re.findall(r"https?:[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
        for found in re.findall(r'href="([^"]{5})|url\((.)', svg):
            assert found[0].startswith(("#", "data:")) or found[1] == "#"
        assert "<metadata" not in svg and "<style" not in svg and "DejaVu" not in svg


def test_ids_are_of_one_figure_alone(drawn):
    ids = [name for svg in drawn.values() for name in re.findall(r' id="([^"]*)"', svg)]
    assert ids and len(ids) == len(set(ids))
    for svg in drawn.values():
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
        assert used == set(re.findall(r' id="([^"]*)"', svg))


def test_text_stays_text_of_a_size_to_read(drawn):
    for title, svg in drawn.items():
        assert len(_texts(svg)) > 5, title
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert min(sizes) >= LEAST_FONT, title
    assert {"layer", "uncentered", "LRKV in the paper"} <= set(_texts(drawn["Curves over layers"]))
    assert {"64", "256", "1,024"} <= set(_texts(drawn["Curves over lengths"]))
    assert {"1", "0.01", "10⁻⁴"} <= set(_texts(drawn["Spectra"]))
    assert "_measured" in _texts(drawn["Within a decade"])
    assert "-1.0" in [text.replace("−", "-") for text in _texts(drawn["One matrix"])]


@pytest.mark.parametrize("low, high", [(1, 1.1), (0.02, 0.05), (3, 40), (1, 900), (1e-9, 3)])
def test_a_logarithmic_axis_names_several_numbers(low, high):
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
    """And matplotlib does not warn of it."""
    svg = draw.lines({"a": (numbers, numbers)}, x="x", y="y", log_x=True, log_y=True)
    assert svg == draw.lines({"a": (numbers, numbers)}, x="x", y="y")
    level = draw.lines(
        {"a": ((1, 2)[: len(numbers)], numbers)}, x="x", y="y", log_y=True, level={"b": 10.0}
    )
    assert "b" in _texts(level)


@pytest.mark.slow
def test_no_style_of_the_process_shows(drawn):
    """And none of ours stays, also where several are drawn at once."""
    with matplotlib.rc_context({"axes.linewidth": 5, "xtick.direction": "in"}):
        before = dict(matplotlib.rcParams)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: drawings(), range(2)))
        assert dict(matplotlib.rcParams) == before
    assert found == [drawn, drawn]


def test_series_differ_by_more_than_their_colour():
    svg = draw.lines({f"{i}": ((0, 1), (i, i)) for i in range(6)}, x="x", y="y")
    lines = re.findall(r'<path d="[^"]*" clip-path[^>]*style="fill: none; ([^"]*)"', svg)
    curves = [line for line in lines if "stroke-width: 1.7" in line]
    dashes = [re.sub(r"stroke: #\w+;? ?", "", line) for line in curves]
    marks = re.findall(r'<path id="f\w+-\d+" d="([^"]*)"', svg)
    assert len(curves) == 6 and len(set(curves)) == 6 and len(set(dashes)) == 4
    assert len(set(marks)) >= 6


def test_colours_are_dark_enough_to_see_on_white():
    """Lines have a contrast of 3 to the page, as WCAG 2 asks of graphics."""
    for color in draw._COLORS:
        linear = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in linear]
        assert 1.05 / (np.dot(linear, (0.2126, 0.7152, 0.0722)) + 0.05) >= 3, color


def test_matrices_share_a_scale_that_is_kept_exactly():
    """Pictures have a pixel a number; zero has one colour on both sides of it."""
    first, second = np.array([[0.0, 0.5], [1.0, np.nan]]), np.array([[0.5, 0.5], [0.0, 1.0]])
    svg = draw.heatmaps({"a": first, "b": second}, x="x", y="y")
    a, b, scale = _pictures(svg)
    assert a.shape[:2] == b.shape[:2] == (2, 2) and scale.shape[1] == 255
    assert (a[0, 1] == b[0, 0]).all() and (a[0, 0] == b[1, 0]).all() and (a[1, 0] == b[1, 1]).all()
    assert (a[0, 0] == scale[0, 0]).all() and (a[1, 0] == scale[0, -1]).all()
    assert (a[1, 1] == (0xB8, 0xBE, 0xC6)).all()
    (signed, _) = _pictures(draw.heatmaps({"a": np.array([[-1.0, 0.0, 4.0]])}, x="x", y="y"))
    assert signed[0, 1].min() > 240  # white in the middle, though 4 is further from it than -1
    assert signed[0, 0].max() > 100 and signed[0, 2].max() < 110


def _pictures(svg: str) -> list[np.ndarray]:
    found = re.findall(r'href="data:image/png;base64,([^"]*)"', svg)
    images = [Image.open(io.BytesIO(base64.b64decode(text))) for text in found]
    assert all(image.mode == "P" for image in images)
    return [np.asarray(image.convert("RGB")) for image in images]


def test_what_is_not_finite_is_left_out():
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
def test_names_are_shown_as_they_are():
    names = ["$x^2$ & <b>", "_hidden", "文字", "x" * 60, ""]
    for svg in (
        draw.lines({name: ((0, 1), (0, 1)) for name in names}, x=names[0], y=names[0]),
        draw.heatmaps({name: np.eye(2) for name in names}, x=names[1], y=names[2], bar=names[0]),
    ):
        told = "".join(_texts(svg))
        for name in names[:-1]:
            assert name.replace(" ", "") in told.replace(" ", ""), name


@pytest.mark.slow
def test_layers_by_the_dozen_keep_their_order():
    """More series than colours go from dark to light, and all are named."""
    names = [f"layer {i}" for i in range(30)]
    svg = draw.lines({name: ((0, 1), (0, i)) for i, name in enumerate(names)}, x="x", y="y")
    assert set(names) <= set(_texts(svg))
    colors = re.findall(r"stroke: (#\w+); stroke-width: 1.7", svg)
    assert len(set(colors)) == 30


def test_a_heatmap_of_attention_is_small():
    found = np.tril(np.random.default_rng(0).random((256, 256)))
    assert len(draw.heatmaps({"head 0": found}, x="key", y="query")) < 100_000
