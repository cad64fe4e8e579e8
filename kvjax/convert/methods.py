"""The methods of conversion: what becomes of one layer's attention.

Thin keys (sections 2.3 and 3.5): keys of low rank, their latents cached, per head or of all heads
together. LRKV: a base that KV heads share and a low-rank residual for each. Both have three
objectives: the error of the `weights`, as in the papers (but for biases, which are factored as a
row of the matrix, and which thin keys' authors keep whole); of keys and values on `inputs` of
calibration text; of logits and `outputs` on it.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple, Protocol

import numpy as np

from kvjax.attention.factored import FactoredConfig
from kvjax.attention.grouped import GroupedConfig
from kvjax.convert import factors, layer as layer_lib
from kvjax.convert.factors import einsum
from kvjax.convert.layer import BasisChange, Layer
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError

OBJECTIVES = ("weights", "inputs", "outputs")
MODES = ("per_head", "joint")
PARTS = ("key", "query", "both", "value", "key_value")


class Converted(NamedTuple):
    """The attention of one layer in its new form."""

    weights: dict  # of `kvjax.attention.Attention`, float64
    errors: dict[str, float]  # by "query", "key" and "value": share of the energy lost


class Method(Protocol):
    """A way to convert one layer."""

    rank: int
    objective: str  # one of OBJECTIVES
    changes_values: bool  # and with them what must learn to recover

    def mechanism(self, config: GroupedConfig, *, rope: bool) -> GroupedConfig | FactoredConfig:
        """The new mechanism of a layer; a UserError for ranks and such that cannot be."""

    def max_rank(self, config: GroupedConfig) -> int:
        """The largest rank of a layer."""

    def energy_losses(
        self, layer: Layer, moment_EE: np.ndarray, ranks: Sequence[int]
    ) -> list[float]:
        """The share of a layer's energy that is lost at each of these ranks, ascending."""

    def convert(self, layer: Layer, moment_EE: np.ndarray) -> Converted:
        """The layer's weights in the new form.

        Args:
          moment_EE: second moment of its inputs, with a last row and column for the biases' 1 where
            there are biases; for the objective "weights" the identity.
        """


