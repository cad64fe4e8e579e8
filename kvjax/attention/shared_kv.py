"""Shared KV: one rotated vector is key and value ("S2" in Su's posts; the base of DeepSeek-V4).

    k_k = v_k = Rot_s(c_k)        o_n = Rot_-t(sum_s p_s v_s)        c = norm(x W^KV)

with K KV heads of H channels, of which RoPE rotates the last P. The output is rotated back by the
query's position t, so each value enters at its relative position s - t (VO-RoPE; Su, kexue.fm 10862
and 10907). Cache: Rot_s(c), K·H elements.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import (
    Mechanism,
    MechanismConfig,
    check_common,
    check_divides,
    head_norm,
    latent_norm,
    require,
    scaled_latent,
)
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentSizes
from kvjax.layers.rope import Base, Positions, Rotary, rotate
from kvjax.layers.weight import weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedKVConfig(MechanismConfig):
    """Sizes N, K, H and P."""

    num_kv_heads: int  # KV heads, K; divides num_heads
    key_dim: int  # channels of a vector that is both key and value, H
    rope_key_dim: int  # rotated channels, P: the last ones; 0: none
    qk_norm: str = "rms"  # norm of queries; keys are always normed

    def __post_init__(self):
        check_common(self, "num_kv_heads", has_latent=True)
        check_divides(self, "num_kv_heads", "num_heads")
        allowed = f"must be even and lie in [0, {self.key_dim}], at most key_dim"
        fits = 0 <= self.rope_key_dim <= self.key_dim and self.rope_key_dim % 2 == 0
        require(fits, "rope_key_dim", self.rope_key_dim, allowed)

    @property
    def title(self) -> str:
        return f"shared KV, {self.num_kv_heads} KV heads"

    @property
    def value_dim(self) -> int:
        return self.key_dim

    def entry(self) -> dict[str, Field]:
        return {"latent": Field("K H", (self.num_kv_heads, self.key_dim))}

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        del rope_base  # the cached vector is already rotated
        return LatentSizes(N=self.num_heads, C=self.key_dim, P=0, Hv=0).flops()

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "SharedKV":
        return SharedKV(self, d_model, rngs=rngs)


class SharedKV(Mechanism):
    """Projections to queries and to the shared keys and values."""

    packable = ("latent", "query", "query_down")

    def __init__(self, config: SharedKVConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, K=c.num_kv_heads, H=c.key_dim)
        self.query = self.query_weight("N H", d_model, rngs=rngs, **sizes)
        self.latent = weight("D -> K H", rngs, **sizes)
        self.query_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.latent_norm = latent_norm(c, (c.num_kv_heads, c.key_dim), "K H", rngs=rngs)
        self.add_query_latent(d_model, rngs=rngs)

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        q_BTNH = self.product(self.query_input(x_BTD), "query")
        if self.query_norm is not None:
            q_BTNH = self.query_norm(q_BTNH)
        latent_BTKH = self.latent_norm(self.product(x_BTD, "latent"))
        latent_BTKH = scaled_latent(self.config, latent_BTKH, x_BTD.shape[-1])
        latent_BTKH = self._rotate_last(latent_BTKH, positions.rotary)
        return self._rotate_last(q_BTNH, positions.rotary), {"latent": latent_BTKH}

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        return raw["latent"], raw["latent"]

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        del rope_base  # the cached vector is already rotated
        return cache_layouts.LatentInputs(query=q_BTNH, scale=self.config.scale)

    def combine(self, o_BTNV: jax.Array, positions: Positions) -> jax.Array:
        """Rotates outputs back by the query's position."""
        rotary = positions.rotary
        inverse = None if rotary is None else Rotary(rotary.cos, -rotary.sin)
        return self._rotate_last(o_BTNV, inverse)

    def _rotate_last(self, x_BTNH: jax.Array, rotary: Rotary | None) -> jax.Array:
        """Rotates the last P channels."""
        if rotary is None or not self.config.rope_key_dim:
            return x_BTNH
        split = self.config.key_dim - self.config.rope_key_dim
        first, last = jnp.split(x_BTNH, [split], axis=-1)
        return jnp.concatenate([first, rotate(last, rotary)], axis=-1)
