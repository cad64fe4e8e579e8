"""Study figures: rows with intervals and the paper's values, for studies with results."""

import json

import pytest

from experiments.studies.demo_size import STUDIES
from experiments.tables import cards, study_figures


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
    colors = [bars.lines[0].get_color() for bars in first.containers]
    assert colors == [cards.RESIDUAL, cards.FULL]  # distinguishable from MHA, or not
    said = " ".join(text.get_text() for text in figure.texts)
    assert "How does the loss depend" in said and "3 seeds, 1.0M training tokens" in said
    assert "from mha (2.0000 bits per byte)" in said


def _labelled(variant, **right):
    sizes = dict(cells=2, width=[32, 64], layers=[2], heads=[2], length=[16])
    sizes |= dict(half_interval=0.01, seeds=2)
    tasks = {task: dict(right=x, **sizes) for task, x in right.items()}
    return dict(variant=variant, tasks=tasks, published=dict.fromkeys(right, 0.9))


def test_tasks_that_all_solve_have_no_panel():
    rows = [_labelled("qkv", sort=0.99, copy=1.0), _labelled("kv_tied", sort=1.0, copy=0.9996)]
    figure = study_figures.sequence_tasks(dict(rows=rows, runs=dict(a={0: 1, 1: 1})))
    (axes,) = figure.axes
    heading = "sort: 2 cells of width 32 and 64, 2 layers, 2 heads, rows of 16"
    assert heading in [text.get_text() for text in figure.texts]
    assert points(axes) == {
        "QKV": (0.99, pytest.approx(0.01)),
        "Q-K=V": (1.0, pytest.approx(0.01)),
    }
    published = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "|"]
    assert 0.9 in published
    assert "Solved by all: copy" in " ".join(text.get_text() for text in figure.texts)


def test_losses_of_variants_while_they_learn():
    sizes = dict(width=32, layers=2, heads=2, length=32, every=20, seeds=3)
    rows = [
        dict(task=task, variant=variant, loss=[2.0, 1.0], **sizes)
        for task in ("sort", "copy")
        for variant in ("qkv", "qk_tied", "qk_tied_plus", "kv_tied", "qkv_tied")
    ]
    figure = study_figures.sequence_task_losses(dict(curves=rows))
    assert [axes.get_title("left") for axes in figure.axes] == ["sort", "copy"]
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["QKV", "Q=K-V", "(Q=K-V)+", "Q=K=V"]
        assert axes.lines[0].get_xydata().tolist() == [[10, 2], [30, 1]]
    assert "3 seeds, each point of 20 steps" in " ".join(text.get_text() for text in figure.texts)


def test_thin_keys_are_a_line_for_each_task():
    rows = [
        dict(task=task, channels=channels, right=channels / 64, right_half_interval=None)
        for task in ("copy_back_l2", "retrieval")
        for channels in (4, 64)
    ]
    rows += [row | dict(start="equal") for row in rows[2:]]
    (axes,) = study_figures.thin_keys(dict(rows=rows, runs=dict(a={0: 1}))).axes
    expected = ["copying", "one of 16 keys", "one of 16 keys, equal start"]
    assert [bars.get_label() for bars in axes.containers] == expected
    assert list(axes.containers[0].lines[0].get_ydata()) == [6.25, 100]


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


def test_images_and_sets_are_per_cent():
    first, second = study_figures.image_sets(dict(mnist=IMAGES, cifar10=IMAGES)).axes
    assert points(first) == points(second) == {"QKV": (98.0, pytest.approx(0.1))}
    drawn, last = study_figures.set_anomaly(ANOMALY).axes
    assert drawn.containers[0].lines[0].get_xdata()[0] == 90
    assert last.containers[0].lines[0].get_xdata()[0] == 80


def test_remedies_stand_beside_what_they_are_for():
    row = dict(task="swap", length=64, variant="qk_tied", right=0.6, right_half_interval=0.01)
    row |= dict(seeds=3)
    rows = [
        row | dict(remedy="annealed", change=0.1, change_half_interval=0.2),
        row | dict(remedy="none", change=None, change_half_interval=None),
        row | dict(remedy="normalised", change=0.1, change_half_interval=0.05),
    ]
    figure = study_figures.diagonal(dict(rows=rows, hottest=5.0))
    said = " ".join(text.get_text() for text in figure.texts)
    assert "3 seeds" in said and "falls from 5" in said.replace("\n", " ")
    (axes,) = figure.axes
    assert set(points(axes)) == {
        "Q=K-V, as it is",
        "Q=K-V, normalised",
        "Q=K-V, annealed",
    }
    colors = [bars.lines[0].get_color() for bars in axes.containers]
    assert colors[1] != colors[0] == colors[2]


def test_ranks_of_heads_are_held_against_equal_ones():
    row = dict(rank=8, seeds=3, bpb=2.5, change=None, change_half_interval=None)
    other = row | dict(way="by head", change=-0.2, change_half_interval=0.1)
    rows = [row | dict(rank=16, way="uncut"), row | dict(way="equal"), other]
    rows.append(other | dict(way="by layer", change=0.1, change_half_interval=0.3))
    figure = study_figures.rank_by_head(dict(rows=rows))
    (axes,) = figure.axes
    assert points(axes) == {
        "by head": (-0.2, pytest.approx(0.1)),
        "by layer": (0.1, pytest.approx(0.3)),
    }
    told, untold = (bars.lines[0].get_color() for bars in axes.containers)
    assert told == cards.RESIDUAL and untold == cards.FULL
    said = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
    assert "from 2.5000 bits per byte with 8 each" in said and "3 seeds" in said


def test_what_has_a_result_is_drawn(tmp_path):
    assert study_figures.figures(tmp_path) == {}
    for name, result in {
        "studies/lrkv_ranks": MODELS,
        "images/mnist": IMAGES,
        "set_anomaly": ANOMALY,
        "thin_keys_tasks": dict(rows=[]),  # nothing has ended
    }.items():
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(result))
    found = study_figures.figures(tmp_path)
    assert set(found) == {"lrkv_ranks", "images", "set_anomaly"}
    assert all(cards.svg(figure).startswith("<?xml") for figure in found.values())


def test_every_study_of_models_can_be_drawn():
    assert {f"studies/{name}" for name in STUDIES} <= set(study_figures._ALONE)
