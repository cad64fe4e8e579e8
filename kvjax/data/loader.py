"""Reads batches of packed rows, from any position and in the same order for any number of hosts."""

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

# One thread reads ahead of the step; more gain nothing, since reading holds the GIL.
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
# Several small batches are read at once, to keep all `shards.THREADS` busy.
_BUCKET_READ_OPTIONS = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)
# URL schemes that ArrayRecord reads; data in other buckets must be copied to a folder.
_BUCKETS = ("gs",)
# Rows of a split that the digest covers, since reading all would take minutes.
_DIGEST_ROWS = 32


@dataclasses.dataclass(frozen=True)
class PackedDataset:
    """A prepared data set: its rows, tokenizer and manifest.

    token_bytes: int32 [V], number of raw bytes of each token, 0 for special tokens; its sum over
      targets is the denominator of bits per byte.
    """

    path: epath.Path
    tokenizer: tokenizer_lib.Tokenizer
    token_bytes: np.ndarray
    info: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """V, including special tokens."""
        return self.tokenizer.vocab_size

    @property
    def is_masked(self) -> bool:
        """True if rows have a loss mask."""
        return self.info.get("masked", False)

    @property
    def sequence_length(self) -> int:
        """T; a row holds T + 1 tokens."""
        return self.info["config"]["sequence_length"]

    def num_rows(self, split: str) -> int:
        """Returns the number of rows of `train` or `validation`."""
        return self.info["splits"][split]["rows"]

    def rows(self, split: str) -> shards.PackedRows:
        """Returns the rows of a split by index, in text order: `{"tokens": unsigned [T + 1]}`.

        Every call returns the same object, so that evaluations share its open files.

        Raises:
          DamagedDataError: the description of the rows is damaged. (A damaged file of rows raises
            the same error when one of its rows is read.)
          DataError: the rows are in a bucket that ArrayRecord does not read.
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
        errors = functools.partial(_damage_as_error, self.path, self.info["config"])
        with errors():
            description = shards.read_description(folder)
            rows = shards.PackedRows(folder, split, description, errors)
            if len(rows) != self.num_rows(split):
                raise ValueError(f"{len(rows)} rows of {split}, not {self.num_rows(split)}")
        return rows

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the vocabulary, the numbers of rows, and 32 evenly spaced rows of each split.

        It does not depend on the folder or the time of preparation.
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
    except Exception as error:  # JSON, Riegeli and Google's client have no common class
        raise manifest.DamagedDataError(path, first_line(error), config) from error


def open_dataset(path: epath.PathLike) -> PackedDataset:
    """Opens a folder that `prepare` wrote.

    Raises:
      UserError: see `manifest.read`; the tokenizer cannot be read.
    """
    path = runtime.path("the folder of prepared data", path)
    info = manifest.read(path)
    tokenizer = tokenizer_lib.load(path / manifest.TOKENIZER)
    return PackedDataset(path, tokenizer, tokenizer.token_bytes(), info)


def share(sharding: jax.sharding.Sharding, batch_size: int) -> tuple[int, int]:
    """Returns (i, n): this process reads the i-th of n equal shares of a batch.

    Usually n is the number of processes. If a row or the model is sharded across hosts, processes
    whose devices hold the same rows read the same share.

    Args:
      sharding: sharding of a batch [batch_size, T + 1], over rows only.

    Raises:
      DataError: devices of two processes share some of their rows but not all.
    """
    ranges: dict[int, set] = {}  # by process: row ranges [start, stop) of its devices
    for device, (index, *_) in sharding.devices_indices_map((batch_size, 1)).items():
        start, stop, _ = index.indices(batch_size)
        ranges.setdefault(device.process_index, set()).add((start, stop))
    shares = sorted({tuple(sorted(process_ranges)) for process_ranges in ranges.values()})
    sizes = [sum(stop - start for start, stop in share) for share in shares]
    if len(set(sizes)) > 1 or sum(sizes) != batch_size:
        raise DataError(
            f"config.mesh: the devices of the processes hold {sizes} of {batch_size} rows, which "
            "are no equal shares. Choose sequence x tensor such that it divides the number of "
            "devices of a process, or is a multiple of it"
        )
    return shares.index(tuple(sorted(ranges[jax.process_index()]))), len(shares)


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
    """Returns endless batches, int32 [batch_size / process_count, T + 1], reshuffled each epoch.

    All processes together consume one stream of rows: one permutation of the split after another.
    Row i of the stream belongs to process i mod process_count. So one integer, `position`, is the
    whole state of the data, and any position can be reached at no cost.

    If rows have a loss mask, a token that does not count is encoded as ~token, which is negative.

    Args:
      dataset: from `open_dataset`.
      sequence_length: T, at most that of the packed rows; longer rows are cut to T + 1 tokens.
      batch_size: rows of all processes together; a multiple of `process_count`.
      seed: seed of the permutations, 0 <= seed < 2**32.
      position: rows consumed so far by all processes; a multiple of `batch_size`.
      process_index, process_count: see `share`.

    Raises:
      ValueError: at the call, for arguments out of range, or a split smaller than a batch.
    """
    _check(dataset, sequence_length, batch_size, process_count)
    if position < 0 or position % batch_size:
        raise DataError(
            f"position={position} must be a non-negative multiple of batch_size={batch_size}, since"
            " rows are consumed in batches. To resume with another batch size, pick one that"
            " divides the position."
        )
    num_rows = dataset.num_rows("train")
    if num_rows < batch_size:
        raise DataError(
            f"the train split has {num_rows} rows, fewer than batch_size={batch_size}: lower"
            " batch_size, or prepare more text or shorter rows."
        )
    rows = dataset.rows("train")
    # Grain shuffles and batches indices only, so that `batch_fn` reads a batch's rows in one call
    # (Grain itself would read them one by one). `repeat` reshuffles in every epoch.
    order = grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat()
    # This process's rows of the stream: position + process_index + k process_count, k = 0, 1, ...
    batches = order[position + process_index :: process_count].batch(
        batch_size // process_count,
        drop_remainder=True,  # the stream is endless; its length, rounded up, would exceed 2**63
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
    """Returns the validation rows once, in order: int32 [batch_size / process_count, T + 1].

    The last batch is padded with rows of BOS tokens, whose byte counts are 0, so that all processes
    get the same number of batches. Loss masks are encoded as in `train_batches`.

    Args:
      limit: read at most this many rows; 0: all.
    """
    _check(dataset, sequence_length, batch_size, process_count)
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
    """Stacks rows as int32 [rows, T + 1], with ~token for masked tokens."""

    def stack(name: str) -> np.ndarray:
        return np.stack([row[name][: sequence_length + 1] for row in rows])

    tokens = stack(packed_rows.FEATURE).astype(np.int32)
    if packed_rows.MASK not in rows[0]:
        return tokens
    return np.where(stack(packed_rows.MASK), tokens, ~tokens)


def _check(
    dataset: PackedDataset,
    sequence_length: int,
    batch_size: int,
    process_count: int,
) -> None:
    if batch_size < 1 or batch_size % process_count:
        raise DataError(
            f"batch_size={batch_size} must be a positive multiple of process_count={process_count}."
        )
    packed = dataset.sequence_length
    if not 1 <= sequence_length <= packed:
        needed = dataset.info["config"] | {"sequence_length": max(1, sequence_length)}
        raise DataError(
            f"sequence_length={sequence_length} must be at least 1 and at most the {packed} that"
            f" the rows in {os.fspath(dataset.path)} were packed with. Prepare longer rows:"
            f" `{config_lib.command(needed)}`."
        )
    if sequence_length < packed:
        warn(
            f"sequence_length={sequence_length} is less than the {packed} of the rows in "
            f"{os.fspath(dataset.path)}: the rest of each row is not used"
        )
