"""Subspaces of a head's key channels that a cache could keep, and what is lost with the others.

A key k is cut at rank r to c + (k - c) A_r B_r, with A_r [H, r] and B_r [r, H]: a cache keeps the r
numbers (k - c) A_r, and the center c is a constant. With A = B^T the subspace is kept as it is; in
general A_r B_r is an oblique projection, which weighs channels by what queries make of them. All
arrays are in float64.

RoPE turns queries and keys by their positions. Before RoPE the same directions of a key are left
wherever it stands, and what is left is turned as it is read. After RoPE keys are cut as attention
uses them.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import numpy as np

from kvjax.analysis.measures import logits, rotary
from kvjax.analysis.measures.activations import Layer, Mask, softmax
from kvjax.analysis.measures.heads import Heads
from kvjax.convert.layer import matrix_roots

_RIDGE = 1e-10  # of the mean energy of a key's channel
_LINEAR = 1e-3  # relative: keys that differ less from input times weights, and a bias, are those


class Subspaces(NamedTuple):
    """Directions of the keys of J heads with C channels, the most important ones first.

    J is K, C is H; or J is 1, C is K·H: keys of all KV heads side by side.

    Attributes:
      center_JC: what is taken away before the cut and put back after it.
      read_JCR: A, by column what is kept of a key.
      write_JRC: B, by row where that goes.
    """

    center_JC: np.ndarray
    read_JCR: np.ndarray
    write_JRC: np.ndarray

    def first(self, rank: int) -> "Subspaces":
        """Those of that rank."""
        return Subspaces(self.center_JC, self.read_JCR[..., :rank], self.write_JRC[:, :rank])

    def cut(self, key_TKH: np.ndarray, rank: int) -> np.ndarray:
        """[T, K, H] keys with so many directions of each of the J left."""
        some, J = self.first(rank), len(self.center_JC)
        key_JTC = key_TKH.reshape(len(key_TKH), J, -1).swapaxes(0, 1) - some.center_JC[:, None]
        found_JTC = key_JTC @ some.read_JCR @ some.write_JRC + some.center_JC[:, None]
        return found_JTC.swapaxes(0, 1).reshape(key_TKH.shape)

    def projectors(self, rank: int) -> np.ndarray:
        """[J, C, C] A_r B_r."""
        some = self.first(rank)
        return some.read_JCR @ some.write_JRC


def of_weights(key_DKH: np.ndarray, bias_KH: np.ndarray, *, together: bool = False) -> Subspaces:
    """The truncated SVD of W_K: x W_K V V^T, biases kept (thin keys, section 3.5).

    Args:
      together: one SVD of all heads' weights, [D, K·H], as in that paper's table 5; else each
        head's own.
    """
    D, K, _ = key_DKH.shape
    J = 1 if together else K
    w_JDC = key_DKH.reshape(D, J, -1).swapaxes(0, 1)
    *_, write_JCC = np.linalg.svd(np.linalg.qr(w_JDC, mode="r"))
    return Subspaces(bias_KH.reshape(J, -1), write_JCC.swapaxes(1, 2), write_JCC)


def of_text(query_moment_KHH: np.ndarray, keys_BTKH: np.ndarray, *, each_row: bool) -> Subspaces:
    """The directions that leave the least squared error over all pairs of queries and keys, by
    second moments.

    Queries of a second moment C_q make of a key's error e the squared error e C_q e^T in the mean.
    Of centred keys with second moment C_k the least of it is left by the eigenvectors U of
    C_q^(1/2) C_k C_q^(1/2): A = C_q^(1/2) U. That is the truncated SVD of E (logit spectra eq. 3),
    of a KV head's queries one below the other, through factors of H channels. It is not the least
    over the pairs that a causal mask leaves, nor where queries and keys depend on each other as
    RoPE turns them.

    t keys leave all but t - 1 directions at zero, and which of those come next would be rounding:
    a ridge, too small to change the others, makes it the ones that queries weigh most.

    Args:
      each_row: keys are centred in each of B rows alone: after RoPE, where what is the same for
        all keys of a row is nothing to its softmax.
    """
    *_, K, H = keys_BTKH.shape
    center_KH = keys_BTKH.mean(axis=(0, 1))
    middle_B1KH = keys_BTKH.mean(axis=1, keepdims=True) if each_row else center_KH
    root_KHH, inverse_KHH = matrix_roots(query_moment_KHH)
    moment_KHH = moments(keys_BTKH - middle_B1KH, K)
    moment_KHH += _RIDGE * np.eye(H) * np.trace(moment_KHH, axis1=1, axis2=2)[:, None, None] / H
    energy_KHH = root_KHH @ moment_KHH @ root_KHH
    _, vectors_KHR = np.linalg.eigh((energy_KHH + energy_KHH.swapaxes(1, 2)) / 2)
    vectors_KHR = vectors_KHR[..., ::-1]
    return Subspaces(center_KH, root_KHH @ vectors_KHR, vectors_KHR.swapaxes(1, 2) @ inverse_KHH)


def moments(x_BTNH: np.ndarray, K: int) -> np.ndarray:
    """[K, H, H] second moments of keys, or of the queries that read each KV head."""
    *_, N, H = x_BTNH.shape
    x_KXH = np.moveaxis(x_BTNH.reshape(-1, K, N // K, H), 1, 0).reshape(K, -1, H)
    return x_KXH.swapaxes(1, 2) @ x_KXH / x_KXH.shape[1]


class Rope(NamedTuple):
    """What RoPE does: channels first and first + F, and so on, are a pair and turn per token by F
    frequencies, in radians."""

    first: int
    frequencies: tuple[float, ...]

    @property
    def rotated(self) -> slice:
        return slice(self.first, self.first + 2 * len(self.frequencies))


def rope_of(heads: Heads) -> Rope:
    """That of a layer."""
    return Rope(heads.rotated.start, tuple(heads.frequencies_F.tolist()))


def rotated_moments(moment_KHH: np.ndarray, rope: Rope, mask: Mask, length: int) -> np.ndarray:
    """[K, H, H] second moments of queries as keys before RoPE meet them.

    A query stands d tokens behind a key and is turned by so much against it: the mean over all
    pairs of L tokens that the mask leaves. That leaves out that near and far keys may differ.
    """
    pairs_HH, mean_HH = _rotations_over_pairs(rope, moment_KHH.shape[-1], mask, length)
    found_KHH = (pairs_HH @ moment_KHH @ pairs_HH.conj().T) * mean_HH
    return (pairs_HH.conj().T @ found_KHH @ pairs_HH).real


@functools.lru_cache(maxsize=64)
def _rotations_over_pairs(
    rope: Rope, H: int, mask: Mask, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """A unitary [H, H] matrix to complex channels, and what turns make of a moment of those: each
    entry by a number, [H, H]."""
    pairs_HH = rotary.to_complex_channels(np.eye(H), rope.rotated, 0)
    frequencies_H = rotary.phases(H, rope.rotated, rope.frequencies)
    queries, keys = np.nonzero(mask.visible(length))
    distances_A, counts_A = np.unique(queries - keys, return_counts=True)
    turns_HA = np.exp(1j * np.outer(frequencies_H, distances_A))
    return pairs_HH, (turns_HA * (counts_A / counts_A.sum())) @ turns_HA.conj().T


def rotate_by_position(x_TKH: np.ndarray, rope: Rope) -> np.ndarray:
    """Keys or queries by RoPE at positions 0, 1, 2, ..."""
    angles_TF = np.outer(np.arange(len(x_TKH)), rope.frequencies)
    return rotary.rotate_pairs(x_TKH, rope.rotated, np.exp(1j * angles_TF)[:, None])


def bias(layer: Layer, heads: Heads) -> np.ndarray:
    """[K, H] what all keys before RoPE have that is not of the input: the bias of keys.

    Zero where a norm stands between: a bias is cut there like the rest.
    """
    key_BTKH = layer.plain_key_BTKH.astype(np.float64)
    rest_BTKH = key_BTKH - np.tensordot(layer.input_BTD.astype(np.float64), heads.key_DKH, 1)
    found_KH = rest_BTKH.mean(axis=(0, 1))
    is_linear = np.abs(rest_BTKH - found_KH).max() <= _LINEAR * np.abs(key_BTKH).max()
    return found_KH if is_linear else np.zeros_like(found_KH)


# -- what is lost ----------------------------------------------------------------------------------


class CutErrors(NamedTuple):
    """What cutting keys in A ways changes for each query head.

    Attributes:
      logit_NA: |E - E_r| / |E|, Frobenius norms of logits centred over the keys that a query sees.
      output_NA: |o - o_r| / |o|, likewise; 0 where there is no output.
    """

    logit_NA: np.ndarray
    output_NA: np.ndarray


def errors(
    layer: Layer, row: int, cut_ATKH: Sequence[np.ndarray], queries: slice = slice(None)
) -> CutErrors:
    """What cut keys, as attention uses them, change for some of a row's queries."""

    def part(x_BTNH):
        return x_BTNH[row].astype(np.float64)

    query_TNH, value_TKH = part(layer.query_BTNH)[queries] * layer.scale, part(layer.value_BTKH)
    key_TKH = part(layer.key_BTKH)
    N, K = query_TNH.shape[1], key_TKH.shape[1]
    visible_TS = layer.mask.visible(len(key_TKH))[queries]

    def share(lost, whole):
        return float(np.linalg.norm(lost) / (np.linalg.norm(whole) or 1.0))

    def of(n):
        query_TH, k = query_TNH[:, n], n * K // N
        z_TS, value_SH = centred(query_TH @ key_TKH[:, k].T, visible_TS), value_TKH[:, k]
        o_TH = softmax(z_TS.copy(), visible_TS) @ value_SH
        logit_A, output_A = [], []
        for cut_SKH in cut_ATKH:
            lost_TS = centred(query_TH @ (cut_SKH[:, k] - key_TKH[:, k]).T, visible_TS)
            logit_A.append(share(lost_TS, z_TS))
            lost_TS += z_TS
            output_A.append(share(softmax(lost_TS, visible_TS) @ value_SH - o_TH, o_TH))
        return logit_A, output_A

    return CutErrors(*map(np.array, zip(*logits.parallel_map(of, range(N)), strict=True)))


def centred(z_TS: np.ndarray, visible_TS: np.ndarray) -> np.ndarray:
    """Logits less the mean of those that each query sees, 0 at the others; in z's memory."""
    z_TS *= visible_TS
    z_TS -= z_TS.sum(axis=1, keepdims=True) / visible_TS.sum(axis=1, keepdims=True)
    z_TS *= visible_TS
    return z_TS


def overlap(one: Subspaces, other: Subspaces) -> np.ndarray:
    """[J] the mean squared cosine of the principal angles between what two cuts leave of keys.

    1: the same subspace; r / H: as of two at random, in the mean.
    """
    bases = [np.linalg.qr(each.write_JRC.swapaxes(1, 2))[0] for each in (one, other)]
    return ((bases[0].swapaxes(1, 2) @ bases[1]) ** 2).sum(axis=(1, 2)) / bases[0].shape[2]
