"""How checkpoints are stored: Orbax's format, with a checksum of every byte that loading uses.

Importing this module changes four things in Orbax 0.12 that it has no option for. Every chunk of
an array is a zstd frame with its checksum (XXH64 of the content, 32 bits kept), which whoever reads
it verifies: the whole array or a part of it, on any mesh. (Orbax leaves it out, and has checksums
of the index and of OCDBT's nodes only; a chunk may decode to other numbers.) A failure is told
once, by who asked: not in Orbax's log with every thread's traceback, nor by event loops that ended
before their last read. Time-outs are measured by a clock that nobody sets: by the wall clock, a
save fails when that jumps. And what it globs for in a folder is found whatever the folder's path
is: with brackets in it nothing was, and a checkpoint was left without its index.
"""

import functools
import glob
import hashlib
import json
import logging
import os
import re
import sys
import time
import traceback
import types
import warnings

from etils import epath
import jax
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.futures import future, signaling_client, synchronization
from orbax.checkpoint._src.serialization import tensorstore_utils
from orbax.checkpoint.experimental.v1._src.handlers import pytree_handler
from orbax.checkpoint.experimental.v1._src.synchronization import compatibility
import tensorstore

from kvjax import distributed
from kvjax.foundation.errors import first_line
from kvjax.foundation.files import in_bucket

# What decoding raises where bytes are wrong or missing. Clients of buckets raise types of their own
# and OSErrors, runtimes RuntimeErrors: whatever is not here does not say that a file is damaged.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, FileNotFoundError)
# TensorStore's words for wrong bytes; its other ones (UNAVAILABLE, PERMISSION_DENIED, UNKNOWN for
# an I/O error, RESOURCE_EXHAUSTED) speak of the machine. Where there is none, it is a wrong value.
_OF_DATA = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE")
_OF_CODEC = re.compile("ZSTD_|checksum|[Dd]igest")  # FAILED_PRECONDITION, as where a disk says no
_CODE = re.compile("[A-Z_]+(?=: )")
_ARRAY = re.compile('"([^"]+)/(?:zarr\\.json|c(?:/[0-9]+)*)"')
_INDEX = "manifest.ocdbt"  # of an item: names every file of its data
_DETAILS = re.compile(r" \[(tensorstore_spec|source locations|os_error_code).*", re.DOTALL)


def _with_checksums(describe):
    """Orbax's function that describes how an array is stored; what it gives, with checksums."""

    @functools.wraps(describe)
    def described(*args, **kwargs):
        metadata = describe(*args, **kwargs)
        (sharding,) = metadata["codecs"]
        (zstd,) = (c for c in sharding["configuration"]["codecs"] if c["name"] == "zstd")
        # Level 1 makes weights as small as Orbax's level 3, and saves the time of the checksum.
        zstd["configuration"] |= dict(checksum=True, level=1)
        return metadata

    return described


tensorstore_utils._build_zarr3_metadata = _with_checksums(tensorstore_utils._build_zarr3_metadata)


class _SteadyTime(types.ModuleType):
    """The module `time` with a `time()` that counts seconds since some moment and never jumps."""

    time = staticmethod(time.monotonic)

    def __getattr__(self, name: str):
        return getattr(time, name)


for _module in (compatibility, future, pytree_handler, signaling_client):
    _module.time = _SteadyTime("time")  # which they subtract and compare


def _by_name(find):
    """Returns etils' glob (which Orbax calls) for folders whose own path is not a pattern."""

    @functools.wraps(find)
    def found(folder: epath.Path, pattern: str):
        return find(type(folder)(glob.escape(os.fspath(folder))), pattern)

    return found


_PathClass = type(epath.Path())
_PathClass.glob = _by_name(_PathClass.glob)


def _is_told_elsewhere(record: logging.LogRecord) -> bool:
    """Whether a line of the log is a failure inside Orbax, which is raised as well."""
    trace = record.exc_info[2] if record.exc_info else None
    text = " ".join([record.pathname, record.getMessage(), *_files(trace)])
    return "orbax" in text or "tensorstore" in text


def _without_orbax(before, what):
    """An unraisablehook: the other reads of a load that failed, which end after its event loop."""
    closed = str(what.exc_value) == "Event loop is closed"
    if not closed and not any("orbax" in file for file in _files(what.exc_traceback)):
        before(what)


