"""The prepared run: programs are made, loaded where they fit, and every stage keeps its rows."""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from experiments import device_run, prepared
from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT


def test_a_program_is_loaded_unless_anything_differs(tmp_path):
    """Other sources, a damaged or lost file and a failed compilation each give a reason."""
    key, made, reasons = ("kernel", "", 3), [], {}

    def make():
        made.append(key)
        return jax.jit(lambda x: 2 * x + 1), (jax.ShapeDtypeStruct((3,), jnp.float32),)

    def fails():
        raise NotImplementedError("no kernel for this")

    def folder(source="sources"):
        return prepared.Folder(tmp_path, source, reasons.__setitem__)

    entry = folder().add(key, make, None)
    assert entry["file"] == "kernel-definition-3.xc" and entry["bytes"]
    assert folder().add(key, make, None) == entry and len(made) == 1
    folder().add("broken", fails, None)
    assert folder().load(key)(jnp.arange(3.0)).tolist() == [1, 3, 5] and not reasons
    assert folder().load("broken") is None and "no kernel for this" in reasons["broken"]
    assert folder().load("other") is None and reasons["other"] == "it was not prepared"
    assert folder("others").load(key) is None and "other" in reasons["kernel-definition-3"]
    file = tmp_path / entry["file"]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert folder().load(key) is None and "is damaged" in reasons["kernel-definition-3"]
    file.unlink()
    folder().add(key, make, None)
    folder("others").add(key, make, None)
    assert len(made) == 3 and folder("others").load(key) is not None


def test_the_digest_follows_sources_and_tuned_sizes(tmp_path):
    files = ["kvjax/a.py", "experiments/b.py", "kvjax/kernels/decode_attention/tuned.json"]
    digests = []
    for name in ["", *files, "kvjax/notes.md"]:
        path = tmp_path / name
        if name:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
        digests.append(prepared.source_digest(tmp_path))
    assert len(set(digests)) == 4 and digests[-1] == digests[-2]


def test_every_program_of_a_plan_has_a_name_of_its_own():
    for plan in device_run.PLANS.values():
        names = [prepared.name_of(key) for key, _, _ in device_run.programs(plan)]
        assert len(names) == len(set(names)) > 5
        assert {name.partition("-")[0] for name in names} == {"flags", "check", "kernels", "steps"}


def test_a_stage_that_fails_or_hangs_leaves_time_for_the_others(tmp_path, monkeypatch):
    now, ran = [0.0], []

    def stopped(command, seconds):
        (stage,) = (c.partition("=")[2] for c in command if c.startswith("--stage="))
        ran.append((stage, round(seconds)))
        now[0] += 500 if stage == "check" else 1  # its share and those of the next two
        return dict(memory="status 3", check=f"after {seconds:.0f} s").get(stage, "")

    monkeypatch.setattr(device_run, "_stopped", stopped)
    monkeypatch.setattr(device_run.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(device_run.provenance, "software", lambda *_: {})
    rows = tmp_path / "rows.jsonl"
    options = argparse.Namespace(device="cpu", folder=str(tmp_path), deadline=1005.0)
    device_run._run(options, rows)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [name for name, _ in ran] == ["memory", "check", "kernels", "steps", "training"]
    assert dict(ran)["kernels"] == 79  # what 0.58 of 1,000 s leaves after 501
    kept = {row["stage"]: row.get("stopped") or row.get("skipped") for row in found}
    assert kept["memory"] == "status 3" and kept["check"] == "after 139 s"
    assert "were left" in kept["flags"]


def test_a_stage_that_hangs_is_killed_with_its_children(tmp_path):
    """A child that measures training would hold the card."""
    pid = tmp_path / "pid"
    script = f"sleep 100 & echo $! >{pid}; wait"
    start = time.monotonic()
    assert device_run._stopped(["sh", "-c", script], 1.0) == "after 1 s"
    assert time.monotonic() - start < 20
    status = pathlib.Path(f"/proc/{pid.read_text().strip()}/status")
    while status.exists() and "zombie" not in status.read_text():  # dies when it is next scheduled
        assert time.monotonic() - start < 20
        time.sleep(0.01)
    assert device_run._stopped(["sh", "-c", "exit 3"], 100.0) == "status 3"
    assert device_run._stopped(["true"], 100.0) == ""


def test_the_table_is_of_the_device_that_was_measured(tmp_path, capsys):
    """Libraries are compared at each point; a kernel that disagrees gives status 1."""
    rows = [dict(stage="run", device="cpu"), dict(stage="memory", device="x")]
    rows[1] |= dict(copy_gbps=10.0, read_gbps=12.0)
    seconds = dict(median=2e-3, low=1e-3, high=3e-3)
    kernel = dict(stage="kernels", batch=1, length=8, seconds=seconds, gbps=1.0, of_copy=0.1)
    kernel |= dict(of_datasheet=None, tflops=0.1, may_stay_on_chip=False, may_be_launches=False)
    rows += [kernel | dict(mechanism="mha", implementation=name) for name in ("gpu", "cudnn")]
    step = dict(stage="steps", batch=1, length=8, seconds=seconds, gbps=5.0, cache_bytes=1)
    step |= dict(tokens_per_second=1.0, host_seconds=1e-3)
    rows += [step | dict(mechanism="MHA"), step | dict(mechanism="LRKV")]
    rows += [dict(stage="check", mechanism="mha", implementation="gpu", batch=1, length=8)]
    rows[-1] |= dict(why="broken", agrees=False)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command_line.status(device_run.main, ["--table", f"--rows={file}"]) == 1
    printed = capsys.readouterr().out
    assert "kernels on cpu" in printed and "1.00 (cudnn)" in printed and "50%" in printed
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert command_line.status(device_run.main, ["--table", f"--rows={file}"]) == 0
    capsys.readouterr()
    assert command_line.status(device_run.main, ["--run", f"--rows={file}"]) == 2
    assert "has the rows of a run" in capsys.readouterr().err
    file.unlink()
    options = ["--run", f"--rows={file}", f"--folder={tmp_path / 'none'}"]
    assert command_line.status(device_run.main, options) == 2
    assert "no programs of h200: --make makes them" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rehearsal_on_the_cpu_gives_every_figure(tmp_path):
    """--make, then --run: programs are loaded, not compiled, and the last lines are the table."""
    base = [sys.executable, "-m", "experiments.device_run", "--device=cpu"]
    base += [f"--folder={tmp_path}", f"--rows={tmp_path / 'rows.jsonl'}"]

    def run(*options):
        done = subprocess.run(
            [*base, *options], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "steps-LRKV-1-128: " in run("--make")
    start = time.monotonic()
    printed = run("--run", "--deadline=2400")
    assert time.monotonic() - start < 2400
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not [row for row in rows if "compiled_here" in row or "stopped" in row]
    by_stage = {stage: [r for r in rows if r["stage"] == stage] for stage in device_run.STAGES}
    assert by_stage["memory"][0]["copy_gbps"] > 0
    assert [r["agrees"] for r in by_stage["check"]] == [True, True]
    assert [r["mechanism"] for r in by_stage["kernels"]] == ["mha", "lrkv"]
    for stage in ("flags", "steps"):
        (row,) = by_stage[stage]
        assert row["seconds"]["median"] > 0 or "noise" in row["why"]
    assert "training lrkv_tiny: " in printed and "kernels on cpu" in printed
    assert run("--table") == printed
