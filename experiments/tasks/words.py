"""WikiText as words, prepared as in the thin keys paper (section 3.3 and its code).

Lines are stripped; empty lines and headings (starting with "=") are dropped. Other lines are
lower-cased and split at white space, and <eos> is added after each. The vocabulary is <pad>, <unk>,
<eos>, and the frequent words of the training text in alphabetical order. WikiText contains "<unk>"
as a word, so <unk> has two ids: texts use the second, but the embedding has a row for the first
too, because the paper counts its parameters.
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
    """The text of each split, as one array of token ids."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    vocabulary: dict[str, int]
    vocab_size: int  # rows of the embedding, with the special <unk> even if no text uses it
    digest: str  # digest of the ids of all splits


def words(lines: Iterable[str]) -> Iterator[str]:
    """Yields the words of lines, and <eos> after each; skips headings and empty lines."""
    for line in lines:
        line = line.strip()
        if line and not line.startswith("="):
            yield from line.lower().split()
            yield "<eos>"


def vocabulary(training: Iterable[str], min_count: int) -> tuple[dict[str, int], int]:
    """Returns ids of the words that occur at least `min_count` times, and `Corpus.vocab_size`."""
    counts = collections.Counter(training)
    del counts["<eos>"]
    ids = {word: i for i, word in enumerate(SPECIALS)}
    frequent = sorted(word for word, count in counts.items() if count >= min_count)
    for i, word in enumerate(frequent, len(SPECIALS)):
        ids[word] = i  # may replace the id of "<unk>"
    return ids, len(SPECIALS) + len(frequent)


def load(folder: pathlib.Path, min_count: int) -> Corpus:
    """Reads WikiText: wiki.{train,valid,test}.tokens, or Parquet files with a column `text`.

    Raises:
      MissingDataError: a split's file is missing.
      DataError: a file is malformed or has no words.
    """
    if not folder.is_dir():
        raise MissingDataError(f"{folder} is not a folder: give the folder of WikiText's files")
    return _corpus({split: _lines(folder, split) for split in SPLITS}, min_count, folder)


def embedded(min_count: int) -> Corpus:
    """Returns the embedded corpus; its validation split is halved into valid and test."""
    held_out = text.books("validation").splitlines()
    half = len(held_out) // 2
    lines = dict(
        train=text.books("train").splitlines(), valid=held_out[:half], test=held_out[half:]
    )
    return _corpus(lines, min_count, "the embedded corpus")


def _corpus(lines: dict[str, list[str]], min_count: int, place: object) -> Corpus:
    words_by_split = {split: list(words(lines[split])) for split in lines}
    for split, tokens in words_by_split.items():
        if not tokens:
            raise DataError(f"{place}: {split} has no words outside headings")
    id_of, vocab_size = vocabulary(words_by_split["train"], min_count)
    unknown = id_of["<unk>"]
    ids = {
        split: np.array([id_of.get(word, unknown) for word in tokens], np.int32)
        for split, tokens in words_by_split.items()
    }
    digest = hashlib.sha256()
    for array in ids.values():
        digest.update(array.tobytes())
    return Corpus(**ids, vocabulary=id_of, vocab_size=vocab_size, digest=digest.hexdigest())


def _lines(folder: pathlib.Path, split: str) -> list[str]:
    plain = folder / f"wiki.{split}.tokens"
    if plain.is_file():
        try:
            return plain.read_text("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{plain}, byte {error.start}: is not UTF-8") from error
    files = sorted(folder.glob(f"{_PARQUET[split]}-*.parquet"))
    if not files:
        raise MissingDataError(
            f"{folder} has neither {plain.name} nor {_PARQUET[split]}-*.parquet: give the folder "
            "of WikiText's files"
        )
    return [line for file in files for line in _parquet(file)]


def _parquet(file: pathlib.Path) -> list[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        lines = parquet.read_table(file, columns=["text"]).column("text").to_pylist()
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: is not Parquet with a column 'text' ({error})") from error
    if None in lines:
        raise DataError(f"{file}, row {lines.index(None)}: has no text")
    return lines


def rows(ids: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Returns rows of `length` ids with the next ids as labels; drops ids that fill no row."""
    count = (len(ids) - 1) // length
    end = count * length
    return dict(x=ids[:end].reshape(-1, length), y=ids[1 : end + 1].reshape(-1, length))
