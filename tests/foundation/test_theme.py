"""One look: a mechanism has one colour in every picture, and colours come from one place."""

import itertools
import json
import re

from etils import epath
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
import numpy as np
import pytest

from experiments.tables import figures
from kvjax import attention, config as config_lib
from kvjax.analysis.page import draw
from kvjax.foundation import command_line, theme
from kvjax.foundation.checkout import ROOT
from kvjax.kernels.profile import __main__ as profile
from kvjax.workdir import metrics


def test_names_of_configs_mean_their_mechanism():
    """A figure drawn from a name has the colour of a figure drawn from the config."""
    unnamed = set()
    for file in command_line.config_files():
        label = command_line.config_label(file)
        model = config_lib.resolve(command_line.load_config(file)).model
        family, named = attention.family(model.mechanisms[0]), theme.mechanism(label)
        assert family in theme.COLORS and named in (family, None), label
        unnamed |= {label} if named is None else set()
    assert {label.partition("_")[0] for label in unnamed} == {"llama"}
    assert set(attention.MECHANISMS) - {"grouped"} <= theme.COLORS.keys()


def test_other_names():
    expected = {
        "LRKV without RoPE": "lrkv",
        "GQA-6": "gqa",
        "MLA without RoPE key": "mla_paper",
        "LRKV x GQA": "lrkv_gqa",
        "(Q=K-V)+": "qk_tied",
        "Q-K=V": "kv_tied",
        "lrkv_tiny: keys": None,
        "layer 3": None,
        "": None,
    }
    assert {name: theme.mechanism(name) for name in expected} == expected
    assert theme.color("layer 3") == theme.GRAY
    layers = [f"layer {i}" for i in range(12)]
    colors = theme.colors(["a run", *layers], {"a run": "tpa"})
    assert len(set(colors.values())) == 13 and colors["a run"] == theme.COLORS["tpa"]


def _lab_and_contrast(color: str) -> tuple[np.ndarray, float]:
    """Returns CIELAB coordinates of a colour, and its contrast to white as WCAG counts it."""
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = to_xyz @ linear
    f = np.cbrt(xyz / [0.9505, 1, 1.089])
    lab = np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
    return lab, 1.05 / (xyz[1] + 0.05)


def test_colors_differ_and_are_seen_on_white():
    measured = {name: _lab_and_contrast(color) for name, color in theme.COLORS.items()}
    assert min(contrast for _, contrast in measured.values()) > 3
    for (first, (a, _)), (second, (b, _)) in itertools.combinations(measured.items(), 2):
        assert np.linalg.norm(a - b) > 15, (first, second)


@pytest.fixture
def drawn(monkeypatch):
    """Returns the figures that are saved from here on."""
    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (saved.append(f), save(f, *a, **k)))
    return saved


def test_a_mechanism_has_one_colour_everywhere(drawn, tmp_path):
    """Draws LRKV alone, and after other mechanisms."""
    names = ["mqa", "lrkv", "mla"]
    lrkv = theme.COLORS["lrkv"]
    records = [dict(step=i, tokens=9 * i, loss=2.0, validation_bpb=1.0) for i in (1, 2)]
    (tmp_path / metrics.METRICS).write_text("".join(f"{json.dumps(r)}\n" for r in records))
    metrics.draw_curves(epath.Path(tmp_path), title="a run", yardstick=None, mechanism="lrkv")
    curves = drawn.pop()
    assert [axes.get_lines()[0].get_color() for axes in curves.axes] == [lrkv, lrkv]

    series = {f"{name}_tiny": ((1, 2), (i, i)) for i, name in enumerate(names)}
    labels = dict(x="x", y="y")
    draw.lines(series, **labels)
    (axes,) = drawn.pop().axes
    assert [line.get_color() for line in axes.get_lines()] == [*map(theme.color, names)]
    runs = {f"run {name}": place for name, place in zip(names, series.values(), strict=True)}
    mechanisms = {name: name.removeprefix("run ") for name in runs}
    _, live = draw.live_lines(runs, **labels, names=list(runs), mechanisms=mechanisms)
    draw.picture(
        [dict(labels, series=dict(list(runs.items())[1:]), names=list(runs), mechanisms=mechanisms)]
    )
    assert live[1].color == drawn.pop().axes[0].get_lines()[0].get_color() == lrkv

    rows = [
        dict(mechanism=name, implementation=implementation, batch=1, length=1, gbps=1.0)
        for name in ("mla", "lrkv_no_rope", "lrkv")
        for implementation in ("xla", "gpu")
    ]
    profile.plot(rows, tmp_path / "plot.png")
    lines = drawn.pop().axes[0].get_lines()
    assert [line.get_color() for line in lines] == [theme.COLORS["mla"]] * 2 + [lrkv] * 4
    assert len({(line.get_marker(), str(line._dash_pattern)) for line in lines[2:]}) == 4

    rows = [
        dict(cell=name, mechanism=name, cache_bytes=9, bpb=1.0, bpb_half_interval=0.1, **more)
        for name in names
        for more in [dict(parameters=1, seeds=[0, 1, 2])]
    ]
    results = dict(rows=rows, runs={name: {0: dict(bpb=1.0)} for name in names}, tokens=1)
    for figure in (figures.results(results), figures.small_caches(results)):
        marks = [line for line in figure.axes[0].get_lines() if line.get_marker() == "o"]
        assert [to_hex(mark.get_color()) for mark in marks] == [*map(theme.color, names)]


def test_pictures_take_their_colours_from_the_theme():
    """No figure has a colour literal or matplotlib's default cycle."""
    literal = re.compile(r"""["']#[0-9a-fA-F]{6}["']|f?["']C(?:\d|\{\w+\})["']""")
    home = ROOT / "kvjax" / "foundation" / "theme.py"
    texts = {
        path: path.read_text("utf-8")
        for folder in ("kvjax", "experiments")
        for path in (ROOT / folder).rglob("*.py")
        if path != home
    }
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        texts[path] = "\n".join(code)
        plots = "pyplot" in texts[path]
        assert not plots or "\ntheme.notebook()\n" in texts[path], path.name
    literals = {path.name: literal.findall(text) for path, text in texts.items()}
    assert not {name: colors for name, colors in literals.items() if colors}
