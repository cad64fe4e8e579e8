"""Conversion methods: each maps one layer's attention to a form with a smaller cache.

`ThinKeys` factors keys, or keys and values, and caches their low-rank latents: one per head, or one
for all heads (arXiv 2603.04427, sections 2.3 and 3.5). `LowRankKV` is LRKV: bases that KV heads
share plus a low-rank residual per head. Both minimise one of three errors: of the `weights`, as in
the papers; of keys and values on calibration `inputs`; or of logits and attention `outputs` on
these inputs. Biases are factored as a last row of the matrix (thin keys' authors do not factor
them).
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple, Protocol

import numpy as np

from kvjax.attention.factored import FactoredConfig
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert import factored_layer, factors, layer as layer_lib
from kvjax.convert.factors import einsum
from kvjax.convert.layer import BasisChange, Layer
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.layers.rope import Base

OBJECTIVES = ("weights", "inputs", "outputs")
MODES = ("per_head", "joint")
PARTS = ("key", "query", "both", "value", "key_value")


class ConvertedLayer(NamedTuple):
    """Weights of one converted attention layer."""

    weights: dict  # of `kvjax.attention.Attention`, float64
    errors: dict[str, float]  # lost share of the energy, by "query", "key", "value"


class Method(Protocol):
    """A way to convert one layer."""

    rank: int
    objective: str  # one of OBJECTIVES
    changes_values: bool  # if True, recovery trains values, too

    def mechanism(self, config: GroupedConfig, *, rope: Base | None) -> MechanismConfig:
        """Returns the layer's new mechanism; raises a UserError for impossible ranks."""

    def max_rank(self, config: GroupedConfig) -> int:
        """Returns the largest rank of a layer."""

    def energy_losses(
        self, layer: Layer, moment_EE: np.ndarray, ranks: Sequence[int]
    ) -> list[float]:
        """Returns the share of a layer's energy that is lost at each of these ascending ranks."""

    def convert(self, layer: Layer, moment_EE: np.ndarray) -> ConvertedLayer:
        """Returns the layer's converted weights.

        Args:
          moment_EE: second moment of the layer's inputs, which end with a 1 if it has biases; the
            identity for the objective "weights".
        """


