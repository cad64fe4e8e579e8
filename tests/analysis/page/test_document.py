"""A page of sections: well-formed, self-contained, deterministic."""

import functools
from html.parser import HTMLParser
import json
import pathlib
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from kvjax.analysis.page import document, draw, formulas
from kvjax.analysis.page.section import Column, Curve, Figure, Point, Section, Table
from kvjax.foundation.intervals import Estimate

CAPTION = "The effective rank of heads, by layer. Table 5 has 98.9 % for MHA at 2.5B."
VOID = ("meta", "link", "br")


@functools.cache
def drawings() -> dict[str, str]:
    """Returns figures of every kind, with short and long names, small and large numbers."""
    r = np.random.default_rng(0)

    def walk(count):
        return (range(count), r.normal(size=count).cumsum() + 90)

    causal = [
        f"{text}, {mask}"
        for text in ("Shakespeare", "King James Bible")
        for mask in ("causal", "all")
    ]
    stages = ("early, layer 0", "middle, layer 15", "late, layer 29")

    def maps(*shape):
        return {f"layer {i}": r.random(shape[1:]) for i in range(shape[0])}

    triangle = np.where(np.tri(48) > 0, 1.0, np.nan)
    return {
        "Curves over layers": draw.lines(
            {name: walk(30) for name in ("uncentered", "centered", "centered, of H - 1")},
            x="layer",
            y="effective rank, % of heads",
            levels={"MHA in the paper": 98.9, "LRKV in the paper": 98.3},
            bands={"centered": (np.full(30, 86.0), np.full(30, 91.0))},
        ),
        "Curves over lengths": draw.lines(
            {name: ((64, 256, 1024), r.uniform(5, 60, 3)) for name in causal},
            x="tokens",
            y="components for 90 % of the energy",
            log_x=True,
        ),
        "Spectra": draw.lines(
            {f"layer {i}": (range(1, 65), np.exp(-np.arange(64) / (3 + i))) for i in range(12)},
            x="component",
            y="share of the energy",
            log_y=True,
        ),
        "Within a decade": draw.lines(
            {"_measured": ((10, 20, 40), (3.1, 2.2, 1.6))},
            x="rank",
            y="error",
            log_x=True,
            log_y=True,
        ),
        "One matrix": draw.heatmaps(
            {"cosine": r.uniform(-1, 1, (3, 3))},
            x="head",
            y="head",
            low=-1,
            high=1,
            color_label="cosine",
        ),
        "Similarity": draw.heatmaps(
            maps(3, 9, 9), x="head", y="head", low=0, high=1, color_label="cosine"
        ),
        "Two models": draw.heatmaps(
            {
                f"{model}: {stage}": r.random((9, 9))
                for model in ("ours", "MHA (beside)")
                for stage in stages
            },
            x="head",
            y="head",
            color_label="cosine",
        ),
        "Layers and heads": draw.heatmaps(
            {"": r.random((30, 9))}, x="head", y="layer", color_label="rank"
        ),
        "Wide": draw.heatmaps(maps(2, 4, 64), x="component", y="layer", color_label="share"),
        "Attention": draw.heatmaps(
            {f"head {i}": r.random((48, 48)) * triangle for i in range(14)},
            x="key",
            y="query",
            color_label="probability",
        ),
    }


def tables() -> list[Table]:
    """Returns a narrow and a wide table, with missing cells and text to escape."""
    r = np.random.default_rng(0)
    names = [f"{name} at {share} %, without RoPE" for name in "EM" for share in (80, 99)]
    wide = [
        (i, "Shakespeare" if i % 2 else "King James Bible", *r.uniform(0, 1e4, 3), None)
        for i in range(30)
    ]
    wide[3] = (*wide[3][:-1], -4.5)
    wide[7] = (*wide[7][:-1], 12.25)
    narrow = [
        ("MHA", 95.4, 98.9, "yes"),
        ('LRKV <64> & "co"', np.float64(94.5), 98.3, "no"),
        ("MQA", np.float32(9.25), float("nan"), None),
    ]
    return [
        Table(
            "Mechanisms",
            [
                Column("mechanism"),
                Column("ours, %"),
                Column("the paper, %", ".1f"),
                Column("agree?"),
            ],
            narrow,
            CAPTION,
        ),
        Table(
            "Energy ranks",
            [Column("layer", "d"), Column("text"), *map(Column, names)],
            wide,
            CAPTION,
        ),
    ]


def sections() -> list[Section]:
    drawn = [
        Figure(title, svg, f"{title}: from 1 to 3, 2 in the mean.", CAPTION)
        for title, svg in drawings().items()
    ]
    lead = "Are heads independent of each other? They fill 95.4 % of the directions there are."

    def section(name, title, figures, tables):
        return Section(name, title, lead, figures, tables, {})

    return [
        section("diversity", "Diversity of heads", drawn[:4], tables()[:1]),
        section("geometry", "Geometry & <factors>", drawn[4:], tables()[1:]),
        section("words", "Words alone", [], []),
        section("live", "Curves to point at", [live()], []),
    ]


