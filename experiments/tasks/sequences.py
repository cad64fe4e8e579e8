"""Synthetic rows of tokens with a label per position.

Projection sharing's five tasks (section 3.1) use the numbers 0 to 9. Thin keys' two tasks are
autoregressive.
"""

from collections.abc import Callable

import numpy as np

NUMBERS = 10


def reverse(x_BT: np.ndarray) -> np.ndarray:
    return x_BT[:, ::-1]


def sort(x_BT: np.ndarray) -> np.ndarray:
    """Sorts each row in ascending order."""
    return np.sort(x_BT, axis=1)


def sub(x_BT: np.ndarray) -> np.ndarray:
    """Returns 9 - x."""
    return NUMBERS - 1 - x_BT


def swap(x_BT: np.ndarray) -> np.ndarray:
    """Swaps the two halves of each row."""
    return np.roll(x_BT, x_BT.shape[1] // 2, axis=1)


def copy(x_BT: np.ndarray) -> np.ndarray:
    return x_BT


# Projection sharing, Table 2, in its order.
TASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    task.__name__: task for task in (reverse, sort, sub, swap, copy)
}


def labelled(task: str, count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns uniform random rows [count, length] and their labels.

    Raises:
      ValueError: the task is "swap" and the length odd.
    """
    if task == "swap" and length % 2:
        raise ValueError(f"length = {length}: must be even, to swap halves")
    x_BT = np.random.default_rng(seed).integers(0, NUMBERS, (count, length), dtype=np.int32)
    return x_BT, np.ascontiguousarray(TASKS[task](x_BT))


# -- thin keys, 3.1 and 3.2 ------------------------------------------------------------------------

COPY_BACK, COPY_WORDS = 8, 16  # distance in tokens; vocabulary
PAIRS, KEYS = 8, 16  # retrieval; keys are tokens 0 to 15, values 16 to 31


def copy_back(
    rng: np.random.Generator, count: int, length: int = 64, *, periodic: bool = False
) -> dict[str, np.ndarray]:
    """Returns tokens x [count, length], labels y and a loss mask counts; y is the token 8 before.

    Args:
      periodic: repeat a random period of 8, as in the authors' code; the label is the next token,
        which any earlier period shows. The paper draws every token, with y_t = x_(t-8).
    """
    position = np.arange(length)
    if periodic:
        period = rng.integers(0, COPY_WORDS, (count, COPY_BACK), dtype=np.int32)
        tiled = np.tile(period, (1, length // COPY_BACK + 1))[:, : length + 1]
        x, y = np.ascontiguousarray(tiled[:, :-1]), np.ascontiguousarray(tiled[:, 1:])
        # Counted from the first position whose next token has occurred before.
        counted = position >= COPY_BACK - 1
    else:
        x = rng.integers(0, COPY_WORDS, (count, length), dtype=np.int32)
        y, counted = np.roll(x, COPY_BACK, axis=1), position >= COPY_BACK
    return dict(x=x, y=y, counts=np.broadcast_to(counted, x.shape))


def retrieval(
    rng: np.random.Generator, count: int, *, keys: int = KEYS, pairs: int = PAIRS
) -> dict[str, np.ndarray]:
    """Returns rows x = k1 v1 .. k8 v8 SEP q [count, 18], labels y and a loss mask counts.

    The one label that counts is q's value, last. A row's keys are distinct, values may repeat, and
    q is one of the row's keys. Token ids: keys, then as many values, then SEP.

    Args:
      keys: number of different keys; a row has `pairs` of them.
    """
    order = np.argsort(rng.random((count, keys)), axis=1)[:, :pairs]
    values = rng.integers(keys, 2 * keys, (count, pairs))
    pair = rng.integers(0, pairs, count)
    x = np.empty((count, 2 * pairs + 2), np.int32)
    x[:, 0 : 2 * pairs : 2], x[:, 1 : 2 * pairs : 2] = order, values
    rows = np.arange(count)
    x[:, -2], x[:, -1] = 2 * keys, order[rows, pair]
    y, counts = np.zeros_like(x), np.zeros(x.shape, bool)
    y[:, -1], counts[:, -1] = values[rows, pair], True
    return dict(x=x, y=y, counts=counts)
