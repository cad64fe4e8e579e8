"""Batches of packed rows from any position on, the same for any number of processes."""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from typing import Any

from etils import epath
import grain
import jax
import numpy as np

from kvjax.data import (
    config as config_lib,
    manifest,
    packed_rows,
    shards,
    tokenizer as tokenizer_lib,
)
from kvjax.foundation import runtime
from kvjax.foundation.errors import DataError, UserError, first_line, warn

# One thread reads ahead of the step; more gain nothing, for reading holds the interpreter's lock.
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
# Batches under way at once keep a bucket's threads (`shards.THREADS`) busy, however small.
_BUCKET_READ_OPTIONS = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)
# What ArrayRecord reads by itself; epath's other buckets have to be copied.
_BUCKETS = ("gs",)
# Rows of a split that tell it from another one: all of them would take minutes to read.
_DIGEST_ROWS = 32


@dataclasses.dataclass(frozen=True)
class PackedDataset:
    """A prepared data set: its rows, its tokenizer, and what `dataset.json` says about it.

    token_bytes: int32 [V], the raw bytes of each token, 0 for specials: bits per byte divide by
      their sum over targets.
    """

    path: epath.Path
    tokenizer: tokenizer_lib.Tokenizer
    token_bytes: np.ndarray
    info: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """V, specials included."""
        return self.tokenizer.vocab_size

    @property
    def is_masked(self) -> bool:
        """Whether rows say of every token if it is trained on."""
        return self.info.get("masked", False)

    @property
    def sequence_length(self) -> int:
        """T: a row holds T + 1 tokens."""
        return self.info["config"]["sequence_length"]

    def num_rows(self, split: str) -> int:
        """The number of rows of `train` or `validation`."""
        return self.info["splits"][split]["rows"]

    def rows(self, split: str) -> shards.PackedRows:
        """The rows of a split by index, in the text's order: `{"tokens": unsigned [T + 1]}`.

        The same object each time: what it has open serves every evaluation.

        Raises:
          DamagedDataError: the description of the rows is not as it was written; of what comes
            back, also where a file of rows is not.
          DataError: they lie in a bucket of a kind that rows are not read from.
        """
        if split not in self._opened:
            self._opened[split] = self._open(split)
        return self._opened[split]

    @functools.cached_property
    def _opened(self) -> dict[str, shards.PackedRows]:
        return {}

    def _open(self, split: str) -> shards.PackedRows:
        folder = self.path / manifest.ROWS / manifest.ROWS_VERSION
        scheme, separator, _ = os.fspath(self.path).partition("://")
        if separator and scheme not in _BUCKETS:
            raise DataError(
                f"{os.fspath(self.path)}: rows are read from a folder or a gs:// bucket, not from "
                f"{scheme}://. Copy it to a folder and give config.data.source=prepared:FOLDER"
            )
        with _damage_as_error(self.path, self.info["config"]):
            description = shards.read_description(folder)
            told = functools.partial(_damage_as_error, self.path, self.info["config"])
            rows = shards.PackedRows(folder, split, description, told)
            if len(rows) != self.num_rows(split):
                raise ValueError(f"{len(rows)} rows of {split}, not {self.num_rows(split)}")
        return rows

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the vocabulary, the numbers of rows, and some rows spread over each split.

        The same wherever the folder lies, whatever it is called and whenever it was prepared.
        """
        vocabulary = sorted(self.tokenizer.vocabulary().items(), key=lambda item: item[1])
        digest = hashlib.sha256(json.dumps(dict(vocabulary)).encode())
        for split in ("train", "validation"):
            count = self.num_rows(split)
            spread = np.linspace(0, count - 1, min(count, _DIGEST_ROWS)).astype(int).tolist()
            rows = _stack(self.rows(split).__getitems__(spread), self.sequence_length)
            digest.update(f"{split} {count} {rows.shape}".encode() + rows.astype("<i4").tobytes())
        return digest.hexdigest()[:20]


@contextlib.contextmanager
def _damage_as_error(path: epath.Path, config: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:  # of JSON, Riegeli, Google's client: each has its own
        raise manifest.DamagedDataError(path, first_line(error), config) from error


def open_dataset(path: epath.PathLike) -> PackedDataset:
    """The data set that `prepare` wrote to this folder.

    Raises:
      UserError: see `manifest.read`; a tokenizer that cannot be read.
    """
    path = runtime.path("the folder of prepared data", path)
    info = manifest.read(path)
    tokenizer = tokenizer_lib.load(path / manifest.TOKENIZER)
    return PackedDataset(path, tokenizer, tokenizer.token_bytes(), info)


def share(sharding: jax.sharding.Sharding, batch_size: int) -> tuple[int, int]:
    """Which part of a batch this process reads, and into how many parts it is cut.

    As many as there are processes, where each has devices with rows of its own; where rows go to
    the devices of several processes (a row or a model split between hosts), all of these read them.

    Args:
      sharding: of a batch [batch_size, T + 1], whose rows alone are split.

    Raises:
      DataError: devices of different processes have some of their rows in common, not all.
    """
    blocks: dict[int, set] = {}  # of rows, by process: a device's first one and the one after
    for device, (index, *_) in sharding.devices_indices_map((batch_size, 1)).items():
        first, end, _ = index.indices(batch_size)
        blocks.setdefault(device.process_index, set()).add((first, end))
    parts = sorted({tuple(sorted(mine)) for mine in blocks.values()})
    sizes = [sum(end - first for first, end in part) for part in parts]
    if len(set(sizes)) > 1 or sum(sizes) != batch_size:
        raise DataError(
            f"config.mesh: process by process the devices hold {sizes} of "
            f"{batch_size} rows, some of them twice. Let sequence x tensor divide the devices of a "
            "process, or be a multiple of them"
        )
    return parts.index(tuple(sorted(blocks[jax.process_index()]))), len(parts)


def train_batches(
    dataset: PackedDataset,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    position: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[np.ndarray]:
    """Endless batches, int32 [batch_size / process_count, T + 1], shuffled anew each epoch.

    All processes together consume one stream of rows, a permutation of the split after another; row
    i of the stream belongs to process i mod process_count. So a position is one integer, and
    starting at any takes no time.

    Where rows have a mask, a token that is not trained on comes as ~token, which is negative.

    Args:
      dataset: from `open_dataset`.
      sequence_length: T, at most the packed rows'; of longer rows the first T + 1 tokens are used.
      batch_size: rows in a batch of all processes together; a multiple of `process_count`.
      seed: of the permutations, 0 <= seed < 2**32.
      position: rows consumed so far by all processes together; a multiple of `batch_size`.
      process_index: which process this is.
      process_count: how many there are.

    Raises:
      ValueError: at the call, for arguments that can't be, and for a split with fewer rows than a
        batch.
    """
    _check(dataset, sequence_length, batch_size, process_index, process_count)
    if not 0 <= seed < 1 << 32:
        raise DataError(f"seed={seed} must be in [0, 2**32).")
    if position < 0 or position % batch_size:
        raise DataError(
            f"position={position} must be a multiple of batch_size={batch_size}, not negative: rows"
            " are consumed by batches. To resume with another batch size, pick one that divides"
            " the position."
        )
    num_rows = dataset.num_rows("train")
    if num_rows < batch_size:
        raise DataError(
            f"the train split has {num_rows} rows, and batch_size={batch_size} needs as many: lower"
            " batch_size, or prepare more text or shorter rows."
        )
    rows = dataset.rows("train")
    # Batches of indices, not of rows: Grain fetches a batch's elements one by one.
    order = grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat()
    batches = order[position + process_index :: process_count].batch(
        batch_size // process_count,
        drop_remainder=True,  # Endless, there is none; but Grain rounds its length up, past 2**63.
        batch_fn=lambda indices: _stack(rows.__getitems__(indices), sequence_length),
    )
    options = _BUCKET_READ_OPTIONS if rows.in_bucket else _READ_OPTIONS
    return iter(batches.to_iter_dataset(options))


def validation_batches(
    dataset: PackedDataset,
    *,
    sequence_length: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    limit: int = 0,
) -> Iterator[np.ndarray]:
    """The validation rows once, in order: int32 [batch_size / process_count, T + 1].

    Masks as in `train_batches`.

    The last batch is filled with rows of BOS, which count no bytes; all processes get the same
    number of batches.

    Args:
      limit: rows to read at most; 0: all.
    """
    _check(dataset, sequence_length, batch_size, process_index, process_count)
    rows, num_rows = dataset.rows("validation"), dataset.num_rows("validation")
    num_rows = min(num_rows, limit or num_rows)

    def batches() -> Iterator[np.ndarray]:
        for start in range(0, num_rows, batch_size):
            batch = np.full(
                (batch_size // process_count, sequence_length + 1),
                dataset.tokenizer.bos_id,
                np.int32,
            )
            indices = range(start + process_index, min(start + batch_size, num_rows), process_count)
            if indices:
                batch[: len(indices)] = _stack(rows.__getitems__(indices), sequence_length)
            yield batch

    return batches()


def _stack(rows: list[dict[str, np.ndarray]], sequence_length: int) -> np.ndarray:
    stack = lambda name: np.stack([row[name][: sequence_length + 1] for row in rows])
    tokens = stack(packed_rows.FEATURE).astype(np.int32)
    if packed_rows.MASK not in rows[0]:
        return tokens
    return np.where(stack(packed_rows.MASK), tokens, ~tokens)


def _check(
    dataset: PackedDataset,
    sequence_length: int,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> None:
    if not 0 <= process_index < process_count:
        raise DataError(
            f"process_index={process_index} must be in [0, process_count={process_count})."
        )
    if batch_size < 1 or batch_size % process_count:
        raise DataError(
            f"batch_size={batch_size} must be a positive multiple of process_count={process_count}."
        )
    packed = dataset.sequence_length
    if not 1 <= sequence_length <= packed:
        again = dataset.info["config"] | {"sequence_length": max(1, sequence_length)}
        raise DataError(
            f"sequence_length={sequence_length} must be at least 1 and at most the {packed} that"
            f" the rows in {os.fspath(dataset.path)} were packed with. Prepare longer rows:"
            f" `{config_lib.command(again)}`."
        )
    if sequence_length < packed:
        warn(
            f"sequence_length={sequence_length} is less than the rows' {packed} in "
            f"{os.fspath(dataset.path)}: the rest of each row is not used"
        )