def live(name: str = "three </script> seeds") -> Figure:
    """Returns a figure with readable points: a band, missing numbers."""
    series = {name: ((1, 2, 4), (3.0, 2.5, 2.25)), "one": ((1, 2, 4), (3.5, float("nan"), 2.0))}
    bands = {name: ((2.9, 2.4, 2.2), (3.1, 2.6, 2.3)), "one": ((3, 2, None), (3.5, 2, 2))}
    svg, curves = draw.live_lines(series, x="tokens", y="bits", bands=bands, names=list(series))
    return Figure("Curves", svg, "Curves: from 1 to 3, 2 in the mean.", CAPTION, curves)


def synthetic() -> str:
    """Returns a page of synthetic sections."""
    about = {
        "Command": "python -m kvjax.analysis --model=~/models/A&B/" + "long_" * 30,
        "Packages": {"jax": "0.11.2", "numpy": "2.4"},
        "Nothing": "",
    }
    return document.page("SmolLM2: attention <inside>", "What is there to see.", sections(), about)


class _Tree(HTMLParser):
    """Checks that tags are closed; keeps tags and texts."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.replace("\N{NO-BREAK SPACE}", " "))

    def all(self, *names: str) -> list[dict]:
        return [attributes for tag, attributes in self.tags if tag in names]


@pytest.fixture(scope="module")
def html():
    return synthetic()


@pytest.fixture(scope="module")
def tree(html):
    return _Tree(html)


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<meta http-equiv="refresh" content="30">
<title>A &amp; B</title>
<style>
page.css</style>
</head>
<body>
<header id="top"><h1>A &amp; B</h1><p class="lead">Of 5 %.</p><ul class="summary">\
<li><b><a href="#first">One</a>:</b> Is &lt;1.</li><li>Two.</li></ul></header>
<nav aria-label="Contents" id="contents"><h2>Contents</h2><ul>
<li><a href="#first">The first</a></li>
<li><a href="#second">The second</a></li>
<li><a href="#about">About this report</a></li>
</ul></nav>
<main>
<div class="legend" role="group" aria-label="Curves">\
<span style="--curve: #123456" data-mark="■">a&lt;b</span></div>
<section id="first" aria-labelledby="first-title">
<h2 id="first-title">The first</h2>
<p class="lead">Leads.</p>
<div class="figures">
<figure id="first-figure-1"><h3>Lines</h3>
<div class="card"><svg role="img" aria-label="Lines. From 1 to 2." viewBox="0 0 1 1"><svg/></svg>\
</div>
<script type="application/json" class="curves">[{"name":"a\\u003cb","color":"#123456",\
"points":[[10.3,20.1,1.23457,2.0,0.5]]}]</script>
<figcaption>Shown.</figcaption></figure>
<figure id="first-figure-2"><h3>Maps</h3>
<div class="card"><svg role="img" aria-label="Maps. All." viewBox="0 0 2 2"></svg></div>
<figcaption>Also &lt;shown&gt;.</figcaption></figure>
</div>
<figure class="table"><h3 id="first-table-1">Numbers</h3>
<div class="scroll" role="region" tabindex="0" aria-labelledby="first-table-1">\
<table class="stacks" aria-labelledby="first-table-1">
<thead><tr><th scope="col" class="number">n</th><th scope="col">said</th>\
<th scope="col" class="number">x</th><th scope="col">none</th></tr></thead>
<tbody>
<tr><th scope="row" class="number" data-value="1">1</th>\
<td data-column="said">a</td>\
<td class="number" data-value="2.25" data-column="x">2.2 ± 0.1</td>\
<td class="missing" data-column="none">–</td></tr>
<tr><th scope="row" class="number" data-value="2000">2,000</th>\
<td data-value="3.0" data-column="said">3.00</td>\
<td class="number missing" data-column="x">–</td><td class="missing" data-column="none">–</td></tr>
<tr><th scope="row" class="number" data-value="3">3</th>\
<td data-value="Infinity" data-column="said">inf</td>\
<td class="number" data-value="-Infinity" data-column="x">-inf</td>\
<td class="missing" data-column="none">–</td></tr>
</tbody></table></div>
<figcaption>Shown.</figcaption></figure>
<p class="top"><a href="#contents">Contents</a></p>
</section>
<section id="second" aria-labelledby="second-title">
<h2 id="second-title">The second</h2>

<p class="top"><a href="#contents">Contents</a></p>
</section>
</main>
<footer><section id="about" aria-labelledby="about-title">
<h2 id="about-title">About this report</h2>
<dl><dt>Command</dt><dd>python</dd><dt>Packages</dt><dd>jax 0.11, numpy 2.4</dd></dl>
</section></footer>
<script>
page.js</script>
</body>
</html>
"""


