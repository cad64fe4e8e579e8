"""The prepared run: programs are made, loaded where they fit, and every stage keeps its rows."""

import argparse
import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from experiments import device_run, prepared
from kvjax.foundation.checkout import ROOT


def test_a_program_is_loaded_unless_anything_differs(tmp_path):
    """Other sources, another JAX, a damaged file and a failed compilation each give a reason."""
    program = jax.jit(lambda x: 2 * x + 1), (jax.ShapeDtypeStruct((3,), jnp.float32),)
    folder = prepared.Folder(tmp_path, "sources")
    entry = folder.add(("kernel", "", 3), program, None)
    assert entry["file"] == "kernel-definition-3.xc" and entry["bytes"]
    assert folder.add(("kernel", "", 3), None, None) == entry  # not compiled again
    folder.add("broken", (jax.jit(lambda x: x.nothing), program[1]), None)

    again = prepared.Folder(tmp_path, "sources")
    assert again.load(("kernel", "", 3))(jnp.arange(3.0)).tolist() == [1, 3, 5]
    assert again.load("broken") is None and "nothing" in again.reasons["broken"]
    assert again.load("other") is None and again.reasons["other"] == "it was not prepared"
    changed = prepared.Folder(tmp_path, "other sources")
    assert changed.load(("kernel", "", 3)) is None
    assert "other sources" in changed.reasons["kernel-definition-3"]
    index = json.loads((tmp_path / "index.json").read_text())
    index["kernel-definition-3"]["jax"] = "0.1"
    (tmp_path / "index.json").write_text(json.dumps(index))
    old = prepared.Folder(tmp_path, "sources")
    assert old.load(("kernel", "", 3)) is None and "JAX 0.1" in old.reasons["kernel-definition-3"]
    file = tmp_path / entry["file"]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert again.load(("kernel", "", 3)) is None
    assert "is damaged" in again.reasons["kernel-definition-3"]


def test_every_program_of_a_plan_has_a_name_of_its_own():
    for plan in device_run.PLANS.values():
        names = [prepared.name_of(key) for key, _, _ in device_run.programs(plan)]
        assert len(names) == len(set(names)) > 5
        assert {name.partition("-")[0] for name in names} == {"flags", "check", "kernels", "steps"}


def test_a_stage_that_fails_or_hangs_leaves_time_for_the_others(tmp_path, monkeypatch):
    now, ran = [0.0], []

    def run(command, *, timeout, **_):
        (stage,) = (c.partition("=")[2] for c in command if c.startswith("--stage="))
        ran.append((stage, round(timeout)))
        if stage == "check":  # takes its share and those of the next two
            now[0] += 500
            raise subprocess.TimeoutExpired(command, timeout)
        now[0] += 1
        return subprocess.CompletedProcess(command, 3 if stage == "memory" else 0)

    monkeypatch.setattr(device_run.subprocess, "run", run)
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
