"""Time to save and to load a checkpoint: with checksums of its chunks, and as Orbax stores it.

    python -m experiments.benchmarks.checkpoint_speed [--save] [--cached] [--repeats=40]

Random float32 weights in one process, saved until they are on the disk and read from it; with
--cached both from the page cache, where the share of the checksums is at its highest. Kinds take
turns, the first of them too; what counts are medians, and of the ratios of neighbours with their
95 % interval (bootstrap over turns). Prints a table.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import tempfile
import time

from etils import epath
import jax
import numpy as np

from experiments import record
from experiments.benchmarks import machine
from kvjax.foundation import command_line, progress
from kvjax.foundation.configuration import at_least
from kvjax.foundation.output import Output
from kvjax.workdir import storage
from kvjax.workdir.checkpoint import Checkpoints

_TU = storage.tensorstore_utils
_WITH = _TU._build_zarr3_metadata
KINDS = {"as Orbax stores it": _WITH.__wrapped__, "with checksums": _WITH}
ARRAYS = 12  # of 1 MB or more each
FIGURES = ("save", "load")
_WARM_UP = 2


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--megabytes", type=int, default=300, help="of weights (300)")
    add("--repeats", type=int, default=40, help="of each kind (40)")
    add("--cached", action="store_true", help="leave the disk out")
    add("--save", action="store_true", help="write experiments/results/checkpoint_speed.json")
    parser.add_output()
    options = parser.parse(arguments)
    at_least("--megabytes", options.megabytes, ARRAYS)
    at_least("--repeats", options.repeats, 3)
    given = f"--megabytes={options.megabytes}"
    machine.check_room(given, options.megabytes * 10**6, memory=3, disk=1)
    record.check(options.save)
    return options


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    options = _options(arguments)
    asked = dict(megabytes=options.megabytes, repeats=options.repeats, cached=options.cached)
    rows = measure(**asked)
    out = Output(options)
    of = lambda row, key: "{:.3f}".format(row[f"{key}_s"])
    ratio = lambda row, key: "{:.3f} [{:.3f}, {:.3f}]".format(*row[f"{key}_ratio"])
    cells = [(row["kind"], *(f(row, key) for key in FIGURES for f in (of, ratio))) for row in rows]
    header = ("chunks", "save, s", "of Orbax's", "load, s", "of Orbax's")
    out.table(header, cells)
    name = "checkpoint_speed_cached" if options.cached else "checkpoint_speed"
    record.record(name, dict(rows=rows, **asked), out, save=options.save)


def measure(megabytes: int, repeats: int, cached: bool) -> list[dict]:
    """A row per kind: median seconds, and median ratios to the first kind with their interval."""
    shape = (megabytes // ARRAYS, 1000, 250)
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    state = dict(params={f"w{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)})
    times = {kind: [] for kind in KINDS}
    waiting = progress.waiting("saving and loading")
    with tempfile.TemporaryDirectory() as folder, waiting as doing:
        for i in range(_WARM_UP + repeats):
            doing.at(f"{i + 1} of {_WARM_UP + repeats}")
            for kind in list(KINDS)[:: -1 if i % 2 else 1]:
                path = epath.Path(folder) / "checkpoints"
                times[kind].append(_once(path, KINDS[kind], state, cached))
    arrays = {kind: np.array(times[kind][_WARM_UP:]) for kind in KINDS}
    ratios = lambda kind: arrays[kind] / arrays[next(iter(KINDS))]
    return [
        dict(kind=kind)
        | {f"{key}_s": np.median(arrays[kind][:, i]).item() for i, key in enumerate(FIGURES)}
        | {f"{key}_ratio": _with_interval(ratios(kind)[:, i]) for i, key in enumerate(FIGURES)}
        for kind in KINDS
    ]


def _with_interval(values: np.ndarray) -> list[float]:
    """The median and its 95 % interval."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    return [
        np.median(values).item(),
        *np.percentile(np.median(drawn, axis=1), [2.5, 97.5]).tolist(),
    ]


def _once(folder: epath.Path, describe, state: dict, cached: bool) -> list[float]:
    """Seconds to save, and to load."""
    _TU._build_zarr3_metadata = describe
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)
    with contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints:
        began = time.monotonic()
        checkpoints.save(1, state, position=0)
        checkpoints.wait()
        if not cached:
            os.sync()
        saved = time.monotonic() - began
        if not cached:
            _forget(pathlib.Path(folder))
        began = time.monotonic()
        restored, _, _ = checkpoints.restore(jax.tree.map(shaped, state))
        jax.block_until_ready(restored)
        loaded = time.monotonic() - began
    shutil.rmtree(folder)
    return [saved, loaded]


def _forget(folder: pathlib.Path) -> None:
    """Takes files out of the page cache: the next read is the disk's."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    command_line.run(main)
