"""Figures of whole models: drawn values and colours of distinguishable ones."""

import pytest

from experiments.tables import cards, model_figures, study_figures
from tests.experiments.tables.test_study_figures import points


def _texts(figure):
    return " ".join(text.get_text() for text in figure.texts)


def _colors(axes):
    return [bars.lines[0].get_color() for bars in axes.containers]


def _place(difference, half=0.01):
    at = dict(positions=[0, 64], bpb=2.0, bpb_half_interval=0.1)
    return at | dict(difference=difference, difference_half_interval=half)


def test_long_rows_are_a_panel_for_each_length():
    def of(mechanism, length, *places):
        return dict(mechanism=mechanism, length=length, seeds=[0, 1, 2], places=places)

    rows = [of("mha", 256, _place(None)), of("lrkv", 256, _place(-0.02))]
    rows += [of("lrkv", 1024, _place(0.005))]
    figure = model_figures.long_rows(dict(rows=rows, tokens=1_048_576))
    short, long = figure.axes
    assert points(short) == {"lrkv, 0 to 63": (-0.02, pytest.approx(0.01))}
    assert points(long) == {"lrkv, 0 to 63": (0.005, pytest.approx(0.01))}
    assert (_colors(short), _colors(long)) == ([cards.RESIDUAL], [cards.FULL])
    assert "trained on rows of 1,024" in _texts(figure) and "3 seeds, 1.0M" in _texts(figure)


def test_layers_have_their_effective_rank_and_what_they_get():
    rows = [dict(layer=i, effective_rank=9.5 + i, half_interval=0.5, rank=12 + i) for i in (0, 1)]
    (axes,) = model_figures.rank_allocation(dict(rows=rows, rank=16, seeds=3)).axes
    assert points(axes) == {"layer 0": (9.5, 0.5), "layer 1": (10.5, 0.5)}
    given = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "|"]
    assert 12 in given and 13 in given


def test_heads_are_told_from_mhas_by_each_measure():
    def now(mean, off=None):
        return dict(mean=mean, half_interval=1.0, against_mha=off)

    apart, alike = dict(mean=-3.0, half_interval=1.0), dict(mean=-0.5, half_interval=1.0)
    heads = dict(mha=dict(share=now(99.0)), mqa=dict(share=now(96.0, apart)))
    heads |= dict(lrkv=dict(share=now(98.5, alike)))
    drawn = model_figures.head_diversity(dict(estimates=heads, seeds=[0, 1, 2])).axes
    assert points(drawn[0]) == {"mha": (99.0, 1.0), "mqa": (96.0, 1.0), "lrkv": (98.5, 1.0)}
    assert _colors(drawn[0]) == [cards.FULL, cards.RESIDUAL, cards.FULL]


def test_padding_is_a_panel_for_each_form_of_rows():
    def nats(x):
        return dict(nats=x, half_interval=0.02)

    rows = [dict(tie="none", trained="padded", seeds=3, against_first={})]
    rows += [dict(tie="kv", trained="padded", seeds=3, against_first=dict(text=nats(0.07)))]
    rows += [dict(tie="qkv", trained="packed", seeds=2, against_first=dict(packed=nats(0.01)))]
    figure = model_figures.padded_loss(dict(rows=rows))
    padded, packed = figure.axes
    assert points(padded) == {"Q-K=V, the same text": (0.07, pytest.approx(0.02))}
    assert points(packed) == {"Q=K=V, packed rows": (0.01, pytest.approx(0.02))}
    assert "2 seeds" in _texts(figure)


def test_a_mechanism_that_never_answers_has_no_steps():
    def row(kind, steps):
        return dict(
            kind=kind,
            steps=steps,
            steps_half_interval=9.0,
            runs=3,
            right=0.5,
            right_half_interval=0.1,
        ) | dict(became_right=2 * bool(steps))

    rows = [row("mha", 700.0), row("lrkv", None)]
    steps, right = model_figures.cross_attention(dict(rows=rows)).axes
    assert points(steps) == {"mha, 2 of 3 runs": (700.0, 9.0)}
    assert points(right).keys() == {"mha", "lrkv"}


def test_linear_attention_is_a_panel_for_each_task():
    now = dict(figure=0.5, half_interval=0.1, seeds=3)
    rows = [dict(kind="linear_tied", tasks=dict(retrieval=now, language=now))]
    retrieval, language = model_figures.linear_attention(dict(rows=rows)).axes
    assert points(retrieval) == {"linear, tied": (50.0, pytest.approx(10.0))}
    assert points(language) == {"linear, tied": (0.5, pytest.approx(0.1))}


def test_word_models_are_a_line_for_each_set(tmp_path):
    row = dict(channels=8, perplexity=120.0, perplexity_half_interval=None, seeds=1)
    (axes,) = model_figures.word_models(dict(embedded=dict(rows=[row]))).axes
    (line,) = axes.containers
    assert line.get_label() == "embedded" and line.lines[0].get_ydata()[0] == 120.0


def test_all_of_them_are_drawn_when_their_results_are_there():
    assert model_figures.ALONE.items() <= study_figures._ALONE.items()
