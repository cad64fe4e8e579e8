"""The documents of a split, streamed from the embedded corpus, files or TFDS.

What is held out is decided before anything is packed:

| source | validation is |
|---|---|
| `embedded` | the last 200,000 bytes of each of the two books, from the next line on |
| .txt | the last `validation_fraction` of each file's bytes, from the next line on |
| .jsonl, .parquet, TFDS | the documents whose hash falls in `validation_fraction` |

So equal records are on the same side. With a `validation_source`, that is validation, and all of
`source` is for training.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import hashlib
import lzma
import os
from typing import NamedTuple
from typing import Protocol

from etils import epath

from kvjax.data import config as config_lib
from kvjax.data import readers
from kvjax.data.manifest import SPLITS
from kvjax.foundation import runtime
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import MissingDataError
from kvjax.foundation.errors import UserError
from kvjax.foundation.errors import first_line
from kvjax.foundation.files import in_bucket

EMBEDDED_VALIDATION_BYTES = 200_000
CORPUS = epath.Path(__file__).parent / "corpus"
_EMBEDDED = "embedded:"
BOOKS = ("shakespeare.txt.xz", "king_james_bible.txt.xz")
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")
SUFFIXES = (".txt", *JSONL, ".parquet")
# Files up to here are told apart by all their bytes, larger ones by size, time and both ends.
HASHED_BYTES = 64 << 20


class Range(NamedTuple):
    """A run of a source, [start, stop) in its own unit, and about how many bytes that is."""

    start: int
    stop: int
    bytes: int


Labelled = tuple[str, readers.Piece]  # a split and a piece of a document of it


class Source(Protocol):
    """Something with documents.

    Attributes:
      name: by which `_named` finds it.
    """

    name: str

    def fingerprint(self) -> str:
        """Changes when the documents do; cheap."""

    def stamp(self) -> str:
        """Changes when its files are written, or nearly always does; costs a look at each."""

    def ranges(self, limit: int) -> Iterator[Range]:
        """All of it in order, in ranges of at most about so many bytes where it can be cut."""

    def density(self) -> float:
        """Bytes of text per byte of its ranges, about."""

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        """The documents of `train`, `validation` (the held-out `fraction`) or `all`."""

    def split(self, fraction: float, range: Range, broken: readers.Broken) -> Iterator[Labelled]:
        """The documents of one of `ranges`, each piece with its split; 0.0 holds none out."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """A range of one of the sources that a key names; all that a worker needs to read it."""

    key: str  # source or validation_source
    name: str  # of the file, or whatever it is
    range: Range
    stamp: str  # of the source when it was looked at

    @property
    def bytes(self) -> int:
        return self.range.bytes


def fingerprints(
    config: config_lib.DataConfig, say: Callable[[str], None] = lambda text: None
) -> dict[str, list[tuple[str, str]]]:
    """By key, the sources it names in order: (name, a hash that changes when its documents do).

    Args:
      say: called with how far it is.

    Raises:
      DataError: a source is named by both keys.
    """
    found = {}
    for key in ("source", "validation_source"):
        found[key] = []
        for source in _sources(config, key):
            found[key].append((source.name, source.fingerprint()))
            say(f"looking at config.data.{key}, {len(found[key]):,} files")
    contents = [{mark for _, mark in marks} for marks in found.values()]
    if set.intersection(*contents):
        raise DataError(
            f"config.data.validation_source = {config.validation_source!r}: shares a file with "
            f"config.data.source = {config.source!r}, or they have equal ones: it would be trained "
            "on. Take it out of one of them"
        )
    return found


def fingerprint(
    config: config_lib.DataConfig, found: dict[str, list[tuple[str, str]]] | None = None
) -> str:
    """A hash of all that decides which documents are in which split, hexadecimal.

    Args:
      found: what `fingerprints` returned, if it was asked.
    """
    parts, held_out = ([mark for _, mark in m] for m in (found or fingerprints(config)).values())
    return _hash(repr((parts, held_out or config.validation_fraction, config.text_key)).encode())


def check(config: config_lib.DataConfig, broken: readers.Broken = readers.refuse) -> None:
    """Opens every source and reads its first document, before hours are spent on the others.

    Args:
      broken: called with a source that cannot be read.

    Raises:
      readers.SourceError: a file that is damaged (a truncated Parquet shard has lost its index),
        of another format, or without the text's column.
    """
    for key in ("source", "validation_source"):
        for source in _sources(config, key):
            try:
                with _failures_told(source.name):
                    next(iter(source.pieces("all", 0.0)), None)
            except readers.SourceError as error:
                broken(error)


def slices(
    config: config_lib.DataConfig, limit: int, broken: readers.Broken = readers.refuse
) -> Iterator[Slice]:
    """All that `source` names and then `validation_source`, in order, in slices.

    Args:
      limit: bytes that a slice has at most, about, where its source can be cut.
      broken: called with a source that cannot be opened.
    """
    for key in ("source", "validation_source"):
        for source in _sources(config, key):
            try:
                with _failures_told(source.name):
                    stamp, ranges = source.stamp(), list(source.ranges(limit))
                for range in ranges:
                    yield Slice(key, source.name, range, stamp)
            except readers.SourceError as error:
                broken(error)


def labelled(
    config: config_lib.DataConfig, slice: Slice, broken: readers.Broken = readers.refuse
) -> Iterator[Labelled]:
    """The documents of a slice in order, each as pieces with their split, read once.

    Args:
      broken: see `readers.Broken`.

    Raises:
      DataError: the source was written to since it was looked at.
      UserError: a disk or a network failed.
    """
    source = _named(slice.name, config.text_key, f"config.data.{slice.key} = {slice.name!r}")
    held_out = 0.0 if config.validation_source else config.validation_fraction
    split = "train" if slice.key == "source" else "validation"
    with _failures_told(slice.name):
        _check_unchanged(source, slice)
        for found, piece in source.split(held_out, slice.range, broken):
            yield split if config.validation_source else found, piece
        _check_unchanged(source, slice)


@contextlib.contextmanager
def _failures_told(name: str) -> Iterator[None]:
    """A disk or a network that fails, as a message."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not in_bucket(name):
            raise  # buckets' clients have errors of their own
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"{name} could not be read: {why}. What is done stays: run the same command again"
        ) from error


