"""MLA as the LRKV paper counts it (section 5, Table 1): no RoPE key; keys are rebuilt per head.

    k_n = Rot(norm(c W_n^UK))        v_n = c W_n^UV        c = x W^D

Cache: the latent c, C elements. Since whole keys are rotated, W^UK cannot be absorbed: decoding
rebuilds every head's key for every cached token and is compute-bound.
"""

import dataclasses

from flax import nnx
import jax

from kvjax.attention.mechanism import (
    Mechanism,
    MechanismConfig,
    check_common,
    gain_of,
    head_norm,
    normalise_and_rotate,
)
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.rebuilt import RebuiltSizes
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import linear, weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperMLAConfig(MechanismConfig):
    """Sizes N, C, H and Hv."""

    latent_dim: int  # channels of the latent, C
    key_dim: int  # channels of a key, H
    value_dim: int  # channels of a value, Hv

    def __post_init__(self):
        check_common(self, "latent_dim", "value_dim")

    @property
    def title(self) -> str:
        return f"MLA without a RoPE key, latent {self.latent_dim}"

    def entry(self) -> dict[str, Field]:
        return {"latent": Field("C", (self.latent_dim,))}

    @property
    def absorbed(self) -> tuple[str, ...]:
        return ("up_key", "up_value")

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        """Counts rebuilding every head's key for every cached token."""
        shape = dict(N=self.num_heads, C=self.latent_dim, H=self.key_dim, Hv=self.value_dim)
        return RebuiltSizes(**shape, rope_base=rope_base, normed=self.qk_norm != "none").flops()

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "PaperMLA":
        return PaperMLA(self, d_model, rngs=rngs)


class PaperMLA(Mechanism):
    """Projections with W_K,h = W_down W_up,h (LRKV Table 1)."""

    packable = ("down", "query", "query_down")

    def __init__(self, config: PaperMLAConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, C=c.latent_dim, H=c.key_dim)
        self.query = self.query_weight("N H", d_model, rngs=rngs, N=c.num_heads, H=c.key_dim)
        self.query_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.key_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.down = weight("D -> C", rngs, **sizes)
        self.up_key = weight("C -> N H", rngs, **sizes)
        self.up_value = weight("C -> N H", rngs, **sizes | dict(H=c.value_dim))
        self.add_query_latent(d_model, rngs=rngs)

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        q_BTNH = self.product(self.query_input(x_BTD), "query")
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, positions.rotary)
        return q_BTNH, {"latent": self.product(x_BTD, "down")}

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTNH = linear(raw["latent"], self.up_key[...])
        k_BTNH = normalise_and_rotate(k_BTNH, self.key_norm, positions.rotary)
        return k_BTNH, linear(raw["latent"], self.up_value[...])

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        c = self.config
        return cache_layouts.RebuiltInputs(
            query=q_BTNH,
            up_key=self.up_key[...],
            up_value=self.up_value[...],
            gain=gain_of(self.key_norm),
            scale=c.scale,
            rope_base=rope_base,
            norm_epsilon=None if self.key_norm is None else c.norm_epsilon,
        )
