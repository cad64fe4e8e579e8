"""Writes a model as a folder of safetensors, with one tensor in memory at a time.

The folder gets its name only when it is complete.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import math

from etils import epath
import numpy as np

from kvjax.convert import digests, into_workdir
from kvjax.convert.model import Parameters
from kvjax.convert.tensors import DTYPES, INDEX, SINGLE
from kvjax.foundation import progress
from kvjax.model.config import TransformerConfig

SHARD_BYTES = 4_000_000_000  # maximum size of a file, unless a single tensor is larger


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor to write; its data is read when it is written."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """The contents of an export.

    Attributes:
      title: name of the model class, for messages.
      transformer: the exported model's config.
      files: texts of the files without tensors, by name.
      notes: messages for the user, one line each.
    """

    title: str
    transformer: TransformerConfig
    tensors: dict[str, LazyTensor]
    files: dict[str, str]
    notes: tuple[str, ...] = ()


def dtype_name(parameters: Parameters) -> str:
    """Returns safetensors' name of the parameters' common dtype, else F32, which holds any."""
    kinds = {dtype for _, dtype in parameters.values()}
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    return names.get(kinds.pop(), "F32") if len(kinds) == 1 else "F32"


def size(plan: ExportPlan, dtype: str) -> int:
    """Returns the bytes of all tensors."""
    return sum(_bytes(tensor, dtype) for tensor in plan.tensors.values())


def write(plan: ExportPlan, out: epath.Path, dtype: str, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the folder; `out` comes from `into_workdir.check`.

    Args:
      dtype: safetensors' name of the tensors' dtype.
      shard_bytes: maximum size of a file, unless a single tensor is larger.

    Raises:
      UserError, OSError: the folder cannot be written; nothing is left behind.
    """
    shards = _shards(plan.tensors, dtype, shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE]
    with into_workdir.staged(out) as folder, progress.waiting(f"writing {out.name}") as doing:
        done = 0
        for file, shard in zip(names, shards, strict=True):
            for _ in _write_file(folder / file, {n: plan.tensors[n] for n in shard}, dtype):
                doing.at(f"{done} of {len(plan.tensors)} tensors")
                done += 1
        texts = dict(plan.files)
        if len(shards) > 1:
            texts[INDEX] = _index(names, shards, size(plan, dtype))
        for file, text in texts.items():
            (folder / file).write_text(text)


def _bytes(tensor: LazyTensor, dtype: str) -> int:
    return math.prod(tensor.shape) * np.dtype(DTYPES[dtype]).itemsize


def _shards(tensors: Mapping[str, LazyTensor], dtype: str, limit: int) -> list[list[str]]:
    """Splits tensor names into files, in order."""
    shards, shard_bytes = [[]], 0
    for name, tensor in tensors.items():
        tensor_bytes = _bytes(tensor, dtype)
        if shards[-1] and shard_bytes + tensor_bytes > limit:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor_bytes
    return shards


def _index(files: Sequence[str], shards: Sequence[Sequence[str]], total: int) -> str:
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    return json.dumps(dict(metadata=dict(total_size=total), weight_map=weight_map), indent=1) + "\n"


def _write_file(path: epath.Path, tensors: Mapping[str, LazyTensor], dtype: str) -> Iterator[None]:
    """Writes a safetensors file, and yields before each tensor.

    The file is the header's length, the header in JSON, and the tensors' bytes. The header has a
    digest of every tensor, so it is written twice: first with placeholders of equal length. The
    library's `save_file` is no alternative, since it needs all tensors in memory.
    """
    placeholder = digests.of_array(np.zeros(0))
    metadata = {"format": "pt"} | {digests.key_of(name): placeholder for name in tensors}
    with open(path, "wb") as file:
        file.write(_header(tensors, dtype, metadata))
        for name, tensor in tensors.items():
            yield
            array = np.ascontiguousarray(tensor.read(), DTYPES[dtype])
            assert array.shape == tensor.shape, name
            metadata[digests.key_of(name)] = digests.of_array(array)
            file.write(array.reshape(-1).view(np.uint8))
        file.seek(0)
        file.write(_header(tensors, dtype, metadata))


def _header(tensors: Mapping[str, LazyTensor], dtype: str, metadata: Mapping[str, str]) -> bytes:
    """Returns the header of a safetensors file, with its length in front.

    Args:
      metadata: has "format", which transformers requires.
    """
    header, end = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        start, end = end, end + _bytes(tensor, dtype)
        header[name] = dict(dtype=dtype, shape=tensor.shape, data_offsets=(start, end))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors' elements
    return len(text).to_bytes(8, "little") + text
