"""Computes spectra of attention logits on a text, and of the weights that make them, in float64.

Logit spectra (arXiv 2604.04384) compares two matrices per head. E [L, L] has the logits of L tokens
minus each row's mean, and so depends on text and weights; M = W_Q W_K^T depends on weights alone. A
soft cap is not part of E, since it is applied afterwards. Energies are squared singular values,
descending.

E is a product of thin matrices, queries and keys [L, H], so that their QR decompositions and an SVD
of an H x H matrix give its SVD. The same holds for M, but not for causal E.
"""

from collections.abc import Callable, Iterable
from concurrent import futures
from typing import NamedTuple

import numpy as np

from kvjax.analysis.measures import rotary
from kvjax.analysis.measures.activations import Mask
from kvjax.analysis.measures.heads import Heads
from kvjax.foundation import runtime

_NOTHING = 1e-12  # singular values below this share of the largest are rounding errors


class CentredLogits(NamedTuple):
    """The thin SVD of each head's E [L, L], R = min(L, H).

    Attributes:
      left_NLR, right_NLR: singular vectors, over queries and over keys, as columns.
      values_NR: singular values, descending.
      mean_NL: each row's mean. It changes the softmax only if the logits have a soft cap.
    """

    left_NLR: np.ndarray
    values_NR: np.ndarray
    right_NLR: np.ndarray
    mean_NL: np.ndarray

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
        """Returns the best rank-r approximation of a head's E, or a block of it.

        Args:
          rank: r; None: E itself.
        """
        left_LR = self.left_NLR[head, queries, :rank] * self.values_NR[head, :rank]
        return left_LR @ self.right_NLR[head, keys, :rank].T


