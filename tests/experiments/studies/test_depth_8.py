"""Depth 8: cells, differences by step, and the step that reaches a loss."""

import json
import math

import pytest

from experiments.studies import depth_8
from experiments.studies.grid import Run
from experiments.tables import study_figures
from kvjax.foundation.errors import UserError


def test_a_prepared_folder_may_lie_elsewhere():
    here, there = (Run(depth_8.cell("mha", at, 8), 0, 8).identity for at in ("/a", "/b/c"))
    assert here == there != Run(depth_8.cell("mha", "/a", 9), 0, 9).identity


def test_differences_by_step_are_of_seeds_that_both_have():
    curves = {
        "mha": {0: {60: 2.0, 120: 1.5}, 1: {60: 2.1, 120: 1.6}},
        "lrkv": {0: {60: 1.9, 120: 1.6}, 1: {60: 1.9}, 2: {60: 1.0}},
        "mla": {},
    }
    first, second = depth_8.by_step(curves)
    assert (first["step"], first["seeds"]) == (60, [0, 1])
    assert first["difference"] == pytest.approx(-0.15)
    assert first["difference_half_interval"] == pytest.approx(12.706 * 0.05, rel=1e-3)  # t of one
    assert (second["step"], second["seeds"], second["difference"]) == (120, [0], pytest.approx(0.1))
    assert second["difference_half_interval"] is None


def test_reaching_a_goal_between_evaluations():
    curve = {"100": 2.0, "200": 1.6, "300": 1.5}
    assert depth_8.reached(curve, 1.7, 400) == pytest.approx(175 / 400)
    assert depth_8.reached(curve, 1.6, 400) == 0.5
    assert depth_8.reached(curve, 2.5, 400) == 0.25  # no earlier evaluation
    assert depth_8.reached(curve, 1.4, 400) is None


def test_the_picture_has_intervals_of_three_seeds_only():
    def row(step, *seeds):
        of = dict(mechanism="lrkv", step=step, seeds=list(seeds), difference=-0.01)
        return of | dict(difference_half_interval=0.002 if len(seeds) > 1 else None)

    found = dict(tokens=10 * depth_8.TOKENS_PER_STEP, by_step=[row(5, 0, 1, 2), row(10, 0, 1)])
    (axes,) = study_figures.depth_8(found | dict(by_step=[*found["by_step"], row(10, 0)])).axes
    bars = [bool(len(bars.lines[2][0].get_segments())) for bars in axes.containers if bars.has_xerr]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["0.2M tokens", "0.3M tokens, 2 seeds", "0.3M tokens, 1 seed"]
    assert bars == [True] and math.isclose(axes.containers[0].lines[0].get_xdata()[0], -0.01)


def _manifest(folder, rows=100, length=1024, vocabulary=8192, **more):
    folder.mkdir(exist_ok=True)
    told = dict(config=dict(source="/somewhere/text.jsonl", sequence_length=length))
    told |= dict(tokenizer=dict(vocab_size=vocabulary, sha256="a"), xz_bits_per_byte=2.2)
    told |= dict(splits=dict(train=dict(rows=rows), validation=dict(rows=3))) | more
    (folder / "dataset.json").write_text(json.dumps(told))
    return folder


def test_unsuitable_folders_are_refused_first(tmp_path):
    def options(*more):
        return depth_8._options([f"--data={tmp_path}", *more])

    def refused(match, *more):
        return pytest.raises(UserError, match=match)

    for broken in ("", "[]", "{}", '{"splits": 3}'):
        (tmp_path / "dataset.json").write_text(broken)
        with refused("--data=.*: give a folder that `kvjax.data.prepare` wrote"):
            options()
    _manifest(tmp_path, rows=31)
    with refused("has 31 to train on: give at most 0 steps, or more text"):
        options()
    _manifest(tmp_path, length=512)
    with refused("rows of 512 tokens of a vocabulary of 8192: must be 1024 and 8192"):
        options()
    _manifest(tmp_path)
    with refused(r"--steps=4: takes 128 rows, .* has 100 to train on: give at most 3 steps"):
        options("--steps=4", f"--runs={tmp_path / 'runs'}")
    assert options("--steps=3", f"--runs={tmp_path / 'runs'}").text["source"] == "text.jsonl"


def test_stopped_curves_stay_and_another_text_is_refused(tmp_path):
    text = depth_8.text_of(_manifest(tmp_path / "one"))
    file = tmp_path / "result.json"
    assert depth_8.earlier(file, text, fresh=False) == {}
    file.write_text(json.dumps(dict(data=text, stopped=dict(lrkv={"1": {"60": 1.9}}))))
    assert depth_8.earlier(file, text, fresh=False) == {"lrkv": {1: {"60": 1.9}}}
    other = depth_8.text_of(_manifest(tmp_path / "two", rows=101))
    with pytest.raises(UserError, match=r"--data: has another text \(text.jsonl\) than the runs"):
        depth_8.earlier(file, other, fresh=False)
    assert depth_8.earlier(file, other, fresh=True) == {}
