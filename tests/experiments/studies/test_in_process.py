"""Studies in one process: resumption, code checks, time estimates and failures."""

import argparse
import json
import subprocess
import sys

import jax
import pytest

from experiments import record
from experiments.studies import (
    code as code_lib,
    cross_attention,
    in_process,
    set_anomaly,
)
from experiments.studies.in_process import Cell
from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def _train(cells, **options):
    given = dict(seeds=2, mix=False, fresh=False, save=True) | options
    return in_process.train(
        "study",
        cells,
        argparse.Namespace(**given),
        lambda kept, failed: dict(failed=dict(failed)) | kept.as_json(),
    )


def _cell(name, trained, **settings):
    def train(seed):
        trained.append((name, seed))
        return dict(right=seed / 2)

    return Cell(name, dict(name=name) | settings, train)


def test_all_cells_with_a_seed_then_with_the_next(results):
    trained = []
    kept, failed = _train([_cell("a", trained), _cell("b", trained)])
    assert trained == [("a", 0), ("b", 0), ("a", 1), ("b", 1)] and not failed
    assert kept.runs["a"][1]["right"] == 0.5 and kept.runs["a"][1]["seconds"] > 0
    written = json.loads((results / "study.json").read_text())
    assert set(written["runs"]) == {"a", "b"} and written["made_by"]["commit"]


@pytest.mark.slow
def test_finished_runs_are_not_trained_again(results, capfd):
    trained = []
    _train([_cell("a", trained)], seeds=1)
    _train([_cell("a", trained), _cell("b", trained)])
    assert trained == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert "3 runs of 4 to train" in capfd.readouterr().err
    before = (results / "study.json").read_text()
    with pytest.raises(UserError, match=r"study.json has a, seed 0, of other options or data"):
        _train([_cell("a", trained, width=2)], seeds=1)
    assert (results / "study.json").read_text() == before and len(trained) == 4
    _train([_cell("a", trained, width=2)], seeds=1, save=False)  # nothing is written over
    assert trained[-1] == ("a", 0) and len(trained) == 5


def test_a_result_has_one_writer(results):
    """A second process is refused; the same process may continue."""
    _train([_cell("a", [])], seeds=1)
    claims = (
        "import pathlib, sys\n"
        "from experiments.studies import finished_runs\n"
        "from kvjax.foundation.errors import UserError\n"
        "try: finished_runs.claim(pathlib.Path(sys.argv[1]))\n"
        "except UserError as error: print(error)\n"
    )
    command = [sys.executable, "-c", claims, str(results / "study.json")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "another process writes" in said and "leave out --save" in said
    assert len(_train([_cell("a", []), _cell("b", [])], seeds=1)[0].runs) == 2


def test_runs_of_other_code_are_not_mixed(results, monkeypatch):
    trained = []
    _train([_cell("a", trained)], seeds=1)
    code = code_lib.code_of(in_process._DECIDES)
    monkeypatch.setattr(code_lib, "code_of", lambda _: code | {"model/mlp.py": "another"})
    with pytest.raises(UserError, match=r"has runs of other code \(model/mlp.py\)"):
        _train([_cell("a", trained)], seeds=1)
    _train([_cell("a", trained)], seeds=1, mix=True)
    assert len(trained) == 1
    _train([_cell("a", trained)], seeds=1, fresh=True)
    assert len(trained) == 2


def test_a_failed_run_is_reported_and_others_continue(results):
    trained = []

    def fails(seed):
        raise FloatingPointError("loss is nan")

    def has_no_room(seed):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    bad = [Cell("bad", {}, fails), Cell("large", {}, has_no_room)]
    _, failed = _train([*bad, _cell("good", trained)], seeds=1)
    assert failed["bad seed 0"] == "loss is nan" and trained == [("good", 0)]
    assert "Out of memory" in failed["large seed 0"]


def test_a_mean_is_over_cells_of_equal_settings(results):
    """A seed trained again on other data replaces the first."""
    trained = []
    first, second = _cell("a", trained, data="one"), _cell("a", trained, data="another")
    _train([first], seeds=3)
    kept, _ = _train([second], seeds=1, save=False)
    assert in_process.means([second], kept, "right", data="another") == {0: 0.0}
    assert in_process.means([first], kept, "right", data="one") == {1: 0.5, 2: 1.0}


@pytest.mark.slow
def test_saving_some_cells_keeps_the_rows_of_others(results, monkeypatch):
    """Rows of earlier runs with equal settings stay in the result, for the ledger."""
    monkeypatch.setattr(set_anomaly.Trainer, "train", lambda *_: dict(right=0.5, loss=1.0))
    right = dict(right=1.0, steps=7, parameters=8, cached_bytes=9)
    monkeypatch.setattr(cross_attention, "train", lambda *_: right)
    for study, part in ((set_anomaly, "--places=last"), (cross_attention, "--kinds=mha")):
        monkeypatch.setattr(in_process.runtime, "start", lambda: None)

        def named(study=study):
            return json.loads((results / f"{study.NAME}.json").read_text())["rows"]

        assert command_line.status(study.main, ["--save", "--seeds=1"]) == 0
        before = named()
        assert command_line.status(study.main, [part, "--save", "--seeds=2"]) == 0
        after = named()

        def shape(rows):
            return [(row.keys(), row.get("places", {}).keys()) for row in rows]

        assert shape(after) == shape(before) != []
        assert after != before
