"""Reads texts from files, as streams; one function per format. Errors name file and place.

A reader yields `Piece`s. A document too long to hold is several pieces; concatenated they are its
text.
"""

import codecs
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import gzip
import io
import lzma
import os
import re
from typing import BinaryIO
from typing import NamedTuple
import zlib

from etils import epath

from kvjax.foundation import json_text
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import first_line

BLOCK_BYTES = 1 << 20
PIECE_CHARACTERS = 1 << 16
DOCUMENT_SEPARATOR = "\f"
# UTF-32's little end starts with UTF-16's: first come, first asked.
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# A line that starts with no blank can open a piece: the split pattern of our tokenizers makes no
# token that reaches into it, so a document in pieces has the same tokens.
_LINE_START = re.compile(r"\n(?=\S)")
_LINE_START_BYTES = re.compile(rb"\n(?=[!-~])")  # whatever the encoding's other bytes are


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    starts_document: bool


class SourceError(DataError):
    """A source that can't be used as it is: says which file, where in it, and what to do."""


def refuse(error: SourceError) -> None:
    """What readers do with what cannot be read, unless told to leave it out."""
    raise error


# Called with what cannot be read: a line, a row group, the rest of a file. If it returns, the
# reader goes on behind that.
Broken = Callable[[SourceError], None]


def _is_damage(error: Exception) -> bool:
    """Whether it says that what was read is broken, not that a disk or a network failed.

    Those of a disk have a number, those of a network a type of their own; Arrow's have neither.
    """
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return type(error) is OSError and error.errno is None
    return True


def read_document(text: str) -> Iterator[Piece]:
    """The pieces of one document held in memory; none if it is empty."""
    return _cut([text])


def read_text(
    path: epath.Path,
    start: int = 0,
    stop: int | None = None,
    broken: Broken = refuse,
    *,
    opens: bool = True,
) -> Iterator[Piece]:
    """The documents in bytes [start, stop) of a UTF-8 text file, separated by form feeds.

    A byte order mark at the file's start is no part of the first.

    Args:
      opens: whether a document starts at `start`, or goes on from before.

    Raises:
      SourceError: bytes that aren't UTF-8, with their offset in the file.
    """
    if start == 0:
        check_encoding(path)
        start = len(codecs.BOM_UTF8) if byte_order_mark(path) else 0
    blocks = _decode(_blocks(path, start, stop), path, start, broken)
    for chunks in _split_documents(blocks):
        yield from _cut(chunks, opens)
        opens = True


def cut(path: epath.Path, offset: int) -> int:
    """Where a text file may be cut: the first such place from a byte offset on, or its end.

    Behind a form feed, or else (within BLOCK_BYTES there is none) where a line starts with no
    blank: the tokens on both sides are those of the whole.
    """
    position, rest, line = offset, b"", None
    for block in _blocks(path, offset, None):
        text = rest + block
        form_feed = text.find(DOCUMENT_SEPARATOR.encode())
        if form_feed >= 0:
            return position - len(rest) + form_feed + 1
        if line is None and (found := _LINE_START_BYTES.search(text)):
            line = position - len(rest) + found.start() + 1
        position += len(block)
        rest = block[-1:]
        if line is not None:
            return line
    return position


def document_starts(path: epath.Path, offset: int) -> bool:
    """Whether a document of a text file starts at a byte offset."""
    return next(_blocks(path, offset - 1, offset), b"") == DOCUMENT_SEPARATOR.encode()


def byte_order_mark(path: epath.Path) -> bool:
    """Whether a file starts with UTF-8's byte order mark."""
    return _head(path).startswith(codecs.BOM_UTF8)


def check_encoding(path: epath.Path) -> None:
    """Raises a SourceError if a file starts with the byte order mark of another encoding."""
    _check_encoding(_head(path), os.fspath(path))


def _head(path: epath.Path) -> bytes:
    with open_file(path) as file:
        return file.read(4)


def _check_encoding(head: bytes, name: str) -> None:
    for mark, encoding in _OTHER_MARKS.items():
        if head.startswith(mark):
            raise SourceError(
                f"{name} is {encoding} text, by its byte order mark. Convert it (iconv -f "
                f"{encoding.lower()} -t utf-8)."
            )


def line_start(path: epath.Path, offset: int) -> int:
    """The first byte offset >= `offset` at which a line starts; the file's size if none does."""
    if offset <= 0:
        return 0
    position = offset - 1
    for block in _blocks(path, position, None):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(block)
    return position


def line_ranges(path: epath.Path, key: str, limit: int) -> Iterator[tuple[int, int, int]]:
    """[start, stop) of bytes of a file of lines, of about `limit` bytes, and how many they are."""
    del key
    size, start = path.stat().length, 0
    while start < size:
        stop = size if size - start <= limit else line_start(path, start + limit)
        yield start, stop, stop - start
        start = stop


