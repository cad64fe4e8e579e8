"""Rows of tokens with a label for each position, made up: what small models are asked.

Numbers are 0 to 9 in projection sharing's five tasks (section 3.1). Thin keys' two tasks are
predicted token by token: a label is what follows.
"""

from collections.abc import Callable

import numpy as np

NUMBERS = 10


def reverse(x_BT: np.ndarray) -> np.ndarray:
    return x_BT[:, ::-1]


def sort(x_BT: np.ndarray) -> np.ndarray:
    """Ascending."""
    return np.sort(x_BT, axis=1)


def sub(x_BT: np.ndarray) -> np.ndarray:
    """9 less each number."""
    return NUMBERS - 1 - x_BT


def swap(x_BT: np.ndarray) -> np.ndarray:
    """The second half, then the first."""
    return np.roll(x_BT, x_BT.shape[1] // 2, axis=1)


def copy(x_BT: np.ndarray) -> np.ndarray:
    return x_BT


# Projection sharing, Table 2, in its order.
TASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    task.__name__: task for task in (reverse, sort, sub, swap, copy)
}


def labelled(task: str, count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of numbers [count, length], drawn uniformly, and their labels.

    Raises:
      ValueError: an odd length, which has no halves to swap.
    """
    if task == "swap" and length % 2:
        raise ValueError(f"length = {length}: must be even, to swap halves")
    x_BT = np.random.default_rng(seed).integers(0, NUMBERS, (count, length), dtype=np.int32)
    return x_BT, np.ascontiguousarray(TASKS[task](x_BT))


# -- thin keys, 3.1 and 3.2 ------------------------------------------------------------------------

COPY_BACK, COPY_WORDS = 8, 16  # tokens to look back; vocabulary
PAIRS, KEYS = 8, 16  # of a retrieval; keys are tokens 0 to 15, values 16 to 31


def copy_back(
    rng: np.random.Generator, count: int, length: int = 64, *, periodic: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [count, length], labels, and which count: what stood 8 tokens before, from the 9th on.

    Args:
      periodic: 8 tokens that repeat, as the authors' code has it; a label is the next token, which
        can be read off any earlier period. The paper draws every token, and says y_t = x_(t-8).
    """
    if periodic:
        few = rng.integers(0, COPY_WORDS, (count, COPY_BACK), dtype=np.int32)
        tiled = np.tile(few, (1, length // COPY_BACK + 1))[:, : length + 1]
        # From the first token on of which the next stood 8 before that.
        counts_BT = np.broadcast_to(np.arange(length) >= COPY_BACK - 1, (count, length))
        return np.ascontiguousarray(tiled[:, :-1]), np.ascontiguousarray(tiled[:, 1:]), counts_BT
    x_BT = rng.integers(0, COPY_WORDS, (count, length), dtype=np.int32)
    labels_BT = np.roll(x_BT, COPY_BACK, axis=1)
    counts_BT = np.broadcast_to(np.arange(length) >= COPY_BACK, x_BT.shape)
    return x_BT, labels_BT, counts_BT


def retrieval(
    rng: np.random.Generator, count: int, *, keys: int = KEYS, pairs: int = PAIRS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows k1 v1 .. k8 v8 SEP q [count, 18], labels and which count: the last alone, q's value.

    Keys of a row differ, values may repeat; q is one of the row's keys. Keys are tokens below
    `keys`, as many values follow, then SEP.

    Args:
      keys: that there are; a row has `pairs` of them.
    """
    order = np.argsort(rng.random((count, keys)), axis=1)[:, :pairs]
    values = rng.integers(keys, 2 * keys, (count, pairs))
    asked = rng.integers(0, pairs, count)
    x_BT = np.empty((count, 2 * pairs + 2), np.int32)
    x_BT[:, 0 : 2 * pairs : 2], x_BT[:, 1 : 2 * pairs : 2] = order, values
    rows = np.arange(count)
    x_BT[:, -2], x_BT[:, -1] = 2 * keys, order[rows, asked]
    labels_BT = np.zeros_like(x_BT)
    labels_BT[:, -1] = values[rows, asked]
    counts_BT = np.zeros(x_BT.shape, bool)
    counts_BT[:, -1] = True
    return x_BT, labels_BT, counts_BT
