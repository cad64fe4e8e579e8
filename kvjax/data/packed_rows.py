"""Rows of T + 1 tokens as TFDS reads them: raw bytes in ArrayRecord, in the order of the stream.

Written here and not by a TFDS builder, so that every shard can be made by a process, or a machine,
of its own, and stays when others fail: TFDS's Beam writers sort all rows between machines, or keep
no order, and start again after a failure. A row's record is what TFDS's serializer makes of it (the
tests compare them), and the description of all shards is TFDS's own.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import os
import pathlib
from typing import NamedTuple

from array_record.python.array_record_module import ArrayRecordWriter
import numpy as np

from kvjax.data import folders
from kvjax.data.manifest import ROWS, ROWS_VERSION
from kvjax.foundation.errors import first_line

_BLOCK_TOKENS = 1 << 16  # are put together at a time
FEATURE = "tokens"
MASK = "mask"  # a second feature, of conversations: 1 byte a token, 1 if it is trained on
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
      masked: every token comes with whether it is trained on.
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
        """The stream's next tokens, 1-D."""
        self._rest[FEATURE].append(tokens)
        if MASK in self._rest:
            self._rest[MASK].append(mask)
        self._waiting += len(tokens)
        if self._waiting > max(self._T, _BLOCK_TOKENS):
            self._write_full_rows()

    def add_row(self, tokens: np.ndarray, mask: np.ndarray) -> None:
        """A row of T + 1 tokens that belongs to no stream."""
        self._write({FEATURE: tokens, MASK: mask})

    def close(self, fill: int | None) -> Shard:
        """Ends the stream.

        Args:
          fill: a token to fill the last row with; None: what fills no row is left out.
        """
        self._write_full_rows()
        (rest,) = self._rest[FEATURE]
        if fill is not None and len(rest) > 1:
            row = {name: np.zeros(self._T + 1, dtype) for name, dtype in self._dtypes.items()}
            row[FEATURE][:] = fill
            for name, (part,) in self._rest.items():
                row[name][: len(part)] = part
            self._write(row)
        with _writing(self._path):
            self.abandon()
        return Shard(self._count, self._path.stat().st_size if self._count else 0)

    def abandon(self) -> None:
        """Closes the file, whatever is in it."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write_full_rows(self) -> None:
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
    """Writes what TFDS needs to read the shards of a folder.

    Args:
      shards: by split, all of them in order.
      row_length: T + 1.
      masked: see `ShardWriter`.
    """
    import tensorflow_datasets as tfds  # Takes 0.5 s, and workers need none.

    identity = tfds.core.dataset_info.DatasetIdentity(
        name=ROWS,
        version=tfds.core.Version(ROWS_VERSION),
        data_dir=os.fspath(folder),
        module_name="kvjax.data.packed_rows",
    )
    tensor = lambda dtype: tfds.features.Tensor(
        shape=(row_length,), dtype=dtype.type, encoding="bytes"
    )
    features = {name: tensor(kind) for name, kind in dtypes(dtype, masked).items()}
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


def dtypes(dtype: np.dtype, masked: bool) -> dict[str, np.dtype]:
    """The features of a row by name, sorted as they are written."""
    return ({MASK: np.dtype("u1")} if masked else {}) | {FEATURE: dtype}


def heads(dtypes: Mapping[str, np.dtype], row_length: int) -> dict[str, bytes]:
    """What stands before the bytes of each feature of a row in a tf.train.Example."""
    sizes = {name: row_length * dtype.itemsize for name, dtype in dtypes.items()}
    return dict(zip(sizes, _heads(sizes.items()), strict=True))


def _heads(sizes: Iterable[tuple[str, int]]) -> list[bytes]:
    """What stands before the bytes of each feature, given (name, number of bytes) in order."""
    entries, total = [], 0
    for name, num_bytes in sizes:
        value = b"\x0a" + _varint(num_bytes)  # BytesList.value
        feature = b"\x0a" + _varint(len(value) + num_bytes) + value  # Feature.bytes_list
        key = b"\x0a" + _varint(len(name)) + name.encode()
        entry = key + b"\x12" + _varint(len(feature) + num_bytes) + feature
        entries.append(b"\x0a" + _varint(len(entry) + num_bytes) + entry)
        total += len(entries[-1]) + num_bytes
    return [b"\x0a" + _varint(total) + entries[0], *entries[1:]]


def _varint(n: int) -> bytes:
    found = b""
    while n > 127:
        found += bytes([n & 127 | 128])
        n >>= 7
    return found + bytes([n])
