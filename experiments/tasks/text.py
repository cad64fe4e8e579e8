"""The embedded corpus: whole, and as rows of bytes for models as small as a vocabulary would be."""

from collections.abc import Iterator
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
