"""Spectra of attention's logits on a text and of the weights that make them, in float64.

Logit spectra (arXiv 2604.04384) compares two matrices of each head: E, the logits of L tokens with
each row's mean taken away, which comes of text and weights, and M = W_Q W_K^T, of the weights.
Energies are squares of singular values, descending. What has small factors is decomposed through
them: E by QR of queries and keys, [L, H] each, and an SVD of H x H; M likewise. E of causal
attention has none.
"""

from collections.abc import Callable, Iterable
from concurrent import futures
from typing import NamedTuple

import numpy as np

from kvjax.analysis.measures import rotary
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.measures.heads import Heads
from kvjax.foundation import runtime

_NOTHING = 1e-12  # of the largest singular value: what smaller ones stand for is rounding


class CentredLogits(NamedTuple):
    """The thin SVD of each head's E [L, L], R = min(L, H).

    Attributes:
      left_NLR, right_NLR: singular vectors in columns, over queries and over keys.
      values_NR: singular values, descending.
    """

    left_NLR: np.ndarray
    values_NR: np.ndarray
    right_NLR: np.ndarray

    @property
    def energies_NR(self) -> np.ndarray:
        return self.values_NR**2

    def truncated(
        self,
        head: int,
        rank: int | None = None,
        queries: slice = slice(None),
        keys: slice = slice(None),
    ) -> np.ndarray:
        """[L, L], or some rows and columns: the nearest matrix of that rank to a head's E; E itself
        without a rank."""
        left_LR = self.left_NLR[head, queries, :rank] * self.values_NR[head, :rank]
        return left_LR @ self.right_NLR[head, keys, :rank].T


