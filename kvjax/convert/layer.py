"""Attention weights of one layer during conversion: float64, biases as a last row.

Softmax attention is unchanged by any invertible map between keys and queries, or between values
and outputs. Conversions choose these maps (`BasisChange`, `whitening`) so that an SVD of the
weights minimises the error of logits or outputs.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.mechanism import MechanismConfig, check_convertible, require
from kvjax.convert.factors import einsum
from kvjax.foundation.errors import UserError
from kvjax.layers.rope import Base

# Whitening raises weak directions to this share of the strongest, so that its inverse is bounded.
_FLOOR = 1e-4
_NEGLIGIBLE = 1e-24  # a head whose second moment is not larger counts as zero


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of MHA, GQA or MQA; E is D, or D + 1 if projections have biases.

    Attributes:
      qk_norm: see `GroupedConfig.qk_norm`.
      gains: [H] gains of `query_norm` and `key_norm`; empty unless `qk_norm` is "rms_gain".
      rope: base of RoPE; None: no RoPE.
    """

    query_ENH: np.ndarray
    key_EKH: np.ndarray
    value_EKH: np.ndarray
    out_NHD: np.ndarray
    out_bias_D: np.ndarray | None
    gains: dict[str, np.ndarray]  # query_norm, key_norm
    qk_norm: str
    rope: Base | None

    @property
    def has_biases(self) -> bool:
        return self.query_ENH.shape[0] > self.out_NHD.shape[-1]

    def weights_of(self, w: np.ndarray) -> np.ndarray:
        """Returns a projection [E, ...] without its bias row."""
        return w[:-1] if self.has_biases else w

    def identity_moment(self) -> np.ndarray:
        """Returns the [E, E] identity, the second moment that the objective "weights" assumes."""
        return np.eye(self.query_ENH.shape[0])


def check(mechanisms: Sequence[MechanismConfig]) -> None:
    """Raises a UserError unless all mechanisms are MHA, GQA or MQA with untied values."""
    for config in mechanisms:
        plain = isinstance(config, GroupedConfig) and config.rank == 0 and config.tie == "none"
        plain = plain and config.num_bases == config.num_kv_heads
        if not plain or config.position_channels or config.alibi:
            raise UserError(
                "only MHA, GQA and MQA are converted: config.attention must be of kind 'grouped', "
                "with rank 0, a base for each KV head, tie 'none', no position_channels, no alibi"
            )
        check_convertible(config, "models with it are not converted")
        per_head = "must be 'rms', 'rms_gain' or 'none': a norm over all heads does not factor"
        whole = config.qk_norm == "rms_whole"
        require(not whole, "qk_norm", repr(config.qk_norm), per_head)
        scaled = bool(config.logit_scale) and config.qk_norm == "rms"
        allowed = "must be 0 to convert a model with QK-norm without gains"
        require(not scaled, "logit_scale", config.logit_scale, allowed)


def read(weights: dict, config: GroupedConfig, *, rope: Base | None) -> Layer:
    """Returns the `Layer` of an `Attention`'s weights, given as a pure dict of one layer.

    Converted mechanisms have no `logit_scale`: it is multiplied into the queries, or into the gains
    of their norm. Gains stored as 1 + weight ("rms_offset") become plain gains.
    """
    inner = weights["mechanism"]
    factor = config.scale * config.key_dim**0.5 if config.logit_scale else 1.0
    offset = 1 if config.qk_norm == "rms_offset" else 0
    gains = {}
    if config.qk_norm in ("rms_gain", "rms_offset"):
        gains = {
            name: offset + np.asarray(inner[name]["gain"], np.float64)
            for name in ("query_norm", "key_norm")
        }
        gains["query_norm"], factor = factor * gains["query_norm"], 1.0

    def rows(name):
        w = np.asarray(inner[name], np.float64)
        if not config.bias:
            return w
        return np.concatenate([w, np.asarray(inner[f"{name}_bias"], np.float64)[None]])

    bias = weights.get("out_bias")
    return Layer(
        query_ENH=rows("query") * factor,
        key_EKH=rows("base_key"),
        value_EKH=rows("base_value"),
        out_NHD=np.asarray(weights["out"], np.float64),
        out_bias_D=None if bias is None else np.asarray(bias, np.float64),
        gains=gains,
        qk_norm="rms_gain" if gains else config.qk_norm,
        rope=rope,
    )


def drop_redundant_biases(layer: Layer) -> Layer:
    """Removes value biases, and key biases that change no probability, without changing the output.

    Probabilities sum to 1, so a value bias passes through attention into the output bias. A key
    bias adds the same number to all logits of a query, unless RoPE rotates it or a norm follows.
    """
    if not layer.has_biases:
        return layer
    values, keys = layer.value_EKH.copy(), layer.key_EKH.copy()
    share = layer.out_NHD.shape[0] // values.shape[1]
    constant_NH = np.repeat(values[-1], share, axis=0)
    out_bias_D = einsum("NH,NHD->D", constant_NH, layer.out_NHD)
    if layer.out_bias_D is not None:
        out_bias_D = out_bias_D + layer.out_bias_D
    values[-1] = 0
    if not layer.rope and layer.qk_norm == "none":
        keys[-1] = 0
    return dataclasses.replace(layer, value_EKH=values, key_EKH=keys, out_bias_D=out_bias_D)


