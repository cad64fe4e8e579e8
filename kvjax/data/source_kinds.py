"""Kinds of sources: embedded books, lookups made from them, text files, files of records, TFDS.

The validation split is chosen before packing:

| source | validation is |
|---|---|
| `embedded` | the last 200,000 bytes of each of the two books, from the next line on |
| .txt | the last `validation_fraction` of each file's bytes, from the next line on |
| JSON lines, .parquet, TFDS, lookups | the documents whose hash falls in `validation_fraction` |

By the hash, duplicate records are in the same split. If there is a `validation_source`, it is the
validation split, and all of `source` is for training.
"""

from collections.abc import Callable, Iterator
import functools
import hashlib
import lzma
import os
from typing import NamedTuple, Protocol

from etils import epath

from kvjax.data import formats, lookups, readers, record_readers, tfds_sets
from kvjax.data.manifest import SPLITS
from kvjax.foundation.files import in_bucket

EMBEDDED_VALIDATION_BYTES = 200_000
CORPUS = epath.Path(__file__).parent / "corpus"
EMBEDDED = "embedded:"
LOOKUPS = f"{EMBEDDED}lookups"
BOOKS = ("shakespeare.txt.xz", "king_james_bible.txt.xz")
SUFFIXES = (formats.TEXT, formats.PARQUET, *formats.LINES)
# Larger files are not hashed whole: their fingerprint has their size, time and both ends.
HASHED_BYTES = 64 << 20


class Range(NamedTuple):
    """A range [start, stop) of a source, in the source's unit, and its approximate bytes."""

    start: int
    stop: int
    bytes: int


SplitPiece = tuple[str, readers.Piece]  # a split's name and a piece of one of its documents


class Source(Protocol):
    """A file or data set of documents.

    Attributes:
      name: the name that `open_source` takes.
    """

    name: str

    def fingerprint(self) -> str:
        """Returns a hash that changes when the documents do."""

    def stamp(self) -> str:
        """Returns a value that changes when the files are written, from their metadata alone."""

    def ranges(self, limit: int) -> Iterator[Range]:
        """Yields ranges that cover the source in order: of about `limit` bytes, or the whole."""

    def density(self) -> float:
        """Returns about how many bytes of text there are per stored byte."""

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        """Yields the documents of split `train`, `validation` (a share `fraction`) or `all`."""

    def split_pieces(
        self, fraction: float, range: Range, on_error: readers.OnError
    ) -> Iterator[SplitPiece]:
        """Yields the documents of a range (see `ranges`), as pieces with their split."""


class TextFile:
    """A .txt file; its end is the validation split."""

    def __init__(self, path: epath.Path):
        self.path, self.name = path, os.fspath(path)

    def fingerprint(self) -> str:
        # Earlier versions kept the byte order mark as text, so their data have another hash.
        marked = " without its mark" if readers.byte_order_mark(self.path) else ""
        return f"txt {file_hash(self.path)}{marked}"

    def stamp(self) -> str:
        return _file_stamp(self.path)

    def ranges(self, limit: int) -> Iterator[Range]:
        readers.check_encoding(self.path)
        size, start = self.path.stat().length, 0
        while start < size:
            stop = size
            if size - start > limit:
                stop = readers.cut(self.path, start + limit)
            yield Range(start, stop, stop - start)
            start = stop

    def density(self) -> float:
        return 1.0

    def _bounds(self, fraction: float) -> tuple[int, int]:
        """Returns the byte offsets at which the training text and the file end."""
        size = self.path.stat().length
        return readers.line_start(self.path, size - int(size * fraction)), size

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        cut, size = self._bounds(0.0 if split == "all" else fraction)
        start, stop = (cut, size) if split == "validation" else (0, cut)
        return readers.read_text(self.path, start, stop)

    def split_pieces(
        self, fraction: float, range: Range, on_error: readers.OnError
    ) -> Iterator[SplitPiece]:
        cut, size = self._bounds(fraction)
        for split, start, stop in (("train", 0, cut), ("validation", cut, size)):
            first, last = max(start, range.start), min(stop, range.stop)
            if first < last:
                at_start = first == start or readers.document_starts(self.path, first)
                for piece in readers.read_text(
                    self.path, first, last, on_error, starts_document=at_start
                ):
                    yield split, piece


class Records:
    """A source of one document per record; a document's hash determines its split."""

    def __init__(
        self, name: str, fingerprint: Callable[[], str], stamp, ranges, read, density=None
    ):
        """Builds a source from functions.

        Args:
          name: see `Source`.
          fingerprint, stamp, ranges: methods of `Source`.
          read: called as read() or read(start, stop, on_error), yields documents.
          density: see `Source`; None: 1.
        """
        self.name, self.fingerprint = name, fingerprint
        self.stamp, self.ranges = stamp, ranges
        self.density = density or (lambda: 1.0)
        self._read = read

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        for text in self._read():
            if split == "all" or (split == "validation") == is_held_out(text, fraction):
                yield from readers.read_document(text)

    def split_pieces(
        self, fraction: float, range: Range, on_error: readers.OnError
    ) -> Iterator[SplitPiece]:
        for text in self._read(range.start, range.stop, on_error):
            split = "validation" if is_held_out(text, fraction) else "train"
            for piece in readers.read_document(text):
                yield split, piece


