"""How the subspace of a text's first tokens drifts as the text grows."""

from collections.abc import Sequence
import itertools

import numpy as np

from kvjax.analysis import key_subspaces
from kvjax.analysis import key_ways
from kvjax.analysis.activations import Layer
from kvjax.analysis.key_subspaces import Rope
from kvjax.analysis.key_subspaces import Subspaces
from kvjax.convert.factors import few_threads

SHARE = 1 / 4  # of a key's channels that are kept
QUERIES = 64  # that errors are measured on, at least where there are so many


def at(length: int) -> tuple[int, ...]:
    """32, 64, 128, ... tokens up to half of them all; of short texts an eighth, a quarter, half."""
    doubled = [32 << i for i in range(length.bit_length()) if 32 << i <= length // 2]
    return tuple(doubled if len(doubled) > 1 else sorted({max(2, length >> i) for i in (3, 2, 1)}))


def grown(layer: Layer, rope: Rope, row: int, where: str, tokens: Sequence[int]) -> list[Subspaces]:
    """Those of so many first tokens, and of all."""
    with few_threads(layer.key_BTKH.shape[1]):
        ends = (*map(slice, tokens), slice(None))
        return [key_ways.of_rows(layer, rope, where, [row], end) for end in ends]


def overlaps(found: Sequence[Subspaces], r: int) -> np.ndarray:
    """[K, tokens, 2] of each but the last with the next, and with the last."""
    cut = [one.first(r) for one in found]
    each = [
        [key_subspaces.overlap(one, more), key_subspaces.overlap(one, cut[-1])]
        for one, more in itertools.pairwise(cut)
    ]
    return np.moveaxis(np.array(each), -1, 0)


def later_errors(
    layer: Layer, rope: Rope, row: int, where: str, of: Sequence[Subspaces | None], r: int
) -> np.ndarray:
    """[N, ...] errors of logits under each for queries of the second half; nan without one."""
    with few_threads(layer.key_BTKH.shape[1]):
        cuts = [key_ways.cut(layer, rope, row, where, one, r) for one in of if one is not None]
    queries = later_queries(layer.key_BTKH.shape[1])
    found_NA = key_subspaces.errors(layer, row, cuts, queries).logit_NA
    there = np.array([one is not None for one in of])
    every_NA = np.full((len(found_NA), len(of)), np.nan)
    every_NA[:, there] = found_NA
    return every_NA


def later_queries(length: int) -> slice:
    """Some of the second half, evenly."""
    return slice(length // 2, None, max(1, length // 2 // QUERIES))
