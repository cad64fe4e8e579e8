"""Fits one layer of MHA or GQA with RoPE by MLA without a norm, in float64.

    logit(q, k, d) = q . Rot(-d) W_K x    ~    q . B [Rot'(-d) W_R x; W_C x]
    value          = W_V x                ~    V W_C x

for a query q, a key of input x at distance d, the P channels W_R x of a RoPE key that all heads
share (Rot' has P/2 frequencies, Rot those of a head), and the C channels W_C x of a latent. B (one
per query head) and V (one per KV head) are free, since they are absorbed into queries and outputs.
The error is the mean square over inputs, queries and the distances that each head attends to. The
fit moves a key's slowly rotating channels into the latent, lets several frequencies share a channel
of the RoPE key, and shrinks queries in channels whose rotation is only approximate. TransMLA (arXiv
2502.07864, section 4) rotates heads, folds frequencies and drops rotations in separate steps. Here
all three follow from one least-squares problem, bilinear in (B, V) and W, whose two sides are
updated in turn.

A vector added to all keys changes no probability, so keys are fitted up to a constant.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg

from kvjax.convert.factors import balance_scales, einsum, root
from kvjax.convert.layer import Layer

_RIDGE = 1e-11  # relative to the diagonal
_TOLERANCE = 1e-3  # the last sweep lowers the error by less than this share


class AttentionStatistics(NamedTuple):
    """Attention of one layer on calibration text.

    Attributes:
      distance_NT: share of each head's attention by distance between query and key.
      key_weight_N: weight of a squared logit error in the squared error of the layer's output.
      value_weight_N: weight of a head's squared value error, after the output projection.
      mean_E: mean input of the layer; E as in `Layer`.
    """

    distance_NT: np.ndarray
    key_weight_N: np.ndarray
    value_weight_N: np.ndarray
    mean_E: np.ndarray


class LatentFit(NamedTuple):
    """MLA's maps of one layer."""

    rope_key_EP: np.ndarray
    rope_query_NHP: np.ndarray  # maps a head's query to the query of the RoPE key
    latent_EC: np.ndarray
    up_key_CNH: np.ndarray
    up_value_CKV: np.ndarray
    errors: dict[str, float]  # by "key" and "value", the lost share of the weighted energy
    squared_errors: tuple[float, float]  # weighted errors of keys and values, in one unit


def fit(
    layer: Layer,
    moment_EE: np.ndarray,
    statistics: AttentionStatistics,
    frequencies: tuple[np.ndarray, np.ndarray],
    channels: int,
    *,
    sweeps: int,
) -> LatentFit:
    """Fits a layer without redundant biases; the others become last rows of the maps.

    Args:
      moment_EE: second moment of the layer's inputs.
      frequencies: frequencies of a head's pairs [H/2] and of the RoPE key's pairs [P/2], in radians
        per token.
      channels: C, even.
      sweeps: maximum number of alternating updates.
    """
    problem = _Problem(layer, moment_EE, statistics, frequencies, channels)
    error = problem.update_queries_and_outputs()
    for _ in range(sweeps):
        problem.update_inputs()
        before, error = error, problem.update_queries_and_outputs()
        if before - error < _TOLERANCE * before:
            break
    return problem.result()


