"""Records the parent of a run in `parent.json`.

The record contains a hash of the parent's parameters, since the parent itself may be moved, deleted
or trained further.
"""

import hashlib
import json
import math

from etils import epath

from kvjax.foundation.files import write_atomically
from kvjax.workdir import storage

PARENT = "parent.json"
_READ_BYTES = 1 << 28  # bytes per read
_PARAMETERS = "params."


def write(workdir: epath.Path, parent: epath.Path, checkpoints: epath.Path, step: int) -> None:
    """Writes the parent's workdir and step, and the hash of its parameters."""
    content = {"workdir": str(parent), "step": step, "sha256": digest(checkpoints / str(step))}
    write_atomically(workdir / PARENT, json.dumps(content, indent=1) + "\n")


def remove(workdir: epath.Path) -> None:
    """Removes the file, which an earlier run that took no step may have left."""
    if (workdir / PARENT).exists():
        (workdir / PARENT).unlink()


def digest(checkpoint: epath.Path) -> str:
    """Hashes names, shapes, dtypes and values of a checkpoint's parameters, in any chunking."""
    item, digest = checkpoint / "state", hashlib.sha256()
    for name, shape in sorted(storage.shapes(item).items()):
        if not name.startswith(_PARAMETERS):
            continue
        array = storage.array(item, name)
        dtype = array.dtype.numpy_dtype
        digest.update(f"{name} {shape} {dtype.name}\n".encode())
        if not shape:
            digest.update(array.read().result().tobytes())
            continue
        rows = max(1, _READ_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
        for start in range(0, shape[0], rows):
            digest.update(array[start : min(start + rows, shape[0])].read().result().tobytes())
    return digest.hexdigest()
