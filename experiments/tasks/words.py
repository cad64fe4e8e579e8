"""Word-level text from local files, as thin keys reads WikiText (section 3.3 and its code).

Lines are stripped, empty ones and headings (starting with "=") dropped, the rest lower-cased and
split at white space, each line followed by <eos>. The vocabulary is <pad>, <unk>, <eos> and then
every word that is frequent enough in the training text, in alphabetical order. WikiText contains
"<unk>" as a word, which replaces the special token: that embedding row is never read, and is kept
because the paper's parameter counts include it.
"""

import collections
from collections.abc import Iterable, Iterator
import dataclasses
import hashlib
import pathlib

import numpy as np

from experiments.tasks import text
from kvjax.foundation.errors import DataError, MissingDataError

SPLITS = ("train", "valid", "test")
SPECIALS = ("<pad>", "<unk>", "<eos>")
_PARQUET = dict(train="train", valid="validation", test="test")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids of every split, concatenated.

    Attributes:
      digest: of all ids.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    vocabulary: dict[str, int]
    size: int  # rows of the embedding; one may be unused
    digest: str


def words(lines: Iterable[str]) -> Iterator[str]:
    """Yields the words of all lines but headings and empty ones, each line followed by <eos>."""
    for line in lines:
        line = line.strip()
        if line and not line.startswith("="):
            yield from line.lower().split()
            yield "<eos>"


def vocabulary(training: Iterable[str], least: int) -> tuple[dict[str, int], int]:
    """Returns ids of the words that occur at least `least` times, and the embedding's rows."""
    counts = collections.Counter(training)
    del counts["<eos>"]
    ids = {word: i for i, word in enumerate(SPECIALS)}
    often = sorted(word for word, count in counts.items() if count >= least)
    for i, word in enumerate(often, len(SPECIALS)):
        ids[word] = i  # "<unk>" may be among them
    return ids, len(SPECIALS) + len(often)


def load(folder: pathlib.Path, least: int) -> Corpus:
    """Reads WikiText: wiki.{train,valid,test}.tokens, or Parquet files with a column `text`.

    Raises:
      MissingDataError: a split's file is missing.
      DataError: a file is malformed or has no words.
    """
    if not folder.is_dir():
        raise MissingDataError(f"{folder} is no folder: give that of WikiText's files")
    return _corpus({split: _lines(folder, split) for split in SPLITS}, least, folder)


def embedded(least: int) -> Corpus:
    """Returns the embedded corpus; its validation split is halved into valid and test."""
    held_out = text.books("validation").splitlines()
    half = len(held_out) // 2
    parts = dict(
        train=text.books("train").splitlines(), valid=held_out[:half], test=held_out[half:]
    )
    return _corpus(parts, least, "the embedded corpus")


def _corpus(parts: dict[str, list[str]], least: int, place: object) -> Corpus:
    found = {split: list(words(lines)) for split, lines in parts.items()}
    for split, of in found.items():
        if not of:
            raise DataError(f"{place}: {split} has no line that is no heading")
    ids, size = vocabulary(found["train"], least)
    unknown = ids["<unk>"]
    as_ids = {
        split: np.array([ids.get(word, unknown) for word in of], np.int32)
        for split, of in found.items()
    }
    digest = hashlib.sha256()
    for of in as_ids.values():
        digest.update(of.tobytes())
    return Corpus(**as_ids, vocabulary=ids, size=size, digest=digest.hexdigest())


def _lines(folder: pathlib.Path, split: str) -> list[str]:
    plain = folder / f"wiki.{split}.tokens"
    if plain.is_file():
        try:
            return plain.read_text("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{plain}, byte {error.start}: is no UTF-8") from error
    files = sorted(folder.glob(f"{_PARQUET[split]}-*.parquet"))
    if not files:
        raise MissingDataError(
            f"{folder} lacks {plain.name} and {_PARQUET[split]}-*.parquet: give the folder of "
            "WikiText's files, in either form"
        )
    return [line for file in files for line in _parquet(file)]


def _parquet(file: pathlib.Path) -> list[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        found = parquet.read_table(file, columns=["text"]).column("text").to_pylist()
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: no Parquet file with a column 'text' ({error})") from error
    if None in found:
        raise DataError(f"{file}, row {found.index(None)}: has no text")
    return found


def rows(ids: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Cuts ids into rows of `length` with the next ids as labels; a short rest is dropped."""
    count = (len(ids) - 1) // length
    end = count * length
    return dict(x=ids[:end].reshape(-1, length), y=ids[1 : end + 1].reshape(-1, length))
