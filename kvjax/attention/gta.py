"""Grouped-tied attention (GTA; Zadouri, Strauss, Dao, arXiv 2505.21487, section 3).

    k_k = [c_k's first H - P channels, r]        v_k = c_k        c = x W^KV,  r = Rot(norm(x W^KR))

with K KV heads of H channels, one rotated key r of P channels for all heads, and queries whose last
P channels are rotated. Cache: K·H + P elements, since c_k is both the value and the unrotated part
of the key. c is not normed; `qk_norm` norms queries and r (the paper has no norm).
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
    normalise_and_rotate,
    require,
)
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentSizes
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTAConfig(MechanismConfig):
    """Sizes N, K, H and P."""

    num_kv_heads: int  # KV heads, K; divides num_heads
    key_dim: int  # channels of a key, and of a value, H
    rope_key_dim: int  # channels of the rotated part of a key, P, which heads share; 0: none
    qk_norm: str = "rms"  # norm of both parts of queries and of the RoPE key; "none" in the paper

    def __post_init__(self):
        check_common(self, "num_kv_heads")
        check_divides(self, "num_kv_heads", "num_heads")
        allowed = f"must be even and lie in [0, {self.key_dim}), below key_dim"
        fits = 0 <= self.rope_key_dim < self.key_dim and self.rope_key_dim % 2 == 0
        require(fits, "rope_key_dim", self.rope_key_dim, allowed)

    @property
    def title(self) -> str:
        return f"GTA, {self.num_kv_heads} KV heads"

    @property
    def value_dim(self) -> int:
        return self.key_dim

    @property
    def content_dim(self) -> int:
        """Number of channels that a key shares with the value, H - P."""
        return self.key_dim - self.rope_key_dim

    def entry(self) -> dict[str, Field]:
        fields = {"latent": Field("K H", (self.num_kv_heads, self.key_dim))}
        if self.rope_key_dim:
            fields["rope_key"] = Field("P", (self.rope_key_dim,), keeps=True)
        return fields

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        del rope_base  # the cached key is already rotated
        shape = dict(N=self.num_heads, C=self.key_dim, P=self.rope_key_dim)
        return LatentSizes(**shape, key_channels=self.content_dim, Hv=0).flops()

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "GTA":
        return GTA(self, d_model, rngs=rngs)


class GTA(Mechanism):
    """Values per KV head whose first channels are also keys, and one shared rotated key."""

    packable = ("latent", "rope_key", "query", "query_down")

    def __init__(self, config: GTAConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, K=c.num_kv_heads, H=c.key_dim, P=c.rope_key_dim)
        self.query = self.query_weight("N H", d_model, rngs=rngs, **sizes)
        self.latent = weight("D -> K H", rngs, **sizes)
        self.query_norm = head_norm(c, c.content_dim, rngs=rngs)
        if c.rope_key_dim:
            self.rope_key = weight("D -> P", rngs, **sizes)
            self.rope_query_norm = head_norm(c, c.rope_key_dim, rngs=rngs)
            self.rope_key_norm = head_norm(c, c.rope_key_dim, rngs=rngs)
        self.add_query_latent(d_model, rngs=rngs)

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        c = self.config
        q_BTNH = self.product(self.query_input(x_BTD), "query")
        q_BTNH, q_BTNP = jnp.split(q_BTNH, [c.content_dim], axis=-1)
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, None)
        raw = {"latent": self.product(x_BTD, "latent")}
        if not c.rope_key_dim:
            return q_BTNH, raw
        q_BTNP = normalise_and_rotate(q_BTNP, self.rope_query_norm, positions.rotary)
        k_BT1P = self.product(x_BTD, "rope_key")[:, :, None]
        k_BT1P = normalise_and_rotate(k_BT1P, self.rope_key_norm, positions.rotary)
        return jnp.concatenate([q_BTNH, q_BTNP], axis=-1), raw | {"rope_key": k_BT1P[:, :, 0]}

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        v_BTKH = raw["latent"]
        k_BTKH = v_BTKH[..., : self.config.content_dim]
        if "rope_key" in raw:
            k_BT1P = raw["rope_key"][:, :, None]
            k_BTKP = jnp.broadcast_to(k_BT1P, (*v_BTKH.shape[:3], k_BT1P.shape[-1]))
            k_BTKH = jnp.concatenate([k_BTKH, k_BTKP], axis=-1)
        return k_BTKH, v_BTKH

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        del rope_base  # the cached key is already rotated
        q_BTNH, q_BTNP = jnp.split(q_BTNH, [self.config.content_dim], axis=-1)
        rope_query = q_BTNP if self.config.rope_key_dim else None
        scale = self.config.scale
        return cache_layouts.LatentInputs(query=q_BTNH, rope_query=rope_query, scale=scale)
