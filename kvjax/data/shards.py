"""Rows by index, from ArrayRecord shards of which few are open at a time.

A data set may have ten thousand shards. How many rows each has stands in the description that lies
beside them, so that none is opened before a row of it is asked for, and the one that was not asked
for the longest is closed before too many are open. Rows that TFDS wrote are read as well: theirs
is the same format.
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

# Rows under way at once where one takes long: from a bucket, or a folder that lies elsewhere. Where
# they do not, threads would only wait for each other's hold on the interpreter.
THREADS = 32
_LONG_SECONDS = 3e-3
# A reader has a file descriptor or two and keeps where each row of its shard begins.
_MOST_READERS = 256
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_POSTSCRIPT_BYTES = 1 << 16
_INDEX_BYTES_PER_ROW = 5  # of a shard's index of rows, compressed
# Errors in reading that say nothing about what was written.
_REFUSED = re.compile(r"open\(\) failed: (?!No such file)|(?<!code: 404); reading gs://")
_READ_BYTES = 1 << 12  # ArrayRecord reads at least so much for a row


@dataclasses.dataclass(frozen=True)
class Description:
    """What TFDS's metadata say of a folder of rows.

    rows: by split, how many each shard has, in order.
    row_length: T + 1.
    dtype: of a token.
    masked: every token has whether it is trained on.
    """

    rows: dict[str, np.ndarray]
    row_length: int
    dtype: np.dtype
    masked: bool = False


def read_description(folder: epath.Path) -> Description:
    """What `packed_rows.describe` wrote to a folder, or TFDS itself.

    Raises:
      ValueError, TypeError or KeyError: it describes no such rows.
    """
    info = json_text.parse((folder / "dataset_info.json").read_bytes())
    features = json_text.parse((folder / "features.json").read_bytes())
    found = {name: f["tensor"] for name, f in features["featuresDict"]["features"].items()}
    masked = packed_rows.MASK in found
    tensor = found.get(packed_rows.FEATURE, {})
    kinds = (info["name"], info["fileFormat"], sorted(found), tensor.get("encoding"))
    names = [packed_rows.MASK] * masked + [packed_rows.FEATURE]
    if kinds != (packed_rows.ROWS, "array_record", names, "bytes"):
        raise ValueError(f"not rows of tokens, but {kinds}")
    (length,) = tensor["shape"]["dimensions"]
    if odd := {split["filepathTemplate"] for split in info["splits"]} - {_TEMPLATE}:
        raise ValueError(f"shards are named otherwise: {odd.pop()}")
    rows = {s["name"]: np.array(s["shardLengths"], np.int64) for s in info["splits"]}
    dtype = np.dtype(tensor["dtype"]).newbyteorder("<")
    return Description(rows, int(length), dtype, masked)


class PackedRows:
    """The rows of a split by index, `{"tokens": unsigned [T + 1]}`; any thread may read.

    Those of conversations may have `"mask"` too, uint8 [T + 1].

    Args:
      folder: of the shards; local, or gs://BUCKET/FOLDER, which ArrayRecord reads by itself.
      told: a context in which a row is read; errors of a reader pass through it.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        split: str,
        description: Description,
        told: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self._folder, self._split, self._told = os.fspath(folder), split, told
        self._rows = description.rows[split]
        self._ends = np.cumsum(self._rows)
        self._length = description.row_length
        self._dtypes = packed_rows.dtypes(description.dtype, description.masked)
        self._heads = packed_rows.heads(self._dtypes, self._length)
        self.in_bucket = in_bucket(self._folder)
        # Not a method of this object: in a circle, readers would stay open until it is collected.
        open_ = functools.partial(_open, self._folder, split, self._rows)
        self._readers = _Readers(open_, most_readers())
        self._take_long = self.in_bucket  # until rows of it show how long they take
        self._threads = futures.ThreadPoolExecutor(THREADS, "rows")  # starts none that is not used

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        (row,) = self.__getitems__([index])
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Several rows: one after another, or many at once where the last ones took long."""
        wanted = np.asarray(indices, np.int64)
        if not wanted.size:
            return []
        if not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()}, of {len(self)}")
        shards = np.searchsorted(self._ends, wanted, side="right")
        places = wanted - (self._ends - self._rows)[shards]
        each = self._threads.map if self._take_long else map
        with self._told():
            rows, seconds = zip(*each(self._read, shards.tolist(), places.tolist()), strict=True)
        self._take_long = sum(seconds) > _LONG_SECONDS * len(rows)
        return list(rows)

    def _read(self, shard: int, place: int) -> tuple[dict[str, np.ndarray], float]:
        """A row, and the seconds that it took."""
        start = time.perf_counter()
        try:
            with self._readers.lend(shard) as reader:
                # A range: of a list, ArrayRecord looks through the shard's whole index each time.
                (record,) = reader.read(place, place + 1)
        except RuntimeError as error:
            if not _REFUSED.search(str(error)):
                raise
            raise DataError(
                f"{self._folder}/{self._name(shard)} could not be read: {first_line(error)}. That "
                "this machine may read it, and has files and network for it, has to be seen to"
            ) from error
        row, end = {}, 0
        for name, head in self._heads.items():
            dtype, begin = self._dtypes[name], end + len(head)
            start_of, end = end, begin + self._length * dtype.itemsize
            if len(record) < end or not record.startswith(head, start_of):
                raise ValueError(f"row {place} of {self._name(shard)} is no row of tokens")
            row[name] = np.frombuffer(record, dtype, self._length, begin)
        if len(record) != end:
            raise ValueError(f"row {place} of {self._name(shard)} is no row of tokens")
        return row, time.perf_counter() - start

    def _name(self, shard: int) -> str:
        return packed_rows.shard_name(self._split, shard, len(self._rows))


def _open(folder: str, split: str, rows: np.ndarray, shard: int) -> ArrayRecordReader:
    """A reader of a shard, where each has so many rows."""
    # What it looks for first, the end of a shard, comes in one piece.
    end = 2 * _POSTSCRIPT_BYTES + _INDEX_BYTES_PER_ROW * int(rows[shard])
    options = f"readahead_buffer_size:0,max_parallelism:0,footer_prefetch_bytes:{end}"
    name = packed_rows.shard_name(split, shard, len(rows))
    path = f"{folder.rstrip('/')}/{name}"
    reader = ArrayRecordReader(path, options, file_reader_buffer_size=_READ_BYTES)
    if not reader.ok():
        reader.close()  # raises what is wrong
    if reader.num_records() != rows[shard]:
        raise ValueError(f"{name} has {reader.num_records()} rows, not {rows[shard]}")
    return reader


def most_readers() -> int:
    """How many shards a split has open at once: a quarter of what the process may open at most."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_READERS if files == resource.RLIM_INFINITY else min(_MOST_READERS, files // 4)
    return max(1, most)


