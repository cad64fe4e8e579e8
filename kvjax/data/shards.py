"""Reads rows by index from ArrayRecord shards, keeping few of them open.

A data set may have ten thousand shards. A shard is opened when one of its rows is read for the
first time, since the description in the folder has the number of rows of every shard. If too many
are open, the least recently used one is closed. Rows written by TFDS can be read as well.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import os
import re
import resource
import threading
import time

from array_record.python.array_record_module import ArrayRecordReader
from etils import epath
import numpy as np

from kvjax.data import packed_rows
from kvjax.foundation import json_text
from kvjax.foundation.errors import DataError, first_line
from kvjax.foundation.files import in_bucket

# Number of threads that read rows if a row takes longer than _SLOW_SECONDS (from a bucket or a
# network file system). From a fast disk, threads would only wait for the GIL.
THREADS = 32
_SLOW_SECONDS = 3e-3
# A reader holds one or two file descriptors and the offsets of all rows of its shard.
_MAX_READERS = 256
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_POSTSCRIPT_BYTES = 1 << 16
_INDEX_BYTES_PER_ROW = 5  # size of a shard's compressed index per row
# Read errors that do not mean damage: permissions, file limits, network.
_REFUSED = re.compile(r"open\(\) failed: (?!No such file)|(?<!code: 404); reading gs://")
_READ_BYTES = 1 << 12  # least number of bytes that ArrayRecord reads per row


@dataclasses.dataclass(frozen=True)
class Description:
    """TFDS's description of a folder of rows."""

    rows: dict[str, np.ndarray]  # by split: number of rows of each shard, in order
    row_length: int  # T + 1
    dtype: np.dtype  # of tokens
    masked: bool = False  # rows have a loss mask


def read_description(folder: epath.Path) -> Description:
    """Reads the description that `packed_rows.describe`, or TFDS itself, wrote to a folder.

    Raises:
      ValueError, TypeError or KeyError: the description is of other data.
    """
    info = json_text.parse((folder / "dataset_info.json").read_bytes())
    features = json_text.parse((folder / "features.json").read_bytes())
    features = features["featuresDict"]["features"]
    masked = packed_rows.MASK in features
    tensor = features.get(packed_rows.FEATURE, {"tensor": {}})["tensor"]
    content = (info["name"], info["fileFormat"], sorted(features), tensor.get("encoding"))
    names = [packed_rows.MASK] * masked + [packed_rows.FEATURE]
    if content != (packed_rows.ROWS, "array_record", names, "bytes"):
        raise ValueError(f"not rows of tokens, but {content}")
    (length,) = tensor["shape"]["dimensions"]
    if unknown := {split["filepathTemplate"] for split in info["splits"]} - {_TEMPLATE}:
        raise ValueError(f"unknown names of shards: {unknown.pop()}")
    rows = {s["name"]: np.array(s["shardLengths"], np.int64) for s in info["splits"]}
    dtype = np.dtype(tensor["dtype"]).newbyteorder("<")
    return Description(rows, int(length), dtype, masked)


class PackedRows:
    """The rows of a split by index, `{"tokens": unsigned [T + 1]}`; thread-safe.

    Rows with a loss mask have `"mask"` too, uint8 [T + 1].

    Args:
      folder: folder of the shards: local, or gs://BUCKET/FOLDER, which ArrayRecord reads itself.
      errors: context manager in which rows are read; may translate exceptions.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        split: str,
        description: Description,
        errors: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self._folder, self._split, self._errors = os.fspath(folder), split, errors
        self._rows = description.rows[split]
        self._ends = np.cumsum(self._rows)
        self._length = description.row_length
        self._dtypes = packed_rows.dtypes(description.dtype, description.masked)
        self._heads = packed_rows.heads(self._dtypes, self._length)
        self.in_bucket = in_bucket(self._folder)
        # Not a bound method: a reference cycle would keep readers open until garbage collection.
        open_ = functools.partial(_open, self._folder, split, self._rows)
        self._readers = _Readers(open_, max_readers())
        self._is_slow = self.in_bucket  # first guess; updated by every read
        self._threads = futures.ThreadPoolExecutor(THREADS, "rows")  # starts threads on demand

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        (row,) = self.__getitems__([index])
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Returns several rows; reads them in threads if the last rows read were slow."""
        wanted = np.asarray(indices, np.int64)
        if not wanted.size:
            return []
        if not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()}, of {len(self)}")
        # The first of the cumulative row counts above an index is that of its shard.
        shards = np.searchsorted(self._ends, wanted, side="right")
        offsets = wanted - (self._ends - self._rows)[shards]
        mapped = self._threads.map if self._is_slow else map
        with self._errors():
            rows, seconds = zip(*mapped(self._read, shards.tolist(), offsets.tolist()), strict=True)
        self._is_slow = sum(seconds) > _SLOW_SECONDS * len(rows)
        return list(rows)

    def _read(self, shard: int, index: int) -> tuple[dict[str, np.ndarray], float]:
        """Returns row `index` of a shard, and the seconds that reading it took."""
        start = time.perf_counter()
        try:
            with self._readers.borrow(shard) as reader:
                # Not a list of indices, for which ArrayRecord scans the shard's whole index.
                (record,) = reader.read(index, index + 1)
        except RuntimeError as error:
            if not _REFUSED.search(str(error)):
                raise
            raise DataError(
                f"{self._folder}/{self._name(shard)} could not be read: {first_line(error)}. Check "
                "its permissions, the limit of open files and the network"
            ) from error
        # A record has, for each feature, a constant protobuf header and then the raw bytes.
        row, end = {}, 0
        for name, head in self._heads.items():
            dtype, begin = self._dtypes[name], end + len(head)
            header_start, end = end, begin + self._length * dtype.itemsize
            if len(record) < end or not record.startswith(head, header_start):
                raise ValueError(f"row {index} of {self._name(shard)} is not a row of tokens")
            row[name] = np.frombuffer(record, dtype, self._length, begin)
        if len(record) != end:
            raise ValueError(f"row {index} of {self._name(shard)} is not a row of tokens")
        return row, time.perf_counter() - start

    def _name(self, shard: int) -> str:
        return packed_rows.shard_name(self._split, shard, len(self._rows))


