"""Reads rows of JSON lines, Parquet, TFDS and CSV as objects, with their positions for messages.

Used for texts (`record_readers`), conversations and benchmark questions.
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

Row = dict | list[str]  # an object, or the cells of a CSV line


def read(path: epath.Path) -> Iterator[tuple[str, Row]]:
    """Yields (position, row) for each row of a file.

    Raises:
      DataError: the suffix is unknown, the file is damaged, JSON is invalid or has duplicate keys
        (see `json_text.parse_strictly`), or columns share a name. The message names file and row.
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
    """Returns the number of rows that `read` yields (for Parquet, from metadata)."""
    if not formats.suffix(os.fspath(path), (formats.PARQUET,)):
        return sum(1 for _ in read(path))
    with open_parquet(path) as table:
        return table.metadata.num_rows


def digest(paths: list[epath.Path]) -> str:
    """Returns the SHA-256 of the concatenated bytes of files."""
    hashed = hashlib.sha256()
    for path in paths:
        with readers.open_file(path) as file:
            while block := file.read(readers.BLOCK_BYTES):
                hashed.update(block)
    return hashed.hexdigest()


def is_damage(error: Exception) -> bool:
    """Returns True if a read error means a damaged file, not a failing disk or network.

    Errors of disks have an errno, and errors of networks have types of their own. Arrow's errors of
    damage are plain OSErrors without an errno.
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
    """Yields (position, object) for each line of a file, plain or compressed.

    Skips blank lines and a byte order mark at the start of the file.

    Args:
      start, stop: byte range of a plain file; both are starts of lines.
      on_error: called for a line that is not a JSON object, and for data that cannot be
        decompressed.
      parse: parses a line, or raises a ValueError.
    """
    name = os.fspath(path)
    is_cut = stop is not None and not formats.suffix(name, formats.COMPRESSIONS)
    with readers.open_file(path) as file:
        file.seek(start)
        try:
            offset = start
            for number, line in enumerate(formats.decompressed(file, name), start=1):
                if is_cut and offset >= stop:
                    return
                place = f"{name}, line {number}"
                if start:  # the line's number is unknown
                    place = f"{name}, the line at byte {offset}"
                offset += len(line)
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
            damage = readers.SourceError(formats.not_decompressed(name, error))
            damage.__cause__ = error
            on_error(damage)


def _object_of(line: bytes, place: str, parse: Callable[[bytes], Any]) -> dict:
    advice = "Each line must be one object (to convert an array: jq -c '.[]')."
    try:
        row = parse(line)
    except ValueError as error:  # also for bytes that are not UTF-8
        raise readers.SourceError(f"{place} is not JSON: {first_line(error)}. {advice}") from error
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
    """Yields (position, row) for the rows of a Parquet file, numbered from 1.

    Values of byte columns are decoded if they are UTF-8, since some writers store text as bytes.

    Args:
      column: the only column to read, which must be text; None: all columns.
      start, stop: range of row groups.
      on_error: called for a row whose text is not UTF-8, and for a row group that cannot be read,
        whose remaining rows are skipped.
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
                damage = readers.SourceError(
                    f"{name}: row group {group} of {table.num_row_groups} cannot be read: "
                    f"{first_line(error)}. Fetch the file again."
                )
                damage.__cause__ = error
                on_error(damage)


def _rows_of(
    batch, name: str, number: int, on_error: readers.OnError
) -> Iterator[tuple[str, dict]]:
    """Yields the rows of a batch whose first row has this number in the file."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, dates out of Python's range
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
    """Returns one row; raises a SourceError that names an unreadable column."""
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
    """Decodes bytes that are UTF-8, also inside lists and dicts."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {key: _as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value


@contextlib.contextmanager
def open_parquet(path: epath.Path, column: str | None = None):
    """Opens a Parquet file.

    Args:
      column: column that must exist once and be text; None: all names must be unique.

    Raises:
      SourceError: the file is damaged, or a column is missing, duplicate or not text.
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
                f"{name} is not a complete Parquet file: {first_line(error)}. Fetch it again."
            ) from error
        names = table.schema_arrow.names
        if column is not None and column not in names:
            raise readers.SourceError(
                f"{name} has no column {column!r}; it has {names}. Set config.data.text_key to one "
                "of them."
            )
        for label in names if column is None else [column]:
            if (times := names.count(label)) > 1:
                raise readers.SourceError(
                    f"{name} has {times} columns named {label!r}: give each its own name."
                )
        if column is not None and not _holds_text(table.schema_arrow.field(column).type):
            raise readers.SourceError(
                f"{name}: column {column!r} is {table.schema_arrow.field(column).type}, not text. "
                "Set config.data.text_key to a column of text."
            )
        yield table


def _holds_text(kind) -> bool:
    """Returns True for Arrow's types of text, of bytes (which may be text), and the null type."""
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)  # of extensions such as arrow.json
    if types.is_dictionary(kind):
        kind = kind.value_type
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    blobs = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(holds(kind) for holds in (*texts, *blobs, types.is_null))


# -- TFDS ------------------------------------------------------------------------------------------


def tfds_rows(
    builder, split: str, name: str, start: int | None = None, stop: int | None = None
) -> Iterator[tuple[str, dict]]:
    """Yields (position, example) for a range of examples of a TFDS split.

    Args:
      name: the split's name, for messages.
    """
    examples = builder.as_data_source(split)
    for i in range(len(examples))[start:stop]:
        place = f"{name}, example {i}"
        try:
            example = examples[i]
        except Exception as error:  # TFDS's errors do not distinguish damage from network failures
            raise DataError(f"{place} cannot be read: {first_line(error)}") from error
        yield place, example


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
            raise DataError(f"{name} is not CSV in UTF-8: {first_line(error)}") from error