def _check_unchanged(source: Source, slice: Slice) -> None:
    if source.stamp() != slice.stamp:
        raise DataError(
            f"config.data.{slice.key}: {slice.name} changed while it was prepared. Put back what "
            "it was, or prepare it once it stays as it is"
        )


def density(config: config_lib.DataConfig, slices: Iterable[Slice]) -> float:
    """Bytes of text per byte of these slices, about."""
    names = dict.fromkeys(piece.name for piece in slices)
    found = [_named(name, config.text_key, f"config.data.source = {name!r}") for name in names]
    return sum(source.density() for source in found) / len(found)


def _key_and_part(config: config_lib.DataConfig, split: str) -> tuple[str, str]:
    """Which key names the sources of a split, and which part of them it is."""
    if config.validation_source:
        return ("source" if split == "train" else "validation_source"), "all"
    return "source", split


def pieces(config: config_lib.DataConfig, split: str) -> Iterator[readers.Piece]:
    """The documents of a split in a fixed order, each as pieces; empty documents are left out.

    Args:
      config: names the sources and the split.
      split: `train` or `validation`.

    Raises:
      FileNotFoundError: a source that matches no file.
      readers.SourceError: a source that can't be read, naming file and place, or an empty split.
    """
    if split not in SPLITS:
        raise DataError(f"split={split!r} must be one of {SPLITS}.")
    key, part = _key_and_part(config, split)
    found = False
    for source in _sources(config, key):
        for piece in source.pieces(part, config.validation_fraction):
            found = True
            yield piece
    if found:
        return
    named = f"config.data.{key} = {getattr(config, key)!r}"
    if part == "all" or not any(True for s in _sources(config, key) for _ in s.pieces("all", 0.0)):
        raise readers.SourceError(f"{named}: has no documents, everything it matches is empty")
    change = "Raise" if split == "validation" else "Lower"
    raise readers.SourceError(
        f"{named}: the {split} split is empty: no document fell into it with"
        f" config.data.validation_fraction = {config.validation_fraction} (documents aren't cut, "
        f"nor are lines). {change} that, or name a validation_source"
    )


