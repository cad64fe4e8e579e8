"""Projects keys to subspaces of a head's channels, which a cache could keep; measures the errors.

To cut a key k at rank r is to replace it by c + (k - c) A_r B_r, with A_r [H, r] and B_r [r, H]. A
cache would keep the r numbers (k - c) A_r; the center c is a constant. A_r B_r is an orthogonal
projection if A = B^T, and in general an oblique one, weighted by the queries. All arrays are
float64.

Keys can be cut before RoPE, in one subspace for all positions, and rotated when they are read. Or
they are cut after RoPE, as attention uses them.
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
_LINEAR = 1e-3  # keys are taken as inputs times weights plus a bias up to this relative error


class Subspaces(NamedTuple):
    """Directions of the keys of J heads with C channels, most important first.

    Either each KV head has its own (J = K, C = H), or there is one subspace for the concatenated
    keys of all KV heads (J = 1, C = K·H).

    Attributes:
      center_JC: c, subtracted before the cut and added after it.
      read_JCR: A, which maps a key to the numbers that are kept.
      write_JRC: B, which maps these numbers back to a key.
    """

    center_JC: np.ndarray
    read_JCR: np.ndarray
    write_JRC: np.ndarray

    def first(self, rank: int) -> "Subspaces":
        """Returns the subspaces of the first `rank` directions."""
        return Subspaces(self.center_JC, self.read_JCR[..., :rank], self.write_JRC[:, :rank])

    def cut(self, key_TKH: np.ndarray, rank: int) -> np.ndarray:
        """Returns [T, K, H] keys, cut at a rank in each of the J heads."""
        kept, J = self.first(rank), len(self.center_JC)
        key_JTC = key_TKH.reshape(len(key_TKH), J, -1).swapaxes(0, 1) - kept.center_JC[:, None]
        cut_JTC = key_JTC @ kept.read_JCR @ kept.write_JRC + kept.center_JC[:, None]
        return cut_JTC.swapaxes(0, 1).reshape(key_TKH.shape)

    def projectors(self, rank: int) -> np.ndarray:
        """Returns [J, C, C] A_r B_r."""
        kept = self.first(rank)
        return kept.read_JCR @ kept.write_JRC


def of_weights(key_DKH: np.ndarray, bias_KH: np.ndarray, *, together: bool = False) -> Subspaces:
    """Returns the right singular vectors V of W_K (thin keys, section 3.5).

    Cut keys are x W_K V_r V_r^T + bias, with the singular vectors of the r largest values.

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

    If the queries have the second moment C_q, an error e of a key causes the mean squared logit
    error e C_q e^T. For centred keys with second moment C_k, the mean over keys is least for
    A = C_q^(1/2) U, where U are the eigenvectors of C_q^(1/2) C_k C_q^(1/2). This is the SVD of E
    (logit spectra eq. 3) with all queries of a KV head stacked. It is not optimal under a causal
    mask, nor if RoPE makes queries and keys depend on each other.

    Centred keys of t tokens span t - 1 directions. A tiny ridge orders the remaining ones by the
    energy of the queries; without it, rounding would.

    Args:
      query_moment_KHH: C_q, see `moments`.
      each_row: True to centre keys per row, which is right for keys after RoPE: a shift that all
        keys of a row have in common cancels in the softmax.
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
    """RoPE of a layer.

    Attributes:
      first: the first rotated channel; channels first + i and first + F + i are a pair.
      frequencies: radians per token of the F pairs.
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

    A query d tokens after a key is rotated by d relative to the key. The moment is therefore
    averaged over all pairs of `length` tokens under the mask, as if near and far keys had the same
    distribution.
    """
    pairs_HH, mean_HH = _rotations_over_pairs(rope, moment_KHH.shape[-1], mask, length)
    complex_KHH = (pairs_HH @ moment_KHH @ pairs_HH.conj().T) * mean_HH
    return (pairs_HH.conj().T @ complex_KHH @ pairs_HH).real


@functools.lru_cache(maxsize=64)
def _rotations_over_pairs(
    rope: Rope, H: int, mask: Mask, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a unitary [H, H] map to complex channels, and [H, H] mean factors.

    In complex channels, averaging a second moment over pairs of tokens multiplies each entry by its
    mean factor.
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
    """Returns the [K, H] bias of keys before RoPE: the mean of keys minus inputs times weights.

    Returns zeros if a norm follows the projection. The bias is then cut like the rest of the key.
    """
    key_BTKH = layer.plain_key_BTKH.astype(np.float64)
    rest_BTKH = key_BTKH - np.tensordot(layer.input_BTD.astype(np.float64), heads.key_DKH, 1)
    mean_KH = rest_BTKH.mean(axis=(0, 1))
    is_linear = np.abs(rest_BTKH - mean_KH).max() <= _LINEAR * np.abs(key_BTKH).max()
    return mean_KH if is_linear else np.zeros_like(mean_KH)


# -- errors ----------------------------------------------------------------------------------------


class CutErrors(NamedTuple):
    """Relative errors that A different cuts of the keys cause, per query head.

    Attributes:
      logit_NA: |E - E_r| / |E|, Frobenius norms of logits centred over the visible keys, after a
        soft cap if the layer has one.
      output_NA: |o - o_r| / |o|; 0 if outputs are zero.
    """

    logit_NA: np.ndarray
    output_NA: np.ndarray


def errors(
    layer: Layer, row: int, cut_ATKH: Sequence[np.ndarray], queries: slice = slice(None)
) -> CutErrors:
    """Returns the errors on some of a row's queries.

    Args:
      cut_ATKH: the row's cut keys as attention uses them, for each cut.
    """

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
            else:  # a product with the difference keeps the digits of small errors
                error_TS = query_TH @ (cut_SKH[:, k] - key_TKH[:, k]).T
            error_TS = centred(error_TS, visible_TS)
            logit_A.append(relative_norm(error_TS, z_TS))
            error_TS += z_TS  # in place: now the logits of cut keys
            output_A.append(relative_norm(softmax(error_TS, visible_TS) @ value_SH - o_TH, o_TH))
        return logit_A, output_A

    return CutErrors(*map(np.array, zip(*logits.parallel_map(head_errors, range(N)), strict=True)))


def centred(z_TS: np.ndarray, visible_TS: np.ndarray) -> np.ndarray:
    """Centres logits over the visible keys and sets the others to 0, in place."""
    z_TS *= visible_TS
    z_TS -= z_TS.sum(axis=1, keepdims=True) / visible_TS.sum(axis=1, keepdims=True)
    z_TS *= visible_TS
    return z_TS


def overlap(one: Subspaces, other: Subspaces) -> np.ndarray:
    """Returns [J] mean squared cosines of the principal angles between two subspaces.

    Equal subspaces have 1; random ones have r / C on average.
    """
    bases = [np.linalg.qr(each.write_JRC.swapaxes(1, 2))[0] for each in (one, other)]
    return ((bases[0].swapaxes(1, 2) @ bases[1]) ** 2).sum(axis=(1, 2)) / bases[0].shape[2]
