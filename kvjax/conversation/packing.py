"""Packs rendered conversations into rows: several whole ones or one per row."""

from collections.abc import Iterable

import numpy as np

from kvjax.data.packed_rows import ShardWriter

Tokens = tuple[np.ndarray, np.ndarray]  # ids and loss mask (uint8), of equal length
WAITING = 1024  # conversations that best-fit packing chooses from


def write_whole(writer: ShardWriter, conversations: Iterable[Tokens], row: int, fill: int) -> int:
    """Writes rows of `row` tokens with whole conversations, packed best-fit.

    A row starts with the conversation that has waited longest, so that the order is roughly kept;
    then the largest one that fits is added until none does. The rest is padded with `fill`, which
    does not count in the loss.

    Returns:
      Number of padding tokens.
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
    """Writes one conversation per row; returns the number of padding tokens."""
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
