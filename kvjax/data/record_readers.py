"""Reads documents that are records of a file: JSON lines, rows of Parquet, examples of TFDS.

One function per format, which yields texts. Errors name file and place.
"""

import codecs
from collections.abc import Iterator
import contextlib
import gzip
import io
import lzma
import os
from typing import BinaryIO
import zlib

from etils import epath

from kvjax.data import readers
from kvjax.foundation import json_text
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import first_line


def _is_damage(error: Exception) -> bool:
    """Whether it says that what was read is broken, not that a disk or a network failed.

    Those of a disk have a number, those of a network a type of their own; Arrow's have neither.
    """
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return type(error) is OSError and error.errno is None
    return True


def line_ranges(path: epath.Path, key: str, limit: int) -> Iterator[tuple[int, int, int]]:
    """[start, stop) of bytes of a file of lines, of about `limit` bytes, and how many they are."""
    del key
    size, start = path.stat().length, 0
    while start < size:
        stop = size if size - start <= limit else readers.line_start(path, start + limit)
        yield start, stop, stop - start
        start = stop


def read_jsonl(
    path: epath.Path,
    key: str,
    start: int = 0,
    stop: int | None = None,
    broken: readers.Broken = readers.refuse,
) -> Iterator[str]:
    """The text under `key` of each line of a .jsonl file, plain or compressed (.gz, .xz, .zst).

    Blank lines are skipped.

    Args:
      start, stop: bytes to read of a plain file, from where a line starts to where one does.

    Raises:
      SourceError: a line that isn't a JSON object with a text under `key` (with its number), or a
        truncated file.
    """
    name = os.fspath(path)
    with readers.open_file(path) as file:
        file.seek(start)
        try:
            position, is_plain = start, stop is not None and name.endswith(".jsonl")
            for number, line in enumerate(decompressed(file, name), start=1):
                if is_plain and position >= stop:
                    return
                place = f"{name}, line {number}"
                if start:  # what line of the file it is, only who read all before would know
                    place = f"{name}, the line at byte {position}"
                position += len(line)
                if number == 1 and not start:
                    readers.check_mark(line, name)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                try:
                    text = _text_of(line, key, place)
                except readers.SourceError as error:
                    broken(error)
                else:
                    yield text
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            if not _is_damage(error):
                raise
            found = readers.SourceError(
                f"{name} can't be decompressed: {error}. Is it truncated? Fetch it again."
            )
            found.__cause__ = error
            broken(found)


def jsonl_density(path: epath.Path, key: str) -> float:
    """Bytes of text per byte of a .jsonl file as it lies, from its first lines."""
    name, lying, text_bytes = os.fspath(path), 0, 0
    with readers.open_file(path) as file:
        try:
            for number, line in enumerate(decompressed(file, name), start=1):
                text_bytes += len(_text_of(line, key, f"{name}, line {number}").encode())
                lying = lying + len(line) if name.endswith(".jsonl") else file.tell()
                if text_bytes > readers.BLOCK_BYTES:
                    break
        except (readers.SourceError, EOFError, lzma.LZMAError, zlib.error, OSError):
            pass  # told when it is read
    return text_bytes / lying if lying else 1.0


def parquet_ranges(path: epath.Path, column: str, limit: int) -> Iterator[tuple[int, int, int]]:
    """[start, stop) of row groups with about `limit` bytes of text, and how many those are.

    Raises:
      SourceError: see `read_parquet`.
    """
    with _parquet(path, column) as table:
        names = [table.metadata.schema.column(i).path for i in range(table.metadata.num_columns)]
        roots = [name.partition(".")[0] for name in names]  # of a column with parts
        place = names.index(column) if column in names else roots.index(column)
        first = size = 0
        for group in range(table.num_row_groups):
            own = table.metadata.row_group(group).column(place).total_uncompressed_size
            if group > first and size + own > limit:
                yield first, group, size
                first, size = group, 0
            size += own
        if table.num_row_groups > first:
            yield first, table.num_row_groups, size


