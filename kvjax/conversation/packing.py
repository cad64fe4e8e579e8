"""Rendered conversations as rows: one stream, or each whole in a row."""

from collections.abc import Iterable

import numpy as np

from kvjax.data.packed_rows import ShardWriter

Tokens = tuple[np.ndarray, np.ndarray]  # ids and mask, uint8, of equal length
WAITING = 1024  # conversations that the best fit is looked for among


def write_stream(writer: ShardWriter, conversations: Iterable[Tokens]) -> None:
    """One after the other; rows are cut every T tokens, as those of texts."""
    for ids, mask in conversations:
        writer.add(ids, mask)


def write_whole(writer: ShardWriter, conversations: Iterable[Tokens], row: int, fill: int) -> int:
    """Writes rows of `row` tokens of whole conversations, next the largest that fits (best fit).

    What is left of a row is filled with `fill`, which does not count. Rows begin with the
    conversation that has waited for longest, so the order stays about what it was.

    Returns:
      Tokens of filling.
    """
    waiting, filled, more = [], 0, iter(conversations)
    while True:
        while len(waiting) < WAITING and (one := next(more, None)) is not None:
            waiting.append(one)
        if not waiting:
            return filled
        taken, room = [waiting.pop(0)], row
        room -= len(taken[0][0])
        while room and (fits := [i for i, one in enumerate(waiting) if len(one[0]) <= room]):
            best = max(fits, key=lambda i: (len(waiting[i][0]), -i))
            taken.append(waiting.pop(best))
            room -= len(taken[-1][0])
        filled += room
        _write_row(writer, taken, row, fill)


def write_single(writer: ShardWriter, conversations: Iterable[Tokens], row: int, fill: int) -> int:
    """Each in a row of its own; what is returned, and the filling, as of `write_whole`."""
    filled = 0
    for one in conversations:
        filled += row - len(one[0])
        _write_row(writer, [one], row, fill)
    return filled


def _write_row(writer: ShardWriter, taken: list[Tokens], row: int, fill: int) -> None:
    ids = np.full(row, fill, taken[0][0].dtype)
    mask = np.zeros(row, np.uint8)
    end = sum(len(one[0]) for one in taken)
    ids[:end] = np.concatenate([one[0] for one in taken])
    mask[:end] = np.concatenate([one[1] for one in taken])
    writer.add_row(ids, mask)
