"""Reads named texts (embedded books or files) as a model's tokens."""

from collections.abc import Iterator, Mapping
import os

import numpy as np

from kvjax.convert.model import LazyModel
from kvjax.data import (
    config as config_lib,
    formats,
    readers,
    source_kinds,
    tokenizer as tokenizer_lib,
)
from kvjax.data.source_kinds import Source
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError

EMBEDDED = "embedded"
MOST_TOKENS = 1 << 18  # tokens read of each text, at most
_BOOKS = dict(zip(("Shakespeare", "King James Bible"), source_kinds.BOOKS, strict=True))
_RECORDS = tuple(end for end in (*formats.LINES, formats.PARQUET) if end not in formats.NAMED_ONLY)
_GIVE = "give NAME=FILE, several separated by commas, or 'embedded'"


def sources(option: str, text_key: str = "text") -> dict[str, Source]:
    """Returns the texts of --texts by name.

    Args:
      option: `NAME=FILE,...` with files of text, JSON lines or Parquet. An item `embedded` stands
        for the held-out parts of both embedded books, which no run trains on.
      text_key: key of the text in JSON lines and Parquet.

    Raises:
      UserError: an item has another form, a name is repeated, or a file is missing.
    """
    by_name: dict[str, Source] = {}
    for item in option.split(","):
        name, equals, file = item.partition("=")
        if item == EMBEDDED:
            item_sources = {
                name: source_kinds.open_source(source_kinds.EMBEDDED + book, text_key, "--texts")
                for name, book in _BOOKS.items()
            }
        elif not (equals and name.strip() and file):
            raise UserError(f"--texts={option}: {item!r} is no text: {_GIVE}")
        elif not name.isprintable():
            raise UserError(f"--texts={option}: {name!r} cannot be printed: {_GIVE}")
        else:
            item_sources = {name: _file(name, file, text_key)}
        for name in item_sources:
            if name in by_name:
                raise UserError(f"--texts={option}: {name!r} is given twice: give another name")
        by_name |= item_sources
    return by_name


def _file(name: str, file: str, text_key: str) -> Source:
    path = runtime.path("--texts", file)
    if not path.is_file() and not os.fspath(path).startswith("/dev/fd/"):
        raise UserError(f"--texts={name}={file}: no such file: give a file of text")
    if formats.suffix(path.name, _RECORDS):
        return source_kinds.open_source(os.fspath(path), text_key, "--texts")
    return source_kinds.TextFile(path)


def tokens(sources: Mapping[str, Source], model: LazyModel, longest: int) -> dict[str, np.ndarray]:
    """Returns the [T] int32 tokens of each text, without a BOS token.

    Args:
      model: the model whose tokenizer is used; its weights are not read.
      longest: number of tokens that each text must have.

    Raises:
      UserError: a text is not UTF-8, cannot be read, or is too short.
    """
    tokenizer = tokenizer_lib.from_json(model.tokenizer_json, f"the tokenizer of {model.name}")
    by_name = {}
    for name, source in sources.items():
        try:
            by_name[name] = _encoded(_pieces(source), tokenizer, max(MOST_TOKENS, longest))
        except OSError as error:
            raise UserError(f"--texts: {name!r}: cannot be read: {error}") from error
        except UserError as error:
            message = config_lib.as_options(str(error))
            raise UserError(f"--texts: {name!r}: {message}") from error
        if len(by_name[name]) < longest:
            raise UserError(
                f"--texts: {name!r} has {len(by_name[name]):,} tokens of {model.name}, and the "
                f"longest of --lengths is {longest:,}: give a longer text, or shorter --lengths"
            )
    return by_name


def _pieces(source: Source) -> Iterator[readers.Piece]:
    held_out = source.name.startswith(source_kinds.EMBEDDED)
    return source.pieces("validation" if held_out else "all", 0.0)


def _encoded(
    pieces: Iterator[readers.Piece], tokenizer: tokenizer_lib.Tokenizer, most: int
) -> np.ndarray:
    """Returns the first `most` tokens of the concatenated documents."""
    parts, count = [np.zeros(0, np.int32)], 0
    for piece in pieces:
        parts.append(np.array(tokenizer.encode(piece.text), np.int32))
        count += len(parts[-1])
        if count >= most:
            break
    return np.concatenate(parts)[:most]
