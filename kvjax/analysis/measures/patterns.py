"""Computes statistics of heads' attention patterns, and distances between them, in float64.

A pattern is p [T, T], each query's probabilities over the visible keys. Queries that see only one
key are left out of all means.
"""

from typing import NamedTuple

import numpy as np
from scipy import special


class Statistics(NamedTuple):
    """Statistics of each head's attention, as means over queries.

    Attributes:
      entropy_N: entropy over the log of the number of visible keys; 0 for one key, 1 for uniform.
      keys_N: exp of the entropy: the number of equally weighted keys with the same entropy.
      first_N: attention on the first token, over later queries that see it.
      itself_N: attention on the query's own token.
      previous_N: attention on the previous token.
      distance_N: distance from query to key in tokens, weighted by attention.
    """

    entropy_N: np.ndarray
    keys_N: np.ndarray
    first_N: np.ndarray
    itself_N: np.ndarray
    previous_N: np.ndarray
    distance_N: np.ndarray


def sees_several_keys(visible_TT: np.ndarray) -> np.ndarray:
    """Returns [T] bool: the queries that see at least two keys."""
    return visible_TT.sum(axis=1) > 1


def statistics(p_NTT: np.ndarray, visible_TT: np.ndarray) -> Statistics:
    """Returns the attention statistics of one sequence."""
    rows_T, length = sees_several_keys(visible_TT), len(visible_TT)
    entropy_NT = special.entr(p_NTT).sum(axis=2)
    most_T = np.log(np.maximum(visible_TT.sum(axis=1), 2))
    index_T = np.arange(length)
    distance_TT = np.abs(index_T[:, None] - index_T)

    def diagonal_NT(offset):
        return np.pad(np.diagonal(p_NTT, offset, axis1=1, axis2=2), [(0, 0), (-offset, 0)])

    def mean(x_NT, at_T=rows_T):
        return x_NT[:, at_T].mean(axis=1)

    return Statistics(
        entropy_N=mean(entropy_NT / most_T),
        keys_N=mean(np.exp(entropy_NT)),
        first_N=mean(p_NTT[:, :, 0], rows_T & visible_TT[:, 0] & (index_T > 0)),
        itself_N=mean(diagonal_NT(0)),
        previous_N=mean(diagonal_NT(-1), rows_T & (index_T > 0)),
        distance_N=mean(np.einsum("NTS,TS->NT", p_NTT, distance_TT)),
    )


def divergences(p_NTT: np.ndarray, visible_TT: np.ndarray) -> np.ndarray:
    """Returns [N, N] Jensen-Shannon divergences between heads' rows in nats, means over queries.

    The divergence is symmetric, 0 for equal patterns and ln 2 for disjoint ones. Takes N²/2 · T²
    logarithms, or half of that under a causal mask.
    """
    p_NS, queries = _visible(p_NTT, visible_TT)
    entropy_N = special.entr(p_NS).sum(axis=1)
    sums_NN = np.zeros((len(p_NS), len(p_NS)))
    for i in range(len(p_NS)):
        for j in range(i):
            sums_NN[i, j] = sums_NN[j, i] = _divergence(
                p_NS[i], p_NS[j], entropy_N[i] + entropy_N[j]
            )
    return sums_NN / queries


def divergence(p_NTT: np.ndarray, q_NTT: np.ndarray, visible_TT: np.ndarray) -> np.ndarray:
    """Returns [N] divergences between each head's two patterns, on two sequences.

    They are near 0 for heads that attend by position alone.
    """
    p_NS, queries = _visible(p_NTT, visible_TT)
    q_NS, _ = _visible(q_NTT, visible_TT)
    entropy_N = special.entr(p_NS).sum(axis=1) + special.entr(q_NS).sum(axis=1)
    return (
        np.array([_divergence(*arguments) for arguments in zip(p_NS, q_NS, entropy_N, strict=True)])
        / queries
    )


def _visible(p_NTT: np.ndarray, visible_TT: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the [N, S] probabilities of visible keys, and the number of queries they are from.

    Only queries that see at least two keys are included.
    """
    rows_T = sees_several_keys(visible_TT)
    return p_NTT[:, visible_TT & rows_T[:, None]], max(int(rows_T.sum()), 1)


def _divergence(p_S: np.ndarray, q_S: np.ndarray, entropy: float) -> float:
    """Returns the entropy of the mean pattern minus the mean of the entropies, summed over queries.

    Args:
      entropy: sum of both patterns' entropies.
    """
    return max(float(special.entr((p_S + q_S) / 2).sum() - entropy / 2), 0.0)


def without_first(p_NTT: np.ndarray, visible_TT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns patterns renormalised over all keys except the first, and their mask.

    Heads that mostly attend to the first token look alike; without it, they can differ.
    """
    left_NTT, others_TT = p_NTT.copy(), visible_TT.copy()
    left_NTT[:, :, 0], others_TT[:, 0] = 0, False
    total_NT1 = left_NTT.sum(axis=2, keepdims=True)
    # A query that attends to nothing else is given a uniform pattern.
    even_TT = others_TT / np.maximum(others_TT.sum(axis=1, keepdims=True), 1)
    has_others = total_NT1 > 0
    return np.where(has_others, left_NTT / np.where(has_others, total_NT1, 1), even_TT), others_TT


# -- repeated text ---------------------------------------------------------------------------------


def repeated(tokens_A: np.ndarray, block: int, rows: int, seed: int) -> np.ndarray:
    """Returns [rows, 2 · block] tokens: in each row, `block` random distinct ones, twice.

    Args:
      tokens_A: at least `block` distinct tokens to draw from.
    """
    rng = np.random.default_rng(seed)

    def draw():
        return rng.choice(tokens_A, block, replace=False)

    return np.stack([np.tile(draw(), 2) for _ in range(rows)]).astype(np.int32)


def induction(p_NTT: np.ndarray, block: int) -> np.ndarray:
    """Returns [N] means of attention on the token after the query token's earlier occurrence.

    Queries are the tokens of the second block of `repeated`. This is the prefix-matching score of
    "In-context learning and induction heads" (Olsson et al. 2022).
    """
    query_A = np.arange(block, 2 * block)
    return p_NTT[:, query_A, query_A - block + 1].mean(axis=1)


def induction_by_chance(visible_TT: np.ndarray, block: int) -> float:
    """Returns the `induction` score of uniform attention."""
    return float((1 / visible_TT[block : 2 * block].sum(axis=1)).mean())
