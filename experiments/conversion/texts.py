"""The conversion studies' text: the embedded corpus with its held-out split."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvjax.data import config as config_lib, sources
from kvjax.foundation.errors import UserError


def training_text() -> list[str]:
    """Returns the documents for calibration and tuning: plays, poems and books of the Bible."""
    return list(_documents("train"))


def validation_text() -> list[str]:
    """Returns the held-out documents: about 200,000 bytes each of Shakespeare and of the Bible."""
    return list(_documents("validation"))


def rows(
    encode: Callable[[str], Sequence[int]],
    documents: Iterable[str],
    *,
    length: int,
    prefix: Sequence[int] = (),
) -> np.ndarray:
    """Concatenates the documents' tokens and cuts them to rows [R, len(prefix) + length] int32.

    Drops the incomplete last row.

    Args:
      encode: tokenizer from text to ids.
      prefix: ids at the start of every row.
    """
    ids = np.concatenate([np.asarray(encode(text), np.int32) for text in documents])
    R = len(ids) // length
    if not R:
        raise UserError(f"a text of {len(ids)} tokens fills no row of {length}: give shorter rows")
    prefix_RP = np.tile(np.asarray(prefix, np.int32), (R, 1))
    return np.concatenate([prefix_RP, ids[: R * length].reshape(R, length)], axis=1)


def _documents(split: str) -> Iterator[str]:
    pieces: list[str] = []
    for piece in sources.pieces(config_lib.DataConfig(source="embedded"), split):
        if piece.starts_document and pieces:
            yield "".join(pieces)
            pieces = []
        pieces.append(piece.text)
    yield "".join(pieces)
