"""The rows of files as objects: JSON lines, Parquet, CSV; with the place of each, for messages."""

from collections.abc import Iterator
import contextlib
import csv
import hashlib
import io
import json
import lzma
import os
import re
import zlib

from etils import epath

from kvjax.data import readers
from kvjax.data import record_readers
from kvjax.foundation import json_text
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import first_line

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet", ".csv")

# May be half a surrogate pair in JSON: its escape, or bytes that Python's reader lets pass.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")

Row = dict | list[str]  # an object; the cells of a line of CSV


def read(path: epath.Path) -> Iterator[tuple[str, Row]]:
    """Each row of a file, and where it stands.

    Raises:
      DataError: another suffix, a file that is damaged or no such format; with file and row.
    """
    name = os.fspath(path)
    if name.endswith(".parquet"):
        yield from _parquet(path)
    elif name.endswith(".csv"):
        yield from _csv(path)
    elif name.endswith(SUFFIXES):
        yield from _jsonl(path)
    else:
        raise DataError(f"{name}: must end in one of {', '.join(SUFFIXES)}")


def count(path: epath.Path) -> int:
    """How many rows `read` finds in a file; of Parquet its index says so."""
    if not os.fspath(path).endswith(".parquet"):
        return sum(1 for _ in read(path))
    with _open_parquet(path) as table:
        return table.metadata.num_rows


def digest(paths: list[epath.Path]) -> str:
    """SHA-256 of the bytes of files, one after the other."""
    found = hashlib.sha256()
    for path in paths:
        with readers.open_file(path) as file:
            while block := file.read(1 << 20):
                found.update(block)
    return found.hexdigest()


def _jsonl(path: epath.Path) -> Iterator[tuple[str, dict]]:
    name = os.fspath(path)
    with readers.open_file(path) as file:
        try:
            for number, line in enumerate(record_readers.decompressed(file, name), start=1):
                if not line.strip():
                    continue
                place = f"{name}, line {number}"
                try:
                    row = json_text.parse(line)
                except ValueError as error:  # also what isn't UTF-8
                    raise DataError(f"{place} is no JSON: {first_line(error)}") from error
                if _SURROGATE.search(line) and not _is_text(row):
                    raise DataError(f"{place}: holds half a surrogate pair, which is no text")
                if not isinstance(row, dict):
                    raise DataError(f"{place} must be an object, not {type(row).__name__}")
                yield place, row
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            raise DataError(
                f"{name} can't be decompressed: {first_line(error)}. Is it truncated? Fetch it "
                "again"
            ) from error


def _is_text(row: object) -> bool:
    """True if all texts of a row, keys too, can be written as UTF-8."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(path: epath.Path) -> Iterator[tuple[str, dict]]:
    import pyarrow

    name, number = os.fspath(path), 0
    with _open_parquet(path) as table:
        try:
            for batch in table.iter_batches(256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{name}, row {number}", row
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{name} cannot be read after row {number}: {first_line(error)}. Fetch it again"
            ) from error


@contextlib.contextmanager
def _open_parquet(path: epath.Path):
    import pyarrow  # Takes 0.3 s.
    import pyarrow.parquet as pq

    with readers.open_file(path) as file:
        try:
            table = pq.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{os.fspath(path)} is no whole Parquet file: {first_line(error)}. Fetch it again"
            ) from error
        yield table


def _csv(path: epath.Path) -> Iterator[tuple[str, list[str]]]:
    name = os.fspath(path)
    with readers.open_file(path) as file:
        try:
            text = file.read().decode("utf-8-sig")
            for number, cells in enumerate(csv.reader(io.StringIO(text, newline="")), start=1):
                if cells:
                    yield f"{name}, row {number}", cells
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{name} is no CSV in UTF-8: {first_line(error)}") from error
