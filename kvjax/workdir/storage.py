"""Storage of checkpoints: Orbax's format, with a checksum of every byte that loading uses.

Importing this module patches Orbax 0.12 in three places, for which Orbax has no options:

- Every chunk of an array is a zstd frame with a checksum (32 bits of XXH64 of the content), which
  every reader verifies. Orbax itself has checksums of the index and of OCDBT's nodes only, so that
  a damaged chunk may decode to wrong numbers.
- Orbax does not log the traceback of every thread that fails; the caller reports the failure once.
- Globbing escapes the folder's own path; otherwise Orbax writes no index if the path has brackets.
"""

from collections.abc import Callable, Mapping
import functools
import glob
import hashlib
import json
import logging
import math
import os
import re
import sys
import traceback
import types
import warnings

from etils import epath
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint._src.serialization import tensorstore_utils
import tensorstore

from kvjax import distributed
from kvjax.foundation.errors import first_line
from kvjax.foundation.files import in_bucket

# Types raised for wrong or missing bytes. Other types (OSErrors, RuntimeErrors, those of bucket
# clients) do not mean that a file is damaged.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, FileNotFoundError)
# TensorStore's codes for wrong bytes; an error without a code also means wrong bytes. Other codes
# (UNAVAILABLE, PERMISSION_DENIED, UNKNOWN for an I/O error, RESOURCE_EXHAUSTED) are failures of the
# machine.
_DAMAGE_CODES = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE")
# Codecs report damage as FAILED_PRECONDITION, as disks report a refusal. Only the codecs' messages
# contain these words.
_CODEC = re.compile("ZSTD_|checksum|[Dd]igest")
_CODE = re.compile("[A-Z_]+(?=: )")
_ARRAY = re.compile('"([^"]+)/(?:zarr\\.json|c(?:/[0-9]+)*)"')
_INDEX = "manifest.ocdbt"  # file in an item's folder that names the item's data files
_DETAILS = re.compile(r" \[(tensorstore_spec|source locations|os_error_code).*", re.DOTALL)


def _with_checksums(build):
    """Wraps Orbax's function that builds an array's Zarr metadata, to add checksums."""

    @functools.wraps(build)
    def build_with_checksums(*args, **kwargs):
        metadata = build(*args, **kwargs)
        (sharding,) = metadata["codecs"]
        (zstd,) = (c for c in sharding["configuration"]["codecs"] if c["name"] == "zstd")
        # Level 1 compresses weights as well as Orbax's level 3, and saves as much time as the
        # checksum takes.
        zstd["configuration"] |= {"checksum": True, "level": 1}
        return metadata

    return build_with_checksums


tensorstore_utils._build_zarr3_metadata = _with_checksums(tensorstore_utils._build_zarr3_metadata)


def _with_escaped_folder(find):
    """Wraps etils' glob, which Orbax calls, so that only `pattern` is a pattern, not the folder."""

    @functools.wraps(find)
    def find_escaped(folder: epath.Path, pattern: str):
        return find(type(folder)(glob.escape(os.fspath(folder))), pattern)

    return find_escaped


_PathClass = type(epath.Path())
_PathClass.glob = _with_escaped_folder(_PathClass.glob)


def _is_also_raised(record: logging.LogRecord) -> bool:
    """Returns True for log records of failures that Orbax or TensorStore also raises."""
    trace = record.exc_info[2] if record.exc_info else None
    text = " ".join([record.pathname, record.getMessage(), *_files(trace)])
    return "orbax" in text or "tensorstore" in text


def _drop_orbax_errors(previous_hook, unraisable):
    """Drops Python's unraisable errors from reads that outlive the event loop of a failed load."""
    closed = str(unraisable.exc_value) == "Event loop is closed"
    if not closed and not any("orbax" in file for file in _files(unraisable.exc_traceback)):
        previous_hook(unraisable)


def _files(trace: types.TracebackType | None) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(trace)]


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: not _is_also_raised(record))
sys.unraisablehook = functools.partial(_drop_orbax_errors, sys.unraisablehook)
warnings.filterwarnings("ignore", "coroutine .* was never awaited")


def steps(directory: epath.Path) -> list[int]:
    """Returns the steps of complete checkpoints in a folder, ascending.

    Reads only, so it is safe while a run writes there.
    """
    checkpoints = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(checkpoint.step for checkpoint in checkpoints)


