"""Reads rows of files as objects: JSON lines, Parquet, CSV; with the place of each, for messages.

The one reader of these formats: for texts (`record_readers`), conversations and questions.
"""

import codecs
from collections.abc import Callable, Iterator
import contextlib
import csv
import gzip
import hashlib
import io
import os
from typing import Any

from etils import epath

from kvjax.data import formats, readers
from kvjax.foundation import json_text
from kvjax.foundation.errors import DataError, first_line

SUFFIXES = (*formats.LINES, formats.PARQUET, formats.CSV)
_BATCH_ROWS = 256

Row = dict | list[str]  # an object; the cells of a line of CSV


def read(path: epath.Path) -> Iterator[tuple[str, Row]]:
    """Yields each row of a file, and where it stands.

    Raises:
      DataError: another suffix, a file that is damaged or no such format, JSON that readers take
        differently (see `json_text.parse_strictly`), columns of one name; with file and row.
    """
    name = os.fspath(path)
    if formats.suffix(name, (formats.PARQUET,)):
        yield from parquet_rows(path)
    elif formats.suffix(name, (formats.CSV,)):
        yield from _csv(path)
    elif formats.suffix(name, formats.LINES):
        yield from json_lines(path, parse=json_text.parse_strictly)
    else:
        raise DataError(f"{name}: must end in one of {formats.listed(SUFFIXES)}")


def count(path: epath.Path) -> int:
    """Returns how many rows `read` finds in a file; of Parquet its index says so."""
    if not formats.suffix(os.fspath(path), (formats.PARQUET,)):
        return sum(1 for _ in read(path))
    with open_parquet(path) as table:
        return table.metadata.num_rows


def digest(paths: list[epath.Path]) -> str:
    """Returns SHA-256 of the bytes of files, one after the other."""
    found = hashlib.sha256()
    for path in paths:
        with readers.open_file(path) as file:
            while block := file.read(readers.BLOCK_BYTES):
                found.update(block)
    return found.hexdigest()


def is_damage(error: Exception) -> bool:
    """Returns True if an error of reading says that a file is broken, not a disk or a network.

    Errors of disks have a number, those of networks a type of their own; Arrow's have neither.
    """
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return type(error) is OSError and error.errno is None
    return True


# -- JSON lines ------------------------------------------------------------------------------------


def json_lines(
    path: epath.Path,
    start: int = 0,
    stop: int | None = None,
    on_error: readers.OnError = readers.raise_error,
    *,
    parse: Callable[[bytes], Any] = json_text.parse,
) -> Iterator[tuple[str, dict]]:
    """Yields the object of each line of a file, plain or compressed, and its place.

    Blank lines are skipped, and a byte order mark at the file's start.

    Args:
      start, stop: bytes to read of a plain file, from where a line starts to where one does.
      on_error: called with a line that is no JSON object, and with what cannot be decompressed.
      parse: makes an object of a line; raises a ValueError.
    """
    name = os.fspath(path)
    is_cut = stop is not None and not formats.suffix(name, formats.COMPRESSIONS)
    with readers.open_file(path) as file:
        file.seek(start)
        try:
            position = start
            for number, line in enumerate(formats.decompressed(file, name), start=1):
                if is_cut and position >= stop:
                    return
                place = f"{name}, line {number}"
                if start:  # only who read all before would know the number
                    place = f"{name}, the line at byte {position}"
                position += len(line)
                if number == 1 and not start:
                    readers.check_mark(line, name)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                try:
                    row = _object_of(line, place, parse)
                except readers.SourceError as error:
                    on_error(error)
                else:
                    yield place, row
        except formats.DECOMPRESSION_ERRORS as error:
            if not is_damage(error):
                raise
            found = readers.SourceError(formats.not_decompressed(name, error))
            found.__cause__ = error
            on_error(found)


def _object_of(line: bytes, place: str, parse: Callable[[bytes], Any]) -> dict:
    advice = "Each line must be one object (of an array: jq -c '.[]')."
    try:
        row = parse(line)
    except ValueError as error:  # also what isn't UTF-8
        raise readers.SourceError(f"{place} is no JSON: {first_line(error)}. {advice}") from error
    if not isinstance(row, dict):
        raise readers.SourceError(f"{place} must be an object, not {type(row).__name__}. {advice}")
    return row


