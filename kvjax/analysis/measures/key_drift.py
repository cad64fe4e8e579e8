"""Drift of the subspace of a text's first tokens as the text grows.

Few tokens estimate a subspace badly even if the text does not change. The control is an equal
number of tokens spread evenly over the text; drift is the excess distance of the first tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.analysis.measures import key_subspaces, subspace_methods
from kvjax.analysis.measures.activations import Layer
from kvjax.analysis.measures.key_subspaces import Rope, Subspaces
from kvjax.convert.factors import few_threads

SHARE = 1 / 4  # of a key's channels to keep, if half of the text has enough tokens for them
QUERIES = 64  # minimum number that errors are measured on, if the text has as many


def rank(channels: int, length: int) -> int:
    """Returns the number of key channels to keep, on texts of a length."""
    return min(subspace_methods.rank(SHARE, channels), max(1, length // 4))


def prefix_lengths(length: int, r: int) -> tuple[int, ...]:
    """Returns half of all tokens, a quarter, ... while they determine rank r, ascending."""
    halved = [length >> i for i in range(1, length.bit_length())]
    return tuple(sorted(t for t in halved if subspace_methods.enough_tokens(t, r)))


def evenly_spaced(tokens: int, length: int) -> np.ndarray:
    """Returns evenly spaced positions of a text, none of them at its ends."""
    return ((2 * np.arange(tokens) + 1) * length) // (2 * tokens)


class PrefixSubspaces(NamedTuple):
    """Subspaces of a row's first tokens, of equally many tokens spread over it, and of all."""

    first: list[Subspaces]
    evenly_spaced: list[Subspaces]
    whole: Subspaces


def prefix_subspaces(
    layer: Layer, rope: Rope, row: int, where: str, tokens: Sequence[int], r: int
) -> PrefixSubspaces:
    """Returns the rank-r subspaces for each number of tokens."""
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
    """Returns [K, tokens, 2] overlaps with the whole: of first tokens, and of spread tokens."""
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
    """Returns [N, ...] logit errors of each subspace on later queries; nan for None."""
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
    """Returns evenly spaced queries of the second half."""
    return slice(length // 2, None, max(1, length // 2 // QUERIES))
