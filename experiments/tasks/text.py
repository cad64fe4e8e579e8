"""The embedded corpus: whole, and as rows of bytes for models as small as a vocabulary would be."""

from collections.abc import Iterator, Sequence
import functools

import numpy as np

from kvjax.data import sources
from kvjax.data.config import DataConfig


@functools.cache
def books(split: str) -> str:
    """All documents of a split, "train" or "validation", one after another."""
    return "".join(piece.text for piece in sources.pieces(DataConfig(), split))


@functools.cache
def corpus(split: str) -> np.ndarray:
    """The same as bytes: uint8."""
    return np.frombuffer(books(split).encode(), np.uint8)


def _rows(text: np.ndarray, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
    taken = text[starts[:, None] + np.arange(length + 1)[None]].astype(np.int32)
    counts = np.ones((len(starts), length), bool)
    return dict(x=taken[:, :-1], y=taken[:, 1:], counts=counts)


def drawn(rng: np.random.Generator, batch: int, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Rows from anywhere in the training split, and what follows each byte, without end."""
    text = corpus("train")
    while True:
        yield _rows(text, rng.integers(0, len(text) - length, batch), length)


def held_out(count: int, length: int) -> dict[str, np.ndarray]:
    """Rows spread evenly over the validation split."""
    text = corpus("validation")
    starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    return _rows(text, starts, length)


EOS = 0  # a byte that the books do not have


def paragraphs(split: str) -> list[np.ndarray]:
    """The documents that padding is tried on: what stands between blank lines, as bytes."""
    parts = (part.strip() for part in books(split).split("\n\n"))
    return [np.frombuffer(part.encode(), np.uint8) for part in parts if part]


def padded(documents: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """A document a row: cut, or filled with EOS; what follows each byte, and whether it is text.

    The first EOS behind a document counts as text, for a model must say where one ends.
    """
    x = np.full((len(documents), length + 1), EOS, np.int32)
    real = np.zeros((len(documents), length), bool)
    for row, document in enumerate(documents):
        taken = document[: length + 1]
        x[row, : len(taken)] = taken
        real[row, : len(taken)] = True  # of targets: the row's second byte is the first
    return dict(x=x[:, :-1], y=x[:, 1:], real=real)


def packed(documents: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """The same as one stream, EOS behind each, cut into rows: all of it is text."""
    stream = np.concatenate([np.append(document, np.uint8(EOS)) for document in documents])
    count = (len(stream) - 1) // length
    found = _rows(stream, length * np.arange(count), length)
    return dict(x=found["x"], y=found["y"], real=found["counts"])
