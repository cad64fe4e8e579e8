"""Two and four real processes on loopback train as one, and end as one."""

import json
import pathlib
import re
import shutil
import signal
import time

from etils import epath
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
import pytest

from experiments.benchmarks import checkpoint_memory
from kvjax.training import loop
from kvjax.workdir import metrics
from tests import runs
from tests.job import Job
from tests.training.test_resume import assert_bitwise_equal

pytestmark = pytest.mark.slow
STEPS = 40
CLOSE = 1e-5
PARAMETERS_CLOSE = 1e-4  # of each one's norm, after 40 steps
CONFIG = """
from tests.distributed import test_multihost
def get_config():
    return test_multihost.quick_config({source!r}, {directory!r})
"""


# Process 1 compiles for longer than gloo waits for it.
SLOW = CONFIG.replace(
    "def get_config():",
    """
import sys, time, jax
if "--process_id=1" in sys.argv:
    compile = jax.stages.Lowered.compile
    def slow(self, *args, **kwargs):
        jax.stages.Lowered.compile = compile
        print("slow", flush=True)
        time.sleep(35)
        return compile(self, *args, **kwargs)
    jax.stages.Lowered.compile = slow
def get_config():""",
)


def quick_config(source, directory, mesh=None, **overrides):
    config = runs.small_config(source, directory, num_steps=STEPS, keep_checkpoints=9)
    config.train.update(dict(sample_tokens=2) | overrides)
    config.mesh.update(mesh or {})
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    sources = dict(source=runs.write_text(folder / "text.txt"), directory=str(folder / "data"))
    (folder / "config.py").write_text(CONFIG.format(**sources))
    (folder / "slow.py").write_text(SLOW.format(**sources))
    return folder


_jobs: list[Job] = []


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    while _jobs:
        _jobs.pop().kill()


def launch(folder, workdirs, *flags, devices, own=None, config="config.py", **job) -> Job:
    """Starts a training process per workdir (often one folder); `own`: further flags of each."""
    commands = []
    for i, workdir in enumerate(workdirs):
        command = ["kvjax.main", f"--config={folder / config}", f"--workdir={workdir}"]
        commands.append([*command, *flags, *(own[i] if own else ())])
    _jobs.append(Job(commands, devices=devices, logs=pathlib.Path(f"{workdirs[0]}-logs"), **job))
    return _jobs[-1]


def run_here(folder, workdir, **overrides) -> None:
    """Trains in this process, with four devices."""
    config = quick_config(str(folder / "text.txt"), str(folder / "data"), **overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:4])
        loop.train(config, epath.Path(workdir))


@pytest.fixture(scope="module")
def one(folder):
    """The workdir of a run of one process with four devices."""
    run_here(folder, folder / "one")
    return folder / "one"


# Gloo's output, which comes from several threads: lines may interrupt each other.
GLOO = (
    r"\[Gloo\]|Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\d+"
)


@pytest.fixture(scope="module")
def two(folder):
    """The workdir of a run of two processes with two devices each."""
    outputs = launch(folder, [folder / "two"] * 2, devices=2).succeed()
    assert "2 processes" in outputs[0] and "--- sample ---" in outputs[0]
    assert not re.sub(GLOO, "", outputs[1]).strip()
    return folder / "two"


def records(workdir) -> list[dict]:
    return metrics.read_records(epath.Path(workdir) / metrics.METRICS)