class EmbeddedBook:
    """A compressed book of the embedded corpus."""

    def __init__(self, path: epath.Path):
        self.path, self.name = path, f"{EMBEDDED}{path.name}"

    def fingerprint(self) -> str:
        return f"embedded {EMBEDDED_VALIDATION_BYTES} {file_hash(self.path)}"

    def stamp(self) -> str:
        return _file_stamp(self.path)

    def ranges(self, limit: int) -> Iterator[Range]:
        del limit
        yield Range(0, 1, self.path.stat().length)

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        del fraction  # the split is fixed, so that losses are comparable between runs
        text = lzma.decompress(self.path.read_bytes())
        cut = len(text)
        if split != "all":
            cut = text.index(b"\n", len(text) - EMBEDDED_VALIDATION_BYTES - 1) + 1
        selected = text[cut:] if split == "validation" else text[:cut]
        for document in selected.decode().split(readers.DOCUMENT_SEPARATOR):
            yield from readers.read_document(document)

    def density(self) -> float:
        return len(lzma.decompress(self.path.read_bytes())) / self.path.stat().length

    def split_pieces(
        self, fraction: float, range: Range, on_error: readers.OnError
    ) -> Iterator[SplitPiece]:
        del range, on_error
        for split in SPLITS if fraction else ("all",):
            for piece in self.pieces(split, fraction):
                yield split, piece


def is_held_out(text: str, fraction: float) -> bool:
    """Returns True if a document's hash puts it into a validation split of this fraction."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def open_source(name: str, text_key: str, where: str) -> Source:
    """Returns the source of a name: `embedded:BOOK` or `:lookups`, `tfds:NAME`, or a file's path.

    Args:
      where: the config key and its value, for messages.
    """
    if name == LOOKUPS:
        return _lookups_source()
    if name.startswith(EMBEDDED):
        return EmbeddedBook(CORPUS / name.removeprefix(EMBEDDED))
    if name.startswith(tfds_sets.PREFIX):
        return _tfds_source(name, text_key, where)
    return _file_source(epath.Path(name), text_key)


def _lookups_source() -> Records:
    """Returns the source of `lookups.documents`, whose passages no book holds out."""
    texts = _lookups()

    def read(start=0, stop=len(texts), on_error=readers.raise_error) -> Iterator[str]:
        del on_error
        yield from texts[start:stop]

    def fingerprint() -> str:
        return f"lookups {digest(repr(texts).encode())}"

    def ranges(limit: int) -> Iterator[Range]:
        del limit
        yield Range(0, len(texts), sum(map(len, texts)))

    return Records(LOOKUPS, fingerprint, fingerprint, ranges, read)


@functools.cache
def _lookups() -> tuple[str, ...]:
    books = [EmbeddedBook(CORPUS / name).pieces("train", 0.0) for name in BOOKS]
    return tuple(lookups.documents("\n".join(piece.text for book in books for piece in book)))


def _file_source(path: epath.Path, text_key: str) -> Source:
    kind = formats.suffix(path.name, SUFFIXES)
    if kind == formats.TEXT:
        return TextFile(path)
    if kind == formats.PARQUET:
        ranges, read = record_readers.parquet_ranges, record_readers.read_parquet
    elif kind in formats.PLAIN_LINES:
        ranges, read = record_readers.line_ranges, record_readers.read_jsonl
    else:  # compressed files cannot be cut
        ranges, read = _single_range, record_readers.read_jsonl
    return Records(
        os.fspath(path),
        lambda: f"{kind} {file_hash(path)}",
        lambda: _file_stamp(path),
        lambda limit: map(Range._make, ranges(path, text_key, limit)),
        functools.partial(read, path, text_key),
        None if kind == formats.PARQUET else lambda: record_readers.jsonl_density(path, text_key),
    )


def _single_range(path: epath.Path, key: str, limit: int) -> Iterator[tuple[int, int, int]]:
    del key, limit
    size = path.stat().length
    yield 0, size, size


def _tfds_source(item: str, text_key: str, where: str) -> Source:
    name, split = tfds_sets.split_name(item)
    split = split or "train"
    try:
        builder = tfds_sets.builder(name)
    except readers.SourceError as error:
        raise readers.SourceError(f"{where}: {error}") from error
    info = builder.info
    split_info = info.splits.get(split)
    sizes = split_info.shard_lengths if split_info else None

    def ranges(limit: int) -> Iterator[Range]:
        count, size = (split_info.num_examples, int(split_info.num_bytes)) if split_info else (0, 0)
        step = max(1, count * limit // max(size, 1))
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield Range(start, stop, size * (stop - start) // count)

    def fingerprint() -> str:
        return f"tfds {info.full_name} {split} {sizes} {info.dataset_size}"

    return Records(
        item,
        fingerprint,
        fingerprint,
        ranges,
        functools.partial(record_readers.read_tfds, builder, split, text_key),
    )


def _file_stamp(path: epath.Path) -> str:
    if in_bucket(path):
        stat = path.stat()
        return f"{stat.length} {stat.mtime}"
    stat = os.stat(path)
    return f"{stat.st_size} {stat.st_mtime_ns}"


def file_hash(path: epath.Path) -> str:
    """Returns a hash of a file's bytes, or of a large file's size, time and both ends."""
    with readers.open_file(path) as file:
        stat = path.stat()
        if stat.length <= HASHED_BYTES:
            hashed = hashlib.blake2b(digest_size=16)
            while block := file.read(readers.BLOCK_BYTES):
                hashed.update(block)
            return hashed.hexdigest()
        head = file.read(readers.BLOCK_BYTES)
        file.seek(stat.length - readers.BLOCK_BYTES)
        return digest(repr((path.name, stat.length, stat.mtime)).encode() + head + file.read())


def digest(content: bytes) -> str:
    """Returns a hexadecimal hash of bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