# -- Parquet ---------------------------------------------------------------------------------------


def parquet_rows(
    path: epath.Path,
    column: str | None = None,
    start: int = 0,
    stop: int | None = None,
    on_error: readers.OnError = readers.raise_error,
) -> Iterator[tuple[str, dict]]:
    """Yields the rows of a Parquet file, and the place of each; rows are numbered from 1.

    Bytes that are UTF-8 are text: some writers do not say so of a column.

    Args:
      column: the only one to read, of text; None: all.
      start, stop: row groups to read.
      on_error: called with a row that holds text that is not UTF-8, and with a row group that
        cannot be read: what is left of it is skipped.
    """
    import pyarrow

    name = os.fspath(path)
    with open_parquet(path, column) as table:
        columns = None if column is None else [column]
        sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
        for group in range(table.num_row_groups)[start:stop]:
            number = 1 + sum(sizes[:group])
            try:
                for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                    yield from _rows_of(batch, name, number, on_error)
                    number += batch.num_rows
            except (pyarrow.ArrowException, OSError) as error:
                if not is_damage(error):
                    raise
                found = readers.SourceError(
                    f"{name}: row group {group} of {table.num_row_groups} cannot be read: "
                    f"{first_line(error)}. Fetch the file again."
                )
                found.__cause__ = error
                on_error(found)


def _rows_of(
    batch, name: str, number: int, on_error: readers.OnError
) -> Iterator[tuple[str, dict]]:
    """Yields the rows of a batch whose first has this number in the file."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # text that is no UTF-8, dates that Python does not have
        rows = None
    for i in range(batch.num_rows):
        place = f"{name}, row {number + i}"
        try:
            row = rows[i] if rows else _row_of(batch, i, place)
        except readers.SourceError as error:
            on_error(error)
        else:
            yield place, {key: _as_text(value) for key, value in row.items()}


def _row_of(batch, i: int, place: str) -> dict:
    """Returns one row; a SourceError that names the column that cannot be read."""
    row = {}
    for column, values in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[column] = values[i].as_py()
        except UnicodeDecodeError as error:
            raise readers.SourceError(
                f"{place}: {column!r} is not UTF-8: {error}. Fetch the file again, or convert it."
            ) from error
        except (ValueError, OverflowError) as error:
            raise readers.SourceError(
                f"{place}: {column!r} cannot be read: {first_line(error)}. Leave that column out."
            ) from error
    return row


def _as_text(value):
    """Returns a value with its bytes as text, where they are UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {key: _as_text(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_text(one) for one in value]
    return value


@contextlib.contextmanager
def open_parquet(path: epath.Path, column: str | None = None):
    """Opens a Parquet file whose columns have a name each, or that has one such column of text.

    Raises:
      SourceError: not a whole Parquet file, no such column (lists those there) or one that is no
        text, two of one name.
    """
    import pyarrow  # Takes 0.3 s, and most runs read no Parquet.
    import pyarrow.parquet as pq

    name = os.fspath(path)
    with readers.open_file(path) as file:
        try:
            table = pq.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as error:
            if not is_damage(error):
                raise
            raise readers.SourceError(
                f"{name} is no whole Parquet file: {first_line(error)}. Fetch it again."
            ) from error
        names = table.schema_arrow.names
        if column is not None and column not in names:
            raise readers.SourceError(
                f"{name} has no column {column!r}; it has {names}. Set config.data.text_key to one "
                "of them."
            )
        for one in names if column is None else [column]:
            if (times := names.count(one)) > 1:
                raise readers.SourceError(
                    f"{name} has {times} columns named {one!r}: write it with a name for each."
                )
        if column is not None and not _holds_text(table.schema_arrow.field(column).type):
            raise readers.SourceError(
                f"{name}: column {column!r} is {table.schema_arrow.field(column).type}, not text. "
                "Set config.data.text_key to a column of text."
            )
        yield table


def _holds_text(kind) -> bool:
    """Returns True for an Arrow type of text, of bytes, which may be text, and of nulls alone."""
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)  # of an extension, as arrow.json
    if types.is_dictionary(kind):
        kind = kind.value_type
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    blobs = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(holds(kind) for holds in (*texts, *blobs, types.is_null))


# -- CSV -------------------------------------------------------------------------------------------


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
