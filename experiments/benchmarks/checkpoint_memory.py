"""Measures resident memory of four processes that load a checkpoint of another mesh.

    python -m experiments.benchmarks.checkpoint_memory [--save]

A training state of 300 MB (float32) is written twice: by four processes with fsdp = 4, and by one
process with one device. Four processes with fsdp = 2 x tensor = 2 load each. Prints a table: by how
much each process's resident memory rises at most while it loads, the bytes that its devices hold
afterwards, and the bytes of the whole state. Needs Linux.
"""

import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time

from etils import epath
import jax

from experiments.benchmarks import contender, machine, runner
from experiments.benchmarks.runner import Option
from kvjax import config as config_lib, distributed, recipes
from kvjax.costs import formulas
from kvjax.distributed import sharding
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.model import parameters
from kvjax.training.program import Program
from kvjax.workdir.checkpoint import Checkpoints

PROCESSES = 4
FSDP = dict(data=1, fsdp=4, sequence=1, tensor=1)
ONE = dict(data=1, fsdp=1, sequence=1, tensor=1)
OTHER = dict(data=1, fsdp=2, sequence=1, tensor=2)
SECONDS = 600  # time limit of a job
_CLEAR = pathlib.Path("/proc/self/clear_refs")
_WORKER = (
    "import json, sys; from experiments.benchmarks import checkpoint_memory; "
    "checkpoint_memory.work(json.loads(sys.argv[1]))"
)


def _check(options: runner.Options) -> None:
    """Raises a UserError if the state cannot be sharded, held or written."""
    d_model, num_layers = options.d_model, options.num_layers
    if not _CLEAR.exists():
        raise UserError(f"{_CLEAR} is missing: only Linux records a process's peak memory")
    shallow, deeper = (experiment(d_model, layers, FSDP).model for layers in (1, 2))
    if not all(sharding.divides(mesh, *parameters.abstract(shallow)) for mesh in (FSDP, OTHER)):
        raise UserError(f"--d_model={d_model}: must divide by {PROCESSES}, as 512 does")
    one_layer, two_layers = (formulas.parameters(model)["total"] for model in (shallow, deeper))
    weights = one_layer + (num_layers - 1) * (two_layers - one_layer)
    state_bytes = 12 * weights  # float32 weights and two moments
    sizes = f"--d_model={d_model} --num_layers={num_layers}"
    machine.check_room(sizes, state_bytes, memory=3, disk=2)


def measure(*, d_model: int, num_layers: int) -> list[dict]:
    """Returns a row per mesh of the writer; its lists have one entry per process that loads."""
    shape = dict(d_model=d_model, num_layers=num_layers)
    rows = []
    waiting = progress.waiting(f"{PROCESSES} processes that write and load a checkpoint")
    with tempfile.TemporaryDirectory() as folder, waiting as doing:
        for written, mesh, processes in (("fsdp=4", FSDP, PROCESSES), ("one device", ONE, 1)):
            task_keys = dict(directory=f"{folder}/{written}", **shape)
            doing.at(f"writing it as {written}")
            _job(processes, dict(do="write", mesh=mesh, **task_keys))
            doing.at(f"loading what was written as {written}")
            results = _job(PROCESSES, dict(do="load", mesh=OTHER, **task_keys))
            row = {key: [f[key] for f in results] for key in ("peak_bytes", "local_bytes")}
            rows.append(dict(written=written, state_bytes=results[0]["state_bytes"]) | row)
    return rows


def _job(processes: int, task: dict) -> list[dict]:
    """Returns the results of several processes with one CPU device each.

    Raises:
      UserError: a process failed, or the job took too long; all processes are ended.
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
            captured = dict(stdout=subprocess.PIPE, text=True)
            children.append(subprocess.Popen(command, cwd=ROOT, env=environment, **captured))
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
    config = recipes.pretrain("wide", scale="tiny", attention=recipes.lrkv(8, rank=16, head_dim=64))
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


def _mb(key: str):
    """Returns a column of bytes by process, in MB."""
    return lambda row: ", ".join(f"{size / 1e6:.0f}" for size in row[key])


_COLUMNS = {
    "written as": "{written}",
    "state, MB": lambda row: f"{row['state_bytes'] / 1e6:.0f}",
    "held by each process, MB": _mb("local_bytes"),
    "peak added by loading, MB": _mb("peak_bytes"),
}
main = runner.benchmark(
    "checkpoint_memory",
    __doc__,
    dict(
        d_model=Option(512, "width of the model", least=1),
        num_layers=Option(12, "layers of the model", least=1),
    ),
    lambda given: dict(rows=measure(d_model=given.d_model, num_layers=given.num_layers)),
    lambda result, out: out.table(*runner.table(_COLUMNS, result["rows"])),
    check=_check,
    start=lambda: None,
)

if __name__ == "__main__":
    command_line.run(main)