@dataclasses.dataclass(frozen=True)
class ThinKeys:
    """Keys of low rank, or keys and values; values or queries alone, or both queries and keys, as
    controls.

    Attributes:
      rank: channels of a latent: of each KV head, or with mode "joint" of all.
      part: what is of low rank. Queries are not cached: theirs are multiplied out again.
      absorb: second factors are folded into other weights for good where nothing stands between:
        those of a head's keys into the queries, of its values into the output. Not where ranks
        differ by layer, and with them the channels of a key.
      value_rank: of values where keys are of low rank too; 0: as `rank`.
    """

    rank: int
    mode: str = "per_head"
    part: str = "key"
    objective: str = "outputs"
    absorb: bool = True
    value_rank: int = 0

    def __post_init__(self):
        one_of("mode", self.mode, MODES)
        one_of("part", self.part, PARTS)
        one_of("objective", self.objective, OBJECTIVES)

    def mechanism(self, config: GroupedConfig, *, rope: bool) -> GroupedConfig | FactoredConfig:
        ranks = dict(key=self._key_rank, value=self._value_rank)
        dims = dict(key=config.key_dim, value=config.value_dim)
        checked = dict(key=self.rank) if self.part == "query" else ranks
        for part, rank in checked.items():
            if rank is not None:
                self._check(rank, dims[part], config.num_kv_heads, of_values=part == "value")
        common = _shared_keys(config)
        folds = self._absorbed(config.qk_norm, rope)
        for part, rank in ranks.items():
            if rank is not None and folds[part]:
                common[f"{part}_dim"], ranks[part] = rank, None
        if ranks["key"] is None and ranks["value"] is None:
            return GroupedConfig(**common, num_bases=config.num_kv_heads, rank=0)
        latents = self._latents(config.num_kv_heads)
        given = {f"{part}_rank": rank or 0 for part, rank in ranks.items()}
        return FactoredConfig(**common, num_latents=latents, **given)

    def convert(self, layer: Layer, moment_EE: np.ndarray) -> Converted:
        layer = layer_lib.drop_redundant_biases(layer)
        errors, expand = {}, {}

        def low_rank(
            name: str, w_EKH: np.ndarray, gauge: BasisChange, rank: int
        ) -> factors.Factors:
            latents = self._latents(w_EKH.shape[1])
            found = factors.low_rank(gauge.of(w_EKH), rank, moment_EE, latents=latents)
            errors[name] = found.error
            return found._replace(expand_KRH=found.expand_KRH @ gauge.inverse_KHH)

        folds = self._absorbed(layer.qk_norm, layer.rope)
        key_change, value_change = self._basis_changes(layer, moment_EE)
        if self.part in ("query", "both"):
            plain = layer_lib.identity_change(*layer.query_ENH.shape[1:])
            multiplied = _expand_factors(low_rank("query", layer.query_ENH, plain, self.rank))
            layer = dataclasses.replace(layer, query_ENH=multiplied)
        if self._key_rank is not None:
            found = low_rank("key", layer.key_EKH, key_change, self._key_rank)
            if folds["key"]:
                layer = dataclasses.replace(layer, key_EKH=found.latent_EJR)
                layer = _absorb_into_queries(layer, found.expand_KRH)
            else:
                latent_EJR, expand["expand_key"] = _balanced(found, layer)
                layer = dataclasses.replace(layer, key_EKH=latent_EJR)
        if self._value_rank is not None:
            found = low_rank("value", layer.value_EKH, value_change, self._value_rank)
            if folds["value"]:
                layer = dataclasses.replace(layer, value_EKH=found.latent_EJR)
                layer = _absorb_into_outputs(layer, found.expand_KRH)
            else:
                latent_EJR, expand["expand_value"] = _balanced(found, layer)
                layer = dataclasses.replace(layer, value_EKH=latent_EJR)
        names = dict(query=layer.query_ENH, base_key=layer.key_EKH, base_value=layer.value_EKH)
        if expand:
            names = dict(query=layer.query_ENH, key=layer.key_EKH, value=layer.value_EKH)
        return Converted(_weights(layer, names, **expand), errors)

    def alone(self, part: str) -> "ThinKeys":
        """Returns this method for one part, as "key"."""
        return dataclasses.replace(self, part=part, value_rank=0)

    @property
    def _key_rank(self) -> int | None:
        """The rank of keys where they are of low rank, else None."""
        return self.rank if self.part in ("key", "both", "key_value") else None

    @property
    def _value_rank(self) -> int | None:
        """The rank of values where they are of low rank, else None."""
        if self.part == "key_value":
            return self.value_rank or self.rank
        return self.rank if self.part == "value" else None

    def _check(self, rank: int, dim: int, kv_heads: int, *, of_values: bool) -> None:
        most = self._most(dim, kv_heads)
        if not 1 <= rank <= most:
            key = "value_rank" if of_values and self.value_rank else "rank"
            of = f"a head of {dim} channels" if self.mode == "per_head" else f"{most} in all heads"
            raise UserError(f"{key} = {rank}: must lie in [1, {most}], {of}")

    def max_rank(self, config: GroupedConfig) -> int:
        dims = dict(query=config.key_dim, key=config.key_dim, value=config.value_dim)
        return self._most(min(dims[part] for part in self._parts), config.num_kv_heads)

    def _most(self, dim: int, heads: int) -> int:
        """The largest rank of heads of so many channels."""
        return dim * heads // self._latents(heads)

    def energy_losses(
        self, layer: Layer, moment_EE: np.ndarray, ranks: Sequence[int]
    ) -> list[float]:
        """The mean over what is of low rank."""
        layer = layer_lib.drop_redundant_biases(layer)
        key_change, value_change = self._basis_changes(layer, moment_EE)
        of = dict(query=layer.query_ENH)
        of |= dict(key=key_change.of(layer.key_EKH), value=value_change.of(layer.value_EKH))
        lost = []
        for part in self._parts:
            latents = self._latents(of[part].shape[1])
            energy_C = factors.energies(of[part], moment_EE, latents=latents).sum(axis=0)
            total = energy_C.sum() or 1.0
            lost.append([energy_C[rank:].sum() / total for rank in ranks])
        return np.mean(lost, axis=0).tolist()

    def _basis_changes(
        self, layer: Layer, moment_EE: np.ndarray
    ) -> tuple[BasisChange, BasisChange]:
        """The coordinates of keys and of values in which errors are made small."""
        of_queries = self.part in ("query", "both")  # which have no output of their own
        return _basis_changes(layer, moment_EE, "inputs" if of_queries else self.objective)

    @property
    def changes_values(self) -> bool:
        return "value" in self._parts

    @property
    def _parts(self) -> tuple[str, ...]:
        """What is of low rank."""
        several = dict(both=("query", "key"), key_value=("key", "value"))
        return several.get(self.part, (self.part,))

    def _latents(self, heads: int) -> int:
        return heads if self.mode == "per_head" else 1

    def _absorbed(self, qk_norm: str, rope: bool) -> dict[str, bool]:
        """Whether the second factors of keys and of values are folded into other weights."""
        per_head = self.absorb and self.mode == "per_head"
        return dict(key=per_head and not rope and qk_norm == "none", value=per_head)


