"""Fits one layer of MHA or GQA with RoPE by MLA without a norm, in float64.

    logit(q, k, d) = q . Rot(-d) W_K x    ~    q . B [Rot'(-d) W_R x; W_C x]
    value          = W_V x                ~    V W_C x

for a query q, a key of input x at distance d, the P channels W_R x of a RoPE key that all heads
share (Rot' has P/2 frequencies, Rot those of a head), and the C channels W_C x of a latent. B (of
each query head) and V (of each KV head) are free: what they multiply is absorbed into queries and
outputs. The error is the mean square over inputs, queries and the distances that each head attends
to. So a key's slowly rotating channels enter the latent, several frequencies may share a channel of
the RoPE key, and queries shrink where a rotation is not known. TransMLA (arXiv 2502.07864,
section 4) rotates heads, folds frequencies and drops rotations in separate steps; here all follow
from one least-squares problem, bilinear in (B, V) and W, by alternating updates of the two.

A constant added to all keys of a query changes no probability, so keys are fitted up to a constant.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg

from kvjax.convert.factors import balance_scales, einsum, root
from kvjax.convert.layer import Layer

_RIDGE = 1e-11  # relative to the diagonal
_TOLERANCE = 1e-3  # a sweep that lowers the error by a smaller share is the last


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
    """MLA's maps of one layer; queries enter through `rope_query_NHP` and `up_key_CNH`."""

    rope_key_EP: np.ndarray
    rope_query_NHP: np.ndarray  # of a head's query to its product with the RoPE key
    latent_EC: np.ndarray
    up_key_CNH: np.ndarray
    up_value_CKV: np.ndarray
    errors: dict[str, float]  # of "key" and "value": the lost share of the weighted energy
    error: float  # weighted squared error, in one unit for keys and values


