"""Writes a checkpoint layer by layer, for models that do not fit into memory.

The result is a checkpoint like those of training, in Orbax's format with the checksums of
`storage`. Orbax itself writes whole arrays only, and an array holds all layers of a layer group.
Here TensorStore writes slices of the arrays, and Orbax's functions write the metadata.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import itertools
import json
import math
import time
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.metadata import (
    array_metadata_store,
    step_metadata_serialization,
    tree as tree_metadata,
)
from orbax.checkpoint._src.path import atomicity_defaults
from orbax.checkpoint._src.serialization import (
    jax_array_handlers,
    ocdbt_utils,
    tensorstore_utils,
    types,
)
import tensorstore

from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket
from kvjax.workdir import storage
from kvjax.workdir.checkpoint import CHUNK_BYTES

IN_FLIGHT_BYTES = 1 << 26  # limit of bytes that TensorStore has copied and not yet written
LEAST_CHUNK_BYTES = 1 << 20  # Orbax warns that smaller chunks are slow
_ITEM = "state"  # as `Checkpoints.save` names it


@contextlib.contextmanager
def writing(directory: epath.Path, *, step: int = 0, shapes: dict) -> Iterator[Callable[..., None]]:
    """Yields a function that writes parameters; the checkpoint is complete when the block ends.

        with streamed.writing(workdir / CHECKPOINTS, shapes=abstract) as write:
            write(("embedding",), embedding_VD)
            for layer in range(32):
                write(("segments", 0, "mlp", "up"), up_DM, index=layer)

    The function takes the keys of an array, and either the whole array or, with `index`, one slice
    along its first axis. Calls may come in any order, and after a call the memory of its argument
    may be reused. Uses IN_FLIGHT_BYTES of memory; arrays of up to CHUNK_BYTES are also kept in
    memory until their last slice.

    If the block raises, there is no checkpoint. A killed process leaves a temporary folder, which
    is never read, and which the next call for this step removes.

    Only one process may write (see `identity.exclusive`).

    Args:
      directory: absolute path of a workdir's checkpoints, created if missing.
      shapes: a tree of ShapeDtypeStructs with the dtypes to store; see `model.parameters.abstract`.

    Raises:
      UserError: the checkpoint exists already.
      ValueError: an array's name, shape or dtype is not in `shapes`; a slice is written twice or
        never.
      OSError: a write failed (such as on a full disk); the message is that of `Checkpoints`.
    """
    path = epath.Path(directory) / str(step)
    exists = path.exists()
    if in_bucket(path):  # a killed process leaves a folder without a commit file
        exists = step in storage.steps(path.parent)
    if exists:
        raise UserError(f"{path} exists already: move it away, or write another step")
    # `finalize` renames it on a disk, or writes a commit file in a bucket.
    temporary = atomicity_defaults.get_default_temporary_path_class(path).from_final(path)
    state = {"params": shapes, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    arrays = _Arrays(temporary.get() / _ITEM, state)
    started = time.time_ns()

    def write(keys: tuple, array: np.ndarray | jax.Array, *, index: int | None = None) -> None:
        name, array = ".".join(map(str, ("params", *keys))), np.asarray(array)
        arrays.check(name, array, index)
        with _reporting(step):
            arrays.write(name, array, index)

    try:
        with _reporting(step):
            asyncio_utils.run_sync(temporary.create())
            arrays.write("step", np.array(step, np.int32), None)
        yield write
        arrays.check_complete()
        with _reporting(step):
            asyncio_utils.run_sync(arrays.finish())
            _write_metadata(temporary.get(), started)
            asyncio_utils.run_sync(temporary.finalize())
    except BaseException:
        arrays.abandon()
        with contextlib.suppress(Exception):  # else it would hide the block's error
            temporary.get().rmtree()
        raise


@contextlib.contextmanager
def _reporting(step: int):
    """Raises any failure as the OSError that `Checkpoints` raises."""
    try:
        yield
    except Exception as error:  # TensorStore raises several types for errors of the file system
        why = storage.reason(error)
        raise OSError(f"checkpoint of step {step} was not written: {why}") from error


class _Arrays:
    """Writer of one checkpoint item's arrays.

    Args:
      folder: folder of the item, which need not exist yet.
      shapes: a tree of ShapeDtypeStructs.
    """

    def __init__(self, folder: epath.Path, shapes: Any):
        self._folder = folder
        self._context = tensorstore_utils.get_ts_context()
        self._infos = jax.tree.map_with_path(self._info, shapes)
        self._by_name = {info.name: info for info in jax.tree.leaves(self._infos)}
        self._shapes = dict(zip(self._by_name, jax.tree.leaves(shapes), strict=True))
        # name -> True for every slice along the first axis (a scalar has one) still to be written
        self._missing = {n: np.ones(x.shape[:1] or 1, bool) for n, x in self._shapes.items()}
        self._gathered = {}  # name -> small array that waits for its last slices
        self._opened = {}  # name -> (TensorStore array, Orbax ArrayMetadata)
        self._in_flight = collections.deque()  # (bytes, future)
        self._in_flight_bytes = 0

    def _info(self, path: tuple, _) -> types.ParamInfo:
        return types.ParamInfo(
            name=jax.tree_util.keystr(path, simple=True, separator="."),
            keypath=path,
            parent_dir=self._folder,
            skip_deserialize=False,
            is_ocdbt_checkpoint=True,
            use_zarr3=True,
            ts_context=self._context,
            value_typestr="jax.Array",
        )

    def check(self, name: str, array: np.ndarray, index: int | None) -> None:
        """Raises a ValueError if an array or slice was written before, or does not fit `shapes`."""
        whole, missing = self._shapes[name], self._missing[name]
        where, shape = name, whole.shape
        if index is not None:
            where, shape = f"{name}[{index}]", whole.shape[1:]
        if not (missing.all() if index is None else missing[index]):
            raise ValueError(f"{where} was written before")
        if (array.shape, array.dtype) != (shape, whole.dtype):
            raise ValueError(
                f"{where} is {array.dtype} {array.shape}: must be {whole.dtype} {shape}"
            )

    def check_complete(self) -> None:
        """Raises a ValueError that names missing arrays and slices."""
        names = []
        for name, missing in self._missing.items():
            if missing.all():
                names.append(name)
            else:
                names += [f"{name}[{i}]" for i in np.flatnonzero(missing)]
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ValueError(f"not written: {', '.join(names[:8])}{more}")

    def write(self, name: str, array: np.ndarray, index: int | None) -> None:
        """Writes an array or slice that `check` accepted; returns when it has been copied."""
        self._missing[name][... if index is None else index] = False
        whole = self._shapes[name]
        if index is None:
            self._put(name, array, 0, whole.shape)
        elif math.prod(whole.shape) * whole.dtype.itemsize > CHUNK_BYTES:
            self._put(name, array[None], index, (1, *whole.shape[1:]))
        else:  # one chunk holds all slices: gather them, instead of rewriting it for every slice
            if name not in self._gathered:
                self._gathered[name] = np.empty(whole.shape, whole.dtype)
            self._gathered[name][index] = array
            if not self._missing[name].any():
                self._put(name, self._gathered.pop(name), 0, whole.shape)

    def _put(self, name: str, array: np.ndarray, start: int, write_shape: tuple) -> None:
        """Writes part of an array chunk by chunk, from `start` along its first axis."""
        if name not in self._opened:
            self._opened[name] = self._open(name, write_shape)
        store, metadata = self._opened[name]
        if array.ndim:
            store = store[start : start + len(array)].translate_to[0]
        ranges = map(range, [0] * array.ndim, array.shape, metadata.chunk_shape)
        for corner in itertools.product(*ranges):
            chunk = tuple(map(slice, corner, np.add(corner, metadata.chunk_shape)))
            self._wait(IN_FLIGHT_BYTES - array[chunk].nbytes)
            future = store[chunk].write(array[chunk])
            self._in_flight.append((array[chunk].nbytes, future))
            self._in_flight_bytes += array[chunk].nbytes
            future.copy.result()

    def _open(self, name: str, write_shape: tuple) -> tuple:
        """Creates an array in TensorStore; returns it with Orbax's metadata.

        An array that is written whole has the chunks of `Checkpoints`. For an array that is written
        in slices, a chunk covers part of one layer. Chunks are then smaller; otherwise reading a
        shard of all layers would read too many bytes that it does not need.
        """
        whole = self._shapes[name]
        layers = 1 if write_shape == whole.shape else whole.shape[0]
        chunk_bytes = min(CHUNK_BYTES, max(CHUNK_BYTES // layers, LEAST_CHUNK_BYTES))
        specification = tensorstore_utils.build_array_write_spec(
            self._by_name[name],
            types.SaveArgs(chunk_byte_size=chunk_bytes),
            global_shape=whole.shape,
            local_shape=write_shape,
            dtype=whole.dtype,
            use_ocdbt=True,
            process_index=0,
        )
        spec = tensorstore.Spec(specification.json)
        # Creation is asynchronous: assume_metadata allows writes before the metadata is on disk.
        self._in_flight.append((0, tensorstore.open(spec, context=self._context, create=True)))
        array = tensorstore.open(spec, context=self._context, open=True, assume_metadata=True)
        return array.result(), specification.metadata

    def _wait(self, most: int) -> None:
        """Waits until at most `most` bytes are in flight; if it is negative, for all writes."""
        while self._in_flight and self._in_flight_bytes > most:
            size, future = self._in_flight.popleft()
            self._in_flight_bytes -= size
            future.result()

    def abandon(self) -> None:
        """Waits for all writes and ignores their errors."""
        for _, future in self._in_flight:
            with contextlib.suppress(Exception):
                future.result()

    async def finish(self) -> None:
        """Waits for all writes, then writes Orbax's metadata of the arrays."""
        self._wait(-1)
        infos, metadatas = [], []
        for name, info in self._by_name.items():
            metadatas.append(self._opened[name][1])
            info.write_shape = metadatas[-1].write_shape
            infos.append(info)
        await array_metadata_store.Store(primary_host=None).write(self._folder, metadatas, 0)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        await jax_array_handlers._async_serialize_shardings(
            [sharding] * len(infos), infos, primary_host=None
        )
        tree = tree_metadata.InternalTreeMetadata.build(self._infos, use_ocdbt=True, use_zarr3=True)
        (self._folder / "_METADATA").write_text(json.dumps(tree.to_json()))
        await ocdbt_utils.merge_ocdbt_per_process_files(
            self._folder, tensorstore_utils.get_ts_context(), use_zarr3=True
        )


def _write_metadata(folder: epath.Path, started: int) -> None:
    """Writes Orbax's metadata of the checkpoint.

    Args:
      started: start of the save, in nanoseconds since the epoch.
    """
    handler = ocp.handlers.PyTreeHandler
    metadata = step_metadata_serialization.InternalCheckpointMetadata.create(
        handler_typestrs={_ITEM: f"{handler.__module__}.{handler.__qualname__}"},
        init_timestamp_nsecs=started,
        commit_timestamp_nsecs=time.time_ns(),
    )
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata.serialize()))