@dataclasses.dataclass(frozen=True)
class LowRankKV:
    """LRKV: bases that KV heads share, and a residual of low rank for each.

    Attributes:
      rank: R of the residuals.
      bases: J, which divides the KV heads.
      align: turn heads towards each other first, as far as attention stays the same.
      step: of ranks that were looked at on the way to this one, see `factors.base_and_residual`.
    """

    rank: int
    bases: int = 1
    objective: str = "outputs"
    align: bool = True
    step: int = 0

    changes_values = True

    def __post_init__(self):
        one_of("objective", self.objective, OBJECTIVES)

    def mechanism(self, config: GroupedConfig, *, rope: bool) -> GroupedConfig:
        most = self.max_rank(config)
        if not 0 <= self.rank <= most:
            raise UserError(f"rank = {self.rank}: must lie in [0, {most}], the channels of a head")
        kv_heads = config.num_kv_heads
        if self.bases < 1 or kv_heads % self.bases:
            raise UserError(f"bases = {self.bases}: must divide the {kv_heads} KV heads")
        shape = dict(num_bases=self.bases, rank=self.rank, latent_bias=config.bias)
        return GroupedConfig(**_shared_keys(config), **shape)

    def convert(self, layer: Layer, moment_EE: np.ndarray) -> Converted:
        layer = layer_lib.drop_redundant_biases(layer)
        key_change, value_change = _basis_changes(layer, moment_EE, self.objective)
        key_change, key = self._factors(
            layer, layer.key_EKH, key_change, moment_EE, self._key_rotations(layer)
        )
        value_change, value = self._factors(
            layer, layer.value_EKH, value_change, moment_EE, self._value_rotations
        )
        layer = layer_lib.change_basis(layer, key_change, value_change)
        names = dict(query=layer.query_ENH, base_key=key.base_EJH, base_value=value.base_EJH)
        expand = {}
        if self.rank:
            names |= dict(latent_key=key.latent_EKR, latent_value=value.latent_EKR)
            expand = dict(expand_key=key.expand_KRH, expand_value=value.expand_KRH)
        errors = dict(key=key.error, value=value.error)
        return Converted(_weights(layer, names, **expand), errors)

    def _factors(
        self,
        layer: Layer,
        w_EKH: np.ndarray,
        gauge: BasisChange,
        moment_EE: np.ndarray,
        rotations: str,
    ) -> tuple[BasisChange, factors.BaseAndResidual]:
        """Bases and residuals of keys or values, and the coordinates that they are in.

        They are found where errors count alike and heads are turned. Back from there, a base goes
        one way with all heads that share it: that which makes up for the mean of their scales.
        """
        found = factors.base_and_residual(
            gauge.of(w_EKH),
            self.rank,
            moment_EE,
            bases=self.bases,
            rotations=rotations,
            step=self.step,
        )
        gauge = gauge.then(found.rotation_KHH, found.rotation_KHH.transpose(0, 2, 1))
        K, H, _ = gauge.matrix_KHH.shape
        square_KHH = gauge.matrix_KHH.transpose(0, 2, 1) @ gauge.matrix_KHH
        mean_JHH = square_KHH.reshape(self.bases, -1, H, H).mean(axis=1)
        root_JHH, inverse_JHH = layer_lib.matrix_roots(mean_JHH)

        def of_heads(x_JHH):
            return np.repeat(x_JHH, K // self.bases, axis=0)

        back_KHH = of_heads(inverse_JHH)
        found = found._replace(
            base_EJH=einsum("EJH,JHI->EJI", found.base_EJH, inverse_JHH),
            expand_KRH=found.expand_KRH @ back_KHH,
        )
        if self.rank:
            factors_of = factors.Factors(found.latent_EKR, found.expand_KRH, found.error)
            latent_EKR, expand_KRH = _balanced(factors_of, layer)
            found = found._replace(latent_EKR=latent_EKR, expand_KRH=expand_KRH)
        return gauge.then(back_KHH, of_heads(root_JHH)), found

    def max_rank(self, config: GroupedConfig) -> int:
        return min(config.key_dim, config.value_dim)

    def energy_losses(
        self, layer: Layer, moment_EE: np.ndarray, ranks: Sequence[int]
    ) -> list[float]:
        """The mean of keys and values."""
        layer = layer_lib.drop_redundant_biases(layer)
        key_change, value_change = _basis_changes(layer, moment_EE, self.objective)

        def find(w_EKH, rotations):
            return factors.losses_by_rank(
                w_EKH, ranks, moment_EE, bases=self.bases, rotations=rotations
            )

        key = find(key_change.of(layer.key_EKH), self._key_rotations(layer))
        value = find(value_change.of(layer.value_EKH), self._value_rotations)
        return np.mean([key, value], axis=0).tolist()

    def _key_rotations(self, layer: Layer) -> str:
        """What turns of keys leave logits as they are."""
        if not self.align or layer.qk_norm == "rms_gain":
            return "none"
        return "pairs" if layer.rope else "all"

    @property
    def _value_rotations(self) -> str:
        return "all" if self.align else "none"


def _basis_changes(
    layer: Layer, moment_EE: np.ndarray, objective: str
) -> tuple[BasisChange, BasisChange]:
    """Coordinates of keys and of values: as they are, but for the objective "outputs"."""
    if objective == "outputs":
        return layer_lib.whitening(layer, moment_EE)

    def of(w_EKH):
        return layer_lib.identity_change(*w_EKH.shape[1:])

    return of(layer.key_EKH), of(layer.value_EKH)


def _balanced(found: factors.Factors, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Latents and second factors with weights of one size; see `factors.evened`."""
    latent_EJR, expand_KRH = found.latent_EJR, found.expand_KRH
    J, (K, R, H) = latent_EJR.shape[1], expand_KRH.shape
    expand_JKRH = expand_KRH.reshape(J, -1, R, H)
    scale_JR = factors.balance_scales(layer.weights_of(latent_EJR), expand_JKRH, ((0,), (1, 3)))
    return latent_EJR * scale_JR, (expand_JKRH / scale_JR[:, None, :, None]).reshape(K, R, H)


def _expand_factors(found: factors.Factors) -> np.ndarray:
    """[E, K, H] of factors."""
    E, J, R = found.latent_EJR.shape
    expand_JKRH = found.expand_KRH.reshape(J, -1, R, found.expand_KRH.shape[-1])
    whole_EJKH = einsum("EJR,JKRH->EJKH", found.latent_EJR, expand_JKRH)
    return whole_EJKH.reshape(E, -1, whole_EJKH.shape[-1])


def _absorb_into_queries(layer: Layer, expand_KRH: np.ndarray) -> Layer:
    """Thin keys: queries in the space of the keys' latents (thin keys, eq. 12).

    Logits stay divided by the root of the channels that there were.
    """
    E, N, H = layer.query_ENH.shape
    K, R, _ = expand_KRH.shape
    query_EKGH = layer.query_ENH.reshape(E, K, N // K, H)
    query_EKGR = einsum("EKGH,KRH->EKGR", query_EKGH, expand_KRH) * (R / H) ** 0.5
    sides = layer.weights_of(layer.key_EKH), layer.weights_of(query_EKGR)
    scale_KR = factors.balance_scales(*sides, ((0,), (0, 2)))
    query_EKGR = query_EKGR / scale_KR[:, None]
    key_EKR = layer.key_EKH * scale_KR
    return dataclasses.replace(layer, query_ENH=query_EKGR.reshape(E, N, R), key_EKH=key_EKR)


def _absorb_into_outputs(layer: Layer, expand_KRH: np.ndarray) -> Layer:
    """Values are their latents, and the output's projection reads those."""
    N, H, D = layer.out_NHD.shape
    K, R, _ = expand_KRH.shape
    out_KGHD = layer.out_NHD.reshape(K, N // K, H, D)
    out_KGRD = einsum("KRH,KGHD->KGRD", expand_KRH, out_KGHD)
    scale_KR = factors.balance_scales(layer.weights_of(layer.value_EKH), out_KGRD, ((0,), (1, 3)))
    out_KGRD = out_KGRD / scale_KR[:, None, :, None]
    value_EKR = layer.value_EKH * scale_KR
    return dataclasses.replace(layer, out_NHD=out_KGRD.reshape(N, R, D), value_EKH=value_EKR)


def _shared_keys(config: GroupedConfig) -> dict:
    """What a new mechanism's config has of the old one's; biases of values go to the output."""
    keys = ("num_heads", "num_kv_heads", "key_dim", "value_dim", "qk_norm", "bias", "norm_epsilon")
    return {key: getattr(config, key) for key in keys}


def _weights(layer: Layer, names: dict[str, np.ndarray], **expand: np.ndarray) -> dict:
    """An `Attention`'s weights from projections with biases as last rows, and what has none."""
    inner = dict(expand)
    for name, w in names.items():
        inner[name] = w[:-1] if layer.has_biases else w
        if layer.has_biases:
            inner[f"{name}_bias"] = w[-1]
    inner |= {name: dict(gain=gain_H) for name, gain_H in layer.gains.items()}
    weights = dict(out=layer.out_NHD, mechanism=inner)
    if layer.out_bias_D is not None:
        weights["out_bias"] = layer.out_bias_D
    return weights