class _TextFile:
    """A .txt file; validation is its end."""

    def __init__(self, path: epath.Path):
        self.path, self.name = path, os.fspath(path)

    def fingerprint(self) -> str:
        # The mark was once a part of the text: what was prepared with it is other data.
        marked = " without its mark" if readers.byte_order_mark(self.path) else ""
        return f"txt {_file_hash(self.path)}{marked}"

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
        """Where the training documents end, and the file."""
        size = self.path.stat().length
        return readers.line_start(self.path, size - int(size * fraction)), size

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        cut, size = self._bounds(0.0 if split == "all" else fraction)
        start, stop = (cut, size) if split == "validation" else (0, cut)
        return readers.read_text(self.path, start, stop)

    def split(self, fraction: float, range: Range, broken: readers.Broken) -> Iterator[Labelled]:
        cut, size = self._bounds(fraction)
        for split, start, stop in (("train", 0, cut), ("validation", cut, size)):
            first, last = max(start, range.start), min(stop, range.stop)
            if first < last:
                opens = first == start or readers.document_starts(self.path, first)
                for piece in readers.read_text(self.path, first, last, broken, opens=opens):
                    yield split, piece


class _Records:
    """Documents one by one; validation are those whose hash falls in the fraction."""

    def __init__(
        self, name: str, fingerprint: Callable[[], str], stamp, ranges, read, density=None
    ):
        """Made of functions.

        Args:
          name: see `Source`.
          fingerprint: called once a preparation: it can read the whole file.
          stamp: see `Source`.
          ranges: of a limit, see `Source`.
          read: of the first and the last place and of what to do with what cannot be read, the
            documents between; of nothing, all.
          density: see `Source`; None: as much text as bytes.
        """
        self.name, self.fingerprint = name, fingerprint
        self.stamp, self.ranges = stamp, ranges
        self.density = density or (lambda: 1.0)
        self._read = read

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        for text in self._read():
            if split == "all" or (split == "validation") == is_held_out(text, fraction):
                yield from readers.read_document(text)

    def split(self, fraction: float, range: Range, broken: readers.Broken) -> Iterator[Labelled]:
        for text in self._read(range.start, range.stop, broken):
            split = "validation" if is_held_out(text, fraction) else "train"
            for piece in readers.read_document(text):
                yield split, piece


class _EmbeddedBook:
    """A compressed book of the corpus."""

    def __init__(self, path: epath.Path):
        self.path, self.name = path, f"{_EMBEDDED}{path.name}"

    def fingerprint(self) -> str:
        return f"embedded {EMBEDDED_VALIDATION_BYTES} {_file_hash(self.path)}"

    def stamp(self) -> str:
        return _file_stamp(self.path)

    def ranges(self, limit: int) -> Iterator[Range]:
        del limit
        yield Range(0, 1, self.path.stat().length)

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        del fraction  # A fixed validation text makes figures comparable.
        text = lzma.decompress(self.path.read_bytes())
        cut = len(text)
        if split != "all":
            cut = text.index(b"\n", len(text) - EMBEDDED_VALIDATION_BYTES - 1) + 1
        part = text[cut:] if split == "validation" else text[:cut]
        for document in part.decode().split(readers.DOCUMENT_SEPARATOR):
            yield from readers.read_document(document)

    def density(self) -> float:
        return len(lzma.decompress(self.path.read_bytes())) / self.path.stat().length

    def split(self, fraction: float, range: Range, broken: readers.Broken) -> Iterator[Labelled]:
        del range, broken
        for split in SPLITS if fraction else ("all",):
            for piece in self.pieces(split, fraction):
                yield split, piece


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document's own hash puts it into a validation split of this fraction."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def _sources(config: config_lib.DataConfig, key: str) -> Sequence[Source]:
    """What `source` or `validation_source` names.

    Raises:
      UserError: it names what is not there, or cannot be read; says which of the two does.
    """
    found: list[Source] = []
    for item in config_lib.split_source(getattr(config, key)):
        where = f"config.data.{key} = {item!r}"
        if item == "embedded":
            names = [_EMBEDDED + book for book in BOOKS]
        elif item.startswith("tfds:"):
            names = [item]
        else:
            names = [os.fspath(path) for path in _files(item, where)]
        found += [_named(name, config.text_key, where) for name in names]
    return found


def _named(name: str, text_key: str, where: str) -> Source:
    if name.startswith(_EMBEDDED):
        return _EmbeddedBook(CORPUS / name.removeprefix(_EMBEDDED))
    if name.startswith("tfds:"):
        return _tfds_source(name, text_key, where)
    return _file_source(epath.Path(name), text_key)


