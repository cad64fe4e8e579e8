"""Writes rows of T + 1 tokens in TFDS's format: raw bytes in ArrayRecord, in stream order.

Each shard can be made by another process or machine, and survives a failure of the others. TFDS's
own Beam writers would not do: they shuffle all rows between machines or do not keep their order,
and start over after a failure. Records equal the output of TFDS's serializer (tests compare them),
and TFDS writes the description of the shards.
"""

from collections.abc import Mapping, Sequence
import contextlib
import os
import pathlib
from typing import NamedTuple

from array_record.python.array_record_module import ArrayRecordWriter
import numpy as np

from kvjax.data import folders
from kvjax.data.manifest import ROWS, ROWS_VERSION
from kvjax.foundation.errors import first_line

_BLOCK_TOKENS = 1 << 16  # tokens to buffer before rows are written
FEATURE = "tokens"
MASK = "mask"  # second feature, for conversations: uint8 per token, 1 if it counts in the loss
_DESCRIPTION = "Rows of tokens; consecutive rows overlap by one token."


class Shard(NamedTuple):
    """Size of one file of rows."""

    rows: int
    bytes: int  # 0 if there are no rows, and thus no file


def shard_name(split: str, index: int, count: int) -> str:
    """Returns the file name of shard `index` of `count` of a split."""
    return f"{ROWS}-{split}.array_record-{index:05}-of-{count:05}"


class ShardWriter:
    """Writes a token stream as rows of sequence_length + 1 tokens.

    The last token of a row is the first of the next, so that every token but the stream's first is
    a target exactly once. Creates no file if the stream does not fill a row.

    Args:
      dtype: dtype of the rows, unsigned little-endian.
      masked: every token comes with a loss mask.
    """

    def __init__(
        self, path: pathlib.Path, sequence_length: int, dtype: np.dtype, *, masked: bool = False
    ):
        self._path, self._T, self._dtype = path, sequence_length, dtype
        self._dtypes = dtypes(dtype, masked)
        self._heads = heads(self._dtypes, sequence_length + 1)
        self._rest = {name: [] for name in self._dtypes}
        self._waiting = 0
        self._writer, self._count = None, 0

    def add(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Appends tokens, 1-D, to the stream."""
        self._rest[FEATURE].append(tokens)
        if MASK in self._rest:
            self._rest[MASK].append(mask)
        self._waiting += len(tokens)
        if self._waiting > max(self._T, _BLOCK_TOKENS):
            self._write_full_rows()

    def add_row(self, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Writes a row of T + 1 tokens that is not part of the stream."""
        self._write({FEATURE: tokens, MASK: mask})

    def close(self, fill: int | None) -> Shard:
        """Ends the stream.

        Args:
          fill: token that pads the last row; None: tokens that do not fill it are dropped.
        """
        self._write_full_rows()
        (rest,) = self._rest[FEATURE]
        if fill is not None and len(rest) > 1:
            row = {name: np.zeros(self._T + 1, dtype) for name, dtype in self._dtypes.items()}
            row[FEATURE][:] = fill
            for name, (tail,) in self._rest.items():
                row[name][: len(tail)] = tail
            self._write(row)
        with _writing(self._path):
            self.abandon()
        return Shard(self._count, self._path.stat().st_size if self._count else 0)

    def abandon(self) -> None:
        """Closes the file without completing it."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write_full_rows(self) -> None:
        # Row i holds tokens i T to i T + T, so n tokens fill (n - 1) // T rows. The rest begins
        # with the last token of the last row.
        T = self._T
        streams = {
            name: np.concatenate([np.empty(0, self._dtypes[name]), *rest])
            for name, rest in self._rest.items()
        }
        full = max(0, (len(streams[FEATURE]) - 1) // T)
        for i in range(full):
            self._write({name: s[i * T : i * T + T + 1] for name, s in streams.items()})
        self._rest = {name: [stream[full * T :]] for name, stream in streams.items()}
        self._waiting = len(self._rest[FEATURE][0])

    def _write(self, row: Mapping[str, np.ndarray]) -> None:
        record = b"".join(head + row[name].tobytes() for name, head in self._heads.items())
        with _writing(self._path):
            if self._writer is None:
                self._writer = ArrayRecordWriter(os.fspath(self._path), "group_size:1")
            self._writer.write(record)
        self._count += 1


def describe(
    folder: pathlib.Path,
    shards: Mapping[str, Sequence[Shard]],
    row_length: int,
    dtype: np.dtype,
    *,
    masked: bool = False,
) -> None:
    """Writes TFDS's description of the shards of a folder.

    Args:
      shards: all shards of each split, in order.
      row_length: T + 1.
      masked: see `ShardWriter`.
    """
    import tensorflow_datasets as tfds  # takes 0.5 s, and workers do not need it

    identity = tfds.core.dataset_info.DatasetIdentity(
        name=ROWS,
        version=tfds.core.Version(ROWS_VERSION),
        data_dir=os.fspath(folder),
        module_name="kvjax.data.packed_rows",
    )
    features = {
        name: tfds.features.Tensor(shape=(row_length,), dtype=kind.type, encoding="bytes")
        for name, kind in dtypes(dtype, masked).items()
    }
    info = tfds.core.DatasetInfo(
        builder=identity,
        description=_DESCRIPTION,
        features=tfds.features.FeaturesDict(features),
        disable_shuffling=True,
    )
    info.set_file_format("array_record")
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name=ROWS, filetype_suffix="array_record"
    )
    splits = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=[shard.rows for shard in split_shards],
            num_bytes=sum(shard.bytes for shard in split_shards),
            filename_template=template.replace(split=split),
        )
        for split, split_shards in shards.items()
    ]
    info.set_splits(tfds.core.splits.SplitDict(splits))
    info.write_to_directory(folder)


@contextlib.contextmanager
def _writing(path: pathlib.Path):
    """Turns ArrayRecord's errors of a full disk or a missing folder into a UserError."""
    with folders.writing(path.parent):
        try:
            yield
        except RuntimeError as error:
            raise OSError(first_line(error)) from error


def dtypes(dtype: np.dtype, masked: bool) -> dict[str, np.dtype]:
    """Returns the dtype of each feature of a row, sorted as in a record."""
    return ({MASK: np.dtype("u1")} if masked else {}) | {FEATURE: dtype}


def heads(dtypes: Mapping[str, np.dtype], row_length: int) -> dict[str, bytes]:
    """Returns the bytes that precede each feature's data in a row's record (a tf.train.Example)."""
    entries, total = [], 0
    for name, dtype in dtypes.items():
        num_bytes = row_length * dtype.itemsize
        value = b"\x0a" + _varint(num_bytes)  # BytesList.value
        feature = b"\x0a" + _varint(len(value) + num_bytes) + value  # Feature.bytes_list
        key = b"\x0a" + _varint(len(name)) + name.encode()
        entry = key + b"\x12" + _varint(len(feature) + num_bytes) + feature
        entries.append(b"\x0a" + _varint(len(entry) + num_bytes) + entry)
        total += len(entries[-1]) + num_bytes
    entries[0] = b"\x0a" + _varint(total) + entries[0]
    return dict(zip(dtypes, entries, strict=True))


def _varint(n: int) -> bytes:
    encoded = b""
    while n > 127:
        encoded += bytes([n & 127 | 128])
        n >>= 7
    return encoded + bytes([n])
