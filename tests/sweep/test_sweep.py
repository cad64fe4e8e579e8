"""The command: a grid with a stand-in for training, and real runs that are stopped and go on."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import psutil
import pytest

from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT
from kvjax.sweep import __main__ as command, runs as runs_lib
from kvjax.workdir import identity
from tests import quick, runs as small_runs

_TRAINS = """
import json, pathlib, sys
workdir, config, rank, seed = sys.argv[1:]
if rank == "8" and seed == "1":
    sys.exit("step 1\\rkvjax: no room")
folder = pathlib.Path(workdir)
(folder / "checkpoints" / "8").mkdir(parents=True)
(folder / "checkpoints" / "8" / "_CHECKPOINT_METADATA").write_text("{}")
(folder / "config.json").write_text(config)
for name in ("dataset.json", "tokenizer.json"):
    (folder / name).write_text("{}")
records = [dict(step=4, validation_bpb=2.5), dict(step=8, validation_bpb=2 + int(rank) / 100)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))
timed = [dict(step=1, seconds_to_first_step=20.0), dict(step=8, tokens_per_second=4096.0)]
timed += [dict(step=8, goodput=0.4, lost_startup=0.4, lost_validating=0.15, lost_saving=0.05)]
(folder / "timing.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in timed))
"""
_GRID = ("configs/lrkv_tiny.py", "--config.train.num_steps=8", "--set", "attention.rank=4,8")


@pytest.fixture
def sweep(monkeypatch, tmp_path, capfd):
    """Returns a function from arguments to status, output and messages; and the started runs."""
    begun = []

    def trains(run, workdir):
        begun.append(run.name)
        config = json.dumps(identity.identity(run.config, jnp.dtype("float32")))
        given = str(workdir), config, str(run.config.attention.rank), str(run.config.train.seed)
        return [sys.executable, "-S", "-c", _TRAINS, *given]

    monkeypatch.setattr(runs_lib, "command", trains)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["kvjax sweep"])
    monkeypatch.chdir(tmp_path)

    def of(*given):
        begun.clear()
        return command_line.status(command.main, given), *capfd.readouterr()

    return of, begun


def test_a_grid_is_trained_once_and_compared(sweep):
    """A failed run is reported with status 1 and trained again; another config is refused."""
    run, begun = sweep
    status, out, _ = run(*_GRID, "--seeds=2", "--plan")
    assert status == 0 and not begun and out.count("to train ") == 4 and not os.listdir()
    status, out, told = run(*_GRID, "--seeds=2", "--processes=2")
    assert status == 1 and len(begun) == 4
    assert re.search(r"lrkv_tiny rank=4 .* 0,1 .* 2\.0400 ± 0\.0000 +-\n", out)
    assert re.search(r"lrkv_tiny rank=8 .* 0 .* 2\.0800 +\+0\.0400\n", out)
    log = "runs/sweep/lrkv_tiny/rank=8_seed=1.log"
    assert f"- failed: rank=8_seed=1, status 1: kvjax: no room; its output is in {log}\n" in out
    page = "kvjax compare runs/sweep/lrkv_tiny --out=runs/compare/lrkv_tiny"
    assert out.endswith(f"\nThe page: {page}\n")
    assert "rank=4_seed=0: 2.0400 bits per byte (" in told
    assert run(*_GRID, "--seeds=2", "--processes=2")[0] == 1 and begun == ["rank=8_seed=1"]
    # 8 x 8,192 tokens at 4,096/s, half as long again for evaluating and saving; 20 s to start.
    status, out, _ = run(*_GRID[:-1], "attention.rank=4,8,12", "--seeds=2", "--plan", "--json")
    states = {row["run"]: (row["state"], row["seconds"]) for row in json.loads(out)["runs"]}
    assert states["rank=4_seed=1"] == ("finished", None)
    assert states["rank=8_seed=1"][1] == pytest.approx(44, rel=0.05)
    assert states["rank=12_seed=0"] == ("to train", pytest.approx(44, rel=0.1))
    status, out, told = run(*_GRID, "--seeds=2", "--config.train.batch_size=8")
    assert (status, out, begun) == (2, "", [])
    assert "train.batch_size: there 32, now 8" in told and "or another --out for a new run" in told


def test_runs_that_cannot_be_compared_are_named(sweep):
    run, _ = sweep
    rows = ("--set", "data.sequence_length=128,256")
    status, out, _ = run(*_GRID[:2], *rows, "--set=attention.rank=4", "--seeds=1")
    assert status == 0
    assert "skipped: sequence_length=256_rank=4_seed=0 cannot be compared with sequence_len" in out


@pytest.mark.parametrize(
    "platform, environment, given, found",
    [
        ("cpu", "", None, 2),
        ("cpu", "", 9, 4),
        ("gpu", "", None, 1),
        ("gpu", "", 2, "must be 1 on a gpu.*PREALLOCATE=false"),
        ("gpu", "false", 2, 2),
        ("tpu", "false", 2, "must be 1 on a tpu, since a run takes all of its memory$"),
    ],
)
def test_runs_at_a_time(monkeypatch, platform, environment, given, found):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", environment)
    monkeypatch.setattr(command.runtime, "cores", lambda: 2)
    if isinstance(found, int):
        assert command._processes(given, platform, 4) == found
    else:
        with pytest.raises(command.UserError, match=found):
            command._processes(given, platform, 4)


@pytest.mark.parametrize(
    "given, said",
    [
        ((), "no config is given"),
        (("a.py", "b.py"), "--out is missing"),
        (("configs/lrkv_tiny.py", "--out=gs://x"), "--out = 'gs://x': must be a local"),
        (("configs/lrkv_tiny.py", "--out=run"), "--out = 'run': is the workdir of a run"),
        (("configs/lrkv_tiny.py", "--seeds=0"), "--seeds = 0: must be"),
    ],
)
def test_what_is_refused(sweep, given, said):
    run, begun = sweep
    pathlib.Path("run").mkdir()
    pathlib.Path("run/config.json").write_text("{}")
    status, out, told = run(*given)
    assert (status, out, begun) == (2, "", []) and said in told


@pytest.mark.slow
def test_runs_are_stopped_and_go_on_as_if_they_had_not_been(tmp_path, source):
    """Children end with the sweep, and numbers are those of a run that was not stopped."""
    (tmp_path / "small.py").write_text(
        small_runs.CONFIG_FILE.format(source=source[0], directory=source[1])
    )
    keys = dict(num_steps=400, eval_every=200, checkpoint_every=400)
    fixed = [f"--config.train.{key}={value}" for key, value in keys.items()]
    words = [sys.executable, "-m", "kvjax.sweep", "small.py", "--set=attention.rank=2,4", *fixed]
    environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT), COLUMNS="200")
    at = dict(cwd=tmp_path, env=environment | quick.cpu_devices(1), text=True)
    workdirs = [tmp_path / "out" / f"rank={rank}_seed=0" for rank in (2, 4)]
    begun = subprocess.Popen([*words, "--out=out"], **at, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not any(map(runs_lib.speed, workdirs)):
        assert time.monotonic() < deadline and begun.poll() is None
        time.sleep(0.05)
    children = psutil.Process(begun.pid).children(recursive=True)
    begun.send_signal(signal.SIGTERM)
    _, told = begun.communicate(timeout=200)
    assert begun.returncode == 75 and "stopped (rank=2_seed=0, rank=4_seed=0)" in told
    assert len(children) == 2 and not any(child.is_running() for child in children)
    logs = [workdir.with_name(f"{workdir.name}.log") for workdir in workdirs]
    assert "Stopped on SIGTERM at step " in "".join(log.read_text() for log in logs)

    def succeed(command):
        return subprocess.run(command, **at, check=True, capture_output=True).stdout

    table, page = succeed([*words, "--out=out"]).split("\nThe page: ")
    assert "resuming from step" in "".join(log.read_text() for log in logs)
    succeed([*words, "--out=whole"])
    for workdir in workdirs:
        whole = tmp_path / "whole" / workdir.name / "metrics.jsonl"
        assert (workdir / "metrics.jsonl").read_bytes() == whole.read_bytes()
    assert table in succeed([sys.executable, *page.split()[1:]])
