"""Grids of runs: configs of runs, resumption, and runs of different code."""

import argparse
import json
import pathlib
import sys

import pytest

from experiments.studies import code as code_lib, grid, side_by_side
from experiments.studies.grid import Cell, FinishedRuns, Run
from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.sweep import runs as runs_lib

STEPS = 8
# Stands in for kvjax.main: argv[1] is the workdir.
_TRAINS = """
import json, pathlib, sys
workdir = pathlib.Path(sys.argv[1])
if "mqa" in workdir.name and "seed1" in workdir.name:
    print("step 1 of 8\\rkvjax: no room")
    sys.exit(2)
records = [dict(step=4, validation_bpb=2.5), dict(step=8, validation_bpb=2.0)]
(workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))
(workdir / "timing.jsonl").write_text(json.dumps(dict(step=8, tokens_per_second=1000.0)) + "\\n")
(workdir / "checkpoints" / "8").mkdir(parents=True, exist_ok=True)
(workdir / "checkpoints" / "8" / "_CHECKPOINT_METADATA").write_text("{}")
"""


def _run(name="mha", seed=0, **overrides):
    return Run(Cell(name, CONFIGS / f"{name}_tiny.py", overrides), seed, STEPS)


@pytest.fixture
def trains(monkeypatch):
    """Replaces training by a stand-in; returns the list of started runs."""
    begun = []

    def command(run, workdir):
        begun.append(run.name)
        return [sys.executable, "-c", _TRAINS, str(workdir)]

    monkeypatch.setattr(runs_lib, "command", command)
    return begun


def _train(runs, folder, processes=2, mix=False):
    return {
        run.name: why for run, why in side_by_side.train(runs, folder, processes=processes, mix=mix)
    }


def test_a_run_is_a_config_with_overrides():
    run = _run(seed=3, **{"model.mlp_dim": 96})
    assert run.name == "mha_seed3_steps8"
    assert run.experiment.model.block.mlp_dim == 96
    train = run.experiment.train
    assert (train.seed, train.num_steps, train.eval_every) == (3, 8, 2)
    program, *_, workdir = runs_lib.command(run, pathlib.Path("w"))[:4]
    assert program == sys.executable and workdir == "--workdir=w"
    assert "--config.model.mlp_dim=96" in runs_lib.command(run, pathlib.Path("w"))
    each = formulas.training_flops_per_token(run.experiment.model, 256)
    assert run.flops == each * 8192 * 8


def test_identity_of_a_run_is_its_config():
    """Keys with default values, which may be newer than the run, do not count."""
    run = _run()
    assert run.identity == _run().identity
    others = [_run(seed=1), _run("gqa"), _run(**{"optimizer.lr_scale": 0.5})]
    assert len({run.identity, *(other.identity for other in others)}) == 4
    assert _run(**{"train.separate": False}).identity == run.identity
    assert _run(**{"train.separate": True}).identity != run.identity


@pytest.mark.parametrize("name", ["lrkv_tiny.py", "mqa_tiny.py", "rivals.py:tpa_wide_tiny"])
def test_widths_are_matched(name):
    file = CONFIGS / name
    (width,) = grid.matched(file, 1_310_720).values()

    def count(width):
        return _parameters(file, width)

    apart = [abs(count(w) - 1_310_720) for w in (width - 1, width, width + 1)]
    assert min(apart) == apart[1] <= 1310


def _parameters(file, width):
    config = load_config(file)
    config.model.mlp_dim = width
    return formulas.parameters(config_lib.resolve(config).model)["total"]


@pytest.mark.slow
def test_runs_are_trained_once(trains, tmp_path):
    """A failure reports its last line and is repeated."""
    runs = [_run(name, seed) for seed in (0, 1) for name in ("mha", "mqa")]
    expected = {run.name: "" for run in runs}
    failed = {"mqa_seed1_steps8": "status 2: kvjax: no room"}
    assert _train(runs, tmp_path) == expected | failed
    assert sorted(trains) == sorted(expected)
    trains.clear()
    assert _train(runs, tmp_path) == expected | failed and trains == list(failed)
    assert runs_lib.curve(tmp_path / "mha_seed0_steps8") == {4: 2.5, 8: 2.0}
    assert runs_lib.speed(tmp_path / "mha_seed0_steps8") == 1000
    assert (
        runs_lib.curve(tmp_path / "nothing") == {} and runs_lib.speed(tmp_path / "nothing") is None
    )


@pytest.mark.slow
def test_runs_of_other_code_or_config_are_not_mixed(trains, tmp_path, monkeypatch):
    """Runs of other configs or code are refused, and so are folders without a record."""
    _train([_run(), _run(seed=1)], tmp_path)
    with pytest.raises(UserError, match=r"mha_seed0_steps8 is of another config\. Give another"):
        _train([_run(**{"model.mlp_dim": 96})], tmp_path)
    (tmp_path / "mha_seed1_steps8" / "metrics.jsonl").unlink()  # stopped before an evaluation
    code = grid.code() | {"model/mlp.py": "another"}
    monkeypatch.setattr(grid, "code", lambda: code)
    monkeypatch.setattr(grid, "code_now", lambda: code)
    trains.clear()
    said = r"mha_seed0_steps8 was trained by other code \(model/mlp\.py\), and 1 more are like it"
    with pytest.raises(UserError, match=said):
        _train([_run(), _run(seed=1)], tmp_path)
    assert not trains
    assert _train([_run()], tmp_path, mix=True) == {"mha_seed0_steps8": ""} and not trains
    (tmp_path / "mha_seed2_steps8").mkdir()
    (tmp_path / "mha_seed2_steps8" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="mha_seed2_steps8 does not name the code that trained it"):
        _train([_run(seed=2)], tmp_path)


