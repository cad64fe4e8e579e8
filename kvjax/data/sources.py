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
from collections.abc import Iterator
from collections.abc import Sequence
import functools
import hashlib
import lzma
import os
from typing import Protocol

from etils import epath

from kvjax.data import config as config_lib
from kvjax.data import readers
from kvjax.data.manifest import SPLITS
from kvjax.foundation import runtime
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import MissingDataError
from kvjax.foundation.errors import first_line

EMBEDDED_VALIDATION_BYTES = 200_000
CORPUS = epath.Path(__file__).parent / "corpus"
BOOKS = ("shakespeare.txt.xz", "king_james_bible.txt.xz")
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")
SUFFIXES = (".txt", *JSONL, ".parquet")
# Files up to here are told apart by all their bytes, larger ones by size, time and both ends.
HASHED_BYTES = 64 << 20


class Source(Protocol):
    """Something with documents."""

    def fingerprint(self) -> str:
        """Changes when the documents do; cheap."""

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        """The documents of `train`, `validation` (the held-out `fraction`) or `all`."""


def fingerprint(
    config: config_lib.DataConfig, say: Callable[[str], None] = lambda text: None
) -> str:
    """A hash of all that decides which documents are in which split, hexadecimal.

    Args:
      say: called with how far it is.
    """

    def of(key: str) -> list[str]:
        found = []
        for source in _sources(config, key):
            found.append(source.fingerprint())
            say(f"looking at config.data.{key}, {len(found):,} files")
        return found

    held_out, parts = of("validation_source"), of("source")
    if set(parts) & set(held_out):
        raise DataError(
            f"config.data.validation_source = {config.validation_source!r}: shares a file with "
            f"config.data.source = {config.source!r}, or they have equal ones: it would be trained "
            "on. Take it out of one of them"
        )
    return _hash(repr((parts, held_out or config.validation_fraction, config.text_key)).encode())


def check(config: config_lib.DataConfig) -> None:
    """Opens every source and reads its first document, before hours are spent on the others.

    Raises:
      readers.SourceError: a file that is damaged (a truncated Parquet shard has lost its index),
        of another format, or without the text's column.
    """
    for key in ("source", "validation_source"):
        for source in _sources(config, key):
            next(iter(source.pieces("all", 0.0)), None)


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
    key, part = "source", split
    if config.validation_source:
        key, part = ("source" if split == "train" else "validation_source"), "all"
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
        self.path = path

    def fingerprint(self) -> str:
        # The mark was once a part of the text: what was prepared with it is other data.
        marked = " without its mark" if readers.byte_order_mark(self.path) else ""
        return f"txt {_file_hash(self.path)}{marked}"

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        size = self.path.stat().length
        cut = size
        if split != "all":
            cut = readers.line_start(self.path, size - int(size * fraction))
        start, stop = (cut, size) if split == "validation" else (0, cut)
        return readers.read_text(self.path, start, stop)


class _Records:
    """Documents one by one; validation are those whose hash falls in the fraction."""

    def __init__(self, fingerprint: Callable[[], str], read):
        self.fingerprint = fingerprint  # Called once a preparation: it can read the whole file.
        self._read = read

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        for text in self._read():
            if split == "all" or (split == "validation") == is_held_out(text, fraction):
                yield from readers.read_document(text)


class _EmbeddedBook:
    """A compressed book of the corpus."""

    def __init__(self, path: epath.Path):
        self.path = path

    def fingerprint(self) -> str:
        return f"embedded {EMBEDDED_VALIDATION_BYTES} {_file_hash(self.path)}"

    def pieces(self, split: str, fraction: float) -> Iterator[readers.Piece]:
        del fraction  # A fixed validation text makes figures comparable.
        text = lzma.decompress(self.path.read_bytes())
        cut = len(text)
        if split != "all":
            cut = text.index(b"\n", len(text) - EMBEDDED_VALIDATION_BYTES - 1) + 1
        part = text[cut:] if split == "validation" else text[:cut]
        for document in part.decode().split(readers.DOCUMENT_SEPARATOR):
            yield from readers.read_document(document)


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
            found += [_EmbeddedBook(CORPUS / book) for book in BOOKS]
        elif item.startswith("tfds:"):
            found.append(_tfds_source(item, config.text_key, where))
        else:
            found += [_file_source(path, config.text_key) for path in _files(item, where)]
    return found


def _file_source(path: epath.Path, text_key: str) -> Source:
    if path.name.endswith(".txt"):
        return _TextFile(path)
    read = readers.read_parquet if path.name.endswith(".parquet") else readers.read_jsonl
    kind = next(suffix for suffix in SUFFIXES if path.name.endswith(suffix))
    read = functools.partial(read, path, text_key)
    return _Records(lambda: f"{kind} {_file_hash(path)}", read)


def _tfds_source(item: str, text_key: str, where: str) -> Source:
    name, _, split = item.removeprefix("tfds:").partition("#")
    split = split or "train"
    try:
        builder = _tfds_builder(name)
    except readers.SourceError as error:
        raise readers.SourceError(f"{where}: {error}") from error
    info = builder.info
    sizes = info.splits[split].shard_lengths if split in info.splits else None
    return _Records(
        lambda: f"tfds {info.full_name} {split} {sizes} {info.dataset_size}",
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
