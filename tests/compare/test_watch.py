"""Watched runs: new ones, removed ones, the end."""

import contextlib
import json
import re
import shutil

import pytest

from kvjax.compare import __main__ as command, runs as runs_lib
from tests import golden
from tests.compare.command import run
from tests.compare.written import write_run


def test_watching_ends_when_all_runs_have(two, drawn, tmp_path, capfd, monkeypatch):
    """The unfinished run is a curve; while it is, the page reads itself again."""
    out, looks = tmp_path / "out", []

    def sleep(seconds):
        looks.append((seconds, "refresh" in (out / "compare.html").read_text()))
        write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert run(two, f"--out={out}", "--watch") == 0
    assert looks == [(30, True)]
    assert "refresh" not in (out / "compare.html").read_text()
    assert json.loads((out / "compare.json").read_text())["rows"][1]["seeds"] == [0, 1, 7]
    assert capfd.readouterr().out.count("mha_tiny (running)") == 1


def test_a_figure_says_of_which_seeds_it_is(two, drawn, tmp_path, capfd, monkeypatch):
    """And a group whose seeds were never evaluated at one step has no curve, which is said.

    So are runs of which none has ended: they have no final figure.
    """
    write_run(two / "l2", seed=2, steps=(30,), bpb=(4,))
    write_run(two / "q", config="mqa_tiny", steps=(25,), bpb=(5,))

    def stop(_):
        raise InterruptedError

    monkeypatch.setattr(command.time, "sleep", stop)
    monkeypatch.chdir(two.parent)
    with contextlib.suppress(InterruptedError):
        run("runs", "--out=out", "--watch=5")
    said = re.sub(r"[\d.]+ MB", "some MB", capfd.readouterr().out)
    (((results, *_),), _) = drawn
    said += f"\n{results.lead}\n{results.tables[0].shown()}\n"
    golden.check_text(said, "compare/watched", 1e-3)


def test_watching_does_not_wait_for_what_cannot_be_read(two, drawn, tmp_path, capfd, monkeypatch):
    write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    write_run(two / "infinite", seed=8, bpb=(4, 3, float("nan"), 2))
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("it waits"))
    assert run(two, f"--out={tmp_path / 'out'}", "--watch=5") == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "infinite has bits per byte that are not finite, at step 75" in said


def test_what_goes_and_what_does_not_fit_is_left_out(two, drawn, tmp_path, capfd, monkeypatch):
    """A folder that is named is moved; a run of other data and a repeat come into another."""
    out, looks = tmp_path / "out", []
    write_run(tmp_path / "named", seed=5)

    def sleep(seconds):
        looks.append(seconds)
        shutil.rmtree(tmp_path / "named")
        write_run(two / "a_other", seed=9, data="other")
        (write_run(two / "a_third", seed=9) / "dataset.json").unlink()
        write_run(two / "a_repeat", seed=0)
        write_run(two / "longer", config="mha_tiny", num_steps=200, steps=(200,), bpb=(2,))
        write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))

    monkeypatch.setattr(command.time, "sleep", sleep)
    asked = (tmp_path / "named", two, f"--out={out}", "--against=mha_tiny", "--watch=5")
    assert run(*asked) == 0
    assert len(looks) == 1
    said = "".join(capfd.readouterr().out.split())  # lines end at hyphens too
    for line in (
        f"skipped: {tmp_path / 'named'} is not there any more",
        f"a_other cannot be compared with {two}/l0: its data set is another",
        "a_third cannot be compared: dataset.json is missing",
        f"a_repeat has the config and the seed (0) of {two}/l0",
    ):
        assert "".join(line.split()) in said
    found = json.loads((out / "compare.json").read_text())["rows"]
    assert {row["name"]: row["seeds"] for row in found} == {
        "lrkv_tiny": [0, 1],
        "mha_tiny num_steps=100": [0, 1, 7],
        "mha_tiny num_steps=200": [0],
    }
    assert found[0]["against"] == pytest.approx(-0.35)


def test_what_will_never_have_a_figure_ends_at_once(tmp_path, capfd, monkeypatch):
    """A run that failed, and weights that were converted: a checkpoint without records."""
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("it waits"))
    write_run(tmp_path / "runs" / "infinite", bpb=(4, 3, float("nan"), 2))
    converted = write_run(tmp_path / "runs" / "converted", steps=(), bpb=())
    (converted / "metrics.jsonl").unlink()
    (converted / "checkpoints" / "100" / "state").mkdir(parents=True)
    (converted / "checkpoints" / "100" / "_CHECKPOINT_METADATA").write_text("{}")
    assert run(tmp_path / "runs", f"--out={tmp_path / 'out'}", "--watch=5") == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "nothing to compare" in said and "converted was never evaluated" in said


@pytest.mark.parametrize("record", ["", '{"step": 100, "loss": 1.0}'])
def test_what_is_being_evaluated_for_the_first_time_is_waited_for(tmp_path, record):
    """Its checkpoint of a step before is there, and the record of the last step may be."""
    workdir = write_run(tmp_path / "a", steps=(), bpb=())
    (workdir / "metrics.jsonl").write_text(record and record + "\n")
    for step in (50, 100):
        (workdir / "checkpoints" / str(step)).mkdir(parents=True)
        (workdir / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").write_text("{}")
        _, (one,) = runs_lib.read(runs_lib.workdirs([str(workdir)]), running=True)
        assert one.why == "was never evaluated" and one.may_come == (step == 50)
