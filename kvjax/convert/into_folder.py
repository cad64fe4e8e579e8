"""A model written as a folder of safetensors, with one tensor in memory at a time.

Nothing stands under the folder's name before all of it is written.
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

SHARD_BYTES = 4_000_000_000  # of a file, unless one tensor has more


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written, not read yet."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """What a folder will hold.

    Attributes:
      title: what it is, for messages.
      transformer: what it computes.
      files: the text of each file that is no tensors'.
    """

    title: str
    transformer: TransformerConfig
    tensors: dict[str, LazyTensor]
    files: dict[str, str]


def dtype_name(parameters: Parameters) -> str:
    """safetensors' name of the dtype that all parameters have, or F32, which holds any."""
    kinds = {dtype for _, dtype in parameters.values()}
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    return names.get(kinds.pop(), "F32") if len(kinds) == 1 else "F32"


def size(plan: ExportPlan, dtype: str) -> int:
    """Bytes of all tensors."""
    return sum(_bytes(tensor, dtype) for tensor in plan.tensors.values())


def write(plan: ExportPlan, out: epath.Path, dtype: str, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a folder; `out` is as `into_workdir.check` gives it.

    Args:
      dtype: safetensors' name of it.
      shard_bytes: of tensors in a file; a larger tensor has a file of its own.

    Raises:
      UserError, OSError: it cannot be written; nothing is left then.
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
    """The names of each file's tensors, in their order."""
    shards, filled = [[]], 0
    for name, tensor in tensors.items():
        more = _bytes(tensor, dtype)
        if shards[-1] and filled + more > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += more
    return shards


def _index(files: Sequence[str], shards: Sequence[Sequence[str]], total: int) -> str:
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    return json.dumps(dict(metadata=dict(total_size=total), weight_map=weight_map), indent=1) + "\n"


def _write_file(path: epath.Path, tensors: Mapping[str, LazyTensor], dtype: str) -> Iterator[None]:
    """Writes safetensors' format: the header's length, the header in JSON, the tensors' bytes.

    The header's metadata has a digest of each tensor. Yields before each tensor. The library's own
    `save_file` takes all of them at once.
    """
    empty = digests.of_array(np.zeros(0))  # as long as those that come in its place
    metadata = {"format": "pt"} | {digests.key_of(name): empty for name in tensors}
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
    """Returns the header of safetensors' format, its length included.

    Args:
      metadata: with "format", which transformers wants to be told.
    """
    header, end = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        start, end = end, end + _bytes(tensor, dtype)
        header[name] = dict(dtype=dtype, shape=tensor.shape, data_offsets=(start, end))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin where their elements are aligned
    return len(text).to_bytes(8, "little") + text