class _Problem:
    """State of the alternating updates.

    Each head has its own expectations over distances. Only terms with the P channels of the RoPE
    key need them: the latent does not rotate, so its terms are computed once for all heads.
    """

    def __init__(self, layer: Layer, moment_EE, statistics, frequencies, channels: int):
        heads_first = (1, 2, 0)
        self.key_KHE = layer.key_EKH.transpose(heads_first)
        self.value_KVE = layer.value_EKH.transpose(heads_first)
        self.moment_EE, self.mean_E = moment_EE, statistics.mean_E
        self.head_freqs, self.rope_freqs = frequencies
        N, K = layer.query_ENH.shape[1], len(self.key_KHE)
        self.kv_head_N = np.arange(N) * K // N
        query_NHE = layer.query_ENH.transpose(heads_first)
        weight_N11 = statistics.key_weight_N[:, None, None]
        self.query_NHH = _second_moments(query_NHE, moment_EE) * weight_N11
        gram_NVV = layer.out_NHD @ layer.out_NHD.transpose(0, 2, 1)
        gram_NVV *= statistics.value_weight_N[:, None, None]
        self.out_KVV = gram_NVV.reshape(K, N // K, *gram_NVV.shape[1:]).sum(axis=1)
        self.rotations = [_Rotations(p_T / p_T.sum()) for p_T in statistics.distance_NT]
        self.mean_KH = self.key_KHE @ self.mean_E
        key_KHH = _second_moments(self.key_KHE, moment_EE)
        self.energy_N = [self._key_energy(n, key_KHH[k]) for n, k in enumerate(self.kv_head_N)]
        self.value_KVV = _second_moments(self.value_KVE, moment_EE)
        # The vector whose product with an input is nearest to 1 on average.
        self.root_EE = root(moment_EE)
        self.constant_E = scipy.linalg.cho_solve((self.root_EE, False), self.mean_E)
        self.rope_PE, self.latent_CE = self._initial_rope_key(), self._initial_latent(channels)

    def _key_energy(self, n: int, moment_HH: np.ndarray) -> np.ndarray:
        """Returns [H, H], the covariance of a head's rotated keys."""
        rotations = self.rotations[n]
        mean_H = rotations.mean(self.mean_KH[self.kv_head_N[n]], self.head_freqs)
        rotated_HH = rotations.moment(moment_HH, self.head_freqs, self.head_freqs)
        return rotated_HH - np.outer(mean_H, mean_H)

    def _initial_rope_key(self) -> np.ndarray:
        """Returns [P, E]: each pair is a principal component of the keys of nearest frequency.

        Components are over KV heads; pairs with the same nearest frequency take successive ones.
        """
        pairs, K, F = len(self.rope_freqs), len(self.key_KHE), len(self.head_freqs)
        rope_PE = np.zeros((2 * pairs, len(self.moment_EE)))
        diagonal_NH = einsum("NHH->NH", self.query_NHH)
        weight_KF = (diagonal_NH[:, :F] + diagonal_NH[:, F:]).reshape(K, -1, F).sum(axis=1)
        used = np.zeros(F, int)
        for s, frequency in enumerate(self.rope_freqs):
            f = int(np.argmin(np.abs(self.head_freqs - frequency)))
            root_K = np.sqrt(weight_KF[:, f])
            pair_KE = self.key_KHE[:, f] + 1j * self.key_KHE[:, F + f]
            moment_KK = pair_KE @ self.moment_EE @ pair_KE.conj().T
            _, vectors_KK = np.linalg.eigh(root_K[:, None] * moment_KK * root_K)
            best_K = vectors_KK[:, ::-1][:, min(used[f], K - 1)]
            component_E = (best_K.conj() * root_K) @ pair_KE
            rope_PE[s], rope_PE[s + pairs] = component_E.real, component_E.imag
            used[f] += 1
        return rope_PE

    def _initial_latent(self, channels: int) -> np.ndarray:
        """Returns [C, E], the principal directions of values and rotation-averaged keys."""
        weight_KHH = np.zeros((len(self.key_KHE), *self.query_NHH.shape[1:]))
        for n, k in enumerate(self.kv_head_N):
            shrinkage_H = self.rotations[n].shrinkage(self.head_freqs)
            weight_KHH[k] += np.outer(shrinkage_H, shrinkage_H) * self.query_NHH[n]
        weights = ((self.value_KVE, self.out_KVV), (self.key_KHE, weight_KHH))
        weighted_XE = np.concatenate([_flat(_roots(w) @ maps) for maps, w in weights])
        white_XE = weighted_XE @ self.root_EE.T
        principal_CE = scipy.linalg.solve_triangular(
            self.root_EE, _principal_inputs(white_XE, channels).T
        ).T
        return np.pad(principal_CE, [(0, channels - len(principal_CE)), (0, 0)])

    def update_queries_and_outputs(self) -> float:
        """Solves for B and V, given W_R and W_C; returns the weighted error."""
        moved_PE, moved_CE = self.rope_PE @ self.moment_EE, self.latent_CE @ self.moment_EE
        self.mean_P, self.mean_C = self.rope_PE @ self.mean_E, self.latent_CE @ self.mean_E
        moment_CC = moved_CE @ self.latent_CE.T
        self._regress_keys(moved_PE, moved_CE, moment_CC)
        cross_KVC = self.value_KVE @ moved_CE.T
        self.up_KVC = _regression(moment_CC, _flat(cross_KVC)).reshape(cross_KVC.shape)
        kept_KVV = self.up_KVC @ cross_KVC.transpose(0, 2, 1)
        lost, energy = np.sum(
            self.out_KVV * np.stack([self.value_KVV - kept_KVV, self.value_KVV]), axis=(1, 2, 3)
        )
        self.value_error = lost, energy
        return self.key_error[0] + self.value_error[0]

    def _regress_keys(self, moved_PE, moved_CE, moment_CC: np.ndarray) -> None:
        """Solves for B: regresses each head's keys on the RoPE key and the latent.

        Args:
          moved_PE, moved_CE: W_R and W_C times the second moment of the inputs.
          moment_CC: second moment of the latent.
        """
        head_freqs, rope_freqs = self.head_freqs, self.rope_freqs
        covariance_CC = moment_CC - np.outer(self.mean_C, self.mean_C)
        covariance_PC = moved_PE @ self.latent_CE.T - np.outer(self.mean_P, self.mean_C)
        covariance_KHC = self.key_KHE @ moved_CE.T - np.multiply.outer(self.mean_KH, self.mean_C)
        moment_PP, moment_KHP = moved_PE @ self.rope_PE.T, self.key_KHE @ moved_PE.T
        targets_XC = np.concatenate([covariance_PC, _flat(covariance_KHC)])
        map_PC, map_XC = np.split(_regression(covariance_CC, targets_XC), [len(covariance_PC)])
        map_KHC = map_XC.reshape(covariance_KHC.shape)
        explained_PP, explained_KHP = map_PC @ covariance_PC.T, map_KHC @ covariance_PC.T
        self.rope_maps_NHP, self.latent_maps_NHC, self.constant_NH = [], [], []
        lost = energy = 0.0
        for n, k in enumerate(self.kv_head_N):
            rotations = self.rotations[n]
            mean_P = rotations.mean(self.mean_P, rope_freqs)
            mean_H = rotations.mean(self.mean_KH[k], head_freqs)
            covariance_PP = rotations.moment(moment_PP, rope_freqs, rope_freqs)
            covariance_PP -= np.outer(mean_P, mean_P)
            cross_HP = rotations.moment(moment_KHP[k], head_freqs, rope_freqs)
            cross_HP -= np.outer(mean_H, mean_P)
            cross_HC = rotations.mean(covariance_KHC[k], head_freqs)
            rope_HP = _regression(
                covariance_PP - rotations.means(explained_PP, rope_freqs, rope_freqs),
                cross_HP - rotations.means(explained_KHP[k], head_freqs, rope_freqs),
                size_F=np.diagonal(covariance_PP),
            )
            latent_HC = rotations.mean(map_KHC[k], head_freqs)
            latent_HC -= rope_HP @ rotations.mean(map_PC, rope_freqs)
            self.rope_maps_NHP.append(rope_HP)
            self.latent_maps_NHC.append(latent_HC)
            self.constant_NH.append(mean_H - rope_HP @ mean_P - latent_HC @ self.mean_C)
            left_HH = self.energy_N[n] - rope_HP @ cross_HP.T - latent_HC @ cross_HC.T
            lost += np.sum(self.query_NHH[n] * left_HH)
            energy += np.sum(self.query_NHH[n] * self.energy_N[n])
        self.key_error = lost, energy

    def update_inputs(self) -> None:
        """Solves for W_R and W_C, given B and V; the inputs' moment cancels from the equations."""
        head_freqs, rope_freqs = self.head_freqs, self.rope_freqs
        P, C, E = len(self.rope_PE), len(self.latent_CE), len(self.moment_EE)
        normal_PP, normal_PC, right_PE = np.zeros((P, P)), np.zeros((P, C)), np.zeros((P, E))
        right_KHC = np.zeros((*self.key_KHE.shape[:2], C))
        constant_P, constant_C = np.zeros(P), np.zeros(C)
        for n, k in enumerate(self.kv_head_N):
            rotations = self.rotations[n].reversed()
            rope_HP, latent_HC = self.rope_maps_NHP[n], self.latent_maps_NHC[n]
            weighted_PH, weighted_CH = (
                rope_HP.T @ self.query_NHH[n],
                latent_HC.T @ self.query_NHH[n],
            )
            normal_PP += rotations.moment(weighted_PH @ rope_HP, rope_freqs, rope_freqs)
            normal_PC += rotations.mean(weighted_PH @ latent_HC, rope_freqs)
            right_PE += rotations.moment(weighted_PH, rope_freqs, head_freqs) @ self.key_KHE[k]
            right_KHC[k] += rotations.mean(weighted_CH.T, head_freqs)
            constant_P += rotations.mean(weighted_PH @ self.constant_NH[n], rope_freqs)
            constant_C += weighted_CH @ self.constant_NH[n]
        latent_NHC = np.stack(self.latent_maps_NHC)
        normal_CC = _flat(latent_NHC).T @ _flat(self.query_NHH @ latent_NHC)
        weighted_KVC = self.out_KVV @ self.up_KVC
        normal_CC += _flat(self.up_KVC).T @ _flat(weighted_KVC)
        right_CE = _flat(right_KHC).T @ _flat(self.key_KHE)
        right_CE += _flat(weighted_KVC).T @ _flat(self.value_KVE)
        constant_F = np.concatenate([constant_P, constant_C])
        right_FE = np.concatenate([right_PE, right_CE]) - np.outer(constant_F, self.constant_E)
        normal_FF = np.block([[normal_PP, normal_PC], [normal_PC.T, normal_CC]])
        self.rope_PE, self.latent_CE = np.split(_solve(normal_FF, right_FE), [P])

    def result(self) -> LatentFit:
        """Returns the maps, with the latent's down- and up-projections balanced in scale."""
        latent_EC = self.latent_CE.T
        up_key_CNH = np.stack(self.latent_maps_NHC).transpose(2, 0, 1)
        up_value_CKV = self.up_KVC.transpose(2, 0, 1)
        C = latent_EC.shape[1]
        up_CX = np.concatenate([up_key_CNH.reshape(C, -1), up_value_CKV.reshape(C, -1)], axis=1)
        scale_C = balance_scales(latent_EC, up_CX, ((0,), (1,)))
        lost = dict(key=self.key_error, value=self.value_error)
        return LatentFit(
            rope_key_EP=self.rope_PE.T,
            rope_query_NHP=np.stack(self.rope_maps_NHP),
            latent_EC=latent_EC * scale_C,
            up_key_CNH=up_key_CNH / scale_C[:, None, None],
            up_value_CKV=up_value_CKV / scale_C[:, None, None],
            errors={name: max(0.0, part / whole) for name, (part, whole) in lost.items()},
            squared_errors=(self.key_error[0], self.value_error[0]),
        )


class _Rotations:
    """Expectations of products with Rot(-d), where the distance d has probability p_T[d]."""

    def __init__(self, p_T: np.ndarray, sign: int = -1):
        self._p_T, self._sign, self._cache = p_T, sign, {}

    def reversed(self) -> "_Rotations":
        """Returns the expectations with Rot(d) instead."""
        if "reversed" not in self._cache:
            self._cache["reversed"] = _Rotations(self._p_T, -self._sign)
        return self._cache["reversed"]

    def _phases(self, frequency_S: np.ndarray) -> np.ndarray:
        distance_T = np.arange(len(self._p_T))
        return np.exp(self._sign * 1j * np.outer(distance_T, frequency_S))

    def mean(self, x_FX: np.ndarray, frequency_S: np.ndarray) -> np.ndarray:
        """Returns E[Rot] x; channels i and i + S are a pair, written x_i + i x_(i+S)."""
        key = ("mean", frequency_S.tobytes())
        if key not in self._cache:
            self._cache[key] = self._p_T @ self._phases(frequency_S)
        first, second = np.split(x_FX, 2)
        factor_S = self._cache[key].reshape(-1, *[1] * (x_FX.ndim - 1))
        rotated_SX = (first + 1j * second) * factor_S
        return np.concatenate([rotated_SX.real, rotated_SX.imag])

    def means(self, x_FG: np.ndarray, left_S: np.ndarray, right_S: np.ndarray) -> np.ndarray:
        """Returns E[Rot_left] X E[Rot_right]^T."""
        return self.mean(self.mean(x_FG, left_S).T, right_S).T

    def shrinkage(self, frequency_S: np.ndarray) -> np.ndarray:
        """Returns |E[exp(i f d)]| of each channel: 1 where rotations do not matter."""
        absolute_S = np.abs(self._p_T @ self._phases(frequency_S))
        return np.concatenate([absolute_S, absolute_S])

    def moment(self, x_FG: np.ndarray, left_S: np.ndarray, right_S: np.ndarray) -> np.ndarray:
        """Returns E[Rot_left X Rot_right^T].

        With rows and columns as complex pairs, X has a part a b^H, which rotates by the difference
        of two frequencies, and a part a b^T, which rotates by their sum.
        """
        key = (left_S.tobytes(), right_S.tobytes())
        if key not in self._cache:
            left_TS, right_TS = self._phases(left_S), self._phases(right_S)
            weighted_ST = (left_TS * self._p_T[:, None]).T
            self._cache[key] = weighted_ST @ right_TS.conj(), weighted_ST @ right_TS
        difference, total = self._cache[key]
        S, R = len(left_S), len(right_S)
        aa, ab, ba, bb = x_FG[:S, :R], x_FG[:S, R:], x_FG[S:, :R], x_FG[S:, R:]
        hermitian = ((aa + bb) + 1j * (ba - ab)) * difference
        plain = ((aa - bb) + 1j * (ba + ab)) * total
        out_FG = np.empty_like(x_FG)
        out_FG[:S, :R] = (plain + hermitian).real / 2
        out_FG[S:, R:] = (hermitian - plain).real / 2
        out_FG[S:, :R] = (plain + hermitian).imag / 2
        out_FG[:S, R:] = (plain - hermitian).imag / 2
        return out_FG


def _flat(w_KHE: np.ndarray) -> np.ndarray:
    return w_KHE.reshape(-1, w_KHE.shape[-1])


def _second_moments(w_KHE: np.ndarray, moment_EE: np.ndarray) -> np.ndarray:
    """Returns the [K, H, H] second moments of heads' outputs."""
    return (w_KHE @ moment_EE) @ w_KHE.transpose(0, 2, 1)


def _roots(moment_KHH: np.ndarray) -> np.ndarray:
    """Returns the symmetric square roots of positive semidefinite matrices."""
    values_KH, vectors_KHI = np.linalg.eigh(moment_KHH)
    root_KH = np.sqrt(np.maximum(values_KH, 0.0))
    return (vectors_KHI * root_KH[:, None]) @ vectors_KHI.transpose(0, 2, 1)


def _principal_inputs(w_XE: np.ndarray, count: int) -> np.ndarray:
    """Returns [count, E] leading right singular vectors, or fewer if the rank is less."""
    X, E = w_XE.shape
    if X >= E:
        return np.linalg.eigh(w_XE.T @ w_XE)[1].T[::-1][:count]
    values_X, vectors_XX = np.linalg.eigh(w_XE @ w_XE.T)
    kept = np.flatnonzero(values_X > _RIDGE * values_X[-1])[::-1][:count]
    return (vectors_XX[:, kept].T @ w_XE) / np.sqrt(values_X[kept])[:, None]


def _regression(moment_FF: np.ndarray, cross_HF: np.ndarray, size_F=None) -> np.ndarray:
    """Returns the linear map [H, F] from features to targets with the least squared error."""
    return _solve(moment_FF, cross_HF.T, size_F).T


def _solve(moment_FF: np.ndarray, right_FX: np.ndarray, size_F=None) -> np.ndarray:
    """Solves the normal equations, with a ridge relative to each feature's size.

    Args:
      size_F: mean squares of the features; None: the diagonal.
    """
    diagonal_F = np.diagonal(moment_FF) if size_F is None else size_F
    scale_F1 = np.sqrt(np.where(diagonal_F > 0, diagonal_F, 1.0))[:, None]
    scaled_FF = moment_FF / scale_F1 / scale_F1.T + _RIDGE * np.eye(len(moment_FF))
    return scipy.linalg.solve(scaled_FF, right_FX / scale_F1, assume_a="sym") / scale_F1
