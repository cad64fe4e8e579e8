"""Which trained model a run started from: `parent.json`, for good.

The parent may go on training, move or go away. What it was stays known by a hash of its parameters.
"""

import hashlib
import json
import math

from etils import epath

from kvjax.foundation.files import write_atomically
from kvjax.workdir import storage

PARENT = "parent.json"
_BLOCK = 1 << 28  # bytes that are read at a time
_PARAMETERS = "params."


def write(workdir: epath.Path, parent: epath.Path, checkpoints: epath.Path, step: int) -> None:
    """Writes down the parent of a run: its workdir, the step, the hash of its parameters."""
    found = dict(workdir=str(parent), step=step, sha256=digest(checkpoints / str(step)))
    write_atomically(workdir / PARENT, json.dumps(found, indent=1) + "\n")


def remove(workdir: epath.Path) -> None:
    """Removes what `write` wrote for a run that took no step."""
    if (workdir / PARENT).exists():
        (workdir / PARENT).unlink()


def digest(checkpoint: epath.Path) -> str:
    """SHA-256 of a checkpoint's parameters: names, shapes, dtypes and values; not how they lie."""
    item, found = checkpoint / "state", hashlib.sha256()
    for name, shape in sorted(storage.shapes(item).items()):
        if not name.startswith(_PARAMETERS):
            continue
        array = storage.array(item, name)
        dtype = array.dtype.numpy_dtype
        found.update(f"{name} {shape} {dtype.name}\n".encode())
        if not shape:
            found.update(array.read().result().tobytes())
            continue
        rows = max(1, _BLOCK // max(1, math.prod(shape[1:]) * dtype.itemsize))
        for start in range(0, shape[0], rows):
            found.update(array[start : min(start + rows, shape[0])].read().result().tobytes())
    return found.hexdigest()
