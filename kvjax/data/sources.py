"""The sources that a config names: their fingerprints, their slices, their documents by split.

Which documents are held out is each source's own business, see `source_kinds`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import os

from kvjax.data import config as config_lib, formats, matching, readers, source_kinds
from kvjax.data.manifest import SPLITS
from kvjax.foundation.errors import DataError, UserError, first_line
from kvjax.foundation.files import in_bucket


@dataclasses.dataclass(frozen=True)
class Slice:
    """A range of one of the sources that a key names; all that a worker needs to read it."""

    key: str  # source or validation_source
    name: str  # of the file, or whatever it is
    range: source_kinds.Range
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
    return source_kinds.digest(
        repr((parts, held_out or config.validation_fraction, config.text_key)).encode()
    )


def check(config: config_lib.DataConfig, on_error: readers.OnError = readers.raise_error) -> None:
    """Opens every source and reads its first document, before hours are spent on the others.

    Args:
      on_error: called with a source that cannot be read.

    Raises:
      readers.SourceError: a file that is damaged (a truncated Parquet shard has lost its index),
        of another format, or without the text's column.
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
    """All that `source` names and then `validation_source`, in order, in slices.

    Args:
      limit: bytes that a slice has at most, about, where its source can be cut.
      on_error: called with a source that cannot be opened.
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
    """The documents of a slice in order, each as pieces with their split, read once.

    Args:
      on_error: see `readers.OnError`.

    Raises:
      DataError: the source was written to since it was looked at.
      UserError: a disk or a network failed.
    """
    source = source_kinds.open_source(
        slice.name, config.text_key, f"config.data.{slice.key} = {slice.name!r}"
    )
    held_out = 0.0 if config.validation_source else config.validation_fraction
    split = "train" if slice.key == "source" else "validation"
    with _read_errors_as_messages(slice.name):
        _check_unchanged(source, slice)
        for found, piece in source.split_pieces(held_out, slice.range, on_error):
            yield split if config.validation_source else found, piece
        _check_unchanged(source, slice)


@contextlib.contextmanager
def _read_errors_as_messages(name: str) -> Iterator[None]:
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


def _check_unchanged(source: source_kinds.Source, slice: Slice) -> None:
    if source.stamp() != slice.stamp:
        raise DataError(
            f"config.data.{slice.key}: {slice.name} changed while it was prepared. Put back what "
            "it was, or prepare it once it stays as it is"
        )


def density(config: config_lib.DataConfig, slices: Iterable[Slice]) -> float:
    """Bytes of text per byte of these slices, about."""
    names = dict.fromkeys(piece.name for piece in slices)
    found = [
        source_kinds.open_source(name, config.text_key, f"config.data.source = {name!r}")
        for name in names
    ]
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
      readers.SourceError: a source that can't be read, naming file and place.
      readers.EmptySplitError: no document is in the split.
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
        raise readers.SourceError(
            f"{named}: has no documents, everything it matches is empty (or null under "
            f"{config.text_key!r})"
        )
    change = "Raise" if split == "validation" else "Lower"
    raise readers.EmptySplitError(
        f"{named}: the {split} split is empty: no document fell into it with"
        f" config.data.validation_fraction = {config.validation_fraction} (documents aren't cut, "
        f"nor are lines). {change} that, or name a validation_source"
    )


def _sources(config: config_lib.DataConfig, key: str) -> Sequence[source_kinds.Source]:
    """What `source` or `validation_source` names.

    Raises:
      UserError: it names what is not there, or cannot be read; says which of the two does.
    """
    found: list[source_kinds.Source] = []
    for item in config_lib.split_source(getattr(config, key)):
        where = f"config.data.{key} = {item!r}"
        if item == "embedded":
            names = [source_kinds.EMBEDDED + book for book in source_kinds.BOOKS]
        elif item.startswith("tfds:"):
            names = [item]
        else:
            advice = (
                "; give 'embedded', 'tfds:NAME', or a file, glob or folder of files ending in "
                f"{formats.listed(source_kinds.SUFFIXES)}"
            )
            found_files = matching.files(item, source_kinds.SUFFIXES, where, advice)
            names = [os.fspath(path) for path in found_files]
        found += [source_kinds.open_source(name, config.text_key, where) for name in names]
    return found