@dataclasses.dataclass
class _Open:
    """A reader, or the wait for it, and how many threads have it."""

    reader: futures.Future
    users: int = 0


class _Readers:
    """Readers that stay open, at most so many: the one unused for longest makes room.

    Args:
      open_: a reader of a shard.
      most: readers open at once; who needs one more while all are in use waits.
    """

    def __init__(self, open_: Callable[[int], ArrayRecordReader], most: int):
        self._open, self._most = open_, most
        self._readers: OrderedDict[int, _Open] = OrderedDict()  # longest unused first
        self._given_back = threading.Condition()

    @contextlib.contextmanager
    def lend(self, shard: int) -> Iterator[ArrayRecordReader]:
        """The reader of a shard, open at least until it is given back."""
        lent = self._take(shard)
        try:
            yield lent.reader.result()
        finally:
            with self._given_back:
                lent.users -= 1
                self._given_back.notify()

    def _take(self, shard: int) -> _Open:
        with self._given_back:
            self._given_back.wait_for(lambda: shard in self._readers or self._room())
            if shard in self._readers:
                self._readers.move_to_end(shard)
                lent, closing = self._readers[shard], None
                lent.users += 1
                return lent
            closing = self._readers.pop(self._idle()) if len(self._readers) >= self._most else None
            lent = self._readers[shard] = _Open(futures.Future(), users=1)
        try:
            if closing is not None:
                closing.reader.result().close()
            lent.reader.set_result(self._open(shard))
        except BaseException as error:
            with self._given_back:  # who waits for it gets the error, who comes later tries again
                del self._readers[shard]
            lent.reader.set_exception(error)
        return lent

    def _room(self) -> bool:
        return len(self._readers) < self._most or self._idle() is not None

    def _idle(self) -> int | None:
        return next((shard for shard, lent in self._readers.items() if not lent.users), None)
