"""Measures how much the subspace of a text's keys drifts as the text grows.

The subspace of a text's first tokens is compared with that of all tokens. Since few tokens estimate
a subspace badly even without drift, the same is done with equally many tokens spread evenly over
the text. Drift is the difference between the two results.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.analysis.measures import key_subspaces, subspace_methods
from kvjax.analysis.measures.activations import Layer
from kvjax.analysis.measures.key_subspaces import Rope, Subspaces
from kvjax.convert.factors import few_threads

SHARE = 1 / 4  # share of a key's channels that are kept, if half of the text has enough tokens
QUERIES = 64  # errors are measured on at least this many queries, if there are as many


def rank(channels: int, length: int) -> int:
    """Returns the number of key channels to keep, on texts of `length` tokens."""
    return min(subspace_methods.rank(SHARE, channels), max(1, length // 4))


def prefix_lengths(length: int, r: int) -> tuple[int, ...]:
    """Returns those of the counts length/2, length/4, ... that determine rank r, ascending."""
    halved = [length >> i for i in range(1, length.bit_length())]
    return tuple(sorted(t for t in halved if subspace_methods.enough_tokens(t, r)))


def evenly_spaced(tokens: int, length: int) -> np.ndarray:
    """Returns `tokens` evenly spaced positions of a text: the centres of equal intervals."""
    return ((2 * np.arange(tokens) + 1) * length) // (2 * tokens)


class PrefixSubspaces(NamedTuple):
    """Subspaces of a row's keys.

    Attributes:
      first: subspaces of the first tokens, one for each count of tokens.
      evenly_spaced: subspaces of equally many tokens, spread evenly over the row.
      whole: the subspace of all tokens.
    """

    first: list[Subspaces]
    evenly_spaced: list[Subspaces]
    whole: Subspaces


def prefix_subspaces(
    layer: Layer, rope: Rope, row: int, where: str, tokens: Sequence[int], r: int
) -> PrefixSubspaces:
    """Returns the rank-r subspaces of a row.

    Args:
      where: a place of `subspace_methods.places`.
      tokens: counts of tokens.
    """
    _, T, _, H = layer.key_BTKH.shape

    def of_tokens(positions):
        return subspace_methods.of_rows(layer, rope, where, [row], positions).first(r)

    with few_threads(H):
        return PrefixSubspaces(
            [of_tokens(slice(t)) for t in tokens],
            [of_tokens(evenly_spaced(t, T)) for t in tokens],
            of_tokens(slice(None)),
        )


def overlaps(subspaces: PrefixSubspaces) -> np.ndarray:
    """Returns [K, counts, 2] overlaps of first and of spread tokens' subspaces with the whole's."""
    with few_threads(subspaces.whole.center_JC.shape[1]):
        overlaps_T2K = [
            [key_subspaces.overlap(subspace, subspaces.whole) for subspace in pair]
            for pair in zip(subspaces.first, subspaces.evenly_spaced, strict=True)
        ]
    return np.moveaxis(np.array(overlaps_T2K), -1, 0)


def later_errors(
    layer: Layer,
    rope: Rope,
    row: int,
    where: str,
    subspaces: Sequence[Subspaces | None],
    r: int,
) -> np.ndarray:
    """Returns [N, subspaces] logit errors of later queries, with keys cut to each subspace.

    The error is nan where a subspace is None.
    """
    _, T, _, H = layer.key_BTKH.shape
    with few_threads(H):
        cuts = [
            subspace_methods.cut_keys(layer, rope, row, where, each, r)
            for each in subspaces
            if each is not None
        ]
    measured_NA = key_subspaces.errors(layer, row, cuts, later_queries(T)).logit_NA
    is_measured = np.array([each is not None for each in subspaces])
    errors_NA = np.full((len(measured_NA), len(subspaces)), np.nan)
    errors_NA[:, is_measured] = measured_NA
    return errors_NA


def later_queries(length: int) -> slice:
    """Returns evenly spaced queries of a text's second half."""
    return slice(length // 2, None, max(1, length // 2 // QUERIES))