def read_jsonl(
    path: epath.Path,
    key: str,
    start: int = 0,
    stop: int | None = None,
    broken: Broken = refuse,
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
    with open_file(path) as file:
        file.seek(start)
        try:
            position, is_plain = start, stop is not None and name.endswith(".jsonl")
            for number, line in enumerate(_decompressed(file, name), start=1):
                if is_plain and position >= stop:
                    return
                place = f"{name}, line {number}"
                if start:  # what line of the file it is, only who read all before would know
                    place = f"{name}, the line at byte {position}"
                position += len(line)
                if number == 1 and not start:
                    _check_encoding(line, name)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                try:
                    text = _text_of(line, key, place)
                except SourceError as error:
                    broken(error)
                else:
                    yield text
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            if not _is_damage(error):
                raise
            found = SourceError(
                f"{name} can't be decompressed: {error}. Is it truncated? Fetch it again."
            )
            found.__cause__ = error
            broken(found)


def jsonl_density(path: epath.Path, key: str) -> float:
    """Bytes of text per byte of a .jsonl file as it lies, from its first lines."""
    name, lying, text_bytes = os.fspath(path), 0, 0
    with open_file(path) as file:
        try:
            for number, line in enumerate(_decompressed(file, name), start=1):
                text_bytes += len(_text_of(line, key, f"{name}, line {number}").encode())
                lying = lying + len(line) if name.endswith(".jsonl") else file.tell()
                if text_bytes > BLOCK_BYTES:
                    break
        except (SourceError, EOFError, lzma.LZMAError, zlib.error, OSError):
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
    broken: Broken = refuse,
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
                found = SourceError(
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
    with open_file(path) as file:
        try:
            table = pq.ParquetFile(file)
        except (pyarrow.ArrowInvalid, OSError) as error:
            if not _is_damage(error):
                raise
            raise SourceError(
                f"{name} is no whole Parquet file: {error}. Fetch it again."
            ) from error
        columns = table.schema_arrow.names
        if column not in columns:
            raise SourceError(
                f"{name} has no column {column!r}; it has {columns}. Set text_key to one of them."
            )
        kind = table.schema_arrow.field(column).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise SourceError(
                f"{name}: column {column!r} is {kind}, not text. Set text_key to a column of text."
            )
        yield table


def read_tfds(
    builder,
    split: str,
    key: str,
    start: int = 0,
    stop: int | None = None,
    broken: Broken = refuse,
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
        raise SourceError(
            f"tfds:{name} has no split {split!r}; it has {list(builder.info.splits)}:"
            " tfds:NAME#SPLIT."
        )
    if key not in builder.info.features:
        raise SourceError(
            f"tfds:{name} has no feature {key!r}; it has {list(builder.info.features)}. Set"
            " text_key to one of them."
        )
    try:
        examples = builder.as_data_source(split)
    except NotImplementedError as error:
        raise SourceError(
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
            raise SourceError(
                f"tfds:{name}: feature {key!r} is {type(value).__name__}, not text. Set text_key."
            )
        try:
            text = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            found = SourceError(f"tfds:{name}#{split}, example {i}: {key!r} is not UTF-8: {error}.")
            found.__cause__ = error
            broken(found)
        else:
            yield text


def open_file(path: epath.Path) -> BinaryIO:
    """The file, opened for reading bytes; a DataError where it is gone, or may not be read."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{os.fspath(path)} is gone. Put it back.") from error
    except PermissionError as error:
        raise DataError(
            f"{os.fspath(path)} can't be read: {error}. Change its permissions."
        ) from error


def _blocks(path: epath.Path, start: int, stop: int | None) -> Iterator[bytes]:
    with open_file(path) as file:
        file.seek(start)
        position = start
        while stop is None or position < stop:
            block = file.read(BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - position))
            if not block:
                return
            position += len(block)
            yield block


def _decode(blocks: Iterable[bytes], path: epath.Path, start: int, broken: Broken) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = start
    try:
        for block in blocks:
            pending = len(decoder.getstate()[0])
            yield decoder.decode(block)
            position += len(block)
        pending = len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = position - pending + error.start
        found = SourceError(
            f"{os.fspath(path)} is not UTF-8: {error.reason} at byte {offset}. Convert it (iconv -t"
            " utf-8)."
        )
        found.__cause__ = error
        broken(found)


def _split_documents(blocks: Iterable[str]) -> Iterator[Iterator[str]]:
    """One iterator of chunks a document; the caller must exhaust each before it takes the next."""
    blocks = iter(blocks)
    rest: str | None = next(blocks, None)

    def chunks() -> Iterator[str]:
        nonlocal rest
        while rest is not None:
            head, separator, tail = rest.partition(DOCUMENT_SEPARATOR)
            if separator:
                rest = tail
                yield head
                return
            rest = next(blocks, None)
            yield head

    while rest is not None:
        yield chunks()


def _cut(chunks: Iterable[str], opens: bool = True) -> Iterator[Piece]:
    """A document as pieces of about PIECE_CHARACTERS, cut at line starts (but in endless lines)."""
    text, starts_document = "", opens
    for chunk in chunks:
        text += chunk
        begin = 0
        while len(text) - begin > PIECE_CHARACTERS:
            boundary = _LINE_START.search(text, begin + PIECE_CHARACTERS - 1)
            if boundary is None and len(text) - begin < 64 * PIECE_CHARACTERS:
                break
            end = boundary.end() if boundary else begin + 64 * PIECE_CHARACTERS
            yield Piece(text[begin:end], starts_document)
            begin, starts_document = end, False
        text = text[begin:]
    if text:
        yield Piece(text, starts_document)


def _decompressed(file: BinaryIO, name: str) -> BinaryIO:
    if name.endswith(".gz"):
        return gzip.open(file, "rb")
    if name.endswith(".xz"):
        return lzma.open(file, "rb")
    if name.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(
            pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"), BLOCK_BYTES
        )
    return file


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        record = json_text.parse(line)
    except ValueError as error:  # Also what isn't UTF-8.
        raise SourceError(
            f"{place} is no JSON: {error}. Each line must be an object with a text under {key!r}."
        ) from error
    if not isinstance(record, dict) or key not in record:
        there = list(record) if isinstance(record, dict) else type(record).__name__
        raise SourceError(
            f"{place} has no key {key!r}; it has {there}. Set text_key to the key with the text."
        )
    text = record[key]
    if not isinstance(text, str):
        raise SourceError(
            f"{place}: {key!r} is {type(text).__name__}, not text. Set text_key to the key with the"
            " text."
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SourceError(
                f"{place}: {key!r} holds half a surrogate pair, which is no text: {error}."
            ) from error
    return text
