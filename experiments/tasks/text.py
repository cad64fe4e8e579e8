"""The embedded corpus as text and as rows of bytes (a larger vocabulary would dwarf the model)."""

from collections.abc import Iterator, Sequence
import functools

import numpy as np

from kvjax.data import sources
from kvjax.data.config import DataConfig


@functools.cache
def books(split: str) -> str:
    """Returns the concatenated documents of a split, "train" or "validation"."""
    return "".join(piece.text for piece in sources.pieces(DataConfig(), split))


@functools.cache
def corpus(split: str) -> np.ndarray:
    """Returns the concatenated documents of a split as UTF-8 bytes, uint8 [N]."""
    return np.frombuffer(books(split).encode(), np.uint8)


def _rows(text: np.ndarray, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
    bytes_BT = text[starts[:, None] + np.arange(length + 1)[None]].astype(np.int32)
    counts = np.ones((len(starts), length), bool)
    return dict(x=bytes_BT[:, :-1], y=bytes_BT[:, 1:], counts=counts)


def random_rows(
    rng: np.random.Generator, batch: int, length: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields endless batches of random training rows with the next bytes as labels."""
    text = corpus("train")
    while True:
        yield _rows(text, rng.integers(0, len(text) - length, batch), length)


def held_out(count: int, length: int) -> dict[str, np.ndarray]:
    """Returns rows spaced evenly over the validation split."""
    text = corpus("validation")
    starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    return _rows(text, starts, length)


EOS = 0  # a byte that does not occur in the corpus


def paragraphs(split: str) -> list[np.ndarray]:
    """Returns the paragraphs of a split (separated by blank lines) as bytes."""
    candidates = (paragraph.strip() for paragraph in books(split).split("\n\n"))
    return [np.frombuffer(paragraph.encode(), np.uint8) for paragraph in candidates if paragraph]


def padded(documents: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Returns one document per row, truncated or padded with EOS, next bytes and a mask of text.

    The first EOS after a document counts as text, because the model has to predict the end.
    """
    x = np.full((len(documents), length + 1), EOS, np.int32)
    real = np.zeros((len(documents), length), bool)
    for row, document in enumerate(documents):
        row_bytes = document[: length + 1]
        x[row, : len(row_bytes)] = row_bytes
        real[row, : len(row_bytes)] = True  # the mask is of targets, which start at the second byte
    return dict(x=x[:, :-1], y=x[:, 1:], real=real)


def packed(documents: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Returns documents joined by EOS and cut into rows: every target is text."""
    stream = np.concatenate([np.append(document, np.uint8(EOS)) for document in documents])
    count = (len(stream) - 1) // length
    rows = _rows(stream, length * np.arange(count), length)
    return dict(x=rows["x"], y=rows["y"], real=rows["counts"])
