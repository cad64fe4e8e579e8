"""The sources that a config names: fingerprints, slices, and documents by split.

Each kind of source chooses its held-out documents, see `source_kinds`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import os

from kvjax.data import config as config_lib, formats, matching, readers, source_kinds
from kvjax.foundation.errors import DataError, UserError, first_line
from kvjax.foundation.files import in_bucket


@dataclasses.dataclass(frozen=True)
class Slice:
    """A range of one source; all that a worker needs to read it."""

    key: str  # source or validation_source
    name: str  # the source's name, see `source_kinds.open_source`
    range: source_kinds.Range
    stamp: str  # the source's stamp when it was inspected

    @property
    def bytes(self) -> int:
        return self.range.bytes


def fingerprints(
    config: config_lib.DataConfig, say: Callable[[str], None] = lambda text: None
) -> dict[str, list[tuple[str, str]]]:
    """Returns by config key, for each source in order, its name and a hash of its documents.

    Args:
      say: called with progress.

    Raises:
      DataError: both keys name the same source.
    """
    hashes_by_key = {}
    for key in ("source", "validation_source"):
        hashes_by_key[key] = []
        for source in _sources(config, key):
            hashes_by_key[key].append((source.name, source.fingerprint()))
            say(f"inspecting config.data.{key}, {len(hashes_by_key[key]):,} files")
    contents = [{content for _, content in pairs} for pairs in hashes_by_key.values()]
    if set.intersection(*contents):
        raise DataError(
            f"config.data.validation_source = {config.validation_source!r}: has a file in common "
            f"with config.data.source = {config.source!r}, so training would include validation "
            "text. Remove it from one of them"
        )
    return hashes_by_key


def fingerprint(
    config: config_lib.DataConfig, known: dict[str, list[tuple[str, str]]] | None = None
) -> str:
    """Returns a hash of everything that determines the documents of each split.

    Args:
      known: result of `fingerprints`; None: computed here.
    """
    hashes = known or fingerprints(config)
    source = [content for _, content in hashes["source"]]
    held_out = [content for _, content in hashes["validation_source"]]
    return source_kinds.digest(
        repr((source, held_out or config.validation_fraction, config.text_key)).encode()
    )


def check(config: config_lib.DataConfig, on_error: readers.OnError = readers.raise_error) -> None:
    """Reads the first document of every source, to find bad sources before hours of work.

    Args:
      on_error: called for a source that cannot be read.

    Raises:
      readers.SourceError: a file is damaged (a truncated Parquet shard has lost its index), has
        another format, or lacks the column of the text.
    """
    for key in ("source", "validation_source"):
        for source in _sources(config, key):
            try:
                with _read_errors_as_messages(source.name):
                    next(iter(source.pieces("all", 0.0)), None)
            except readers.SourceError as error:
                on_error(error)


def slices(
    config: config_lib.DataConfig, limit: int, on_error: readers.OnError = readers.raise_error
) -> Iterator[Slice]:
    """Yields slices that cover all of `source` and then `validation_source`, in order.

    Args:
      limit: approximate maximum size of a slice in bytes, if the source can be cut.
      on_error: called for a source that cannot be opened.
    """
    for key in ("source", "validation_source"):
        for source in _sources(config, key):
            try:
                with _read_errors_as_messages(source.name):
                    stamp, ranges = source.stamp(), list(source.ranges(limit))
                for range in ranges:
                    yield Slice(key, source.name, range, stamp)
            except readers.SourceError as error:
                on_error(error)


def split_pieces(
    config: config_lib.DataConfig, slice: Slice, on_error: readers.OnError = readers.raise_error
) -> Iterator[source_kinds.SplitPiece]:
    """Yields the documents of a slice in order, as pieces with their split.

    Args:
      on_error: see `readers.OnError`.

    Raises:
      DataError: the source has changed since it was inspected.
      UserError: a disk or a network failed.
    """
    source = source_kinds.open_source(
        slice.name, config.text_key, f"config.data.{slice.key} = {slice.name!r}"
    )
    held_out = 0.0 if config.validation_source else config.validation_fraction
    split = "train" if slice.key == "source" else "validation"
    with _read_errors_as_messages(slice.name):
        _check_unchanged(source, slice)
        for own_split, piece in source.split_pieces(held_out, slice.range, on_error):
            yield split if config.validation_source else own_split, piece
        _check_unchanged(source, slice)


@contextlib.contextmanager
def _read_errors_as_messages(name: str) -> Iterator[None]:
    """Turns errors of a disk or a network into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not in_bucket(name):
            raise  # a bug; only clients of buckets raise other types for failed reads
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"{name} could not be read: {why}. Finished parts stay: run the same command again"
        ) from error


