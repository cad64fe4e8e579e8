"""Subspaces of a head's key channels that a cache could keep, and the resulting errors.

Cutting a key k at rank r gives c + (k - c) A_r B_r, with A_r [H, r] and B_r [r, H]: a cache keeps
the r numbers (k - c) A_r, and the center c is constant. A = B^T is an orthogonal projection; in
general A_r B_r is an oblique one, weighted by the queries. All arrays are float64.

RoPE rotates queries and keys by position. Before RoPE one subspace serves all positions, and cut
keys are rotated when they are read. After RoPE keys are cut as attention uses them.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import numpy as np

from kvjax.analysis.measures import logits, rotary
from kvjax.analysis.measures.activations import Layer, Mask, capped, softmax
from kvjax.analysis.measures.heads import Heads
from kvjax.convert.layer import matrix_roots

_RIDGE = 1e-10  # relative to the mean energy of a key's channel
_LINEAR = 1e-3  # relative error below which keys are input times weights plus a bias


class Subspaces(NamedTuple):
    """Directions of the keys of J heads with C channels, most important first.

    J is K and C is H; or J is 1 and C is K·H: keys of all KV heads concatenated.

    Attributes:
      center_JC: subtracted before the cut, added after it.
      read_JCR: A, columns are the directions kept of a key.
      write_JRC: B, rows are their reconstruction.
    """

    center_JC: np.ndarray
    read_JCR: np.ndarray
    write_JRC: np.ndarray

    def first(self, rank: int) -> "Subspaces":
        """Returns the rank-r subspaces."""
        return Subspaces(self.center_JC, self.read_JCR[..., :rank], self.write_JRC[:, :rank])

    def cut(self, key_TKH: np.ndarray, rank: int) -> np.ndarray:
        """Returns [T, K, H] keys, cut to the first `rank` directions of each of the J heads."""
        kept, J = self.first(rank), len(self.center_JC)
        key_JTC = key_TKH.reshape(len(key_TKH), J, -1).swapaxes(0, 1) - kept.center_JC[:, None]
        cut_JTC = key_JTC @ kept.read_JCR @ kept.write_JRC + kept.center_JC[:, None]
        return cut_JTC.swapaxes(0, 1).reshape(key_TKH.shape)

    def projectors(self, rank: int) -> np.ndarray:
        """Returns [J, C, C] A_r B_r."""
        kept = self.first(rank)
        return kept.read_JCR @ kept.write_JRC


def of_weights(key_DKH: np.ndarray, bias_KH: np.ndarray, *, together: bool = False) -> Subspaces:
    """Returns the truncated SVD of W_K: x W_K V V^T, with biases kept (thin keys, section 3.5).

    Args:
      together: one SVD of all heads' weights, [D, K·H], as in table 5 of the paper; else one per
        head.
    """
    D, K, _ = key_DKH.shape
    J = 1 if together else K
    w_JDC = key_DKH.reshape(D, J, -1).swapaxes(0, 1)
    *_, write_JCC = np.linalg.svd(np.linalg.qr(w_JDC, mode="r"))
    return Subspaces(bias_KH.reshape(J, -1), write_JCC.swapaxes(1, 2), write_JCC)


def of_text(query_moment_KHH: np.ndarray, keys_BTKH: np.ndarray, *, each_row: bool) -> Subspaces:
    """Returns the subspaces with the least squared logit error over all pairs of queries and keys.

    With second moment C_q of the queries, a key error e causes the mean squared logit error e C_q
    e^T. For centred keys of second moment C_k it is least for the eigenvectors U of C_q^(1/2) C_k
    C_q^(1/2): A = C_q^(1/2) U. This is the truncated SVD of E (logit spectra eq. 3) with all
    queries of a KV head stacked. It is not optimal under a causal mask, nor where RoPE makes
    queries and keys depend on each other.

    t centred keys have t - 1 directions; rounding would order the others: a tiny ridge orders them
    by the energy of the queries.

    Args:
      each_row: centre keys per row. For keys after RoPE: a shift common to all keys of a row
        cancels in its softmax.
    """
    *_, K, H = keys_BTKH.shape
    center_KH = keys_BTKH.mean(axis=(0, 1))
    row_center_B1KH = keys_BTKH.mean(axis=1, keepdims=True) if each_row else center_KH
    root_KHH, inverse_KHH = matrix_roots(query_moment_KHH)
    moment_KHH = moments(keys_BTKH - row_center_B1KH, K)
    moment_KHH += _RIDGE * np.eye(H) * np.trace(moment_KHH, axis1=1, axis2=2)[:, None, None] / H
    energy_KHH = root_KHH @ moment_KHH @ root_KHH
    _, vectors_KHR = np.linalg.eigh((energy_KHH + energy_KHH.swapaxes(1, 2)) / 2)
    vectors_KHR = vectors_KHR[..., ::-1]
    return Subspaces(center_KH, root_KHH @ vectors_KHR, vectors_KHR.swapaxes(1, 2) @ inverse_KHH)


def moments(x_BTNH: np.ndarray, K: int) -> np.ndarray:
    """Returns [K, H, H] second moments of keys, or of the queries that read each KV head."""
    *_, N, H = x_BTNH.shape
    x_KXH = np.moveaxis(x_BTNH.reshape(-1, K, N // K, H), 1, 0).reshape(K, -1, H)
    return x_KXH.swapaxes(1, 2) @ x_KXH / x_KXH.shape[1]


class Rope(NamedTuple):
    """RoPE's channel pairs, first + i and first + F + i, and their F frequencies in radians per
    token.
    """

    first: int
    frequencies: tuple[float, ...]

    @property
    def rotated(self) -> slice:
        return slice(self.first, self.first + 2 * len(self.frequencies))


def rope_of(heads: Heads) -> Rope:
    """Returns a layer's `Rope`."""
    return Rope(heads.rotated.start, tuple(heads.frequencies_F.tolist()))


