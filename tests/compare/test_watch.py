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


def test_watching_ends_with_the_last_run(two, drawn, tmp_path, capfd, monkeypatch):
    """Shows the unfinished run as a curve, and reloads the page until it has finished."""
    out, sleeps = tmp_path / "out", []

    def sleep(seconds):
        sleeps.append((seconds, "refresh" in (out / "compare.html").read_text()))
        write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert run(two, f"--out={out}", "--watch") == 0
    assert sleeps == [(30, True)]
    assert "refresh" not in (out / "compare.html").read_text()
    assert json.loads((out / "compare.json").read_text())["rows"][1]["seeds"] == [0, 1, 7]
    assert capfd.readouterr().out.count("mha_tiny (running)") == 1


def test_results_name_their_seeds(two, drawn, tmp_path, capfd, monkeypatch):
    """Reports groups without a common step, which have no curve, and groups without a result."""
    write_run(two / "l2", seed=2, steps=(30,), bpb=(4,))
    write_run(two / "q", config="mqa_tiny", steps=(25,), bpb=(5,))

    def stop(_):
        raise InterruptedError

    monkeypatch.setattr(command.time, "sleep", stop)
    monkeypatch.chdir(two.parent)
    with contextlib.suppress(InterruptedError):
        run("runs", "--out=out", "--watch=5")
    text = re.sub(r"[\d.]+ MB", "some MB", capfd.readouterr().out)
    ((sections,), _) = drawn
    (results,) = (section for section in sections if section.name == "results")
    text += f"\n{results.lead}\n{golden.cells(results.tables[0])}\n"
    golden.check_text(text, "compare/watched", 1e-3)


def test_watching_does_not_wait_for_unusable_runs(two, drawn, tmp_path, capfd, monkeypatch):
    write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))
    write_run(two / "infinite", seed=8, bpb=(4, 3, float("nan"), 2))
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("it waits"))
    assert run(two, f"--out={tmp_path / 'out'}", "--watch=5") == 0
    output = " ".join(capfd.readouterr().out.split())
    assert "infinite has bits per byte that are not finite, at step 75" in output


def test_removed_and_incomparable_runs_are_skipped(two, drawn, tmp_path, capfd, monkeypatch):
    """Removes a named folder; adds runs of other data and a repeated seed to another."""
    out, sleeps = tmp_path / "out", []
    write_run(tmp_path / "named", seed=5)

    def sleep(seconds):
        sleeps.append(seconds)
        shutil.rmtree(tmp_path / "named")
        write_run(two / "a_other", seed=9, data="other")
        (write_run(two / "a_third", seed=9) / "dataset.json").unlink()
        write_run(two / "a_repeat", seed=0)
        write_run(two / "longer", config="mha_tiny", num_steps=200, steps=(200,), bpb=(2,))
        write_run(two / "z", seed=7, config="mha_tiny", bpb=(4, 3.5, 3, 2.6))

    monkeypatch.setattr(command.time, "sleep", sleep)
    arguments = (tmp_path / "named", two, f"--out={out}", "--against=mha_tiny", "--watch=5")
    assert run(*arguments) == 0
    assert len(sleeps) == 1
    output = "".join(capfd.readouterr().out.split())  # lines end at hyphens too
    for line in (
        f"skipped: {tmp_path / 'named'} does not exist any more",
        f"a_other cannot be compared with {two}/l0: its data set is another",
        "a_third cannot be compared: dataset.json is missing",
        f"a_repeat has the config and the seed (0) of {two}/l0",
    ):
        assert "".join(line.split()) in output
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert {row["name"]: row["seeds"] for row in rows} == {
        "lrkv_tiny": [0, 1],
        "mha_tiny num_steps=100": [0, 1, 7],
        "mha_tiny num_steps=200": [0],
    }
    assert rows[0]["against"] == pytest.approx(-0.35)


def test_watching_ends_at_once_without_usable_runs(tmp_path, capfd, monkeypatch):
    """Covers a failed run, and a conversion: a checkpoint without metrics."""
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("it waits"))
    write_run(tmp_path / "runs" / "infinite", bpb=(4, 3, float("nan"), 2))
    converted = write_run(tmp_path / "runs" / "converted", steps=(), bpb=())
    (converted / "metrics.jsonl").unlink()
    (converted / "checkpoints" / "100" / "state").mkdir(parents=True)
    (converted / "checkpoints" / "100" / "_CHECKPOINT_METADATA").write_text("{}")
    assert run(tmp_path / "runs", f"--out={tmp_path / 'out'}", "--watch=5") == 2
    message = " ".join(capfd.readouterr().err.split())
    assert "nothing to compare" in message and "converted was never evaluated" in message


@pytest.mark.parametrize("record", ["", '{"step": 100, "loss": 1.0}'])
def test_watching_waits_for_the_first_evaluation(tmp_path, record):
    """An earlier checkpoint exists, and perhaps the record of the last step."""
    workdir = write_run(tmp_path / "a", steps=(), bpb=())
    (workdir / "metrics.jsonl").write_text(record and record + "\n")
    for step in (50, 100):
        (workdir / "checkpoints" / str(step)).mkdir(parents=True)
        (workdir / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").write_text("{}")
        _, (skipped,) = runs_lib.read(runs_lib.workdirs([str(workdir)]), running=True)
        assert skipped.why == "was never evaluated" and skipped.may_come == (step == 50)
