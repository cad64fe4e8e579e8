"""Reads texts from files, as streams; one function per format. Errors name file and place.

A reader yields `Piece`s. A document too long to hold is several pieces; concatenated they are its
text.
"""

import codecs
from collections.abc import Iterable
from collections.abc import Iterator
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


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    starts_document: bool


class SourceError(DataError):
    """A source that can't be used as it is: says which file, where in it, and what to do."""


def read_document(text: str) -> Iterator[Piece]:
    """The pieces of one document held in memory; none if it is empty."""
    return _cut([text])


def read_text(path: epath.Path, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """The documents in bytes [start, stop) of a UTF-8 text file, separated by form feeds.

    A byte order mark at the file's start is no part of the first.

    Raises:
      SourceError: bytes that aren't UTF-8, with their offset in the file.
    """
    if start == 0 and byte_order_mark(path):
        start = len(codecs.BOM_UTF8)
    blocks = _decode(_blocks(path, start, stop), path, start)
    for chunks in _split_documents(blocks):
        yield from _cut(chunks)


def byte_order_mark(path: epath.Path) -> bool:
    """Whether a file starts with UTF-8's byte order mark.

    Raises:
      SourceError: it starts with another encoding's.
    """
    with open_file(path) as file:
        head = file.read(4)
    _check_encoding(head, os.fspath(path))
    return head.startswith(codecs.BOM_UTF8)


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


def read_jsonl(path: epath.Path, key: str) -> Iterator[str]:
    """The text under `key` of each line of a .jsonl file, plain or compressed (.gz, .xz, .zst).

    Blank lines are skipped.

    Raises:
      SourceError: a line that isn't a JSON object with a text under `key` (with its number), or a
        truncated file.
    """
    name = os.fspath(path)
    with open_file(path) as file:
        try:
            for number, line in enumerate(_decompressed(file, name), start=1):
                if number == 1:
                    _check_encoding(line, name)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _text_of(line, key, f"{name}, line {number}")
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            raise SourceError(
                f"{name} can't be decompressed: {error}. Is it truncated? Fetch it again."
            ) from error


def read_parquet(path: epath.Path, column: str) -> Iterator[str]:
    """The texts of one column of a Parquet file, a batch of rows at a time; nulls are skipped.

    Raises:
      SourceError: not a whole Parquet file, no such column (lists those there), or a column that
        isn't text.
    """
    import pyarrow  # Takes 0.3 s, and most runs read no Parquet.
    import pyarrow.parquet as pq

    name = os.fspath(path)
    with open_file(path) as file:
        try:
            table = pq.ParquetFile(file)
            columns = table.schema_arrow.names
            if column not in columns:
                raise SourceError(
                    f"{name} has no column {column!r}; it has {columns}. Set text_key to one of"
                    " them."
                )
            kind = table.schema_arrow.field(column).type
            if pyarrow.types.is_dictionary(kind):
                kind = kind.value_type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise SourceError(
                    f"{name}: column {column!r} is {kind}, not text. Set text_key to a column of"
                    " text."
                )
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
        except (pyarrow.ArrowInvalid, UnicodeDecodeError, OSError) as error:
            raise SourceError(
                f"{name} is no whole Parquet file: {error}. Fetch it again."
            ) from error


def read_tfds(builder, split: str, key: str) -> Iterator[str]:
    """The texts under feature `key` of a split of a TFDS data set prepared as ArrayRecord.

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
    for i in range(len(examples)):
        value = examples[i][key]
        if not isinstance(value, (bytes, str)):
            raise SourceError(
                f"tfds:{name}: feature {key!r} is {type(value).__name__}, not text. Set text_key."
            )
        try:
            yield value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            raise SourceError(
                f"tfds:{name}#{split}, example {i}: {key!r} is not UTF-8: {error}."
            ) from error


def open_file(path: epath.Path) -> BinaryIO:
    """The file, opened for reading bytes; SourceError where permissions forbid it."""
    try:
        return path.open("rb")
    except PermissionError as error:
        raise SourceError(
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


def _decode(blocks: Iterable[bytes], path: epath.Path, start: int) -> Iterator[str]:
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
        raise SourceError(
            f"{os.fspath(path)} is not UTF-8: {error.reason} at byte {offset}. Convert it (iconv -t"
            " utf-8)."
        ) from error


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


def _cut(chunks: Iterable[str]) -> Iterator[Piece]:
    """A document as pieces of about PIECE_CHARACTERS, cut at line starts (but in endless lines)."""
    text, starts_document = "", True
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