def _file_source(path: epath.Path, text_key: str) -> Source:
    if path.name.endswith(".txt"):
        return _TextFile(path)
    kind = next(suffix for suffix in SUFFIXES if path.name.endswith(suffix))
    if kind == ".parquet":
        ranges, read = readers.parquet_ranges, readers.read_parquet
    elif kind == ".jsonl":
        ranges, read = readers.line_ranges, readers.read_jsonl
    else:  # compressed: from the start on or not at all
        ranges, read = _whole, readers.read_jsonl
    return _Records(
        os.fspath(path),
        lambda: f"{kind} {_file_hash(path)}",
        lambda: _file_stamp(path),
        lambda limit: (Range(*range) for range in ranges(path, text_key, limit)),
        functools.partial(read, path, text_key),
        None if kind == ".parquet" else lambda: readers.jsonl_density(path, text_key),
    )


def _whole(path: epath.Path, key: str, limit: int) -> Iterator[tuple[int, int, int]]:
    del key, limit
    size = path.stat().length
    yield 0, size, size


def _tfds_source(item: str, text_key: str, where: str) -> Source:
    name, _, split = item.removeprefix("tfds:").partition("#")
    split = split or "train"
    try:
        builder = _tfds_builder(name)
    except readers.SourceError as error:
        raise readers.SourceError(f"{where}: {error}") from error
    info = builder.info
    known = info.splits.get(split)
    sizes = known.shard_lengths if known else None

    def ranges(limit: int) -> Iterator[Range]:
        count, size = (known.num_examples, int(known.num_bytes)) if known else (0, 0)
        step = max(1, count * limit // max(size, 1))
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield Range(start, stop, size * (stop - start) // count)

    fingerprint = lambda: f"tfds {info.full_name} {split} {sizes} {info.dataset_size}"
    return _Records(
        item,
        fingerprint,
        fingerprint,
        ranges,
        functools.partial(readers.read_tfds, builder, split, text_key),
    )


@functools.cache
def _tfds_builder(name: str):
    import tensorflow_datasets as tfds  # Takes 0.5 s, and most runs read no TFDS source.

    folder = os.environ.get("TFDS_DATA_DIR")
    try:
        builder = tfds.builder(name, data_dir=folder, file_format="array_record")
    except Exception as error:  # Whatever the data set's own code raises.
        raise readers.SourceError(
            f"tfds:{name} can't be opened: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not builder.is_prepared():
        # Not prepared from here: most data sets' code needs TensorFlow, and hours.
        raise readers.SourceError(
            f"tfds:{name} is not prepared as ArrayRecord in {builder.data_dir}. Where there is a"
            f" network, run: tfds build {name} --file_format=array_record --data_dir=FOLDER; then"
            " set TFDS_DATA_DIR=FOLDER."
        )
    return builder


def _files(pattern: str, where: str) -> list[epath.Path]:
    """The files of a path, folder (those directly in it) or glob, sorted.

    Args:
      where: for messages: the key and its value.
    """
    try:
        found = _matching(pattern, where)
    except OSError as error:  # a name too long, a folder that may not be listed
        raise readers.SourceError(f"{where}: cannot be opened: {error}") from error
    if not found:
        raise MissingDataError(
            f"{where}: matches no file; give 'embedded', 'tfds:NAME', or a file, glob or folder of "
            f"files ending in {', '.join(SUFFIXES)}"
        )
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise readers.SourceError(
                f"{where}: {os.fspath(file)} ends in none of {', '.join(SUFFIXES)}: convert or "
                "rename it"
            )
    return found


def _matching(pattern: str, where: str) -> list[epath.Path]:
    path = runtime.path(where.partition(" = ")[0], pattern)
    if any(c in pattern for c in "*?["):
        parts = path.parts
        first = next(i for i, part in enumerate(parts) if any(c in part for c in "*?["))
        folder = epath.Path(*parts[:first])
        return sorted(p for p in folder.glob("/".join(parts[first:])) if not p.is_dir())
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES) and not p.is_dir())
    return [path] if path.exists() else []


def _file_stamp(path: epath.Path) -> str:
    if in_bucket(path):
        found = path.stat()
        return f"{found.length} {found.mtime}"
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns}"


def _file_hash(path: epath.Path) -> str:
    stat = path.stat()
    with readers.open_file(path) as file:
        if stat.length <= HASHED_BYTES:
            digest = hashlib.blake2b(digest_size=16)
            while block := file.read(readers.BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()
        head = file.read(readers.BLOCK_BYTES)
        file.seek(stat.length - readers.BLOCK_BYTES)
        return _hash(repr((path.name, stat.length, stat.mtime)).encode() + head + file.read())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