def shapes(item: epath.Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of stored arrays by dotted name.

    Args:
      item: a folder in a checkpoint, such as its training state.

    Raises:
      FileNotFoundError: the folder or its index is missing, as after an interrupted copy.
    """
    index = item / _INDEX
    if not index.exists():  # TensorStore would open an empty store
        raise FileNotFoundError(f"{index} is not there: was the checkpoint copied whole?")
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": _base(item)}).result()
    suffix = "/zarr.json"
    keys = [key.decode() for key in store.list().result()]
    reads = {key: store.read(key) for key in keys if key.endswith(suffix)}  # in parallel
    return {
        key.removesuffix(suffix): tuple(json.loads(read.result().value)["shape"])
        for key, read in reads.items()
    }


def fingerprint(item: epath.Path) -> str:
    """Hashes an item's index, without reading arrays.

    Every save has another hash, since it gives new random names to the data files in the index.
    """
    return hashlib.sha256((item / _INDEX).read_bytes()).hexdigest()


def _base(item: epath.Path) -> str | dict:
    """Returns TensorStore's specification of an item's folder."""
    folder = f"{item}/"
    return folder if in_bucket(folder) else {"driver": "file", "path": folder}


def array(item: epath.Path, name: str) -> tensorstore.TensorStore:
    """Opens a stored array without reading it; reads verify checksums.

    Args:
      name: dotted name, as in `shapes`.
    """
    return _open(item, name).result()


def _open(item: epath.Path, name: str) -> tensorstore.Future:
    kvstore = {"driver": "ocdbt", "base": _base(item), "path": f"{name}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True)


def start_reading(item: epath.Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> Callable:
    """Starts to read whole arrays in TensorStore's threads; reads verify checksums.

    Args:
      arrays: by dotted name, the stored shape and the dtype to cast to.

    Returns:
      A function that waits and returns NumPy arrays by name, or raises the error of a failed read.
      The arrays are aligned so that JAX on a CPU can use them without a copy.
    """
    opened = {name: _open(item, name) for name in arrays}  # in parallel
    buffers, writes = {}, []
    for name, x in arrays.items():
        stored = opened[name].result()
        if stored.dtype.numpy_dtype != x.dtype:
            stored = tensorstore.cast(stored, x.dtype)
        buffers[name] = _aligned(x.shape, x.dtype)
        writes.append(tensorstore.array(buffers[name], copy=False).write(stored))

    def finish() -> dict[str, np.ndarray]:
        for write in writes:
            write.result()
        return buffers

    return finish


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array at an address that is a multiple of 64, XLA's alignment on a CPU."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a tree of arrays or ShapeDtypeStructs by dotted name, like `shapes`."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in leaves}


def listing_error(path: epath.Path) -> OSError | None:
    """Returns the error of listing a checkpoint's folders, or None.

    A folder that cannot be listed makes its files seem to be missing.
    """
    try:
        for item in path.iterdir():
            if item.is_dir():
                list(item.iterdir())
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def is_damage(error: Exception) -> bool:
    """Returns True if a load failed because bytes are wrong or missing.

    Returns False for failures of the machine (I/O, permissions, memory).
    """
    cause = _deepest(error)
    code = _CODE.match(str(cause))
    data_code = code is None or code[0] in _DAMAGE_CODES or _CODEC.search(str(cause))
    return isinstance(cause, _DAMAGED) and bool(data_code)


def reason(error: BaseException) -> str:
    """Returns one line about the deepest cause of an error, whose text is the most useful."""
    cause = _deepest(error)
    text = _DETAILS.sub("", str(cause))
    code, array = _CODE.match(text), _ARRAY.search(text)
    if '": ' not in text or not (code or array):
        return f"{type(cause).__name__}: {first_line(cause)}"
    # TensorStore's text has a status code, the operation (from array to file), and the cause.
    parts = [code and code[0], array and array[1], first_line(text.rpartition('": ')[2])]
    return ": ".join(filter(None, parts))


def _deepest(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def single_process_context() -> ocp.Context:
    """Returns an Orbax context for this process alone, without barriers."""
    context = ocp.Context()
    if distributed.count() > 1:
        index = distributed.index()
        context.multiprocessing.primary_host = index
        context.multiprocessing.active_processes = {index}
        context.multiprocessing.barrier_sync_key_prefix = f"alone{index}"
    return context


def align_operation_ids() -> None:
    """Advances Orbax's operation counter to the largest of all processes.

    Orbax names its barriers by the counter. After a load that failed on some processes only, the
    counters differ, and in the next save processes would wait at different barriers.
    """
    counter = synchronization.OperationIdGenerator  # there is no public interface
    most = max(map(int, distributed.gather("operations", counter.get_current_operation_id())))
    while int(counter.get_current_operation_id()) < most:
        counter.next_operation_id()