def _check_unchanged(source: source_kinds.Source, slice: Slice) -> None:
    if source.stamp() != slice.stamp:
        raise DataError(
            f"config.data.{slice.key}: {slice.name} changed while it was prepared. Restore it, or "
            "prepare it again once nothing writes to it"
        )


def density(config: config_lib.DataConfig, slices: Iterable[Slice]) -> float:
    """Returns about how many bytes of text the slices have per stored byte."""
    names = dict.fromkeys(piece.name for piece in slices)
    opened = [
        source_kinds.open_source(name, config.text_key, f"config.data.source = {name!r}")
        for name in names
    ]
    return sum(source.density() for source in opened) / len(opened)


def pieces(config: config_lib.DataConfig, split: str) -> Iterator[readers.Piece]:
    """Yields the documents of a split in a fixed order, as pieces; skips empty documents.

    Args:
      split: `train` or `validation`.

    Raises:
      FileNotFoundError: a source matches no file.
      readers.SourceError: a source cannot be read; the message names file and position.
      readers.EmptySplitError: the split has no documents.
    """
    key, source_split = "source", split
    if config.validation_source:
        key, source_split = ("source" if split == "train" else "validation_source"), "all"
    has_pieces = False
    for source in _sources(config, key):
        for piece in source.pieces(source_split, config.validation_fraction):
            has_pieces = True
            yield piece
    if has_pieces:
        return
    named = f"config.data.{key} = {getattr(config, key)!r}"
    documents = (d for s in _sources(config, key) for d in s.pieces("all", 0.0))
    if source_split == "all" or next(documents, None) is None:
        raise readers.SourceError(
            f"{named}: has no documents: everything it matches is empty (or null under "
            f"{config.text_key!r})"
        )
    change = "Raise" if split == "validation" else "Lower"
    raise readers.EmptySplitError(
        f"{named}: the {split} split is empty: no document falls into it with"
        f" config.data.validation_fraction = {config.validation_fraction} (documents and lines are "
        f"not cut). {change} it, or set a validation_source"
    )


def _sources(config: config_lib.DataConfig, key: str) -> Sequence[source_kinds.Source]:
    """Returns the sources that a key names.

    Raises:
      UserError: a source does not exist or cannot be read; the message names it.
    """
    opened: list[source_kinds.Source] = []
    for item in config_lib.split_source(getattr(config, key)):
        where = f"config.data.{key} = {item!r}"
        if item == "embedded":
            names = [source_kinds.EMBEDDED + book for book in source_kinds.BOOKS]
        elif item == source_kinds.LOOKUPS or item.startswith("tfds:"):
            names = [item]
        else:
            advice = (
                "; give 'embedded', 'tfds:NAME', 'hf://datasets/OWNER/NAME/PATH', or a file, glob "
                f"or folder of files ending in {formats.listed(source_kinds.SUFFIXES)}"
            )
            found_files = matching.files(item, source_kinds.SUFFIXES, where, advice)
            names = [os.fspath(path) for path in found_files]
        opened += [source_kinds.open_source(name, config.text_key, where) for name in names]
    return opened
