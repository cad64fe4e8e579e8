"""Packs rendered conversations into rows: several whole ones or one per row."""

from collections.abc import Iterable
import itertools

import numpy as np

from kvjax.data.packed_rows import ShardWriter

Tokens = tuple[np.ndarray, np.ndarray]  # ids and loss mask (uint8), of equal length
WAITING = 1024  # conversations that best-fit packing chooses from


def write_whole(
    writer: ShardWriter, conversations: Iterable[Tokens], row_length: int, fill: int
) -> int:
    """Writes rows of `row_length` tokens with whole conversations, packed best-fit.

    A row starts with the conversation that has waited longest, so that the order is roughly kept;
    then the largest conversation that fits is added until none fits. Padding tokens are `fill`, and
    do not count in the loss.

    Returns:
      Number of padding tokens.
    """
    waiting, padding, conversations = [], 0, iter(conversations)
    while True:
        waiting += itertools.islice(conversations, WAITING - len(waiting))
        if not waiting:
            return padding
        chosen = [waiting.pop(0)]
        room = row_length - len(chosen[0][0])
        while room and (fits := [i for i, (ids, _) in enumerate(waiting) if len(ids) <= room]):
            best = max(fits, key=lambda i: (len(waiting[i][0]), -i))
            chosen.append(waiting.pop(best))
            room -= len(chosen[-1][0])
        padding += room
        _write_row(writer, chosen, row_length, fill)


def write_single(
    writer: ShardWriter, conversations: Iterable[Tokens], row_length: int, fill: int
) -> int:
    """Writes one conversation per row; returns the number of padding tokens."""
    padding = 0
    for ids, mask in conversations:
        padding += row_length - len(ids)
        _write_row(writer, [(ids, mask)], row_length, fill)
    return padding


def _write_row(writer: ShardWriter, chosen: list[Tokens], row_length: int, fill: int) -> None:
    tokens, masks = map(np.concatenate, zip(*chosen, strict=True))
    ids = np.full(row_length, fill, tokens.dtype)
    mask = np.zeros(row_length, np.uint8)
    ids[: len(tokens)], mask[: len(tokens)] = tokens, masks
    writer.add_row(ids, mask)
