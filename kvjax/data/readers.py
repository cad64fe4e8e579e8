"""Reads text, as streams of pieces of documents. Errors name file and place.

A reader of text yields `Piece`s. A document too long to hold is several pieces; concatenated they
are its text. `record_readers` read formats of one document after another.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator
import os
import re
from typing import BinaryIO, NamedTuple

from etils import epath

from kvjax.foundation.errors import DataError
from kvjax.foundation.files import special

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


class NullTextError(SourceError):
    """A record whose text is null: no document, and nothing wrong."""


class EmptySplitError(SourceError):
    """Documents, and none of them in the split that was asked for."""


def raise_error(error: SourceError) -> None:
    """Raises what cannot be read, as readers do unless told to leave it out; skips nulls."""
    if not isinstance(error, NullTextError):
        raise error


# Called with what cannot be read (a line, a row, a row group, the rest of a file) and with null
# texts. If it returns, the reader goes on behind that.
OnError = Callable[[SourceError], None]


def read_document(text: str) -> Iterator[Piece]:
    """The pieces of one document held in memory; none if it is empty."""
    return _cut([text])


def read_text(
    path: epath.Path,
    start: int = 0,
    stop: int | None = None,
    on_error: OnError = raise_error,
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
    blocks = _decode(_blocks(path, start, stop), path, start, on_error)
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
    check_mark(_head(path), os.fspath(path))


def _head(path: epath.Path) -> bytes:
    with open_file(path) as file:
        return file.read(4)


def check_mark(head: bytes, name: str) -> None:
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


def open_file(path: epath.Path) -> BinaryIO:
    """Returns the file, opened for reading bytes; a DataError where that cannot be done."""
    if kind := special(path):
        raise DataError(f"{os.fspath(path)} is {kind}: give a file")
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{os.fspath(path)} is gone. Put it back.") from error
    except PermissionError as error:
        raise DataError(
            f"{os.fspath(path)} can't be read: {error}. Change its permissions."
        ) from error


def read_bytes(path: epath.Path) -> bytes:
    """Returns the bytes of a small file; a DataError as of `open_file`."""
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
        on_error(found)


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