def test_code_that_changes_while_a_study_runs(trains, tmp_path, monkeypatch):
    grid.code()  # caches the digests at the start
    monkeypatch.setattr(grid, "code_now", lambda: {"optim.py": "changed"})
    (why,) = _train([_run()], tmp_path).values()
    assert why.startswith("the code changed after the study began (") and not trains


@pytest.mark.slow
def test_a_run_that_cannot_be_measured_has_failed(trains, tmp_path):
    """A run on other data than its reference is left out."""
    (tmp_path / "runs").mkdir()
    kept = FinishedRuns(tmp_path / "kept.json", STEPS, mix=False, fresh=False)
    given = dict(runs=tmp_path / "runs", processes=1, mix=False, save=True)
    options, after = argparse.Namespace(**given), []

    def more(workdir):
        (workdir / "dataset.json").write_text("other" if "seed2" in workdir.name else "data")
        if "seed1" in workdir.name:
            raise UserError("has no room")
        return dict(more=1)

    runs = [_run(seed=seed) for seed in range(3)]
    failed = side_by_side.train_missing(runs[:2], kept, options, after.append, more)
    assert failed == {"mha_seed1_steps8": "has no room"} and len(after) == 1
    assert kept.of(runs[0])["more"] == 1 and kept.of(runs[1]) is None
    more(tmp_path / "runs" / "mha_seed0_steps8")
    kept.keep(runs[0], tmp_path / "runs" / "mha_seed0_steps8", bpb=2.0)
    _train(runs[2:], tmp_path / "runs")
    more(tmp_path / "runs" / "mha_seed2_steps8")
    failed = side_by_side.train_missing(runs[2:], kept, options, after.append, more)
    assert "was trained on other data" in failed["mha_seed2_steps8"]
    against = Run(Cell("gqa", CONFIGS / "gqa_tiny.py", against="mha"), 2, STEPS)
    _train([against], tmp_path / "runs")
    more(tmp_path / "runs" / "gqa_seed2_steps8")
    with pytest.raises(UserError, match="on other data .* give another --runs"):
        kept.keep(against, tmp_path / "runs" / "gqa_seed2_steps8", bpb=2.0)


@pytest.mark.slow
def test_an_interrupted_study_starts_no_other_run(trains, tmp_path):
    runs = side_by_side.train(
        [_run(), _run(seed=1), _run(seed=2)], tmp_path, processes=1, mix=False
    )
    next(runs)
    runs.close()
    assert len(trains) < 3


def test_code_is_what_it_does():
    files = grid.code()
    assert {"attention/grouped.py", "optim.py", "training/program.py"} <= files.keys()
    bare = code_lib._bare('"""Doc."""\n\ndef f(x):\n    """Doc."""\n    return x + 1  # more\n')
    assert bare == code_lib._bare("def f(x): return x + 1")
    assert bare != code_lib._bare("def f(x): return x + 2")
    other = files | {"optim.py": "x", "new.py": "y"}
    assert code_lib.changed(files, other) == ["new.py", "optim.py"]


@pytest.mark.slow
def test_finished_runs_are_of_the_same_config_and_code(trains, tmp_path, monkeypatch):
    file, options = tmp_path / "kept.json", dict(mix=False, fresh=False)
    _train([_run()], tmp_path)
    kept = FinishedRuns(file, STEPS, **options)
    assert kept.of(_run()) is None
    kept.keep(_run(), tmp_path / "mha_seed0_steps8", bpb=2.0)
    file.write_text(json.dumps(dict(steps=STEPS) | kept.as_json()))
    again = FinishedRuns(file, STEPS, **options)
    assert again.of(_run())["bpb"] == 2.0 and again.of(_run(seed=1)) is None
    assert again.of(_run())["made_by"]["packages"]["jax"]
    assert again.of(_run(**{"model.mlp_dim": 96})) is None  # of another config
    said = r"--steps = 16: .*kept.json has runs of 8 steps; .*--fresh"
    with pytest.raises(UserError, match=said):
        FinishedRuns(file, 2 * STEPS, **options)
    assert FinishedRuns(file, STEPS, mix=False, fresh=True).of(_run()) is None
    code = grid.code() | {"optim.py": "another"}
    monkeypatch.setattr(grid, "code", lambda: code)
    with pytest.raises(UserError, match=r"has runs of other code \(optim.py\).*--fresh.*--mix"):
        FinishedRuns(file, STEPS, **options)
    mixed = FinishedRuns(file, STEPS, mix=True, fresh=False)
    assert mixed.of(_run())["bpb"] == 2.0 and mixed.as_json()["codes"] == again.codes
    for text, said in (("{", "kept.json"), ('{"steps": 8}', "kept.json lacks 'runs'")):
        file.write_text(text)
        with pytest.raises(UserError, match=said):
            FinishedRuns(file, STEPS, **options)