def _open(folder: str, split: str, rows: np.ndarray, shard: int) -> ArrayRecordReader:
    """Opens a reader of a shard, and checks its number of rows."""
    # The postscript and the index of rows, at the shard's end, are read in one request.
    footer_bytes = 2 * _POSTSCRIPT_BYTES + _INDEX_BYTES_PER_ROW * int(rows[shard])
    options = f"readahead_buffer_size:0,max_parallelism:0,footer_prefetch_bytes:{footer_bytes}"
    name = packed_rows.shard_name(split, shard, len(rows))
    path = f"{folder.rstrip('/')}/{name}"
    reader = ArrayRecordReader(path, options, file_reader_buffer_size=_READ_BYTES)
    if not reader.ok():
        reader.close()  # raises the error
    if reader.num_records() != rows[shard]:
        raise ValueError(f"{name} has {reader.num_records()} rows, not {rows[shard]}")
    return reader


def max_readers() -> int:
    """Returns the number of shards that a split may have open: a quarter of the file limit."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_READERS if files == resource.RLIM_INFINITY else min(_MAX_READERS, files // 4)
    return max(1, limit)


@dataclasses.dataclass
class _Entry:
    """A reader, open or being opened, and the number of threads that use it."""

    reader: futures.Future
    users: int = 0


class _Readers:
    """An LRU cache of open readers, shared by threads.

    Args:
      open_: opens the reader of a shard.
      limit: maximum number of open readers; a thread that needs one more waits.
    """

    def __init__(self, open_: Callable[[int], ArrayRecordReader], limit: int):
        self._open, self._limit = open_, limit
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._returned = threading.Condition()

    @contextlib.contextmanager
    def borrow(self, shard: int) -> Iterator[ArrayRecordReader]:
        """Yields the reader of a shard, which stays open while the context lasts."""
        entry = self._acquire(shard)
        try:
            yield entry.reader.result()
        finally:
            with self._returned:
                entry.users -= 1
                self._returned.notify()

    def _acquire(self, shard: int) -> _Entry:
        with self._returned:
            self._returned.wait_for(lambda: shard in self._entries or self._has_room())
            if shard in self._entries:
                self._entries.move_to_end(shard)
                entry = self._entries[shard]
                entry.users += 1
                return entry
            evicted = None
            if len(self._entries) >= self._limit:
                evicted = self._entries.pop(self._idle())
            entry = self._entries[shard] = _Entry(futures.Future(), users=1)
        # Open and close outside the lock: other threads wait for the future instead.
        try:
            if evicted is not None:
                evicted.reader.result().close()
            entry.reader.set_result(self._open(shard))
        except BaseException as error:
            with self._returned:  # waiting threads get the error, later ones try again
                del self._entries[shard]
            entry.reader.set_exception(error)
        return entry

    def _has_room(self) -> bool:
        return len(self._entries) < self._limit or self._idle() is not None

    def _idle(self) -> int | None:
        """Returns the least recently used shard that no thread uses."""
        return next((shard for shard, entry in self._entries.items() if not entry.users), None)
