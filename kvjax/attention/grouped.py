"""MHA, GQA, MQA, LRKV, LRKV x GQA, thin keys and projection sharing: one family.

    K_k = Base^K[j(k)] + R^K_k B^K_k        V_k = Base^V[j(k)] + R^V_k B^V_k        # LRKV eq. 2

with N query heads reading K KV heads reading J bases, and R^K = X U^K of rank R (B is stored
transposed, [R, H]). J = K and rank 0 is MHA (K = N), GQA or MQA (K = 1); J = 1 and K = N with
rank R is LRKV; H < Hv is thin keys. MFA (arXiv 2412.19255) is MQA with heads of 256 and queries of
a rank: the number of heads costs no cache. Cache: J·(H + Hv) + 2·K·R elements, and K wide 1/rms
where keys with residuals are normed; J·H + K·R where values are the keys.

Projections may be shared (`tie`, projection sharing eq. 2-4): "kv", Q-K=V, values are the keys
before norm and RoPE; "qk", Q=K-V, queries are the keys; "qkv", both. `position_channels` adds that
paper's "+": fixed 2-D sinusoids of m channels on the logits, mapped back by m weights. `alibi` is
ALiBi (arXiv 2108.12409): logits fall with the distance of the key, by a slope for each head.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention import position_bias
from kvjax.attention.mechanism import (
    MAX_DIM,
    Mechanism,
    MechanismConfig,
    check_common,
    check_divides,
    check_residual,
    gain_of,
    head_norm,
    normalise_and_rotate,
    require,
)
from kvjax.attention.pca_init import pca_factors
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.layout import Sizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes
from kvjax.kernels.decode_attention.cache_layouts.tied import TiedSizes
from kvjax.layers.norm import inverse_rms
from kvjax.layers.rope import Base, Positions, rotate
from kvjax.layers.weight import affine, weight

TIES = ("none", "kv", "qk", "qkv")
ROPES = ("full", "shared")


RESIDUAL_INITS = ("linear", "zeros", "pca")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig(MechanismConfig):
    """N, K, J, R, H and Hv of the family, and what is tied."""

    num_kv_heads: int  # KV heads, K; divides num_heads
    num_bases: int  # bases, J; divides num_kv_heads
    rank: int  # rank of the residuals, R; 0: KV heads of a base are equal
    key_dim: int  # channels of a key, H
    value_dim: int  # channels of a value, Hv
    qk_norm: str = "rms"  # norm of queries and whole keys: "rms", "rms_gain" or "none"
    bias: bool = False  # on queries, bases and the output
    out_bias: bool = True  # with bias: on the output too
    latent_bias: bool = False  # with bias: on the latents of residuals too
    # How B starts: "linear" like every matrix, "zeros" (as MQA), or "pca": base, U and B as what is
    # nearest to heads drawn as MHA's.
    residual_init: str = "linear"
    # Where the model has RoPE: "full" rotates whole keys; "shared" the base only, and an unrotated
    # query meets the residual: another model, cheaper to decode.
    rope: str = "full"
    tie: str = "none"  # "kv": Q-K=V; "qk": Q=K-V; "qkv": Q=K=V; "none"
    position_channels: int = 0  # m of the "+" variants, even; 0: none
    alibi: bool = False  # logits fall with distance, in each head by a slope of its own

    def __post_init__(self):
        check_common(self, "num_kv_heads", "num_bases", "value_dim")
        check_divides(self, "num_kv_heads", "num_heads")
        check_divides(self, "num_bases", "num_kv_heads")
        check_residual(self, "MQA", RESIDUAL_INITS)
        for key, choices in (("rope", ROPES), ("tie", TIES)):
            value = getattr(self, key)
            require(value in choices, key, repr(value), f"must be one of {choices}")
        channels = self.position_channels
        require(
            0 <= channels <= MAX_DIM and channels % 2 == 0,
            "position_channels",
            channels,
            "must be even, half of it for the row and half for the column, or 0; "
            f"at most {MAX_DIM:,}",
        )
        both = "must be False where position_channels are on the logits"
        require(not (channels and self.alibi), "alibi", self.alibi, both)
        self._check_ties()

    def _check_ties(self) -> None:
        if self.tie == "none":
            return
        shown = repr(self.tie)
        if self.ties_values:
            same = f"needs value_dim = {self.value_dim} equal to key_dim = {self.key_dim}"
            require(self.key_dim == self.value_dim, "tie", shown, same)
        if self.ties_queries:
            every = f"needs num_kv_heads = {self.num_kv_heads} and num_bases = {self.num_bases} "
            every += f"equal to num_heads = {self.num_heads}, and rank 0"
            fits = self.num_bases == self.num_heads and not self.rank
            require(fits, "tie", shown, every)
            allowed = f"must be 0 where queries are the keys (tie = {shown})"
            require(not self.query_rank, "query_rank", self.query_rank, allowed)
        require(self.rope == "full", "rope", repr(self.rope), "must be 'full' where keys are tied")

    @property
    def title(self) -> str:
        tied = {"none": "", "kv": "Q-K=V", "qk": "Q=K-V", "qkv": "Q=K=V"}[self.tie]
        if tied:
            tied = f"({tied})+, " if self.position_channels else f"{tied}, "
        thin = f", keys of {self.key_dim}" if self.key_dim < self.value_dim else ""
        low = f", queries of rank {self.query_rank}" if self.query_rank else ""
        return tied + self._shared + thin + low

    @property
    def _shared(self) -> str:
        """What heads share, by the field's names."""
        bases, heads = self.num_bases, self.num_kv_heads
        if self.rank:
            over = f" over {bases} bases" if bases > 1 else ""
            grouped = f", {heads} KV heads" if heads < self.num_heads else ""
            return f"LRKV{over}{grouped}, rank {self.rank}"
        if bases == self.num_heads:
            return "MHA"
        if bases == 1:
            return "MFA" if self.query_rank else "MQA"
        return f"GQA, {bases} KV heads"

    @property
    def ties_values(self) -> bool:
        return self.tie in ("kv", "qkv")

    @property
    def ties_queries(self) -> bool:
        return self.tie in ("qk", "qkv")

    @property
    def splits_rope(self) -> bool:
        """Whether an unrotated residual stands beside a rotated base."""
        return bool(self.rank) and self.rope == "shared"

    @property
    def query_dim(self) -> int:
        parts = 2 if self.splits_rope else 1
        return parts * self.key_dim + position_bias.channels(self)

    @property
    def key_heads(self) -> int:
        return self.num_kv_heads if self.rank else self.num_bases

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5

    def entry(self) -> dict[str, Field]:
        fields = {"base_key": Field("J H", (self.num_bases, self.key_dim))}
        if not self.ties_values:
            fields["base_value"] = Field("J H", (self.num_bases, self.value_dim))
        if self.rank:  # LRKV eq. 5: 2(H + N·R) elements per token
            residual = Field("K R", (self.num_kv_heads, self.rank))
            fields["residual_key"] = residual
            if not self.ties_values:  # with tied values the norm is taken when keys are read
                fields["residual_value"] = residual
                if self.qk_norm != "none":
                    fields["key_scale"] = Field("K 1", (self.num_kv_heads, 1), wide=True)
        return fields

    @property
    def needs_angles(self) -> bool:
        return self.position_channels > 0

    @property
    def absorbed(self) -> tuple[str, ...]:
        return ("expand_key", "expand_value") if self.rank else ()

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        flops = self._sizes(rope_base).flops()
        once = 0
        if self.rank and self.qk_norm != "none" and not self.ties_values:  # 1/rms of the new key
            once = self.num_kv_heads * self.key_dim * (2 * self.rank + 3)
        biased = 2 * self.num_heads if self.alibi else self.position_channels
        return DecodeFlops(flops.per_query + once, flops.per_key + biased)

    def _sizes(self, rope_base: Base | None) -> Sizes:
        """The sizes of the way its cache is read."""
        shape = dict(N=self.num_heads, K=self.num_kv_heads, H=self.key_dim)
        normed = self.qk_norm != "none"
        if self.ties_values:
            gain = self.qk_norm == "rms_gain"
            residual = dict(J=self.num_bases, R=self.rank, rope_base=rope_base)
            return TiedSizes(**shape, **residual, normed=normed, gain=gain)
        shape |= dict(Hv=self.value_dim)
        if not self.rank:
            return GroupedSizes(**shape)
        rope_base = None if self.splits_rope else rope_base
        residual = dict(J=self.num_bases, R=self.rank, rope_base=rope_base)
        return ResidualSizes(**shape, **residual, scaled=normed)

    @property
    def output_bias(self) -> bool:
        return self.bias and self.out_bias

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Grouped":
        return Grouped(self, d_model, rngs=rngs)