class BasisChange(NamedTuple):
    """An invertible map of keys (or values) whose inverse is applied to queries (or outputs).

    Logits are unchanged: (k M) . (q M^-T) = k . q. Under RoPE the matrix of keys must commute with
    rotations of channel pairs.
    """

    matrix_KHH: np.ndarray
    inverse_KHH: np.ndarray

    def apply(self, w_EKH: np.ndarray) -> np.ndarray:
        """Returns keys or values in the new basis."""
        return einsum("EKH,KHI->EKI", w_EKH, self.matrix_KHH)

    def then(self, matrix_KHH: np.ndarray, inverse_KHH: np.ndarray) -> "BasisChange":
        """Composes this basis change with a second one."""
        return BasisChange(self.matrix_KHH @ matrix_KHH, inverse_KHH @ self.inverse_KHH)


def identity_change(heads: int, channels: int) -> BasisChange:
    """Returns the basis change that changes nothing."""
    eye_KHH = np.broadcast_to(np.eye(channels), (heads, channels, channels))
    return BasisChange(eye_KHH, eye_KHH)


def whitening(layer: Layer, moment_EE: np.ndarray) -> tuple[BasisChange, BasisChange]:
    """Returns the basis changes of keys and of values in which all channels' errors count equally.

    In the new basis each KV head's queries have a unit second moment, and its output projections a
    unit Gram matrix. The squared error of a key is then the mean squared error of its logits, and
    the squared error of a value that of the output. Under RoPE there is one scale per channel pair,
    so the queries' second moment is a unit one only on average over rotations. Normalised keys keep
    their basis.

    Args:
      moment_EE: second moment of the layer's inputs.
    """
    _, K, H = layer.key_EKH.shape
    key = identity_change(K, H)
    if layer.qk_norm == "none":
        query_EKGH = _by_kv_head(layer.query_ENH, K, axis=1)
        inputs = einsum("EF,FKGH->EKGH", moment_EE, query_EKGH)
        moment_KHH = einsum("EKGH,EKGI->KHI", query_EKGH, inputs)
        key = BasisChange(
            *matrix_roots(_rotation_average(moment_KHH) if layer.rope else moment_KHH)
        )
    out_KGHD = _by_kv_head(layer.out_NHD, K, axis=0)
    return key, BasisChange(*matrix_roots(einsum("KGHD,KGID->KHI", out_KGHD, out_KGHD)))


def logit_variance(layer: Layer, moment_EE: np.ndarray) -> float:
    """Returns the mean square of a logit over heads and independent pairs of query and key.

    Keys that lose a share of their energy after `whitening` lose the same share of this variance.
    Under RoPE it is the mean over rotations. Normalised queries and keys have mean square 1 before
    their gains.
    """
    N, H = layer.query_ENH.shape[1:]
    if layer.qk_norm != "none":
        gains = [layer.gains.get(name, np.ones(H)) for name in ("query_norm", "key_norm")]
        return float(np.mean(np.prod(gains, axis=0) ** 2))
    key_EKH = whitening(layer, moment_EE)[0].apply(layer.key_EKH)
    return float(einsum("EKH,EF,FKH->", key_EKH, moment_EE, key_EKH)) / (N * H)


def change_basis(layer: Layer, key: BasisChange, value: BasisChange) -> Layer:
    """Returns the layer in another basis; its output is the same."""
    K = layer.key_EKH.shape[1]
    query_EKGH = _by_kv_head(layer.query_ENH, K, axis=1)
    query_EKGH = einsum("EKGH,KIH->EKGI", query_EKGH, key.inverse_KHH)
    out_KGHD = _by_kv_head(layer.out_NHD, K, axis=0)
    out_KGHD = einsum("KIH,KGHD->KGID", value.inverse_KHH, out_KGHD)
    return dataclasses.replace(
        layer,
        query_ENH=query_EKGH.reshape(layer.query_ENH.shape),
        key_EKH=key.apply(layer.key_EKH),
        value_EKH=value.apply(layer.value_EKH),
        out_NHD=out_KGHD.reshape(layer.out_NHD.shape),
    )


def _by_kv_head(x: np.ndarray, K: int, axis: int) -> np.ndarray:
    """Splits the axis of query heads into KV heads and the query heads of each."""
    shape = x.shape
    return x.reshape(*shape[:axis], K, shape[axis] // K, *shape[axis + 1 :])


def _rotation_average(moment_KHH: np.ndarray) -> np.ndarray:
    """Averages second moments over RoPE's rotations: one scale per channel pair."""
    diagonal_K2F = einsum("KHH->KH", moment_KHH).reshape(len(moment_KHH), 2, -1)
    pair_KF = diagonal_K2F.mean(axis=1)
    return np.concatenate([pair_KF, pair_KF], axis=-1)[:, :, None] * np.eye(moment_KHH.shape[-1])


def matrix_roots(moment_KHH: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the symmetric square roots [K, H, H] and their inverses.

    A negligible moment (a head whose output is zero) gives the identity.
    """
    values_KH, vectors_KHI = np.linalg.eigh(moment_KHH)
    largest_K1 = values_KH.max(axis=-1, keepdims=True)
    values_KH = np.maximum(values_KH, _FLOOR**2 * largest_K1)
    values_KH = np.sqrt(np.where(largest_K1 > _NEGLIGIBLE, values_KH, 1.0))

    def with_eigenvalues(scale_KH):
        return einsum("KHI,KI,KJI->KHJ", vectors_KHI, scale_KH, vectors_KHI)

    return with_eigenvalues(values_KH), with_eigenvalues(1 / values_KH)
