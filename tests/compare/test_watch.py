"""Runs that are watched as they go on: what comes, what goes, when it ends."""

import contextlib
import json
import shutil

import pytest

from experiments.benchmarks.compare_speed import write_run
from kvjax.compare import __main__ as command
from tests.compare.command import run


@pytest.mark.slow
def test_watching_ends_when_all_runs_have(two, tmp_path, capfd, monkeypatch):
    """The unfinished run is a curve; while it is, the page reads itself again."""
    out, looks = tmp_path / "out", []

    def sleep(seconds):
        looks.append((seconds, "refresh" in (out / "compare.html").read_text()))
        write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert run(two, f"--out={out}", "--watch=5") == 0
    assert looks == [(5, True)]
    assert "refresh" not in (out / "compare.html").read_text()
    assert json.loads((out / "compare.json").read_text())["rows"][1]["seeds"] == [0, 1, 7]
    assert "running" in capfd.readouterr().out


@pytest.mark.slow
def test_a_figure_says_of_which_seeds_it_is(two, tmp_path, capfd, monkeypatch):
    """And a group whose seeds were never evaluated at one step has no curve, which is said."""
    write_run(two / "l2", seed=2, steps=(30,), bpb=(4,))

    def stop(_):
        raise InterruptedError

    monkeypatch.setattr(command.time, "sleep", stop)
    with contextlib.suppress(InterruptedError):
        run(two, f"--out={tmp_path / 'out'}", "--watch=5")
    said = " ".join(capfd.readouterr().out.split())
    assert "(seed 0,1)" in said
    assert "lrkv_tiny has no curve: no step was evaluated with all of its seeds" in said


@pytest.mark.slow
def test_watching_does_not_wait_for_what_cannot_be_read(two, tmp_path, capfd, monkeypatch):
    write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    write_run(two / "infinite", seed=8, bpb=(4, 3, float("nan"), 2))
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("it waits"))
    assert run(two, f"--out={tmp_path / 'out'}", "--watch=5") == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "infinite has bits per byte that are no number, at step 75" in said


@pytest.mark.slow
def test_what_goes_and_what_does_not_fit_is_left_out(two, tmp_path, capfd, monkeypatch):
    """A folder that is named is moved; a run of other data and a repeat come into another."""
    out, looks = tmp_path / "out", []
    write_run(tmp_path / "named", seed=5)

    def sleep(seconds):
        looks.append(seconds)
        shutil.rmtree(tmp_path / "named")
        write_run(two / "other", seed=9, data="other")
        write_run(two / "repeat", seed=0)
        write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert run(tmp_path / "named", two, f"--out={out}", "--watch=5") == 0
    assert len(looks) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "left out: " + str(tmp_path / "named") + " is not there any more" in said
    assert "other cannot be compared: their data set is not the same" in said
    assert "repeat are the same config with the same seed (0)" in said
    rows = {
        row["name"]: row["seeds"] for row in json.loads((out / "compare.json").read_text())["rows"]
    }
    assert rows == {"lrkv_tiny": [0, 1], "mha_tiny": [0, 1, 7]}


def test_what_will_never_have_a_figure_ends_at_once(tmp_path, capfd, monkeypatch):
    """A run that failed, and weights that were converted: a checkpoint without records."""
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("it waits"))
    write_run(tmp_path / "runs" / "infinite", bpb=(4, 3, float("nan"), 2))
    converted = write_run(tmp_path / "runs" / "converted", steps=(), bpb=())
    (converted / "checkpoints" / "100" / "state").mkdir(parents=True)
    (converted / "checkpoints" / "100" / "_CHECKPOINT_METADATA").write_text("{}")
    assert run(tmp_path / "runs", f"--out={tmp_path / 'out'}", "--watch=5") == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "nothing to compare" in said and "converted was never evaluated" in said