def assert_close(a, b, last: int) -> str:
    """Compares losses and parameters up to rounding; returns the differences as text.

    Args:
      last: step up to which losses are compared; parameters are those of the last checkpoint.
    """
    worst = 0.0
    for key, count in (("loss", last), ("validation_loss", last // 20)):
        pairs = [
            [(r["step"], r["tokens"], r[key]) for r in records(w) if key in r and r["step"] <= last]
            for w in (a, b)
        ]
        assert len(pairs[0]) == count
        np.testing.assert_allclose(*pairs, rtol=CLOSE)
        worst = max(worst, np.max(np.abs(np.divide(*pairs) - 1)))
    states = [jax.tree_util.tree_leaves_with_path(final_state(w)["params"]) for w in (a, b)]
    distances = {
        jax.tree_util.keystr(path): np.linalg.norm(x - y) / np.linalg.norm(y)
        for (path, x), (_, y) in zip(*states, strict=True)
    }
    assert len(distances) > 8 and max(distances.values()) < PARAMETERS_CLOSE, distances
    return f"losses within {worst:.1e}, parameters within {max(distances.values()):.1e}"


def final_state(workdir: pathlib.Path) -> dict:
    """Returns the last checkpoint, on one device of this process."""
    path, on_device = workdir / "checkpoints" / str(STEPS), jax.sharding.SingleDeviceSharding
    saved = ocp.metadata(path, checkpointable_name="state").metadata

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device(jax.devices()[0]))

    return ocp.load(path, jax.tree.map(shape, saved), checkpointable_name="state")


def test_processes_read_disjoint_rows(folder):
    """Each row of a batch is read once, or by both processes that share its devices."""
    arguments = json.dumps([str(folder / "text.txt"), str(folder / "other data")])
    command = ["tests.job", "rows", arguments]
    _jobs.append(Job([command] * 4, devices=1, logs=folder / "rows-logs"))
    outputs = [json.loads(text.splitlines()[-1])["found"] for text in _jobs[-1].succeed()]
    shares = [set(output["fsdp4"]) for output in outputs]
    assert [len(share) for share in shares] == [2, 2, 2, 2] and len(set().union(*shares)) == 8
    shares = [frozenset(output["tensor2"]) for output in outputs]
    assert [len(share) for share in shares] == [4, 4, 4, 4] and len(frozenset().union(*shares)) == 8
    assert sorted(shares.count(share) for share in set(shares)) == [2, 2]
    all_rows = set(outputs[0]["tensor4"])
    assert len(all_rows) == 8 and all(set(output["tensor4"]) == all_rows for output in outputs)
    assert all_rows == frozenset().union(*shares)
    prepared = list((folder / "other data" / "datasets").iterdir())
    assert len(prepared) == 1 and not list((folder / "other data").glob(".kvjax-*"))


def test_two_processes_train_as_one(one, two):
    print(f"one process and two: {assert_close(one, two, STEPS)}")

    def names(path):
        return {p.name for p in path.iterdir()}

    assert names(two) == names(one)
    timed = metrics.read_records(epath.Path(two) / metrics.TIMING)
    assert sum(timed[-1].values()) - timed[-1]["step"] == pytest.approx(1)  # shares of wall time
    timing = [record for record in timed if "step_seconds_p50" in record][-1]
    assert timing["tokens_per_second_per_device"] == timing["tokens_per_second"] / 4
    assert 0 < timing["step_seconds_p50"] <= timing["step_seconds_p90"]


def test_four_processes_go_on_as_two_and_as_one(folder, one):
    """Resumes four processes' checkpoint of step 20; results equal those of an unbroken run."""
    four = folder / "four"
    launch(folder, [four] * 4, "--config.train.stop_after=20", devices=1).succeed()
    for name in ("four-one", "four-two"):
        shutil.copytree(four, folder / name)
    outputs = launch(folder, [folder / "four-two"] * 2, devices=2, config="slow.py").succeed()
    assert "resuming from step 20" in outputs[0] and "slow" in outputs[1]
    run_here(folder, folder / "four-one")
    for name in ("four-one", "four-two"):
        print(f"{name}: {assert_close(folder / name, one, STEPS)}")


@pytest.mark.parametrize(
    "mesh",
    [dict(data=2, fsdp=2), dict(fsdp=2, sequence=2), dict(data=2, fsdp=1, sequence=2)],
    ids=lambda mesh: "x".join(axis for axis, size in mesh.items() if size > 1),
)
def test_a_mesh_that_splits_two_axes(folder, mesh, request):
    """Two processes with different hash seeds have the losses of a single process."""
    name = request.node.callspec.id
    short = dict(mesh=mesh, num_steps=10, eval_every=10, sample_tokens=0)
    arguments = [str(folder / "text.txt"), str(folder / "data"), str(folder / f"{name}-two"), short]
    command = ["tests.job", "records", json.dumps(arguments)]
    _jobs.append(Job([command] * 2, devices=2, logs=folder / f"{name}-logs"))
    statuses = _jobs[-1].wait()
    assert statuses == [0, 0], (statuses, _jobs[-1].outputs())
    first, second = (json.loads(o.splitlines()[-1])["records"] for o in _jobs[-1].outputs())
    assert first == second and [r["step"] for r in first] == [*range(1, 11), 10]

    run_here(folder, folder / f"{name}-one", **short)
    for single, joint in zip(records(folder / f"{name}-one"), first, strict=True):
        assert single.keys() == joint.keys()
        for key in single.keys() & {"loss", "validation_loss", "grad_norm"}:
            np.testing.assert_allclose(single[key], joint[key], rtol=CLOSE)


def wait_for_step(job: Job, workdir: pathlib.Path, step: int, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not (records(workdir) or [dict(step=0)])[-1]["step"] >= step:
        assert time.monotonic() < deadline and job.processes[0].poll() is None, job.outputs()
        time.sleep(0.01)


def test_stopped_lost_and_resumed_is_the_same_to_the_bit(folder, two):
    """SIGTERM to one process, then SIGKILL of one, of two processes with two devices each."""
    workdir = folder / "broken"

    def start():
        return launch(folder, [workdir] * 2, devices=2, heartbeat_seconds=10)

    job = start()
    wait_for_step(job, workdir, 4)
    job.send(1, signal.SIGTERM)
    assert job.wait() == [75, 75], job.outputs()
    (step,) = re.findall(r"Stopped on SIGTERM at step (\d+) of 40, saved", job.outputs()[0])
    assert step in {p.name for p in (workdir / "checkpoints").iterdir()}
    assert 4 <= int(step) < STEPS == int(two.joinpath("metrics.jsonl").read_text().count("grad_"))

    job = start()
    wait_for_step(job, workdir, int(step) + 3)
    job.send(1, signal.SIGKILL)
    killed = time.monotonic()
    statuses = job.wait(60)
    seconds = time.monotonic() - killed
    print(f"the survivor ended {seconds:.1f} s after the kill")
    assert statuses == [75, -9] and seconds < 10 + 20, (statuses, seconds, job.outputs())
    assert "Traceback" not in job.outputs()[0], job.outputs()[0]
    assert re.search(
        r"kvjax: another process of this job was lost .*Run the same command",
        job.outputs()[0],
    )

    start().succeed()
    assert (workdir / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    assert_bitwise_equal(final_state(workdir), final_state(two))


def test_the_coordinator_is_lost(folder):
    """Process 0 runs the coordination service: the others notice at once."""
    workdir = folder / "headless"
    job = launch(folder, [workdir] * 2, devices=1)
    wait_for_step(job, workdir, 2)
    job.send(0, signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(60) == [-9, 75], job.outputs()
    assert time.monotonic() - killed < 30
    assert "kvjax: another process of this job was lost" in job.outputs()[1]


@pytest.mark.parametrize("kind", ["user 0", "bug 1"])
def test_an_error_in_one_process_stops_all(folder, kind):
    job = Job(
        [["tests.job", "failing", json.dumps([kind])]] * 2,
        devices=1,
        logs=folder / f"{kind}-logs",
    )
    _jobs.append(job)
    outcomes = dict(user=(2, "the key is wrong"), bug=(1, "KeyError: 'a bug'"))
    status, message = outcomes[kind.split()[0]]
    started = time.monotonic()
    assert job.wait(90) == [status] * 2, job.outputs()
    failing = int(kind[-1])
    for i, output in enumerate(job.outputs()):
        assert ("" if i == failing else f"process {failing} stopped: ") + message in output
        assert ("Traceback" in output) == (status == 1 and i == failing)
    assert time.monotonic() - started < 60


def test_all_fall_back_to_the_checkpoint_that_all_can_read(folder):
    directory = folder / "store"
    command = ["tests.job", "checkpoints", json.dumps([str(directory)])]
    job = Job([command] * 2, devices=1, logs=folder / "store-logs")
    _jobs.append(job)
    for output in job.succeed():
        assert json.loads(output.splitlines()[-1]) == dict(
            before=[2, 3], step=2, position=20, values=[2.0]
        )
    assert (folder / "unreadable-checkpoint-3").exists()
    assert {p.name for p in directory.iterdir()} == {"2", "3"}


def test_no_process_holds_the_whole_state_while_loading():
    """Four load another mesh's checkpoint: resident memory rises by far less than the state."""
    rows = checkpoint_memory.measure(d_model=512, num_layers=12)
    assert [r["written"] for r in rows] == ["fsdp=4", "one device"]
    for r in rows:
        print(r)
        assert r["state_bytes"] > 250e6
        for peak, local in zip(r["peak_bytes"], r["local_bytes"], strict=True):
            assert 0.2 * r["state_bytes"] < local < 0.3 * r["state_bytes"]
            assert local < peak < 0.75 * r["state_bytes"]