def fit(
    layer: Layer,
    moment_EE: np.ndarray,
    statistics: AttentionStatistics,
    frequencies: tuple[np.ndarray, np.ndarray],
    channels: int,
    *,
    sweeps: int,
) -> LatentFit:
    """Fits a layer whose redundant biases were dropped; other biases are rows of the maps.

    Args:
      moment_EE: second moment of the layer's inputs.
      frequencies: of a head's pairs [H/2] and of the RoPE key's [P/2], in radians per token.
      channels: C, even.
      sweeps: maximum of alternating updates.
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

    All features of a key, W_R x and W_C x, are pairs (i, i + S) that rotate; the pairs of the
    latent have frequency 0. That order, first halves of all pairs before second halves, is RoPE's.
    """

    def __init__(self, layer: Layer, moment_EE, statistics, frequencies, channels: int):
        heads_first = (1, 2, 0)
        self.key_KHE = layer.key_EKH.transpose(heads_first)
        self.value_KVE = layer.value_EKH.transpose(heads_first)
        self.moment_EE, self.mean_E = moment_EE, statistics.mean_E
        self.of_head, rope = frequencies
        pairs = channels // 2
        self.frequency_S = np.concatenate([rope, np.zeros(pairs)])
        first = np.arange(len(rope), len(rope) + pairs)
        self.latent = np.concatenate([first, first + len(self.frequency_S)])
        self.rope = np.setdiff1d(np.arange(2 * len(self.frequency_S)), self.latent)
        N, K = layer.query_ENH.shape[1], len(self.key_KHE)
        self.kv_head_N = np.arange(N) * K // N
        query_NHE = layer.query_ENH.transpose(heads_first)
        moment_NHH = einsum("NHE,EF,NIF->NHI", query_NHE, moment_EE, query_NHE)
        self.query_NHH = moment_NHH * statistics.key_weight_N[:, None, None]
        gram_NVV = einsum("NVD,NUD->NVU", layer.out_NHD, layer.out_NHD)
        gram_NVV *= statistics.value_weight_N[:, None, None]
        self.out_KVV = gram_NVV.reshape(K, N // K, *gram_NVV.shape[1:]).sum(axis=1)
        self.heads = [_Rotations(p_T / p_T.sum()) for p_T in statistics.distance_NT]
        self.key_moment_KHE = einsum("KHE,EF->KHF", self.key_KHE, moment_EE)
        self.energy_N = [self._key_energy(n) for n in range(N)]
        # The input whose product with x is nearest to 1.
        self.root_EE = root(moment_EE)
        self.constant_E = scipy.linalg.cho_solve((self.root_EE, False), self.mean_E)
        self.inputs_FE = self._initial_inputs()

    def _key_energy(self, n: int) -> np.ndarray:
        """Returns [H, H], the covariance of a head's rotated keys."""
        k, rotations = self.kv_head_N[n], self.heads[n]
        mean_H = rotations.mean(self.key_KHE[k] @ self.mean_E, self.of_head)
        moment_HH = self.key_moment_KHE[k] @ self.key_KHE[k].T
        rotated_HH = rotations.moment(moment_HH, self.of_head, self.of_head)
        return rotated_HH - np.outer(mean_H, mean_H)

    def _initial_inputs(self) -> np.ndarray:
        """Returns [F, E]: a RoPE key of principal components, and principal inputs as latent.

        Each pair of the RoPE key is the next principal component, over KV heads, of the head's
        frequency that is nearest; the latent has the principal directions of keys, shrunk by their
        rotation, and values.
        """
        S = len(self.frequency_S)
        K, F = len(self.key_KHE), len(self.of_head)
        inputs_FE = np.zeros((2 * S, self.moment_EE.shape[0]))
        diagonal_NH = einsum("NHH->NH", self.query_NHH)
        weight_KF = (diagonal_NH[:, :F] + diagonal_NH[:, F:]).reshape(K, -1, F).sum(axis=1)
        used = np.zeros(F, int)
        for s in range(len(self.rope) // 2):
            f = int(np.argmin(np.abs(self.of_head - self.frequency_S[s])))
            root_K = np.sqrt(weight_KF[:, f])
            pair_KE = self.key_KHE[:, f] + 1j * self.key_KHE[:, F + f]
            moment_KK = pair_KE @ self.moment_EE @ pair_KE.conj().T
            _, vectors_KK = np.linalg.eigh(root_K[:, None] * moment_KK * root_K)
            best_K = vectors_KK[:, ::-1][:, min(used[f], K - 1)]
            component_E = (best_K.conj() * root_K) @ pair_KE
            inputs_FE[s], inputs_FE[s + S] = component_E.real, component_E.imag
            used[f] += 1
        energy_EE = einsum("KVE,KVU,KUF->EF", self.value_KVE, self.out_KVV, self.value_KVE)
        for n, k in enumerate(self.kv_head_N):
            shrunk_HE = self.heads[n].shrinkage(self.of_head)[:, None] * self.key_KHE[k]
            energy_EE += shrunk_HE.T @ self.query_NHH[n] @ shrunk_HE
        E, C = len(energy_EE), len(self.latent)
        white_EE = self.root_EE @ energy_EE @ self.root_EE.T
        _, vectors_EC = scipy.linalg.eigh(white_EE, subset_by_index=[max(0, E - C), E - 1])
        principal = scipy.linalg.solve_triangular(self.root_EE, vectors_EC)
        inputs_FE[self.latent[: principal.shape[1]]] = principal.T[::-1]
        return inputs_FE

    def update_queries_and_outputs(self) -> float:
        """Regresses rotated keys and values on the features; returns the weighted error."""
        of_head, own = self.of_head, self.frequency_S
        features_FE = self.inputs_FE @ self.moment_EE
        moment_FF = features_FE @ self.inputs_FE.T
        cross_KHF = self.key_KHE @ features_FE.T
        mean_F, mean_KH = self.inputs_FE @ self.mean_E, self.key_KHE @ self.mean_E
        self.maps_NHF, self.constant_NH, lost, energy = [], [], 0.0, 0.0
        for n, k in enumerate(self.kv_head_N):
            rotations = self.heads[n]
            expected_F = rotations.mean(mean_F, own)
            expected_H = rotations.mean(mean_KH[k], of_head)
            covariance_FF = rotations.moment(moment_FF, own, own)
            covariance_FF -= np.outer(expected_F, expected_F)
            cross_HF = rotations.moment(cross_KHF[k], of_head, own)
            cross_HF -= np.outer(expected_H, expected_F)
            map_HF = _regression(covariance_FF, cross_HF)
            self.maps_NHF.append(map_HF)
            self.constant_NH.append(expected_H - map_HF @ expected_F)
            left_HH = self.energy_N[n] - map_HF @ cross_HF.T
            lost += np.sum(self.query_NHH[n] * left_HH)
            energy += np.sum(self.query_NHH[n] * self.energy_N[n])
        self.key_error = lost, energy
        latent_CE = features_FE[self.latent]
        moment_CC = moment_FF[np.ix_(self.latent, self.latent)]
        cross_KVC = self.value_KVE @ latent_CE.T
        self.up_KVC = [_regression(moment_CC, cross_VC) for cross_VC in cross_KVC]
        moment_KVV = einsum("KVE,EF,KUF->KVU", self.value_KVE, self.moment_EE, self.value_KVE)
        kept_KVV = einsum("KVC,KUC->KVU", np.stack(self.up_KVC), cross_KVC)
        energy = np.sum(self.out_KVV * moment_KVV)
        self.value_error = np.sum(self.out_KVV * (moment_KVV - kept_KVV)), energy
        return self.key_error[0] + self.value_error[0]

    def update_inputs(self) -> None:
        """Solves for W_R and W_C, given B and V; the moment of the inputs cancels."""
        of_head, own = self.of_head, self.frequency_S
        features = len(self.inputs_FE)
        normal_FF, right_FE = np.zeros((features, features)), np.zeros_like(self.inputs_FE)
        constant_F = np.zeros(features)
        for n, k in enumerate(self.kv_head_N):
            rotations = self.heads[n].reversed()
            weighted_FH = self.maps_NHF[n].T @ self.query_NHH[n]
            normal_FF += rotations.moment(weighted_FH @ self.maps_NHF[n], own, own)
            right_FE += rotations.moment(weighted_FH, own, of_head) @ self.key_KHE[k]
            constant_F += rotations.mean(weighted_FH @ self.constant_NH[n], own)
        right_FE -= np.outer(constant_F, self.constant_E)
        for k, up_VC in enumerate(self.up_KVC):
            weighted_CV = up_VC.T @ self.out_KVV[k]
            normal_FF[np.ix_(self.latent, self.latent)] += weighted_CV @ up_VC
            right_FE[self.latent] += weighted_CV @ self.value_KVE[k]
        self.inputs_FE = _solve(normal_FF, right_FE)

    def result(self) -> LatentFit:
        """Returns the maps, with the latent and what reads it of balanced scale."""
        maps_NHF = np.stack(self.maps_NHF)
        latent_EC, rope_EP = self.inputs_FE[self.latent].T, self.inputs_FE[self.rope].T
        up_key_CNH = maps_NHF[..., self.latent].transpose(2, 0, 1)
        up_value_CKV = np.stack(self.up_KVC).transpose(2, 0, 1)
        C = latent_EC.shape[1]
        up_CX = np.concatenate([up_key_CNH.reshape(C, -1), up_value_CKV.reshape(C, -1)], axis=1)
        scale_C = balance_scales(latent_EC, up_CX, ((0,), (1,)))
        rope_NHP = maps_NHF[..., self.rope]
        lost = dict(key=self.key_error, value=self.value_error)
        return LatentFit(
            rope_key_EP=rope_EP,
            rope_query_NHP=rope_NHP,
            latent_EC=latent_EC * scale_C,
            up_key_CNH=up_key_CNH / scale_C[:, None, None],
            up_value_CKV=up_value_CKV / scale_C[:, None, None],
            errors={name: max(0.0, part / whole) for name, (part, whole) in lost.items()},
            error=self.key_error[0] + self.value_error[0],
        )


class _Rotations:
    """Expectations over the distance d, of probability p_T[d], of products with Rot(-d)."""

    def __init__(self, p_T: np.ndarray, sign: int = -1):
        self._p_T, self._sign, self._known = p_T, sign, {}

    def reversed(self) -> "_Rotations":
        """Returns the expectations with Rot(d) instead."""
        if "reversed" not in self._known:
            self._known["reversed"] = _Rotations(self._p_T, -self._sign)
        return self._known["reversed"]

    def _phases(self, frequency_S: np.ndarray) -> np.ndarray:
        distance_T = np.arange(len(self._p_T))
        return np.exp(self._sign * 1j * np.outer(distance_T, frequency_S))

    def mean(self, x_F: np.ndarray, frequency_S: np.ndarray) -> np.ndarray:
        """Returns E[Rot x]; channels i and i + S are a pair, written x_i + i x_(i+S)."""
        key = ("mean", frequency_S.tobytes())
        if key not in self._known:
            self._known[key] = self._p_T @ self._phases(frequency_S)
        first, second = np.split(x_F, 2)
        rotated_S = (first + 1j * second) * self._known[key]
        return np.concatenate([rotated_S.real, rotated_S.imag])

    def shrinkage(self, frequency_S: np.ndarray) -> np.ndarray:
        """Returns |E[exp(i f d)]| of each channel: 1 where attention sees no rotation."""
        absolute_S = np.abs(self._p_T @ self._phases(frequency_S))
        return np.concatenate([absolute_S, absolute_S])

    def moment(self, x_FG: np.ndarray, left_S: np.ndarray, right_S: np.ndarray) -> np.ndarray:
        """Returns E[Rot_left X Rot_right^T].

        With rows and columns as complex pairs, X has a part a b^H, which rotates by the difference
        of two frequencies, and a part a b^T, which rotates by their sum.
        """
        key = (left_S.tobytes(), right_S.tobytes())
        if key not in self._known:
            left_TS, right_TS = self._phases(left_S), self._phases(right_S)
            weighted_ST = (left_TS * self._p_T[:, None]).T
            self._known[key] = weighted_ST @ right_TS.conj(), weighted_ST @ right_TS
        difference, total = self._known[key]
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


def _regression(moment_FF: np.ndarray, cross_HF: np.ndarray) -> np.ndarray:
    """Returns [H, F], the linear map of features that is nearest to the targets."""
    return _solve(moment_FF, cross_HF.T).T


def _solve(moment_FF: np.ndarray, right_FX: np.ndarray) -> np.ndarray:
    """Solves the normal equations, with a ridge relative to each feature's size."""
    diagonal_F = np.diagonal(moment_FF)
    scale_F1 = np.sqrt(np.where(diagonal_F > 0, diagonal_F, 1.0))[:, None]
    scaled_FF = moment_FF / scale_F1 / scale_F1.T + _RIDGE * np.eye(len(moment_FF))
    return scipy.linalg.solve(scaled_FF, right_FX / scale_F1, assume_a="sym") / scale_F1
