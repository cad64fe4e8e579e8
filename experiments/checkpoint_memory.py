"""Resident memory of four processes that load a checkpoint of another mesh.

python -m experiments.checkpoint_memory [--save]

A training state of 300 MB (float32) is written by four processes as fsdp = 4, and by one process
with one device, and loaded by four as fsdp = 2 x tensor = 2. What counts is how far a process's
resident memory rises at its highest above where it was before loading, beside the bytes that its
devices then hold and beside the whole state.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

PROCESSES = 4
ROOT = pathlib.Path(__file__).parents[1]
FSDP = dict(data=1, fsdp=4, sequence=1, tensor=1)
ONE = dict(data=1, fsdp=1, sequence=1, tensor=1)
OTHER = dict(data=1, fsdp=2, sequence=1, tensor=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true", help="write experiments/results")
    parser.add_argument("--d_model", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=12)
    options = parser.parse_args()
    rows = measure(d_model=options.d_model, num_layers=options.num_layers)
    print("| written as | state, MB | of it in each of 4, MB | peak above before, MB |")
    print("|---|---|---|---|")
    for r in rows:
        peaks = ", ".join(f"{p / 1e6:.0f}" for p in r["peak_bytes"])
        here = ", ".join(f"{p / 1e6:.0f}" for p in r["local_bytes"])
        print(f"| {r['written']} | {r['state_bytes'] / 1e6:.0f} | {here} | {peaks} |")
    from experiments import record  # takes JAX, which the processes above should not share

    record.record("checkpoint_memory", dict(rows=rows), save=options.save)


def measure(*, d_model: int, num_layers: int) -> list[dict]:
    """A row per way of writing; lists have one entry per process that loads."""
    shape = dict(d_model=d_model, num_layers=num_layers)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for written, mesh, processes in (("fsdp=4", FSDP, PROCESSES), ("one device", ONE, 1)):
            where = dict(directory=f"{folder}/{written}", **shape)
            _job(processes, dict(do="write", mesh=mesh, **where))
            found = _job(PROCESSES, dict(do="load", mesh=OTHER, **where))
            row = {key: [f[key] for f in found] for key in ("peak_bytes", "local_bytes")}
            rows.append(dict(written=written, state_bytes=found[0]["state_bytes"]) | row)
    return rows


def _job(processes: int, task: dict) -> list[dict]:
    """What each of several processes, with one CPU device each, says at its end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    environment = os.environ | dict(
        JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2"
    )
    children = []
    for i in range(processes):
        job = dict(coordinator=coordinator, num_processes=processes, process_id=i)
        command = [sys.executable, "-m", "experiments.checkpoint_memory", "--worker"]
        children.append(
            subprocess.Popen(
                [*command, json.dumps(task | dict(job=job))],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [child.communicate(timeout=600)[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit(f"{task}: {[child.returncode for child in children]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _work(task: dict) -> None:
    from kvjax import distributed
    from kvjax import runtime

    runtime.start()
    distributed.start(**task["job"])
    with distributed.ending_together():
        print(json.dumps(_write_or_load(task)), flush=True)


def _write_or_load(task: dict) -> dict:
    from etils import epath
    import jax

    from kvjax import experiment
    from kvjax import recipes
    from kvjax import sharding
    from kvjax.checkpoint import Checkpoints
    from kvjax.program import Program

    config = recipes.pretrain("wide", scale="tiny", attention=recipes.lrkv(8, rank=16, dim=64))
    d_model = task["d_model"]
    config.model.update(num_layers=task["num_layers"], d_model=d_model, mlp_dim=4 * d_model)
    config.mesh.update(task["mesh"])
    run = experiment.resolve(config)
    mesh = sharding.make_mesh(run.mesh, jax.devices())
    program = Program(run, run.compute.resolve("cpu", run.model.block.num_layers), mesh)
    checkpoints = Checkpoints(epath.Path(task["directory"]), keep=1)
    if task["do"] == "write":
        checkpoints.save(0, program.init(jax.random.key(0)), 0)
        checkpoints.close()
        return {}
    before = _reset_peak()
    state, _, _ = checkpoints.restore(program.abstract_state)
    jax.block_until_ready(state)
    peak = _status("VmHWM")
    shards = [s.data for x in jax.tree.leaves(state) for s in x.addressable_shards]
    return dict(
        peak_bytes=peak - before,
        local_bytes=sum(x.nbytes for x in shards),
        state_bytes=sum(x.nbytes for x in jax.tree.leaves(state)),
    )


def _reset_peak() -> int:
    """Makes the kernel count the highest resident memory from here on; what it is now."""
    time.sleep(1)  # threads that start
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{key}:")[1].split()[0])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(json.loads(sys.argv[2]))
    else:
        main()