def read_parquet(
    path: epath.Path,
    column: str,
    start: int = 0,
    stop: int | None = None,
    broken: readers.Broken = readers.refuse,
) -> Iterator[str]:
    """The texts of one column of a Parquet file, a batch of rows at a time; nulls are skipped.

    Args:
      start, stop: row groups to read.

    Raises:
      SourceError: not a whole Parquet file, no such column (lists those there), or a column that
        isn't text.
    """
    with _parquet(path, column) as table:
        for group in range(table.num_row_groups)[start:stop]:
            try:
                for batch in table.iter_batches(256, row_groups=[group], columns=[column]):
                    yield from (text for text in batch.column(0).to_pylist() if text is not None)
            except (OSError, ValueError) as error:  # Arrow's own are ValueErrors
                if not _is_damage(error):
                    raise
                found = readers.SourceError(
                    f"{os.fspath(path)}: row group {group} of {table.num_row_groups} cannot be "
                    f"read: {error}. Fetch the file again."
                )
                found.__cause__ = error
                broken(found)


@contextlib.contextmanager
def _parquet(path: epath.Path, column: str):
    """An open Parquet file that has a column of text."""
    import pyarrow  # Takes 0.3 s, and most runs read no Parquet.
    import pyarrow.parquet as pq

    name = os.fspath(path)
    with readers.open_file(path) as file:
        try:
            table = pq.ParquetFile(file)
        except (pyarrow.ArrowInvalid, OSError) as error:
            if not _is_damage(error):
                raise
            raise readers.SourceError(
                f"{name} is no whole Parquet file: {error}. Fetch it again."
            ) from error
        columns = table.schema_arrow.names
        if column not in columns:
            raise readers.SourceError(
                f"{name} has no column {column!r}; it has {columns}. Set text_key to one of them."
            )
        kind = table.schema_arrow.field(column).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise readers.SourceError(
                f"{name}: column {column!r} is {kind}, not text. Set text_key to a column of text."
            )
        yield table


def read_tfds(
    builder,
    split: str,
    key: str,
    start: int = 0,
    stop: int | None = None,
    broken: readers.Broken = readers.refuse,
) -> Iterator[str]:
    """The texts under feature `key` of a split of a TFDS data set prepared as ArrayRecord.

    Args:
      start, stop: examples to read.

    Raises:
      SourceError: no such split or feature (lists those there), not ArrayRecord, or a text that
        isn't UTF-8.
    """
    name = builder.info.full_name
    if split not in builder.info.splits:
        raise readers.SourceError(
            f"tfds:{name} has no split {split!r}; it has {list(builder.info.splits)}:"
            " tfds:NAME#SPLIT."
        )
    if key not in builder.info.features:
        raise readers.SourceError(
            f"tfds:{name} has no feature {key!r}; it has {list(builder.info.features)}. Set"
            " text_key to one of them."
        )
    try:
        examples = builder.as_data_source(split)
    except NotImplementedError as error:
        raise readers.SourceError(
            f"tfds:{name} is prepared in a format without random access; prepare it again with"
            " file_format='array_record'."
        ) from error
    for i in range(len(examples))[start:stop]:
        try:
            value = examples[i][key]
        except Exception as error:  # damage, or a network: its libraries' errors do not tell
            raise DataError(
                f"tfds:{name}#{split}, example {i} cannot be read: {first_line(error)}"
            ) from error
        if not isinstance(value, (bytes, str)):
            raise readers.SourceError(
                f"tfds:{name}: feature {key!r} is {type(value).__name__}, not text. Set text_key."
            )
        try:
            text = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            found = readers.SourceError(
                f"tfds:{name}#{split}, example {i}: {key!r} is not UTF-8: {error}."
            )
            found.__cause__ = error
            broken(found)
        else:
            yield text


def decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """A file's bytes, decompressed as the end of its name says."""
    if name.endswith(".gz"):
        return gzip.open(file, "rb")
    if name.endswith(".xz"):
        return lzma.open(file, "rb")
    if name.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(
            pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"),
            readers.BLOCK_BYTES,
        )
    return file


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        record = json_text.parse(line)
    except ValueError as error:  # Also what isn't UTF-8.
        raise readers.SourceError(
            f"{place} is no JSON: {error}. Each line must be an object with a text under {key!r}."
        ) from error
    if not isinstance(record, dict) or key not in record:
        there = list(record) if isinstance(record, dict) else type(record).__name__
        raise readers.SourceError(
            f"{place} has no key {key!r}; it has {there}. Set text_key to the key with the text."
        )
    text = record[key]
    if not isinstance(text, str):
        raise readers.SourceError(
            f"{place}: {key!r} is {type(text).__name__}, not text. Set text_key to the key with the"
            " text."
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise readers.SourceError(
                f"{place}: {key!r} holds half a surrogate pair, which is no text: {error}."
            ) from error
    return text
