"""A run that is killed and started again ends where an uninterrupted one does, to the bit."""

import contextlib
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

from etils import epath
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
import pytest

from kvjax.foundation.checkout import ROOT
from kvjax.workdir import metrics
from tests import quick, runs

KILLS = 8
STEPS = 600
WHOLE = (f"--config.train.num_steps={STEPS}", f"--config.train.checkpoint_every={STEPS}")


_children: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def no_child_left():
    yield
    for child in _children:
        child.kill()
    _children.clear()


def launch(config: pathlib.Path, workdir: pathlib.Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "kvjax.main", f"--config={config}", f"--workdir={workdir}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": quick.XLA_FLAGS}
    child = subprocess.Popen(
        [*command, *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _children.append(child)
    return child


def finish(process: subprocess.Popen, seconds: float = 240, status: int = 0) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == status, output
    return output


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    source = runs.write_text(folder / "text.txt")
    path = folder / "config.py"
    path.write_text(runs.CONFIG_FILE.format(source=source, directory=str(folder / "data")))
    return path


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The workdir of a run that nothing disturbs."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    finish(launch(config, workdir, *WHOLE))
    return workdir


def final_state(workdir: pathlib.Path) -> dict:
    checkpointer = ocp.training.Checkpointer(workdir / "checkpoints")
    return checkpointer.load_checkpointables()["state"]


def assert_bitwise_equal(a: dict, b: dict) -> None:
    a, b = (jax.tree_util.tree_leaves_with_path(tree) for tree in (a, b))
    assert len(a) == len(b) > 20
    for (path, x), (_, y) in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


def last_step(workdir: pathlib.Path) -> int:
    records = metrics.read_records(epath.Path(workdir) / metrics.METRICS)
    return records[-1]["step"] if records else 0


def unfinished(workdir: pathlib.Path) -> set[tuple[str, int]]:
    """Checkpoints being written, or left half-written: names and inodes."""
    found = set()
    for path in (workdir / "checkpoints").glob("*tmp*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


@pytest.mark.slow
def test_sigkill_at_random_moments(config, whole, tmp_path):
    """Some of the SIGKILLs come while a checkpoint is being written."""
    flags = (WHOLE[0], "--config.train.checkpoint_every=25")
    broken = tmp_path / "broken"
    rng = random.Random(0)
    kills = during_save = 0
    while kills < KILLS:
        first, left = last_step(broken), unfinished(broken)
        process = launch(config, broken, *flags)
        on_save = kills % 2 == 0
        deadline = time.monotonic() + (60 if on_save else rng.uniform(0.5, 8.0))
        while process.poll() is None and time.monotonic() < deadline:
            if on_save and unfinished(broken) - left:
                break
            if not on_save and last_step(broken) > first + 50:  # leave some for the next
                break
            time.sleep(0.002)
        assert process.poll() is None, "the run ended before it was killed: " + finish(process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        during_save += bool(unfinished(broken) - left)
    finish(launch(config, broken, *flags))
    print(f"{kills} kills, {during_save} of them during a save")
    assert during_save >= 3, (kills, during_save)
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert_bitwise_equal(final_state(broken), final_state(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, status", [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_and_ends_with_its_status(config, whole, tmp_path, number, status):
    stopped = tmp_path / "stopped"
    process = launch(config, stopped, *WHOLE)
    metrics = stopped / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size > 1000):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.005)
    process.send_signal(number)
    output = finish(process, status=status)
    assert number.name in output and "saved" in output
    steps = [int(path.name) for path in (stopped / "checkpoints").iterdir()]
    assert len(steps) == 1 and 0 < steps[0] < STEPS
    if number != signal.SIGTERM:
        return  # the others save in the same way
    assert f"resuming from step {steps[0]}" in finish(launch(config, stopped, *WHOLE))
    assert metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert_bitwise_equal(final_state(stopped), final_state(whole))


def run_with_file_limit(config, workdir, limit: int, until: str) -> tuple[int, str]:
    """Runs with a limit on file sizes from the first checkpoint until the output contains `until`.

    Returns:
      Its exit status and output.
    """
    flags = (WHOLE[0], "--config.train.checkpoint_every=50")
    process = launch(config, workdir, *flags, "--config.train.log_every=50")
    while not (workdir / "checkpoints" / "50").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.005)
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, -1))
    output = ""
    while until not in output and (line := process.stdout.readline()):
        output += line
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
    rest, _ = process.communicate(timeout=240)
    return process.returncode, output + rest


@pytest.mark.slow
def test_a_save_that_fails_is_a_warning(config, whole, tmp_path):
    """A checkpoint exceeds the limit, log lines do not: the run continues and saves again later."""
    status, output = run_with_file_limit(config, tmp_path / "run", 50_000, "the run goes on")
    assert status == 0 and "was not written" in output, output
    assert "Traceback" not in output and "orbax/" not in output, output
    assert sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())[-1] == STEPS
    assert_bitwise_equal(final_state(tmp_path / "run"), final_state(whole))


@pytest.mark.slow
def test_a_disk_without_room_for_a_log_line_stops_the_run(config, tmp_path):
    message = "The last checkpoint is intact"
    status, output = run_with_file_limit(config, tmp_path / "run", 1, message)
    assert status == 2 and message in output and "Traceback" not in output, output
    flags = (WHOLE[0], "--config.train.checkpoint_every=50")
    output = finish(launch(config, tmp_path / "run", *flags, "--config.train.log_every=50"))
    assert "resuming from step" in output


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_two_lines(config, tmp_path):
    workdir = tmp_path / "run"
    flags = ("--config.train.sample_tokens=0", "--config.train.num_steps=40")
    undisturbed = finish(launch(config, workdir, *flags))
    before = final_state(workdir)
    for file in (workdir / "checkpoints" / "40" / "state").rglob("d/*"):
        whole = bytearray(file.read_bytes())
        whole[len(whole) // 2] ^= 1
        file.write_bytes(whole)
    output = finish(launch(config, workdir, *flags))
    warnings = [line for line in output.split("\n") if "WARNING" in line]
    assert (
        len(warnings) == 2
        and "step 40 cannot be read" in warnings[0]
        and "from step 30" in warnings[1]
    )
    assert output.count("\n") <= undisturbed.count("\n") + 3, output
    assert_bitwise_equal(final_state(workdir), before)