def centred_logits(query_LNH: np.ndarray, key_LKH: np.ndarray, scale: float) -> CentredLogits:
    """E = Z - mean of each row over all keys, Z = scale · q k^T, of each query head.

    Logit spectra eq. 2 and 3. Every query meets every key, those behind it too, as in the paper.
    Taking the row's mean away is the same as centring keys, so that the rank of E is at most H (not
    H + 1) and at most L - 1. It costs 4·L·H² FLOPs and an SVD of H x H for each head.
    """
    N, K = query_LNH.shape[1], key_LKH.shape[1]
    queries_NLP, left_NPH = np.linalg.qr(_by_head(query_LNH))
    keys_KLP, right_KPH = np.linalg.qr(_centred(key_LKH))
    keys_NLP, right_NPH = (np.repeat(x, N // K, axis=0) for x in (keys_KLP, right_KPH))
    core_NPP = scale * left_NPH @ right_NPH.swapaxes(1, 2)
    left_NPR, values_NR, right_NRP = np.linalg.svd(core_NPP)
    return CentredLogits(queries_NLP @ left_NPR, values_NR, keys_NLP @ right_NRP.swapaxes(1, 2))


def energies(query_LNH: np.ndarray, key_LKH: np.ndarray, scale: float) -> np.ndarray:
    """[N, R] those of `field`, without its vectors: about half the work."""
    N, K = query_LNH.shape[1], key_LKH.shape[1]
    left_NPH = np.linalg.qr(_by_head(query_LNH), mode="r")
    right_NPH = np.repeat(np.linalg.qr(_centred(key_LKH), mode="r"), N // K, axis=0)
    core_NPP = scale * left_NPH @ right_NPH.swapaxes(1, 2)
    return np.linalg.svd(core_NPP, compute_uv=False) ** 2


def _centred(key_LKH: np.ndarray) -> np.ndarray:
    """[K, L, H] keys about their mean over tokens."""
    key_KLH = _by_head(key_LKH)
    return key_KLH - key_KLH.mean(axis=1, keepdims=True)


def masked_centred_logits(
    query_LH: np.ndarray, key_LH: np.ndarray, scale: float, mask: Mask
) -> np.ndarray:
    """[L, L] E of what one head's queries see: centred over those keys, zero at the others.

    A row's softmax is the same with it. Of causal attention it is a lower triangle, of full rank:
    the edge takes components of its own. Random queries and keys of 10 channels and 1,024 tokens
    need 9 for 90 % of the energy of E, and 20 of this one's.
    """
    visible_LL = mask.visible(len(query_LH))
    z_LL = scale * query_LH.astype(np.float64) @ key_LH.T.astype(np.float64)
    z_LL[~visible_LL] = 0
    z_LL -= z_LL.sum(axis=1, keepdims=True) / visible_LL.sum(axis=1, keepdims=True)
    z_LL[~visible_LL] = 0
    return z_LL


def masked_energies(
    query_LNH: np.ndarray, key_LKH: np.ndarray, scale: float, mask: Mask
) -> np.ndarray:
    """[N, L] energies of each head's `masked_field`.

    Of E E^T, without vectors: 7/3·L³ FLOPs for each head and 32·L² bytes while it takes them, as
    many heads at once as there are cores. At L = 1,024 that is 0.09 s of a core of a Xeon.
    """
    N, K = query_LNH.shape[1], key_LKH.shape[1]

    def of(head):
        e_LL = masked_centred_logits(query_LNH[:, head], key_LKH[:, head * K // N], scale, mask)
        return np.maximum(np.linalg.eigvalsh(e_LL @ e_LL.T)[::-1], 0)

    return np.stack(parallel_map(of, range(N)))


def parallel_map(function: Callable, items: Iterable) -> list:
    """What a function makes of each item, one item to a core; BLAS has one thread."""
    with (
        runtime.blas_threads(1),
        futures.ThreadPoolExecutor(runtime.cores()) as pool,
    ):
        return list(pool.map(function, items))


# -- the weights -----------------------------------------------------------------------------------


class Interaction:
    """M = W_Q R W_K^T of each query head, R what RoPE does between two tokens (eq. 4).

    Norms of queries and keys are left out but for their gains, and so are biases; see `Heads`.
    """

    def __init__(self, heads: Heads):
        def r(w_DNH):
            return np.linalg.qr(w_DNH.swapaxes(0, 1), mode="r")

        self._heads = heads
        self._query_NPH = r(heads.query_DNH)
        key_KPH = r(heads.key_DKH)
        self._key_NPH = np.repeat(key_KPH, heads.num_heads // len(key_KPH), axis=0)

    def energies(self) -> np.ndarray:
        """[N, H] without RoPE: R is the identity, as in the paper."""
        return self._energies(self._query_NPH)

    def energies_at(self, distance: int) -> np.ndarray:
        """[N, H] of a query that stands so many tokens behind the key."""
        return self._energies(
            self._rotated_queries(np.exp(1j * distance * self._heads.frequencies_F))
        )

    def energies_averaged(self, length: int) -> np.ndarray:
        """[N, H] of the mean over all pairs of a query and a key not behind it in L tokens.

        What fast pairs of channels do at one distance they undo at another: it has at most the
        energy that M has at the distances of those pairs on average.
        """
        distances_L = np.arange(length)
        pairs_L = (length - distances_L) / (length * (length + 1) / 2)
        turns_LF = np.exp(1j * np.outer(distances_L, self._heads.frequencies_F))
        return self._energies(self._rotated_queries(pairs_L @ turns_LF))

    def _rotated_queries(self, turn_F: np.ndarray) -> np.ndarray:
        """Queries with each pair of channels, as a complex number, by a factor."""
        return rotary.rotate_pairs(self._query_NPH, self._heads.rotated, turn_F)

    def _energies(self, query_NPH: np.ndarray) -> np.ndarray:
        core_NPP = query_NPH @ self._key_NPH.swapaxes(1, 2)
        return np.linalg.svd(core_NPP, compute_uv=False) ** 2


# -- what bounds softmax ---------------------------------------------------------------------------


def delocalisation(found: CentredLogits) -> np.ndarray:
    """[N, R] sqrt(L) · max_j |v_j| of E's right singular vectors, at most sqrt(L); beta is the
    largest of a head's (logit spectra eq. 6).

    1: spread evenly over keys. Vectors of singular values that are but rounding have nan.
    """
    length = found.right_NLR.shape[1]
    spread_NR = np.sqrt(length) * np.abs(found.right_NLR).max(axis=1)
    there_NR = found.values_NR > _NOTHING * found.values_NR[:, :1]
    return np.where(there_NR, spread_NR, np.nan)


def beta(found: CentredLogits) -> np.ndarray:
    """[N] the largest `delocalisation` of each head; 0 of a head whose E is zero."""
    return np.nan_to_num(delocalisation(found)).max(axis=1)


def softmax_bound(found: CentredLogits, rank: int) -> np.ndarray:
    """[N] what no row of |p - p_r|_1 exceeds: beta / sqrt(L) · the sum of the values left out.

    Logit spectra, proposition 4.1. It rests on |u| <= 1 and |v| <= beta / sqrt(L).
    """
    length = found.right_NLR.shape[1]
    return beta(found) / np.sqrt(length) * found.values_NR[:, rank:].sum(axis=1)


class KeyGeometry(NamedTuple):
    """How evenly tokens and directions share the keys of each KV head."""

    incoherence_K: np.ndarray
    condition_K: np.ndarray


def key_geometry(key_LKH: np.ndarray) -> KeyGeometry:
    """Incoherence and condition number of each head's keys [L, H], which are not centred.

    Logit spectra (sections 4.2 and 4.3) has mu_K from a reference of its own and does not define
    it. Here it is the standard one, mu = L / r · max_j |row j of the left singular vectors|², r the
    rank: 1 where all tokens share the space of keys alike, L / r where one token has a direction to
    itself; 1 of any keys where L <= H. The condition number is that of the r directions there are.
    """
    length = len(key_LKH)
    left_KLR, values_KR, _ = np.linalg.svd(_by_head(key_LKH), full_matrices=False)
    there_KR = values_KR > _NOTHING * values_KR[:, :1]
    rank_K = there_KR.sum(axis=1)
    leverage_KL = ((left_KLR * there_KR[:, None]) ** 2).sum(axis=2)
    incoherence_K = length / np.maximum(rank_K, 1) * leverage_KL.max(axis=1)
    least_K = np.where(there_KR, values_KR, np.inf).min(axis=1)
    return KeyGeometry(incoherence_K, values_KR[:, 0] / least_K)


def _by_head(x_LNH: np.ndarray) -> np.ndarray:
    """[N, L, H] in float64."""
    return np.ascontiguousarray(x_LNH.astype(np.float64).swapaxes(0, 1))
