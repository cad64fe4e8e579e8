"""Tokenizes, packs and writes one part of a corpus, and counts its content.

The rows depend only on the part, the tokenizer and the row length.
"""

from collections.abc import Iterator
import dataclasses
import hashlib
import lzma
import pathlib
from typing import Any, NamedTuple

import numpy as np

from kvjax.data import config as config_lib, packed_rows, parts, readers
from kvjax.data.manifest import SPLITS
from kvjax.data.parts import Part
from kvjax.data.source_kinds import SplitPiece
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation.errors import DataError, first_line, warn

# Size of a batch to encode. The library's encodings take about 100 bytes of memory per token.
BATCH_CHARACTERS = 1 << 21
XZ_PRESET = 9 | lzma.PRESET_EXTREME
MAX_MESSAGES = 100  # number of messages about skipped records in the manifest


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of one split, in a part or in all parts."""

    documents: int = 0
    bytes: int = 0  # of text, UTF-8
    tokens: int = 0  # with BOS, without padding
    rows: int = 0
    file_bytes: int = 0
    xz_bytes: int = 0  # validation text, compressed part by part

    def __add__(self, other: "Counts") -> "Counts":
        names = (field.name for field in dataclasses.fields(Counts))
        return Counts(*(getattr(self, name) + getattr(other, name) for name in names))


class Skipped(NamedTuple):
    """Counts of unreadable sources and records, and of records whose text is null."""

    count: int = 0
    messages: tuple[str, ...] = ()  # the first MAX_MESSAGES
    nulls: int = 0


class PartResult(NamedTuple):
    """Content of a written part."""

    counts: dict[str, Counts]  # by split
    skipped: Skipped


def write(
    config: config_lib.DataConfig,
    part: Part,
    count: int,
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    *,
    skip_broken: bool = False,
) -> PartResult:
    """Writes the shards of a part, one of `count`, into a local folder.

    Args:
      skip_broken: skip records that cannot be read, and list them in the result.

    Raises:
      DataError: a source cannot be read, or the tokenizer loses text.
      OSError: the folder cannot be written.
    """
    dtype = dtype_of(tokenizer)
    streams = {}
    for split in SPLITS:
        path = folder / packed_rows.shard_name(split, part.index, count)
        writer = packed_rows.ShardWriter(path, config.sequence_length, dtype)
        streams[split] = _Stream(writer, tokenizer, dtype, measured=split == "validation")
    errors = ErrorCollector(skip_broken)
    try:
        for batch in _batches(parts.split_pieces(config, part, errors)):
            encoded = _encoded(tokenizer, [piece for _, piece in batch])
            for (split, piece), ids in zip(batch, encoded, strict=True):
                streams[split].add(piece, ids)
        counts = {split: stream.close() for split, stream in streams.items()}
    finally:
        for stream in streams.values():
            stream.writer.abandon()
    for split, written in counts.items():
        size = streams[split].token_bytes
        if size != written.bytes and not tokenizer.keeps_bytes:
            warn(
                f"config.data.tokenizer = {config.tokenizer!r}: changes text: the {split} split of "
                f"a part has {written.bytes:,} bytes, its tokens have {size:,}, and bits per byte "
                "count the bytes of tokens"
            )
        elif size != written.bytes:
            raise DataError(
                f"config.data.tokenizer = {config.tokenizer!r}: loses text: the {split} split has "
                f"{written.bytes} bytes, its tokens {size}. Use a tokenizer "
                "whose vocabulary has all 256 bytes, or 'bpe'"
            )
    return PartResult(counts, errors.skipped())


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Returns the dtype of rows: the narrowest unsigned integers that hold every token id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def tokenizer_info(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the keys of a manifest that describe the tokenizer and the rows' dtype."""
    sha256 = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    sizes = dict(vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id)
    return {"tokenizer": sizes | {"sha256": sha256}, "dtype": dtype_of(tokenizer).name}


class ErrorCollector:
    """Counts unreadable records and null texts, as the `readers.OnError` of readers.

    Args:
      allowed: unreadable records are allowed; False: raises their error.
    """

    def __init__(self, allowed: bool):
        self._allowed = allowed
        self._count, self._first, self._nulls = 0, {}, 0

    def __call__(self, error: readers.SourceError) -> None:
        if isinstance(error, readers.NullTextError):
            self._nulls += 1
            return
        if not self._allowed:
            raise error
        text = first_line(error)
        self._count += text not in self._first  # a file may be opened several times
        if len(self._first) < MAX_MESSAGES:
            self._first[text] = None

    def skipped(self) -> Skipped:
        """Returns the counts so far."""
        return Skipped(self._count, tuple(self._first), self._nulls)


class _Stream:
    """The token stream of one split of a part: [BOS] + document, concatenated."""

    def __init__(self, writer, tokenizer: Tokenizer, dtype: np.dtype, *, measured: bool):
        self.writer, self._fill = writer, None
        self._bos = np.array([tokenizer.bos_id], dtype)
        self._token_bytes_V, self._dropped_V = tokenizer.token_bytes(), tokenizer.dropped_bytes()
        self._dtype, self._xz = dtype, None
        self._documents = self._bytes = self._tokens = self.token_bytes = self._xz_bytes = 0
        if measured:  # validation
            self._fill = tokenizer.bos_id
            # `xz -9e` on the same text is a reference for validation's bits per byte.
            self._xz = lzma.LZMACompressor(preset=XZ_PRESET)

    def add(self, piece: readers.Piece, ids: np.ndarray) -> None:
        content = piece.text.encode()
        if piece.starts_document:
            self.writer.add(self._bos)
        self.writer.add(ids.astype(self._dtype))
        self._documents += piece.starts_document
        self._tokens += len(ids) + piece.starts_document
        self._bytes += len(content)
        self.token_bytes += int(self._token_bytes_V[ids].sum())
        if self._dropped_V is not None and piece.starts_document and len(ids):
            self.token_bytes -= int(self._dropped_V[ids[0]])
        if self._xz:
            self._xz_bytes += len(self._xz.compress(content))

    def close(self) -> Counts:
        """Writes the last row and returns the counts."""
        shard = self.writer.close(self._fill)
        if self._xz and self._bytes:
            self._xz_bytes += len(self._xz.flush())
        return Counts(self._documents, self._bytes, self._tokens, *shard, self._xz_bytes)


def _encoded(tokenizer: Tokenizer, pieces: list[readers.Piece]) -> list[np.ndarray]:
    """Returns the ids of each piece; a piece that starts a document is encoded differently."""
    ids: list = [None] * len(pieces)
    for starts, position in ((True, "start"), (False, "inside")):
        chosen = [i for i, piece in enumerate(pieces) if piece.starts_document is starts]
        if chosen:
            batch = tokenizer.encode_batch([pieces[i].text for i in chosen], position)
            for i, encoded in zip(chosen, batch, strict=True):
                ids[i] = encoded
    return ids


def _batches(pieces: Iterator[SplitPiece]) -> Iterator[list[SplitPiece]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[1].text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
