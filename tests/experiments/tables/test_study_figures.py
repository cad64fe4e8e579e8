"""Study figures: means, intervals and colours; tests/test_readme.py compares all of them."""

import json

import pytest

from experiments.tables import cards, model_figures, study_figures
from kvjax.foundation import theme


def _model(cell, against="", difference=None, half=None):
    found = dict(cell=cell, against=against, bpb=2.0, seeds=[0, 1, 2])
    return found | dict(difference=difference, difference_half_interval=half)


MODELS = dict(
    asks="How does the loss depend on the rank?",
    tokens=1_048_576,
    rows=[
        _model("mha"),
        _model("lrkv_r0", "mha", 0.012, 0.004),
        _model("lrkv_r16", "mha", -0.003, 0.004),
        _model("lrkv_other", "lrkv_r16", 0.5, 0.1),
    ],
)


def points(axes):
    """Returns the drawn mean and half interval by label."""
    found = {}
    labels = [label.get_text() for label in axes.get_yticklabels()]
    for label, bars in zip(labels, axes.containers, strict=True):
        (low, high) = bars.lines[2][0].get_segments()[0][:, 0]
        found[label] = bars.lines[0].get_xdata()[0], (high - low) / 2
    return found


def test_differences_of_models_on_one_scale():
    figure = study_figures.language_models(MODELS)
    first, second = figure.axes
    assert points(first) == {
        "lrkv_r0": (0.012, pytest.approx(0.004)),
        "lrkv_r16": (-0.003, pytest.approx(0.004)),
    }
    assert first.get_xlim() == second.get_xlim()
    marks = [bars.lines[0] for bars in first.containers]
    mqa, lrkv = theme.COLORS["mqa"], theme.COLORS["lrkv"]  # LRKV of rank 0 is MQA
    assert [mark.get_color() for mark in marks] == [mqa, lrkv]
    assert [mark.get_markerfacecolor() for mark in marks] == [mqa, "white"]  # filled: excludes 0
    said = " ".join(text.get_text() for text in figure.texts)
    assert "How does the loss depend" in said and "3 seeds, 1.0M training tokens" in said
    assert "from mha (2.0000 bits per byte)" in said


def test_word_models_are_a_line_for_each_set():
    """No result is stored whose figure would show this."""
    row = dict(channels=8, perplexity=120.0, perplexity_half_interval=None, seeds=1)
    (axes,) = model_figures.word_models(dict(embedded=dict(rows=[row]))).axes
    (line,) = axes.containers
    assert line.get_label() == "embedded" and line.lines[0].get_ydata()[0] == 120.0


def test_a_mechanism_is_a_line_through_its_precisions():
    sizes = {2048: 1.8, 1152: 1.81, 640: 1.9}
    rows = [
        dict(mechanism=name, kind=kind, seeds=3, cache_bytes=size, bpb=bpb, bpb_half_interval=0.01)
        for name, kind in (("mha", "MHA"), ("lrkv", "LRKV"), ("lrkv_no_rope", "LRKV"))
        for size, bpb in sizes.items()
    ]
    (axes,) = model_figures.cache_bits(dict(rows=rows, tokens=2e6)).axes
    line, *others = axes.containers
    assert line.get_label() == "MHA"
    assert [other.get_label() for other in others] == ["LRKV (lrkv)", "LRKV (lrkv_no_rope)"]
    assert list(line.lines[0].get_ydata()) == [1.9, 1.81, 1.8]  # from the smallest cache


IMAGES = dict(
    rows=[dict(variant="qkv", right=0.98, right_half_interval=0.001, published=0.981)],
    grid=dict(widths=[64], layers=[2], patches=[7], epochs=20),
    runs=dict(a={0: 1}),
)
ANOMALY = dict(
    rows=[
        dict(
            variant="qkv",
            places=dict(
                drawn=dict(right=0.9, half_interval=0.01), last=dict(right=0.8, half_interval=None)
            ),
        ),
    ],
    runs=dict(a={0: 1}),
)


def test_studies_with_a_result_are_drawn(tmp_path):
    assert study_figures.figures(tmp_path) == {}
    for name, result in {
        "studies/lrkv_ranks": MODELS,
        "images/mnist": IMAGES,
        "set_anomaly": ANOMALY,
        "thin_keys_tasks": dict(rows=[]),  # no finished run
    }.items():
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(result))
    found = study_figures.figures(tmp_path)
    assert set(found) == {"lrkv_ranks", "images", "set_anomaly"}
    assert all(cards.svg(figure).startswith("<?xml") for figure in found.values())
