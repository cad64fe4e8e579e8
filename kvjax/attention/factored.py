"""Low-rank keys, values or both, without a base: the form of a compressed pretrained model.

    K_k = C^K[j(k)] B^K_k        V_k = C^V[j(k)] B^V_k        C^K = X A^K, C^V = X A^V

K KV heads read J latents of R channels, and the cache stores the latents (thin keys, section 2.3).
J = K factors each head separately; J = 1 is one latent for all. Without RoPE, decoding absorbs B^K
into the query; with RoPE it expands and rotates keys as it reads them. LRKV (`grouped.py`) adds a
base to the latents. Cache: J·R elements of keys (K·H if not factored), likewise of values with
their own rank, and K float32 1/rms if keys are factored and normed.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import (
    MAX_DIM,
    Mechanism,
    MechanismConfig,
    check_common,
    check_divides,
    gain_of,
    head_norm,
    normalise_and_rotate,
    require,
    times_gain,
)
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.factored import FactoredSizes
from kvjax.layers.norm import inverse_rms
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactoredConfig(MechanismConfig):
    """Sizes N, K, J, both ranks, H and Hv."""

    num_kv_heads: int  # KV heads, K; divides num_heads
    num_latents: int  # latents, J; divides num_kv_heads
    key_rank: int  # channels of a key latent; 0: keys are not factored
    value_rank: int  # channels of a value latent; 0: values are not factored
    key_dim: int  # channels of a key, H
    value_dim: int  # channels of a value, Hv
    qk_norm: str = "rms"  # norm of queries and expanded keys: "rms", "rms_gain" or "none"
    bias: bool = False  # on queries, keys, values (or their latents) and the output
    out_bias: bool = True  # with bias: on the output too

    def __post_init__(self):
        check_common(self, "num_kv_heads", "num_latents", "value_dim")
        check_divides(self, "num_kv_heads", "num_heads")
        check_divides(self, "num_latents", "num_kv_heads")
        heads_per_latent = self.num_kv_heads // self.num_latents
        for key, dim in (("key_rank", self.key_dim), ("value_rank", self.value_dim)):
            most = min(MAX_DIM, dim * heads_per_latent)
            allowed = (
                f"must lie in [0, {most}], at most {heads_per_latent} heads per latent times {dim} "
                "channels (0: not factored)"
            )
            require(0 <= getattr(self, key) <= most, key, getattr(self, key), allowed)

    @property
    def title(self) -> str:
        keys, values = (rank or "whole" for rank in (self.key_rank, self.value_rank))
        return f"low rank, keys {keys}, values {values}"

    @property
    def scales_keys(self) -> bool:
        """True if the cache stores 1/rms of expanded keys next to their latents."""
        return bool(self.key_rank) and self.qk_norm != "none"

    def entry(self) -> dict[str, Field]:
        def field(rank: int, dim: int) -> Field:
            if rank:
                return Field("J R", (self.num_latents, rank))
            return Field("K H", (self.num_kv_heads, dim))

        fields = {
            "key": field(self.key_rank, self.key_dim),
            "value": field(self.value_rank, self.value_dim),
        }
        if self.scales_keys:
            fields["key_scale"] = Field("K 1", (self.num_kv_heads, 1), wide=True)
        return fields

    @property
    def absorbed(self) -> tuple[str, ...]:
        ranks = {"expand_key": self.key_rank, "expand_value": self.value_rank}
        return tuple(name for name, rank in ranks.items() if rank)

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        shape = dict(N=self.num_heads, K=self.num_kv_heads, J=self.num_latents)
        ranks = dict(R=self.key_rank, Rv=self.value_rank, H=self.key_dim, Hv=self.value_dim)
        sizes = FactoredSizes(**shape, **ranks, rope_base=rope_base, scaled=self.scales_keys)
        flops = sizes.flops()
        norm = 0
        if self.scales_keys:  # expands the new token's keys for their 1/rms
            norm = self.num_kv_heads * self.key_dim * (2 * self.key_rank + 3)
        return DecodeFlops(flops.per_query + norm, flops.per_key)

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Factored":
        return Factored(self, d_model, rngs=rngs)


class Factored(Mechanism):
    """Projections to queries and latents, and the factors that expand latents to heads."""

    packable = ("key", "value", "query", "query_down")

    def __init__(self, config: FactoredConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, K=c.num_kv_heads, J=c.num_latents)

        def bias(axes, **sizes):
            return weight(axes, rngs, init="zeros", **sizes) if c.bias else None

        self.query = self.query_weight("N H", d_model, rngs=rngs, H=c.key_dim, **sizes)
        self.query_bias = bias("N H", H=c.key_dim, **sizes)
        kinds = (("key", c.key_rank, c.key_dim), ("value", c.value_rank, c.value_dim))
        for name, rank, dim in kinds:
            axes, out = ("J R", dict(R=rank)) if rank else ("K H", dict(H=dim))
            setattr(self, name, weight(f"D -> {axes}", rngs, **out, **sizes))
            setattr(self, f"{name}_bias", bias(axes, **out, **sizes))
            if rank:
                setattr(self, f"expand_{name}", weight("K: R -> H", rngs, R=rank, H=dim, **sizes))
        self.query_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.key_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.add_query_latent(d_model, rngs=rngs)

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        q_BTNH = self.product(self.query_input(x_BTD), "query")
        raw = {name: self.product(x_BTD, name) for name in ("key", "value")}
        return normalise_and_rotate(q_BTNH, self.query_norm, positions.rotary), raw

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTKH = normalise_and_rotate(self._expanded_keys(raw), self.key_norm, positions.rotary)
        v_BTKH = raw["value"]
        if self.config.value_rank:
            v_BTKH = _expand(v_BTKH, self.expand_value)
        return k_BTKH, v_BTKH

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        """Returns latents, and 1/rms of expanded keys.

        Keys that are not factored are normed and rotated before they are cached.
        """
        entry = dict(raw)
        if not self.config.key_rank:
            entry["key"] = normalise_and_rotate(raw["key"], self.key_norm, positions.rotary)
        elif self.config.scales_keys:
            entry["key_scale"] = inverse_rms(self._expanded_keys(raw), self.config.norm_epsilon)
        return entry

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        c = self.config
        gain_H = gain_of(self.key_norm)
        return cache_layouts.FactoredInputs(
            query=q_BTNH,
            expand_key=times_gain(self.expand_key[...], gain_H) if c.key_rank else None,
            expand_value=self.expand_value[...] if c.value_rank else None,
            scale=c.scale,
            rope_base=rope_base if c.key_rank else None,
        )

    def _expanded_keys(self, raw: dict) -> jax.Array:
        """Returns keys [B, T, K, H] before norm and rotation."""
        return _expand(raw["key"], self.expand_key) if self.config.key_rank else raw["key"]


def _expand(latent_BTJR: jax.Array, expand_KRH: nnx.Param) -> jax.Array:
    """Expands latents to KV heads, [B, T, K, H]; head k reads latent k·J // K."""
    B, T, J, R = latent_BTJR.shape
    expand_JkRH = expand_KRH[...].reshape(J, -1, R, expand_KRH.shape[-1])
    heads_BTJkH = jnp.einsum("BTJR,JkRH->BTJkH", latent_BTJR, expand_JkRH)
    return heads_BTJkH.reshape(B, T, -1, expand_KRH.shape[-1])