def _files(trace: types.TracebackType | None) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(trace)]


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: not _is_told_elsewhere(record))
sys.unraisablehook = functools.partial(_without_orbax, sys.unraisablehook)
warnings.filterwarnings("ignore", "coroutine .* was never awaited")


def steps(directory: epath.Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending; what is half-written is none.

    Only looks, so it is safe beside a run that is writing there.
    """
    found = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(checkpoint.step for checkpoint in found)


def shapes(item: epath.Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored arrays by dotted name, each as under its checksum.

    Args:
      item: a folder in a checkpoint: its training state, say.

    Raises:
      FileNotFoundError: the folder or its index is missing, as after an interrupted copy.
    """
    index = item / _INDEX
    if not index.exists():  # TensorStore takes it for an empty store
        raise FileNotFoundError(f"{index} is not there: was the checkpoint copied whole?")
    store = tensorstore.KvStore.open(dict(driver="ocdbt", base=_base(item))).result()
    end = "/zarr.json"
    keys = [key.decode() for key in store.list().result()]
    reads = {key: store.read(key) for key in keys if key.endswith(end)}
    shape = lambda read: tuple(json.loads(read.result().value)["shape"])
    return {key.removesuffix(end): shape(read) for key, read in reads.items()}


def fingerprint(item: epath.Path) -> str:
    """What tells the arrays of a checkpoint from those of any other save, as a hash.

    Of the index, which names every file of data, drawn anew by each save: no array is read.
    """
    return hashlib.sha256((item / _INDEX).read_bytes()).hexdigest()


def _base(item: epath.Path) -> str | dict:
    """Where an item's files are, for TensorStore."""
    folder = f"{item}/"
    return folder if in_bucket(folder) else dict(driver="file", path=folder)


def array(item: epath.Path, name: str) -> tensorstore.TensorStore:
    """One stored array, of which nothing is read yet; what is read of it is checked.

    Args:
      name: dotted, as in `shapes`.
    """
    kvstore = dict(driver="ocdbt", base=_base(item), path=f"{name}/")
    return tensorstore.open(dict(driver="zarr3", kvstore=kvstore), open=True).result()


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    """The same of a tree of arrays, or of ShapeDtypeStructs."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in leaves}


def listing_error(path: epath.Path) -> OSError | None:
    """Why a checkpoint's folders cannot be listed: what lies there seems not to be there at all."""
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
    """Whether a load failed for what it read: bytes that are wrong or not there.

    Not so where the machine failed (I/O, permissions, memory): a good checkpoint raises that too.
    """
    cause = _deepest(error)
    code = _CODE.match(str(cause))
    of_data = code is None or code[0] in _OF_DATA or _OF_CODEC.search(str(cause))
    return isinstance(cause, _DAMAGED) and bool(of_data)


def reason(error: BaseException) -> str:
    """What the deepest cause says, where Orbax leaves the useful text, in one line."""
    cause = _deepest(error)
    text = _DETAILS.sub("", str(cause))
    code, array = _CODE.match(text), _ARRAY.search(text)
    if '": ' not in text or not (code or array):
        return f"{type(cause).__name__}: {first_line(cause)}"
    # TensorStore: a code, what it was about to do, from the array down to a file, and the cause.
    parts = [code and code[0], array and array[1], first_line(text.rpartition('": ')[2])]
    return ": ".join(filter(None, parts))


def _deepest(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def single_process_context() -> ocp.Context:
    """Orbax without its barriers, at which this process would wait for others."""
    context = ocp.Context()
    if distributed.count() > 1:
        me = distributed.index()
        context.multiprocessing.primary_host = me
        context.multiprocessing.active_processes = {me}
        context.multiprocessing.barrier_sync_key_prefix = f"alone{me}"
    return context


def align_operation_ids() -> None:
    """Orbax numbers a process's operations, and its barriers by these: a load that failed in some
    processes only leaves them waiting for each other at the next save.
    """
    counter = synchronization.OperationIdGenerator  # nothing public counts
    most = max(map(int, distributed.gather("operations", counter.get_current_operation_id())))
    while int(counter.get_current_operation_id()) < most:
        counter.next_operation_id()
