"""Rows of T + 1 tokens as TFDS reads them: raw bytes in ArrayRecord, in the order of the stream.

Written here and not by a TFDS builder, so that every shard can be made by a process, or a machine,
of its own, and stays when others fail: TFDS's Beam writers sort all rows between machines, or keep
no order, and start again after a failure. A row's record is what TFDS's serializer makes of it (the
tests compare them), and the description of all shards is TFDS's own.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import os
import pathlib
from typing import NamedTuple

from array_record.python.array_record_module import ArrayRecordWriter
import numpy as np

from kvjax.data import folders
from kvjax.data.manifest import ROWS
from kvjax.data.manifest import ROWS_VERSION
from kvjax.foundation.errors import first_line

_BLOCK_TOKENS = 1 << 16  # are put together at a time
FEATURE = "tokens"
_DESCRIPTION = "Rows of tokens; consecutive rows overlap by one token."


class Shard(NamedTuple):
    """What one file has of a split."""

    rows: int
    bytes: int  # of its file; 0: no rows and no file


def shard_name(split: str, index: int, count: int) -> str:
    """The file of a split's shard `index` of `count`."""
    return f"{ROWS}-{split}.array_record-{index:05}-of-{count:05}"


class ShardWriter:
    """Writes a stream of tokens as rows of sequence_length + 1; no file if it fills none.

    Rows share their last token with the next one's first, so that every token but the stream's
    first is a target once.

    Args:
      dtype: of rows, unsigned, little end first.
    """

    def __init__(self, path: pathlib.Path, sequence_length: int, dtype: np.dtype):
        self._path, self._T, self._dtype = path, sequence_length, dtype
        self._head = record_head((sequence_length + 1) * dtype.itemsize)
        self._rest, self._waiting = [], 0
        self._writer, self._count = None, 0

    def add(self, tokens: np.ndarray) -> None:
        """The stream's next tokens, 1-D."""
        self._rest.append(tokens)
        self._waiting += len(tokens)
        if self._waiting > max(self._T, _BLOCK_TOKENS):
            self._write_full_rows()

    def close(self, fill: int | None) -> Shard:
        """Ends the stream.

        Args:
          fill: a token to fill the last row with; None: what fills no row is left out.
        """
        self._write_full_rows()
        (rest,) = self._rest
        if fill is not None and len(rest) > 1:
            row = np.full(self._T + 1, fill, self._dtype)
            row[: len(rest)] = rest
            self._write(row.tobytes())
        with _writing(self._path):
            self.abandon()
        return Shard(self._count, self._path.stat().st_size if self._count else 0)

    def abandon(self) -> None:
        """Closes the file, whatever is in it."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write_full_rows(self) -> None:
        T, stream = self._T, np.concatenate([np.empty(0, self._dtype), *self._rest])
        full = max(0, (len(stream) - 1) // T)
        for i in range(full):
            self._write(stream[i * T : i * T + T + 1].tobytes())
        self._rest = [stream[full * T :]]
        self._waiting = len(self._rest[0])

    def _write(self, row: bytes) -> None:
        with _writing(self._path):
            if self._writer is None:
                self._writer = ArrayRecordWriter(os.fspath(self._path), "group_size:1")
            self._writer.write(self._head + row)
        self._count += 1


def describe(
    folder: pathlib.Path, shards: Mapping[str, Sequence[Shard]], row_length: int, dtype: np.dtype
) -> None:
    """Writes what TFDS needs to read the shards of a folder.

    Args:
      shards: by split, all of them in order.
      row_length: T + 1.
    """
    import tensorflow_datasets as tfds  # Takes 0.5 s, and workers need none.

    identity = tfds.core.dataset_info.DatasetIdentity(
        name=ROWS,
        version=tfds.core.Version(ROWS_VERSION),
        data_dir=os.fspath(folder),
        module_name="kvjax.data.packed_rows",
    )
    tokens = tfds.features.Tensor(shape=(row_length,), dtype=dtype.type, encoding="bytes")
    info = tfds.core.DatasetInfo(
        builder=identity,
        description=_DESCRIPTION,
        features=tfds.features.FeaturesDict({FEATURE: tokens}),
        disable_shuffling=True,
    )
    info.set_file_format("array_record")
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name=ROWS, filetype_suffix="array_record"
    )
    splits = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=[shard.rows for shard in found],
            num_bytes=sum(shard.bytes for shard in found),
            filename_template=template.replace(split=split),
        )
        for split, found in shards.items()
    ]
    info.set_splits(tfds.core.splits.SplitDict(splits))
    info.write_to_directory(folder)


@contextlib.contextmanager
def _writing(path: pathlib.Path):
    """A disk without room, or a folder that is gone, as a message: ArrayRecord has its own."""
    with folders.writing(path.parent):
        try:
            yield
        except RuntimeError as error:
            raise OSError(first_line(error)) from error


def record_head(num_bytes: int) -> bytes:
    """What stands before the bytes of a row in a tf.train.Example of this one feature."""
    value = b"\x0a" + _varint(num_bytes)  # BytesList.value
    feature = b"\x0a" + _varint(len(value) + num_bytes) + value  # Feature.bytes_list
    key = b"\x0a" + _varint(len(FEATURE)) + FEATURE.encode()
    entry = key + b"\x12" + _varint(len(feature) + num_bytes) + feature
    features = b"\x0a" + _varint(len(entry) + num_bytes) + entry
    return b"\x0a" + _varint(len(features) + num_bytes) + features


def _varint(n: int) -> bytes:
    found = b""
    while n > 127:
        found += bytes([n & 127 | 128])
        n >>= 7
    return found + bytes([n])
