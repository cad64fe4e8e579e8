"""Reads text files as streams of `Piece`s; errors name file and position.

A piece is a document, or part of a long one: no document is held in memory whole. `record_readers`
reads formats with one document per record.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator
import os
import re
from typing import BinaryIO, NamedTuple

from etils import epath

from kvjax.foundation.errors import DataError
from kvjax.foundation.files import is_special

BLOCK_BYTES = 1 << 20
PIECE_CHARACTERS = 1 << 16
DOCUMENT_SEPARATOR = "\f"
# In this order, since UTF-32's little-endian mark starts with UTF-16's.
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# Documents are cut where a line starts with a non-blank. No word of `tokenizer.SPLIT_PATTERN`
# crosses such a point, so the pieces have the same tokens as the document.
_LINE_START = re.compile(r"\n(?=\S)")
_LINE_START_BYTES = re.compile(rb"\n(?=[!-~])")  # ASCII only, valid within any UTF-8 text


class Piece(NamedTuple):
    """A document, or a piece of a long one."""

    text: str
    starts_document: bool


class SourceError(DataError):
    """A source cannot be read; the message names file, position and remedy."""


class NullTextError(SourceError):
    """The text of a record is null; `raise_error` ignores this error."""


class EmptySplitError(SourceError):
    """A split has no documents, though the sources have some."""


class NoRowError(DataError):
    """The training text does not fill a row."""


def raise_error(error: SourceError) -> None:
    """Raises an error unless it is a NullTextError; default of `on_error`."""
    if not isinstance(error, NullTextError):
        raise error


# Called for unreadable data (a line, a row, a row group, the rest of a file) and for null texts. If
# it returns, the reader skips that data and continues.
OnError = Callable[[SourceError], None]


def read_document(text: str) -> Iterator[Piece]:
    """Yields the pieces of one document in memory; nothing if it is empty."""
    return _cut([text])


def read_text(
    path: epath.Path,
    start: int = 0,
    stop: int | None = None,
    on_error: OnError = raise_error,
    *,
    starts_document: bool = True,
) -> Iterator[Piece]:
    """Yields the documents in bytes [start, stop) of a UTF-8 text file, separated by form feeds.

    A byte order mark at the start of the file is skipped.

    Args:
      starts_document: True if a document starts at `start`; False if one continues there.

    Raises:
      SourceError: the text is not UTF-8; the message has the offset in the file.
    """
    if start == 0:
        check_encoding(path)
        start = len(codecs.BOM_UTF8) if byte_order_mark(path) else 0
    blocks = _decode(_blocks(path, start, stop), path, start, on_error)
    for chunks in _split_documents(blocks):
        yield from _cut(chunks, starts_document)
        starts_document = True


def cut(path: epath.Path, offset: int) -> int:
    """Returns the first byte offset >= `offset` where a text file may be cut, or its size.

    A cut follows a form feed. If there is none within BLOCK_BYTES, a line that starts with a
    non-blank follows the cut, since such a cut changes no token.
    """
    position, last_byte = offset, b""
    for block in _blocks(path, offset, None):
        text = last_byte + block
        start = position - len(last_byte)
        form_feed = text.find(DOCUMENT_SEPARATOR.encode())
        if form_feed >= 0:
            return start + form_feed + 1
        if match := _LINE_START_BYTES.search(text):
            return start + match.start() + 1
        position += len(block)
        last_byte = block[-1:]
    return position


def document_starts(path: epath.Path, offset: int) -> bool:
    """Returns True if a document of a text file starts at a byte offset."""
    return next(_blocks(path, offset - 1, offset), b"") == DOCUMENT_SEPARATOR.encode()


def byte_order_mark(path: epath.Path) -> bool:
    """Returns True if a file starts with UTF-8's byte order mark."""
    return _head(path).startswith(codecs.BOM_UTF8)


def check_encoding(path: epath.Path) -> None:
    """Raises a SourceError if a file starts with the byte order mark of another encoding."""
    check_mark(_head(path), os.fspath(path))


def _head(path: epath.Path) -> bytes:
    with open_file(path) as file:
        return file.read(4)


def check_mark(head: bytes, name: str) -> None:
    """Raises a SourceError if bytes start with another encoding's byte order mark."""
    for mark, encoding in _OTHER_MARKS.items():
        if head.startswith(mark):
            raise SourceError(
                f"{name} is {encoding} text, by its byte order mark. Convert it (iconv -f "
                f"{encoding.lower()} -t utf-8)."
            )


def line_start(path: epath.Path, offset: int) -> int:
    """Returns the first byte offset >= `offset` where a line starts, or the file's size."""
    if offset <= 0:
        return 0
    position = offset - 1
    for block in _blocks(path, position, None):
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(block)
    return position


def open_file(path: epath.Path) -> BinaryIO:
    """Opens a file for reading bytes; raises a DataError on failure."""
    if is_special(path):
        raise DataError(f"{os.fspath(path)} is a pipe or device: give a file")
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{os.fspath(path)} no longer exists. Restore it.") from error
    except PermissionError as error:
        raise DataError(
            f"{os.fspath(path)} cannot be read: {error}. Change its permissions."
        ) from error


def read_bytes(path: epath.Path) -> bytes:
    """Returns the bytes of a small file; raises like `open_file`."""
    with open_file(path) as file:
        return file.read()


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


def _decode(
    blocks: Iterable[bytes], path: epath.Path, start: int, on_error: OnError
) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = start
    try:
        for block in blocks:
            # Bytes of an incomplete character from the last block, where error.start counts from.
            pending = len(decoder.getstate()[0])
            yield decoder.decode(block)
            position += len(block)
        pending = len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = position - pending + error.start
        damage = SourceError(
            f"{os.fspath(path)} is not UTF-8: {error.reason} at byte {offset}. Convert it (iconv -t"
            " utf-8)."
        )
        damage.__cause__ = error
        on_error(damage)


def _split_documents(blocks: Iterable[str]) -> Iterator[Iterator[str]]:
    """Yields one iterator of chunks per document; exhaust each before taking the next."""
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


def _cut(chunks: Iterable[str], starts_document: bool = True) -> Iterator[Piece]:
    """Yields a document as pieces of about PIECE_CHARACTERS, cut where lines start.

    A line longer than 64 PIECE_CHARACTERS is cut anywhere.
    """
    text = ""
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