@dataclasses.dataclass(frozen=True)
class ThinKeys:
    """Keys or values of low rank, with the latents cached.

    Attributes:
      rank: channels of a latent.
      mode: "per_head": one latent per KV head; "joint": one for all heads.
      part: the projections that are factored. "value", "query" and "both" (queries and keys) are
        controls; queries are not cached, so their factors are multiplied out again.
      absorb: with mode "per_head", multiply keys' up-projections into queries and values' into
        outputs where no RoPE or norm prevents it. Must be off if ranks differ by layer, because
        key channels would differ, too.
      value_rank: rank of values with part "key_value"; 0: `rank`.
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

    @property
    def title(self) -> str:
        ranks = dict(key=self._key_rank, value=self._value_rank)
        return ", ".join(f"{name} rank {rank or 'full'}" for name, rank in ranks.items())

    def mechanism(self, config: GroupedConfig, *, rope: Base | None) -> MechanismConfig:
        ranks = dict(key=self._key_rank, value=self._value_rank)
        dims = dict(key=config.key_dim, value=config.value_dim)
        ranks_to_check = dict(key=self.rank) if self.part == "query" else ranks
        for part, rank in ranks_to_check.items():
            if rank is not None:
                self._check(rank, dims[part], config.num_kv_heads, of_values=part == "value")
        common = shared_keys(config)
        absorbed = self._absorbed(config.qk_norm, rope)
        for part, rank in ranks.items():
            if rank is not None and absorbed[part]:
                common[f"{part}_dim"], ranks[part] = rank, None
        if ranks["key"] is None and ranks["value"] is None:
            return GroupedConfig(**common, num_bases=config.num_kv_heads, rank=0)
        latents = self._latents(config.num_kv_heads)
        rank_keys = {f"{part}_rank": rank or 0 for part, rank in ranks.items()}
        return FactoredConfig(**common, num_latents=latents, **rank_keys)

    def convert(self, layer: Layer, moment_EE: np.ndarray) -> ConvertedLayer:
        layer = layer_lib.drop_redundant_biases(layer)
        errors, expand = {}, {}

        def low_rank(
            name: str, w_EKH: np.ndarray, basis: BasisChange, rank: int
        ) -> factors.Factors:
            latents = self._latents(w_EKH.shape[1])
            fit = factors.low_rank(basis.apply(w_EKH), rank, moment_EE, latents=latents)
            errors[name] = fit.error
            return fit._replace(expand_KRH=fit.expand_KRH @ basis.inverse_KHH)

        absorbed = self._absorbed(layer.qk_norm, layer.rope)
        key_change, value_change = self._basis_changes(layer, moment_EE)
        if self.part in ("query", "both"):
            plain = layer_lib.identity_change(*layer.query_ENH.shape[1:])
            multiplied = factored_layer.multiplied_out(
                low_rank("query", layer.query_ENH, plain, self.rank)
            )
            layer = dataclasses.replace(layer, query_ENH=multiplied)
        if self._key_rank is not None:
            fit = low_rank("key", layer.key_EKH, key_change, self._key_rank)
            if absorbed["key"]:
                layer = dataclasses.replace(layer, key_EKH=fit.latent_EJR)
                layer = factored_layer.absorb_into_queries(layer, fit.expand_KRH)
            else:
                latent_EJR, expand["expand_key"] = factored_layer.balanced(fit, layer)
                layer = dataclasses.replace(layer, key_EKH=latent_EJR)
        if self._value_rank is not None:
            fit = low_rank("value", layer.value_EKH, value_change, self._value_rank)
            if absorbed["value"]:
                layer = dataclasses.replace(layer, value_EKH=fit.latent_EJR)
                layer = factored_layer.absorb_into_outputs(layer, fit.expand_KRH)
            else:
                latent_EJR, expand["expand_value"] = factored_layer.balanced(fit, layer)
                layer = dataclasses.replace(layer, value_EKH=latent_EJR)
        prefix = "" if expand else "base_"  # FactoredConfig's names, or GroupedConfig's
        projections = {
            "query": layer.query_ENH,
            f"{prefix}key": layer.key_EKH,
            f"{prefix}value": layer.value_EKH,
        }
        return ConvertedLayer(
            factored_layer.attention_weights(layer, projections, **expand), errors
        )

    def alone(self, part: str) -> "ThinKeys":
        """Returns this method for one projection, such as "key"."""
        return dataclasses.replace(self, part=part, value_rank=0)

    @property
    def _key_rank(self) -> int | None:
        """The rank of keys, or None if keys are not factored."""
        return self.rank if self.part in ("key", "both", "key_value") else None

    @property
    def _value_rank(self) -> int | None:
        """The rank of values, or None if values are not factored."""
        if self.part == "key_value":
            return self.value_rank or self.rank
        return self.rank if self.part == "value" else None

    def _check(self, rank: int, dim: int, kv_heads: int, *, of_values: bool) -> None:
        most = self._max_rank(dim, kv_heads)
        if not 1 <= rank <= most:
            key = "value_rank" if of_values and self.value_rank else "rank"
            per_head = self.mode == "per_head"
            source = f"the {dim} channels of a head" if per_head else "the channels of all heads"
            raise UserError(f"{key} = {rank}: must lie in [1, {most}], {source}")

    def max_rank(self, config: GroupedConfig) -> int:
        dims = dict(query=config.key_dim, key=config.key_dim, value=config.value_dim)
        return self._max_rank(min(dims[part] for part in self._parts), config.num_kv_heads)

    def _max_rank(self, dim: int, heads: int) -> int:
        """Returns the largest rank for heads of `dim` channels."""
        return dim * heads // self._latents(heads)

    def energy_losses(
        self, layer: Layer, moment_EE: np.ndarray, ranks: Sequence[int]
    ) -> list[float]:
        """Returns, by rank, the lost share of energy as a mean over the factored projections."""
        layer = layer_lib.drop_redundant_biases(layer)
        key_change, value_change = self._basis_changes(layer, moment_EE)
        weights = dict(query=layer.query_ENH)
        weights |= dict(
            key=key_change.apply(layer.key_EKH), value=value_change.apply(layer.value_EKH)
        )
        losses = []
        for part in self._parts:
            latents = self._latents(weights[part].shape[1])
            energy_C = factors.energies(weights[part], moment_EE, latents=latents).sum(axis=0)
            total = energy_C.sum() or 1.0
            losses.append([energy_C[rank:].sum() / total for rank in ranks])
        return np.mean(losses, axis=0).tolist()

    def _basis_changes(
        self, layer: Layer, moment_EE: np.ndarray
    ) -> tuple[BasisChange, BasisChange]:
        """Returns the basis changes of keys and of values in which the SVD is taken."""
        # Whitening is by queries, so it cannot weigh the errors of queries themselves.
        factors_queries = self.part in ("query", "both")
        return factored_layer.basis_changes(
            layer, moment_EE, "inputs" if factors_queries else self.objective
        )

    @property
    def changes_values(self) -> bool:
        return "value" in self._parts

    @property
    def _parts(self) -> tuple[str, ...]:
        """The projections that are factored."""
        several = dict(both=("query", "key"), key_value=("key", "value"))
        return several.get(self.part, (self.part,))

    def _latents(self, heads: int) -> int:
        return heads if self.mode == "per_head" else 1

    def _absorbed(self, qk_norm: str, rope: Base | None) -> dict[str, bool]:
        """Returns whether the up-projection of keys is absorbed, and that of values."""
        per_head = self.absorb and self.mode == "per_head"
        return dict(key=per_head and not rope and qk_norm == "none", value=per_head)


@dataclasses.dataclass(frozen=True)
class LowRankKV:
    """LRKV: bases that KV heads share, and a low-rank residual per head.

    Attributes:
      rank: rank R of the residuals.
      bases: number J of bases, a divisor of the number of KV heads.
      align: first rotate heads towards each other; the rotations leave attention unchanged.
      step: as in `factors.base_and_residual`.
    """

    rank: int
    bases: int = 1
    objective: str = "outputs"
    align: bool = True
    step: int = 0

    changes_values = True

    def __post_init__(self):
        one_of("objective", self.objective, OBJECTIVES)

    @property
    def title(self) -> str:
        return f"bases {self.bases}, rank {self.rank}"

    def mechanism(self, config: GroupedConfig, *, rope: Base | None) -> GroupedConfig:
        most = self.max_rank(config)
        if not 0 <= self.rank <= most:
            raise UserError(f"rank = {self.rank}: must lie in [0, {most}], the channels of a head")
        kv_heads = config.num_kv_heads
        if self.bases < 1 or kv_heads % self.bases:
            raise UserError(f"bases = {self.bases}: must divide the {kv_heads} KV heads")
        shape = dict(num_bases=self.bases, rank=self.rank, latent_bias=config.bias)
        return GroupedConfig(**shared_keys(config), **shape)

    def convert(self, layer: Layer, moment_EE: np.ndarray) -> ConvertedLayer:
        layer = layer_lib.drop_redundant_biases(layer)
        key_change, value_change = factored_layer.basis_changes(layer, moment_EE, self.objective)
        key_change, key = self._factors(
            layer, layer.key_EKH, key_change, moment_EE, self._key_rotations(layer)
        )
        value_change, value = self._factors(
            layer, layer.value_EKH, value_change, moment_EE, self._value_rotations
        )
        # For queries and outputs; the changed keys and values are replaced by factors.
        layer = layer_lib.change_basis(layer, key_change, value_change)
        projections = {
            "query": layer.query_ENH,
            "base_key": key.base_EJH,
            "base_value": value.base_EJH,
        }
        expand = {}
        if self.rank:
            projections |= {"latent_key": key.latent_EKR, "latent_value": value.latent_EKR}
            expand = {"expand_key": key.expand_KRH, "expand_value": value.expand_KRH}
        errors = {"key": key.error, "value": value.error}
        return ConvertedLayer(
            factored_layer.attention_weights(layer, projections, **expand), errors
        )

    def _factors(
        self,
        layer: Layer,
        w_EKH: np.ndarray,
        basis: BasisChange,
        moment_EE: np.ndarray,
        rotations: str,
    ) -> tuple[BasisChange, factors.BaseAndResidual]:
        """Fits bases and residuals of keys or values; returns their basis change and the fit.

        The fit is done in each head's own basis, whitened and rotated. Heads that share a base then
        need one basis: the inverse root of the mean of their squared basis changes is applied to
        all of them, which undoes whitening on average.
        """
        fit = factors.base_and_residual(
            basis.apply(w_EKH),
            self.rank,
            moment_EE,
            bases=self.bases,
            rotations=rotations,
            step=self.step,
        )
        basis = basis.then(fit.rotation_KHH, fit.rotation_KHH.transpose(0, 2, 1))
        K, H, _ = basis.matrix_KHH.shape
        square_KHH = basis.matrix_KHH.transpose(0, 2, 1) @ basis.matrix_KHH
        mean_JHH = square_KHH.reshape(self.bases, -1, H, H).mean(axis=1)
        root_JHH, inverse_JHH = layer_lib.matrix_roots(mean_JHH)

        def repeat_for_heads(x_JHH):
            return np.repeat(x_JHH, K // self.bases, axis=0)

        back_KHH = repeat_for_heads(inverse_JHH)
        fit = fit._replace(
            base_EJH=einsum("EJH,JHI->EJI", fit.base_EJH, inverse_JHH),
            expand_KRH=fit.expand_KRH @ back_KHH,
        )
        if self.rank:
            factors_of = factors.Factors(fit.latent_EKR, fit.expand_KRH, fit.error)
            latent_EKR, expand_KRH = factored_layer.balanced(factors_of, layer)
            fit = fit._replace(latent_EKR=latent_EKR, expand_KRH=expand_KRH)
        return basis.then(back_KHH, repeat_for_heads(root_JHH)), fit

    def max_rank(self, config: GroupedConfig) -> int:
        return min(config.key_dim, config.value_dim)

    def energy_losses(
        self, layer: Layer, moment_EE: np.ndarray, ranks: Sequence[int]
    ) -> list[float]:
        """Returns, by rank, the lost share of energy as a mean of keys and values."""
        layer = layer_lib.drop_redundant_biases(layer)
        key_change, value_change = factored_layer.basis_changes(layer, moment_EE, self.objective)

        def losses(w_EKH, rotations):
            return factors.losses_by_rank(
                w_EKH, ranks, moment_EE, bases=self.bases, rotations=rotations
            )

        key = losses(key_change.apply(layer.key_EKH), self._key_rotations(layer))
        value = losses(value_change.apply(layer.value_EKH), self._value_rotations)
        return np.mean([key, value], axis=0).tolist()

    def _key_rotations(self, layer: Layer) -> str:
        """Returns the rotations of keys that leave logits unchanged: "none", "pairs" or "all"."""
        if not self.align or layer.qk_norm == "rms_gain":
            return "none"
        return "pairs" if layer.rope else "all"

    @property
    def _value_rotations(self) -> str:
        return "all" if self.align else "none"


def shared_keys(config: GroupedConfig) -> dict:
    """Returns the config keys that a new mechanism takes from the old one."""
    keys = ("num_heads", "num_kv_heads", "key_dim", "value_dim", "qk_norm", "bias", "norm_epsilon")
    shared = {key: getattr(config, key) for key in keys}
    if config.qk_norm == "rms_offset":  # `layer.read` converts its gains
        shared["qk_norm"] = "rms_gain"
    return shared
