"""Time to save and to load a checkpoint, with the checksums of its chunks and without.

    python -m experiments.checkpoint_speed [--save] [--megabytes=300] [--repeats=12]

Random float32 weights in one process, written until they are committed and read from the page
cache: the disk is left out, so the checksums' share is at its highest. Kinds take turns; what
counts is the least time of each, and CPU seconds of all threads beside it. Prints a table.
"""

import argparse
import contextlib
import shutil
import tempfile
import time

from etils import epath
import jax
import numpy as np

from experiments import machine
from experiments import record
from kvjax import command_line
from kvjax import progress
from kvjax import storage
from kvjax.checkpoint import Checkpoints
from kvjax.configuration import at_least
from kvjax.output import Output

_TU = storage.tensorstore_utils
_WITH = _TU._build_zarr3_metadata
KINDS = {"checksums": _WITH, "none": _WITH.__wrapped__}
ARRAYS = 12  # of 1 MB or more each


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--megabytes", type=int, default=300, help="of weights (300)")
    add("--repeats", type=int, default=12, help="of each kind (12)")
    add("--save", action="store_true", help="write experiments/results/checkpoint_speed.json")
    parser.add_output()
    options = parser.parse(arguments)
    at_least("--megabytes", options.megabytes, ARRAYS)
    at_least("--repeats", options.repeats, 1)
    given = f"--megabytes={options.megabytes}"
    machine.check_room(given, options.megabytes * 10**6, memory=3, disk=1)
    record.check(options.save)
    return options


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    options = _options(arguments)
    asked = dict(megabytes=options.megabytes, repeats=options.repeats)
    rows = measure(**asked)
    out = Output(options)
    figures = ("save", "save_cpu", "load", "load_cpu")
    cells = [(row["kind"], *(f"{row[key]:.3f}" for key in figures)) for row in rows]
    out.table(("chunks", "save, s", "CPU", "load, s", "CPU"), cells)
    record.record("checkpoint_speed", dict(rows=rows, **asked), out, save=options.save)


def measure(megabytes: int, repeats: int) -> list[dict]:
    """A row per kind: least seconds of the repeats."""
    shape = (megabytes // ARRAYS, 1000, 250)
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    state = dict(params={f"w{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)})
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)
    times = {kind: [] for kind in KINDS}
    waiting = progress.waiting("saving and loading")
    with tempfile.TemporaryDirectory() as folder, waiting as doing:
        for i in range(repeats):
            doing.at(f"{i + 1} of {repeats}")
            for kind, describe in KINDS.items():
                times[kind].append(_once(epath.Path(folder) / kind, describe, state, shaped))
    least = lambda kind: np.min(times[kind], axis=0).tolist()
    names = ("save", "save_cpu", "load", "load_cpu")
    return [dict(kind=kind, **dict(zip(names, least(kind), strict=True))) for kind in KINDS]


def _once(folder: epath.Path, describe, state: dict, shaped) -> list[float]:
    """Seconds to save, of CPU while saving, to load, of CPU while loading."""
    _TU._build_zarr3_metadata = describe
    with contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints:
        began, cpu = time.monotonic(), time.process_time()
        checkpoints.save(1, state, position=0)
        checkpoints.wait()
        saved, saved_cpu = time.monotonic(), time.process_time()
        restored, _, _ = checkpoints.restore(jax.tree.map(shaped, state))
        jax.block_until_ready(restored)
        figures = [saved - began, saved_cpu - cpu]
        figures += [time.monotonic() - saved, time.process_time() - saved_cpu]
    shutil.rmtree(folder)
    return figures


if __name__ == "__main__":
    command_line.run(main)
