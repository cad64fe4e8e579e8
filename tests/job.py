"""Real processes on this machine, joined as one job, and the functions that they run."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from kvjax.foundation.checkout import ROOT
from tests import quick


class Job:
    """Processes of one job, each with CPU devices and a hash seed of its own, its output in a file.

    Args:
      commands: arguments after `python -m`, by process; the coordinator's address is added.
      devices: number per process.
      logs: folder of the output files.
      flags: further flags of all processes.
    """

    def __init__(self, commands: list[list[str]], *, devices: int, logs: pathlib.Path, **flags):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{s.getsockname()[1]}"
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"process-{i}.txt" for i in range(len(commands))]
        environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
        environment |= quick.cpu_devices(devices)
        self.processes = []
        for i, command in enumerate(commands):
            own = dict(coordinator=coordinator, num_processes=len(commands), process_id=i) | flags
            with open(self.logs[i], "w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *command, *(f"--{k}={v}" for k, v in own.items())],
                        cwd=ROOT,
                        env=environment | dict(PYTHONHASHSEED=str(2 * i + 1)),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def wait(self, seconds: float = 300) -> list[int]:
        """Returns the exit statuses by process; kills all processes after `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            return [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.processes]
        finally:
            self.kill()

    def succeed(self) -> list[str]:
        """Waits for all processes, checks that none failed, and returns their outputs."""
        statuses = self.wait()
        assert not any(statuses), (statuses, self.outputs())
        return self.outputs()

    def outputs(self) -> list[str]:
        return [log.read_text() for log in self.logs]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def send(self, process: int, number: signal.Signals) -> None:
        self.processes[process].send_signal(number)


# -- functions that the processes of `python -m tests.job` run -------------------------------------


def rows(source: str, directory: str) -> dict:
    """Returns the first rows that this process reads, as texts, by mesh."""
    import jax

    from kvjax import config as config_lib, distributed
    from kvjax.data import loader
    from kvjax.distributed import sharding
    from kvjax.training import preflight
    from tests import runs

    data = config_lib.resolve(runs.small_config(source, directory)).data
    dataset = preflight.prepare_dataset(data)
    by_mesh = {}
    for name, axes in dict(fsdp4={}, tensor2=dict(tensor=2), tensor4=dict(tensor=4)).items():
        mesh = sharding.make_mesh(sharding.MeshConfig(**axes), jax.devices())
        batch_sharding = sharding.batch_sharding(mesh)
        index, count = loader.share(batch_sharding, 8)
        options = dict(process_index=index, process_count=count, sequence_length=32, batch_size=8)
        batch = next(loader.train_batches(dataset, seed=0, position=16, **options))
        placed = jax.make_array_from_process_local_data(batch_sharding, batch, (8, 33))
        local = {bytes(row.tolist()).hex() for s in placed.addressable_shards for row in s.data}
        by_mesh[name] = sorted(bytes(row.tolist()).hex() for row in batch % 256)
        assert len(local) == len(batch)
    return dict(found=by_mesh, process=distributed.index())


def prepared(keys: dict, part_bytes: int) -> dict:
    """Returns the parts of a data set that this process made, and the data set's path."""
    from kvjax.data import config, parts, pool
    from kvjax.foundation import runtime
    from kvjax.training import preflight

    parts.PART_BYTES, parts._ROWS = part_bytes, 1
    runtime.cores = lambda: 1  # so that parts are made in this process
    made, make_part = [], pool.make_part

    def noting(config, part, *args, **kwargs):
        made.append(part.index)
        make_part(config, part, *args, **kwargs)

    pool.make_part = noting
    dataset = preflight.prepare_dataset(config.DataConfig(**keys))
    return dict(made=made, path=str(dataset.path))


def checkpoints(directory: str) -> dict:
    """Saves three checkpoints, and restores while process 1 cannot read the last one."""
    from etils import epath
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    import numpy as np

    from kvjax import distributed
    from kvjax.workdir import checkpoint

    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    split = jax.sharding.NamedSharding(mesh, P("x"))
    make = jax.jit(lambda v: {"w": v * jnp.ones((64, 8))}, out_shardings=split)
    store = checkpoint.Checkpoints(epath.Path(directory), keep=2)
    for step in (1, 2, 3):
        store.save(step, make(float(step)), 10 * step)
    store.close()
    store = checkpoint.Checkpoints(epath.Path(directory), keep=2)
    before, load = store.steps(), checkpoint.ocp.load_checkpointables

    def load_or_fail(path, abstract):
        if path.name == "3" and distributed.index() == 1:
            raise ValueError("DATA_LOSS: cannot read")
        return load(path, abstract)

    checkpoint.ocp.load_checkpointables = load_or_fail
    abstract = {"w": jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=split)}
    state, position, step = store.restore(abstract)
    store.save(3, make(33.0), 30)
    store.close()
    values = {float(x) for s in state["w"].addressable_shards for x in np.ravel(s.data)}
    return dict(before=before, step=step, position=position, values=sorted(values))


def records(source: str, directory: str, workdir: str, overrides: dict) -> dict:
    """Trains; returns the records that this process wrote, or, unless the first, would write."""
    from etils import epath

    from kvjax.training import loop
    from kvjax.workdir import metrics
    from tests.distributed import test_multihost

    seen = []

    def note(self, step, **values):
        seen.append(dict(step=step, **values))

    metrics.NullWriter.write = note
    loop.train(test_multihost.quick_config(source, directory, **overrides), epath.Path(workdir))
    return dict(records=seen or metrics.read_records(epath.Path(workdir) / metrics.METRICS))


def failing(kind: str) -> dict:
    """Ends the process whose number ends `kind` by an error, while the others wait for it."""
    from kvjax import distributed
    from kvjax.foundation.errors import UserError

    if distributed.index() == int(kind[-1]):
        time.sleep(1)
        if kind.startswith("interrupt"):
            signal.raise_signal(signal.SIGINT)
        raise UserError("the key is wrong") if kind.startswith("user") else KeyError("a bug")
    distributed.gather("never", "")
    return {}


if __name__ == "__main__":
    from kvjax import distributed
    from kvjax.foundation import runtime

    flags = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[3:] if a.startswith("--"))
    runtime.start()
    distributed.start(
        coordinator=flags["coordinator"],
        num_processes=int(flags["num_processes"]),
        process_id=int(flags["process_id"]),
    )
    with distributed.end_together():
        result = globals()[sys.argv[1]](*json.loads(sys.argv[2]))
        print(json.dumps(result), flush=True)
