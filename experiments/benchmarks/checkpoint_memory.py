"""Resident memory of four processes that load a checkpoint of another mesh.

    python -m experiments.benchmarks.checkpoint_memory [--save]

A training state of 300 MB (float32) is written by four processes as fsdp = 4, and by one process
with one device, and loaded by four as fsdp = 2 x tensor = 2. Measures the peak of each process's
resident memory above its level before loading. Prints a table, with the bytes that its devices hold
afterwards and those of the whole state. Needs Linux.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time

from etils import epath
import jax

from experiments import record
from experiments.benchmarks import contender, machine
from kvjax import config as config_lib, distributed, recipes
from kvjax.costs import formulas
from kvjax.distributed import sharding
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.model import parameters
from kvjax.training.program import Program
from kvjax.workdir.checkpoint import Checkpoints

PROCESSES = 4
FSDP = dict(data=1, fsdp=4, sequence=1, tensor=1)
ONE = dict(data=1, fsdp=1, sequence=1, tensor=1)
OTHER = dict(data=1, fsdp=2, sequence=1, tensor=2)
SECONDS = 600  # a job takes at most
_CLEAR = pathlib.Path("/proc/self/clear_refs")
_WORKER = (
    "import json, sys; from experiments.benchmarks import checkpoint_memory; "
    "checkpoint_memory.work(json.loads(sys.argv[1]))"
)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--d_model", type=int, default=512, help="width of the model (512)")
    add("--num_layers", type=int, default=12, help="its layers (12)")
    add("--save", action="store_true", help="write experiments/results/checkpoint_memory.json")
    parser.add_output()
    options = parser.parse(arguments)
    at_least("--d_model", options.d_model, 1)
    at_least("--num_layers", options.num_layers, 1)
    record.check(options.save)
    return options


def _check(d_model: int, num_layers: int) -> None:
    """Raises a UserError if the state cannot be sharded, held or written."""
    if not _CLEAR.exists():
        raise UserError(f"{_CLEAR} is not there: only Linux says how high memory rose")
    one, two = (experiment(d_model, layers, FSDP).model for layers in (1, 2))
    if not all(sharding.divides(mesh, *parameters.abstract(one)) for mesh in (FSDP, OTHER)):
        raise UserError(f"--d_model={d_model}: must divide by {PROCESSES}, as 512 does")
    first, both = (formulas.parameters(model)["total"] for model in (one, two))
    most = 12 * (first + (num_layers - 1) * (both - first))  # float32 weights and two moments
    given = f"--d_model={d_model} --num_layers={num_layers}"
    machine.check_room(given, most, memory=3, disk=2)


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    options = _options(arguments)
    shape = dict(d_model=options.d_model, num_layers=options.num_layers)
    _check(**shape)
    rows = measure(**shape)
    out = Output(options)

    def mb(sizes: list[float]) -> str:
        return ", ".join(f"{size / 1e6:.0f}" for size in sizes)

    header = ("written as", "state, MB", "of it in each of 4, MB", "peak above before, MB")
    cells = [
        (r["written"], mb([r["state_bytes"]]), mb(r["local_bytes"]), mb(r["peak_bytes"]))
        for r in rows
    ]
    out.table(header, cells)
    record.record("checkpoint_memory", dict(rows=rows), out, save=options.save)


def measure(*, d_model: int, num_layers: int) -> list[dict]:
    """Returns a row per way of writing; its lists have one entry per process that loads."""
    shape = dict(d_model=d_model, num_layers=num_layers)
    rows = []
    waiting = progress.waiting(f"{PROCESSES} processes that write and load a checkpoint")
    with tempfile.TemporaryDirectory() as folder, waiting as doing:
        for written, mesh, processes in (("fsdp=4", FSDP, PROCESSES), ("one device", ONE, 1)):
            where = dict(directory=f"{folder}/{written}", **shape)
            doing.at(f"writing it as {written}")
            _job(processes, dict(do="write", mesh=mesh, **where))
            doing.at(f"loading what was written as {written}")
            found = _job(PROCESSES, dict(do="load", mesh=OTHER, **where))
            row = {key: [f[key] for f in found] for key in ("peak_bytes", "local_bytes")}
            rows.append(dict(written=written, state_bytes=found[0]["state_bytes"]) | row)
    return rows


def _job(processes: int, task: dict) -> list[dict]:
    """Returns the results of several processes with one CPU device each.

    Raises:
      UserError: one of them failed, or they took too long; none is left running.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    environment = os.environ | dict(
        JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2"
    )
    children = []
    try:
        for i in range(processes):
            job = dict(coordinator=coordinator, num_processes=processes, process_id=i)
            command = [*contender.python(_WORKER), json.dumps(task | dict(job=job))]
            kept = dict(stdout=subprocess.PIPE, text=True)
            children.append(subprocess.Popen(command, cwd=ROOT, env=environment, **kept))
        outputs = [child.communicate(timeout=SECONDS)[0] for child in children]
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{task['do']}: not done after {SECONDS} s: take a smaller model"
        ) from error
    finally:
        for child in children:
            child.kill()
    statuses = [child.returncode for child in children]
    if any(statuses):
        raise UserError(f"{task['do']}: the processes ended with statuses {statuses}, see above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def work(task: dict) -> None:
    """Runs one process of a job; prints its result."""
    runtime.start()
    distributed.start(**task["job"])
    with distributed.end_together():
        print(json.dumps(_write_or_load(task)), flush=True)


def experiment(d_model: int, num_layers: int, mesh: dict[str, int]) -> config_lib.Experiment:
    """Returns the experiment of an LRKV model on a mesh."""
    config = recipes.pretrain("wide", scale="tiny", attention=recipes.lrkv(8, rank=16, dim=64))
    config.model.update(num_layers=num_layers, d_model=d_model, mlp_dim=4 * d_model)
    config.mesh.update(mesh)
    return config_lib.resolve(config)


def _write_or_load(task: dict) -> dict:
    run = experiment(task["d_model"], task["num_layers"], task["mesh"])
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
    """Resets the process's peak of resident memory; returns its resident bytes."""
    time.sleep(1)  # threads that start
    _CLEAR.write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{key}:")[1].split()[0])


if __name__ == "__main__":
    command_line.run(main)