class Grouped(Mechanism):
    """The family's weights and its projections."""

    def __init__(
        self, config: GroupedConfig, d_model: int, *, rngs: nnx.Rngs, query_width: int = 0
    ):
        """
        Args:
          query_width: of what queries are made of; 0: d_model, what keys and values are made of.
        """
        self.config = c = config
        query_width = query_width or d_model
        sizes = dict(
            D=d_model, N=c.num_heads, K=c.num_kv_heads, J=c.num_bases, R=c.rank, H=c.key_dim
        )
        value_sizes = sizes | dict(H=c.value_dim)
        bias = lambda axes, sizes: weight(axes, rngs, init="zeros", **sizes) if c.bias else None
        if not c.ties_queries:
            self.query = self.query_weight("N H", query_width, rngs=rngs, **sizes)
            self.query_bias = bias("N H", sizes)
        self.base_key = weight("D -> J H", rngs, **sizes)  # LRKV eq. 1: W_shared
        self.base_key_bias = bias("J H", sizes)
        if not c.ties_values:
            self.base_value = weight("D -> J H", rngs, **value_sizes)
            self.base_value_bias = bias("J H", value_sizes)
        self.query_norm = head_norm(c.key_dim, c.qk_norm, epsilon=c.norm_epsilon, rngs=rngs)
        self.key_norm = head_norm(c.key_dim, c.qk_norm, epsilon=c.norm_epsilon, rngs=rngs)
        if c.position_channels:
            # The 1x1 map is these over m, so that it starts as the identity on the logits.
            channels = dict(init="ones", C=c.position_channels)
            self.position_map = weight("C", rngs, **channels)
        # Drawn last, so that models of equal seed share every weight they have in common.
        if c.rank:
            expand = dict(init="zeros" if c.residual_init == "zeros" else "linear")
            latent_bias = lambda: bias("K R", sizes) if c.latent_bias else None
            self.latent_key = weight("D -> K R", rngs, **sizes)  # LRKV eq. 1: U
            self.latent_key_bias = latent_bias()
            if not c.ties_values:
                self.latent_value = weight("D -> K R", rngs, **sizes)
                self.latent_value_bias = latent_bias()
            self.expand_key = weight("K: R -> H", rngs, **expand, **sizes)  # B, transposed
            if not c.ties_values:
                self.expand_value = weight("K: R -> H", rngs, **expand, **value_sizes)
        self.add_query_latent(query_width, rngs=rngs)
        if c.rank and c.residual_init == "pca":
            allowed = (
                f"must be at most config.model.d_model = {d_model}: so many components there are"
            )
            require(c.rank <= d_model, "rank", c.rank, allowed)
            for kind in ("key",) if c.ties_values else ("key", "value"):
                whole_DKH = weight("D -> K H", rngs, **(sizes if kind == "key" else value_sizes))
                parts = pca_factors(whole_DKH[...], c.num_bases, c.rank)
                for name, part in zip(("base", "latent", "expand"), parts, strict=True):
                    getattr(self, f"{name}_{kind}")[...] = part

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        raw = self.raw(x_BTD)
        return self.queries(x_BTD, raw, positions), raw

    def raw(self, x_BTD: jax.Array) -> dict[str, jax.Array]:
        """What keys and values are made of, of [B, T, D]: arrays [B, T, J, H] and [B, T, K, R]."""
        c = self.config
        raw = {"base_key": affine(x_BTD, self.base_key, self.base_key_bias)}
        if not c.ties_values:
            raw["base_value"] = affine(x_BTD, self.base_value, self.base_value_bias)
        if c.rank:
            raw["residual_key"] = affine(x_BTD, self.latent_key, self.latent_key_bias)
            if not c.ties_values:
                raw["residual_value"] = affine(x_BTD, self.latent_value, self.latent_value_bias)
        return raw

    def queries(self, x_BTD: jax.Array, raw: dict, positions: Positions) -> jax.Array:
        """[B, T, N, H], or as many channels as `query_dim` says; `raw` where they are the keys."""
        c = self.config
        if c.ties_queries:
            q_BTNH = raw["base_key"]
        else:
            q_BTNH = affine(self.query_input(x_BTD), self.query, self.query_bias)
        if not c.splits_rope:
            q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, positions.rotary)
        else:
            q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, None)
            rotated = q_BTNH if positions.rotary is None else rotate(q_BTNH, positions.rotary)
            q_BTNH = jnp.concatenate([rotated, q_BTNH], axis=-1)
        return position_bias.queries_with_channels(c, q_BTNH, self._map())

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        c = self.config
        whole_BTKH = self._whole_keys(raw)
        if c.ties_values:
            v_BTKH = whole_BTKH
        elif c.rank:
            v_BTKH = _add_residual(raw["base_value"], raw["residual_value"], self.expand_value)
        else:
            v_BTKH = raw["base_value"]
        if c.splits_rope:
            k_BTKH = self._split_keys(raw, whole_BTKH, positions)
        else:
            k_BTKH = normalise_and_rotate(whole_BTKH, self.key_norm, positions.rotary)
        return position_bias.keys_with_channels(c, k_BTKH, positions), v_BTKH

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        """The bases and latents of LRKV eq. 5; with rank 0 the keys and values themselves.

        With a residual, what is rotated ahead is the base (times the norm's gain); the norm of
        the whole key is one positive number per token and KV head, kept in float32 or wider.
        With tied values the entry is the keys before norm and rotation.
        """
        c = self.config
        if c.ties_values:
            return dict(raw)
        if not c.rank:
            k_BTJH = normalise_and_rotate(raw["base_key"], self.key_norm, positions.rotary)
            return {"base_key": k_BTJH, "base_value": raw["base_value"]}
        entry = dict(raw)
        if self.key_norm is not None:
            scale_BTK1 = inverse_rms(self._whole_keys(raw), c.norm_epsilon)
            entry["key_scale"] = scale_BTK1
            entry["base_key"] = _times_gain(entry["base_key"], gain_of(self.key_norm))
        if positions.rotary is not None:
            entry["base_key"] = rotate(entry["base_key"], positions.rotary)
        return entry

    def decode_inputs(
        self, q_BTNH: jax.Array, rope_base: Base | None
    ) -> cache_layouts.DecodeInputs:
        c = self.config
        q_BTNH, bias = position_bias.split_queries(c, q_BTNH, self._map())
        shared = dict(bias=bias, scale=c.scale)
        gain = gain_of(self.key_norm)
        if c.ties_values:
            return cache_layouts.TiedInputs(
                query=q_BTNH,
                expand_key=self.expand_key[...] if c.rank else None,
                gain=gain,
                norm_epsilon=None if self.key_norm is None else c.norm_epsilon,
                rope_base=rope_base,
                **shared,
            )
        if not c.rank:
            return cache_layouts.GroupedInputs(query=q_BTNH, **shared)
        base_query, residual_query = q_BTNH, q_BTNH
        if c.splits_rope:
            base_query, residual_query = jnp.split(q_BTNH, 2, axis=-1)
        return cache_layouts.ResidualInputs(
            query=base_query,
            residual_query=residual_query,
            expand_key=_times_gain(self.expand_key[...], gain),
            expand_value=self.expand_value[...],
            rope_base=None if c.splits_rope else rope_base,
            **shared,
        )

    def _whole_keys(self, raw: dict) -> jax.Array:
        """[B, T, K, H] keys before norm and rotation ([B, T, J, H] with rank 0)."""
        if not self.config.rank:
            return raw["base_key"]
        return _add_residual(raw["base_key"], raw["residual_key"], self.expand_key)

    def _split_keys(self, raw: dict, whole_BTKH: jax.Array, positions: Positions) -> jax.Array:
        """[B, T, K, 2H]: the rotated base beside the residual, both by the norm of their sum."""
        B, T, K, H = whole_BTKH.shape
        J = self.config.num_bases
        base_BTJ1H = raw["base_key"][:, :, :, None]
        base_BTKH = jnp.broadcast_to(base_BTJ1H, (B, T, J, K // J, H)).reshape(B, T, K, H)
        both = [base_BTKH, _residual(raw["residual_key"], self.expand_key)]
        if self.key_norm is not None:
            scale_BTK1 = inverse_rms(whole_BTKH, self.config.norm_epsilon)
            both = [(x.astype(scale_BTK1.dtype) * scale_BTK1).astype(x.dtype) for x in both]
            both = [_times_gain(x, gain_of(self.key_norm)) for x in both]
        if positions.rotary is not None:
            both[0] = rotate(both[0], positions.rotary)
        return jnp.concatenate(both, axis=-1)

    def _map(self) -> jax.Array | None:
        return self.position_map[...] if self.config.position_channels else None


def _times_gain(x: jax.Array, gain_H: jax.Array | None) -> jax.Array:
    return x if gain_H is None else x * gain_H.reshape((1,) * (x.ndim - 1) + (-1,))


def _residual(latent_BTKR: jax.Array, expand_KRH: nnx.Param) -> jax.Array:
    return jnp.einsum("BTKR,KRH->BTKH", latent_BTKR, expand_KRH[...])


def _add_residual(base_BTJH: jax.Array, latent_BTKR: jax.Array, expand_KRH: nnx.Param) -> jax.Array:
    """[B, T, K, H]: each KV head's base plus its low-rank residual (LRKV eq. 2)."""
    residual_BTKH = _residual(latent_BTKR, expand_KRH)
    B, T, K, H = residual_BTKH.shape
    J = base_BTJH.shape[2]
    grouped = residual_BTKH.reshape(B, T, J, K // J, H)
    base = jnp.broadcast_to(base_BTJH[:, :, :, None], grouped.shape)
    return (base + grouped).reshape(B, T, K, H)
