"""Time to save and to load a checkpoint, with the checksums of its chunks and without.

python -m experiments.checkpoint_speed [--save] [--megabytes=300] [--repeats=12]

Random float32 weights in one process, written until they are committed and read from the page
cache: the disk is left out, so the checksums' share is at its highest. Kinds take turns; what
counts is the least time of each, and CPU seconds of all threads beside it.
"""

import argparse
import contextlib
import shutil
import tempfile
import time

from etils import epath
import jax
import numpy as np

from experiments import record
from kvjax import storage
from kvjax.checkpoint import Checkpoints

_TU = storage.tensorstore_utils
_WITH = _TU._build_zarr3_metadata
KINDS = {"checksums": _WITH, "none": _WITH.__wrapped__}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true", help="write experiments/results")
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    rows = measure(options.megabytes, options.repeats)
    print("| chunks | save, s | CPU | load, s | CPU |")
    print("|---|---|---|---|---|")
    for row in rows:
        figures = (row[key] for key in ("save", "save_cpu", "load", "load_cpu"))
        print(f"| {row['kind']} | {' | '.join(f'{x:.3f}' for x in figures)} |")
    record.record("checkpoint_speed", dict(rows=rows, **vars(options)), save=options.save)


def measure(megabytes: int, repeats: int) -> list[dict]:
    """A row per kind: least seconds of the repeats."""
    shape = (megabytes // 12, 1000, 250)
    keys = jax.random.split(jax.random.key(0), 12)
    state = dict(params={f"w{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)})
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)
    times = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
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
    main()