def rotated_moments(moment_KHH: np.ndarray, rope: Rope, mask: Mask, length: int) -> np.ndarray:
    """Returns [K, H, H] second moments of queries relative to keys before RoPE.

    A query d tokens after a key is rotated by d relative to it: the moment is averaged over all
    pairs of L tokens under the mask, ignoring that near and far keys may differ.
    """
    pairs_HH, mean_HH = _rotations_over_pairs(rope, moment_KHH.shape[-1], mask, length)
    complex_KHH = (pairs_HH @ moment_KHH @ pairs_HH.conj().T) * mean_HH
    return (pairs_HH.conj().T @ complex_KHH @ pairs_HH).real


@functools.lru_cache(maxsize=64)
def _rotations_over_pairs(
    rope: Rope, H: int, mask: Mask, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a unitary [H, H] map to complex channels, and the mean rotation factor [H, H] per
    entry.
    """
    pairs_HH = rotary.to_complex_channels(np.eye(H), rope.rotated, 0)
    frequencies_H = rotary.phases(H, rope.rotated, rope.frequencies)
    queries, keys = np.nonzero(mask.visible(length))
    distances_A, counts_A = np.unique(queries - keys, return_counts=True)
    rotations_HA = np.exp(1j * np.outer(frequencies_H, distances_A))
    return pairs_HH, (rotations_HA * (counts_A / counts_A.sum())) @ rotations_HA.conj().T


def rotate_by_position(x_TKH: np.ndarray, rope: Rope) -> np.ndarray:
    """Applies RoPE to keys or queries at positions 0, 1, 2, ..."""
    angles_TF = np.outer(np.arange(len(x_TKH)), rope.frequencies)
    return rotary.rotate_pairs(x_TKH, rope.rotated, np.exp(1j * angles_TF)[:, None])


def bias(layer: Layer, heads: Heads) -> np.ndarray:
    """Returns the [K, H] bias of keys before RoPE: their mean less the part linear in the input.

    Zero if a norm follows the projection: the bias is then cut like the rest of the key.
    """
    key_BTKH = layer.plain_key_BTKH.astype(np.float64)
    rest_BTKH = key_BTKH - np.tensordot(layer.input_BTD.astype(np.float64), heads.key_DKH, 1)
    mean_KH = rest_BTKH.mean(axis=(0, 1))
    is_linear = np.abs(rest_BTKH - mean_KH).max() <= _LINEAR * np.abs(key_BTKH).max()
    return mean_KH if is_linear else np.zeros_like(mean_KH)


# -- errors ----------------------------------------------------------------------------------------


class CutErrors(NamedTuple):
    """Relative errors per query head of cutting keys in A ways.

    Attributes:
      logit_NA: |E - E_r| / |E|, Frobenius norms of logits, after a soft cap if the layer has one,
        centred over the visible keys.
      output_NA: |o - o_r| / |o|; 0 without outputs.
    """

    logit_NA: np.ndarray
    output_NA: np.ndarray


def errors(
    layer: Layer, row: int, cut_ATKH: Sequence[np.ndarray], queries: slice = slice(None)
) -> CutErrors:
    """Returns the errors of cut keys, given as attention uses them, on some of a row's queries."""

    def row_of(x_BTNH):
        return x_BTNH[row].astype(np.float64)

    query_TNH, value_TKH = row_of(layer.query_BTNH)[queries] * layer.scale, row_of(layer.value_BTKH)
    key_TKH = row_of(layer.key_BTKH)
    N, K = query_TNH.shape[1], key_TKH.shape[1]
    visible_TS = layer.mask.visible(len(key_TKH))[queries]

    def relative_norm(error, reference):
        return float(np.linalg.norm(error) / (np.linalg.norm(reference) or 1.0))

    def head_errors(n):
        query_TH, k = query_TNH[:, n], n * K // N
        value_SH, capped_TS = value_TKH[:, k], capped(query_TH @ key_TKH[:, k].T, layer.softcap)
        z_TS = centred(capped_TS.copy(), visible_TS)
        o_TH = softmax(z_TS.copy(), visible_TS) @ value_SH
        logit_A, output_A = [], []
        for cut_SKH in cut_ATKH:
            if layer.softcap:
                error_TS = capped(query_TH @ cut_SKH[:, k].T, layer.softcap) - capped_TS
            else:  # small errors keep their digits
                error_TS = query_TH @ (cut_SKH[:, k] - key_TKH[:, k]).T
            error_TS = centred(error_TS, visible_TS)
            logit_A.append(relative_norm(error_TS, z_TS))
            error_TS += z_TS  # in place: now the logits of cut keys
            output_A.append(relative_norm(softmax(error_TS, visible_TS) @ value_SH - o_TH, o_TH))
        return logit_A, output_A

    return CutErrors(*map(np.array, zip(*logits.parallel_map(head_errors, range(N)), strict=True)))


def centred(z_TS: np.ndarray, visible_TS: np.ndarray) -> np.ndarray:
    """Centres logits over the visible keys, 0 at the others; in place."""
    z_TS *= visible_TS
    z_TS -= z_TS.sum(axis=1, keepdims=True) / visible_TS.sum(axis=1, keepdims=True)
    z_TS *= visible_TS
    return z_TS


def overlap(one: Subspaces, other: Subspaces) -> np.ndarray:
    """Returns [J], the mean squared cosine of the principal angles between two subspaces.

    1: the same subspace; r / H: two random ones, on average.
    """
    bases = [np.linalg.qr(each.write_JRC.swapaxes(1, 2))[0] for each in (one, other)]
    return ((bases[0].swapaxes(1, 2) @ bases[1]) ** 2).sum(axis=(1, 2)) / bases[0].shape[2]