def centred_logits(query_LNH: np.ndarray, key_LKH: np.ndarray, scale: float) -> CentredLogits:
    """Returns E = Z - mean of each row over all keys, with Z = scale · q k^T, for each query head.

    Logit spectra eq. 2 and 3. Every query sees every key, also later ones, as in the paper.
    Subtracting a row's mean is the same as centring the keys, so the rank of E is at most H (not
    H + 1) and at most L - 1. Costs 4·L·H² FLOPs and an SVD of an H x H matrix per head.
    """
    N, K = query_LNH.shape[1], key_LKH.shape[1]
    queries_NLP, left_NPH = np.linalg.qr(_by_head(query_LNH))
    centred_KLH, mean_K1H = _centred(key_LKH)
    keys_KLP, right_KPH = np.linalg.qr(centred_KLH)
    keys_NLP, right_NPH = (np.repeat(x, N // K, axis=0) for x in (keys_KLP, right_KPH))
    core_NPP = scale * left_NPH @ right_NPH.swapaxes(1, 2)
    left_NPR, values_NR, right_NRP = np.linalg.svd(core_NPP)
    mean_NL = scale * (_by_head(query_LNH) @ np.repeat(mean_K1H, N // K, axis=0).swapaxes(1, 2))
    right_NLR = keys_NLP @ right_NRP.swapaxes(1, 2)
    return CentredLogits(queries_NLP @ left_NPR, values_NR, right_NLR, mean_NL[..., 0])


def energies(query_LNH: np.ndarray, key_LKH: np.ndarray, scale: float) -> np.ndarray:
    """Returns the [N, R] energies of `centred_logits` without its vectors, in half the time."""
    N, K = query_LNH.shape[1], key_LKH.shape[1]
    left_NPH = np.linalg.qr(_by_head(query_LNH), mode="r")
    right_NPH = np.repeat(np.linalg.qr(_centred(key_LKH)[0], mode="r"), N // K, axis=0)
    core_NPP = scale * left_NPH @ right_NPH.swapaxes(1, 2)
    return np.linalg.svd(core_NPP, compute_uv=False) ** 2


def _centred(key_LKH: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns [K, L, H] keys minus their mean over tokens, and the [K, 1, H] mean."""
    key_KLH = _by_head(key_LKH)
    mean_K1H = key_KLH.mean(axis=1, keepdims=True)
    return key_KLH - mean_K1H, mean_K1H


def masked_centred_logits(
    query_LH: np.ndarray, key_LH: np.ndarray, scale: float, mask: Mask
) -> np.ndarray:
    """Returns [L, L] E of one head under a mask: centred over visible keys, zero at the others.

    Its masked softmax is that of the logits. Causal E is lower triangular and has full rank, since
    the edge of the triangle adds components: for random queries and keys (10 channels, 1,024
    tokens), 9 components of E have 90 % of its energy, and 20 components of causal E.
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
    """Returns [N, L] energies of each head's `masked_centred_logits`.

    Eigenvalues of E E^T take 7/3·L³ FLOPs per head: 0.09 s of a Xeon core at L = 1,024. Each core
    computes one head at a time, in 32·L² bytes.
    """
    N, K = query_LNH.shape[1], key_LKH.shape[1]

    def head_energies(head):
        e_LL = masked_centred_logits(query_LNH[:, head], key_LKH[:, head * K // N], scale, mask)
        return np.maximum(np.linalg.eigvalsh(e_LL @ e_LL.T)[::-1], 0)

    return np.stack(parallel_map(head_energies, range(N)))


def parallel_map(function: Callable, items: Iterable) -> list:
    """Maps a function over items in parallel: one item per core at a time, with one BLAS thread."""
    with (
        runtime.blas_threads(1),
        futures.ThreadPoolExecutor(runtime.cores()) as pool,
    ):
        return list(pool.map(function, items))


# -- the weights -----------------------------------------------------------------------------------


class Interaction:
    """M = W_Q R W_K^T of each query head, with RoPE's relative rotation R (eq. 4).

    As in `Heads`, norms of queries and keys are reduced to their gains, and biases left out.
    """

    def __init__(self, heads: Heads):
        def triangular_factor(w_DNH):
            return np.linalg.qr(w_DNH.swapaxes(0, 1), mode="r")

        self._heads = heads
        self._query_NPH = triangular_factor(heads.query_DNH)
        key_KPH = triangular_factor(heads.key_DKH)
        self._key_NPH = np.repeat(key_KPH, heads.num_heads // len(key_KPH), axis=0)

    def energies(self) -> np.ndarray:
        """Returns [N, H] energies of M without RoPE, R = 1, as in the paper."""
        return self._energies(self._query_NPH)

    def energies_at(self, distance: int) -> np.ndarray:
        """Returns [N, H] energies of M for a query `distance` tokens after the key."""
        return self._energies(
            self._rotated_queries(np.exp(1j * distance * self._heads.frequencies_F))
        )

    def energies_averaged(self, length: int) -> np.ndarray:
        """Returns [N, H] energies of M averaged over the pairs of a causal mask on L tokens.

        Rotations of fast channel pairs cancel in the average, so its energy is at most the mean
        energy over pairs of tokens.
        """
        distances_L = np.arange(length)
        pairs_L = (length - distances_L) / (length * (length + 1) / 2)
        rotations_LF = np.exp(1j * np.outer(distances_L, self._heads.frequencies_F))
        return self._energies(self._rotated_queries(pairs_L @ rotations_LF))

    def _rotated_queries(self, factor_F: np.ndarray) -> np.ndarray:
        """Multiplies each channel pair of the queries, as a complex number, by a factor."""
        return rotary.rotate_pairs(self._query_NPH, self._heads.rotated, factor_F)

    def _energies(self, query_NPH: np.ndarray) -> np.ndarray:
        core_NPP = query_NPH @ self._key_NPH.swapaxes(1, 2)
        return np.linalg.svd(core_NPP, compute_uv=False) ** 2


# -- the bound on softmax --------------------------------------------------------------------------


def delocalisation(svd: CentredLogits) -> np.ndarray:
    """Returns [N, R] sqrt(L) · max_j |v_j| of E's right singular vectors v.

    A vector that is spread evenly over keys has 1, a vector on a single key sqrt(L). The result is
    nan if the singular value is a rounding error. The largest of a head is its beta (logit spectra
    eq. 6).
    """
    length = svd.right_NLR.shape[1]
    spread_NR = np.sqrt(length) * np.abs(svd.right_NLR).max(axis=1)
    nonzero_NR = svd.values_NR > _NOTHING * svd.values_NR[:, :1]
    return np.where(nonzero_NR, spread_NR, np.nan)


def beta(svd: CentredLogits) -> np.ndarray:
    """Returns [N] betas, the largest `delocalisation` of each head; 0 if its E is zero."""
    return np.nan_to_num(delocalisation(svd)).max(axis=1)


def softmax_bound(svd: CentredLogits, rank: int) -> np.ndarray:
    """Returns [N] upper bounds of |p - p_r|_1 of any row: beta / sqrt(L) · sum of dropped values.

    This is proposition 4.1 of logit spectra. It follows from |u| <= 1 and |v| <= beta / sqrt(L).
    """
    length = svd.right_NLR.shape[1]
    return beta(svd) / np.sqrt(length) * svd.values_NR[:, rank:].sum(axis=1)


class KeyGeometry(NamedTuple):
    """Incoherence and condition number of each KV head's keys."""

    incoherence_K: np.ndarray
    condition_K: np.ndarray


def key_geometry(key_LKH: np.ndarray) -> KeyGeometry:
    """Returns incoherence and condition number of each head's keys [L, H], uncentred.

    Logit spectra (sections 4.2 and 4.3) gives values of an incoherence mu_K without defining it.
    Here it is the standard one, mu = L / r · max_j |row j of the left singular vectors|², where r
    is the rank. It is 1 if all tokens share the key space evenly, and for any keys of rank r = L;
    it is L / r if one token has a direction to itself. The condition number is that of the r
    nonzero singular values.
    """
    length = len(key_LKH)
    left_KLR, values_KR, _ = np.linalg.svd(_by_head(key_LKH), full_matrices=False)
    nonzero_KR = values_KR > _NOTHING * values_KR[:, :1]
    rank_K = nonzero_KR.sum(axis=1)
    leverage_KL = ((left_KLR * nonzero_KR[:, None]) ** 2).sum(axis=2)
    incoherence_K = length / np.maximum(rank_K, 1) * leverage_KL.max(axis=1)
    least_K = np.where(nonzero_KR, values_KR, np.inf).min(axis=1)
    return KeyGeometry(incoherence_K, values_KR[:, 0] / least_K)


def _by_head(x_LNH: np.ndarray) -> np.ndarray:
    """Returns [N, L, H] in float64."""
    return np.ascontiguousarray(x_LNH.astype(np.float64).swapaxes(0, 1))
