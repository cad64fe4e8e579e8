"""The embedded corpus as bytes: for models so small that a vocabulary would be most of them."""

from collections.abc import Iterator
import functools

import numpy as np

from kvjax.data import sources
from kvjax.data.config import DataConfig


@functools.cache
def corpus(split: str) -> np.ndarray:
    """All documents of a split, "train" or "validation", one after another: uint8."""
    pieces = sources.pieces(DataConfig(tokenizer="byte"), split)
    return np.frombuffer("".join(piece.text for piece in pieces).encode(), np.uint8)


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