def test_the_whole_page(monkeypatch):
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path, encoding: path.name)
    columns = [Column("n", ",d"), Column("said"), Column("x", ".1f"), Column("none")]
    rows = [
        (1, "a", Estimate(2.25, 0.1), None),
        (np.int64(2000), 3.0, np.nan, None),
        (3, np.inf, -np.inf, None),
    ]
    curve = Curve("a<b", "#123456", 1, [(10.26, 20.14, 1.2345678, 2.0, 0.5)])
    svg = '<svg viewBox="0 0 1 1"><svg/></svg>'
    figures = [
        Figure("Lines", svg, "From 1 to 2.", "Shown.", [curve]),
        Figure("Maps", '<svg viewBox="0 0 2 2"></svg>', "All.", "Also <shown>."),
    ]
    tables = [Table("Numbers", columns, rows, "Shown.", stacks=True)]
    first = Section("first", "The first", "Leads.", figures, tables, {})
    about = {"Command": "python", "Packages": {"jax": "0.11", "numpy": "2.4"}, "Nothing": ""}
    sections = [first, Section("second", "The second", "", [], [], {})]
    summary = [Point("One", "Is <1.", "first"), Point("", "Two.")]
    made = document.page("A & B", "Of 5 %.", sections, about, summary=summary, reload_seconds=30)
    assert made == PAGE
    assert "refresh" not in document.page("A & B", "", [], {})


@pytest.mark.slow
def test_pages_are_well_formed_and_deterministic(html, tree):
    assert html == synthetic()
    assert html.startswith("<!DOCTYPE html>\n") and tree.all("html") == [{"lang": "en"}]
    assert len(tree.all("h1")) == 1 and len(tree.all("title")) == 1
    ids = [attributes["id"] for _, attributes in tree.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in tree.all("a")} == {
        *("diversity", "geometry", "words", "live", "about", "contents")
    }
    assert {a["href"][1:] for a in tree.all("a")} <= set(ids)


def test_pages_load_nothing(html, tree):
    for _, attributes in tree.tags:
        for name in ("href", "src", "xlink:href", "action", "srcset"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    rest = re.sub(r'"data:[^"]*"', "", html)
    rest = rest.replace("http://www.w3.org/2000/svg", "")  # a namespace
    assert not re.search(r"https?:|//[a-z]|@import|@font-face|url\((?!#)", rest)
    policy = next(m["content"] for m in tree.all("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none';") and "http" not in policy


def test_texts_are_escaped(html, tree):
    assert "attention &lt;inside&gt;" in html and "Geometry &amp; &lt;factors&gt;" in html
    assert "LRKV &lt;64&gt; &amp; &quot;co&quot;" in html
    hostile = "</title></style></script><script>alert(1)</script>\"' onload=x"
    figure = Figure(
        hostile, draw.lines({hostile: ((0, 1), (0, 1))}, x=hostile, y=hostile), hostile, hostile
    )
    table = Table(hostile, [Column(hostile)], [(hostile,)], hostile)
    section = Section(hostile, hostile, hostile, [figure], [table], {})
    parsed = _Tree(document.page(hostile, hostile, [section], {hostile: hostile}))
    assert len(parsed.all("script")) == 1 and len(parsed.all("style")) == 1
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert parsed.texts.count(hostile) > 5


def test_points_of_curves_are_stored(html):
    """Stores the numbers, and their positions in the drawing."""
    (text,) = re.findall(r'<script type="application/json" class="curves">(.*?)</script>', html)
    first, second = json.loads(text)
    assert first["name"] == "three </script> seeds" and "</script>" not in text
    assert [point[2:] for point in first["points"]] == [[1, 3, 0.1], [2, 2.5, 0.1], [4, 2.25, 0.05]]
    assert [point[2:] for point in second["points"]] == [[1, 3.5, 0.25], [4, 2, 0]]  # no nan
    (drawing,) = (svg for svg in re.findall(r"<svg.*?</svg>", html, re.S) if "data-series" in svg)
    root = ElementTree.fromstring(drawing)
    for i, curve in enumerate((first, second)):
        (line,) = (node for node in root.iter() if node.get("data-series") == str(i))
        path = next(node for node in line.iter() if node.tag.endswith("path")).get("d")
        at = [list(map(float, pair)) for pair in re.findall(r"[ML] ?([\d.]+) ([\d.]+)", path)]
        assert np.allclose(at, [point[:2] for point in curve["points"]], atol=0.5)


def test_formulas_are_set():
    """Products, transposes, norms and fractions become MathML; names and other texts stay."""
    found = formulas.set_in(
        "as M = W_Q W_K^T: |W_a|² over |W_b|, of LRKV_tiny, X_1 and a_b || &lt;"
    )
    q, k = "<msub><mi>W</mi><mi>Q</mi></msub>", "<msubsup><mi>W</mi><mi>K</mi><mi>T</mi></msubsup>"
    product = f"<math><mi>M</mi><mo>=</mo><mrow>{q}{k}</mrow></math>"
    a, b = (f"<mrow><mo>|</mo><msub><mi>W</mi><mi>{x}</mi></msub><mo>|</mo></mrow>" for x in "ab")
    top, bottom = f"<mrow><msup>{a}<mn>2</mn></msup></mrow>", f"<mrow>{b}</mrow>"
    fraction = f"<math><mfrac>{top}{bottom}</mfrac></math>"
    assert found == f"as {product}: {fraction}, of LRKV_tiny, X_1 and a_b || &lt;"
