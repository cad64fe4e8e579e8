"""Multi-matrix factorization attention with keys reused as values (MFA-KR, arXiv 2412.19255).

    k_k = Rot(norm(c_k))        v_k = c_k + a * (c_k M)        c = x W^K

with K KV heads (one in the paper) of H channels, a map M [H, H] and gates a [H] that start at 0, so
that training starts as Q-K=V. The paper's queries have low rank (`query_rank`). The paper does not
define c under RoPE; here c is the key before norm and rotation, so values carry no position. The
map from c to v is linear, so it is applied once, to the weighted sum of c. Cache: c, K·H elements.
"""

import dataclasses

from flax import nnx
import jax

from kvjax.attention.mechanism import (
    Mechanism,
    MechanismConfig,
    check_common,
    check_divides,
    gain_of,
    head_norm,
    normalise_and_rotate,
)
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.tied import TiedSizes
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import linear, weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class MFAKRConfig(MechanismConfig):
    """Sizes N, K, H and Cq."""

    num_kv_heads: int  # KV heads, K; divides num_heads
    key_dim: int  # channels of a key, and of a value, H

    def __post_init__(self):
        check_common(self, "num_kv_heads")
        check_divides(self, "num_kv_heads", "num_heads")

    @property
    def title(self) -> str:
        return f"MFA-KR, {self.num_kv_heads} KV heads"

    @property
    def value_dim(self) -> int:
        return self.key_dim

    @property
    def extra_flops(self) -> int:
        return 2 * (self.num_heads - 1) * self.key_dim**2

    @property
    def extra_activations(self) -> int:
        return (self.num_heads - 1) * self.key_dim

    def entry(self) -> dict[str, Field]:
        return {"base_key": Field("K H", (self.num_kv_heads, self.key_dim))}

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        normed, gain = self.qk_norm != "none", self.qk_norm == "rms_gain"
        heads = dict(N=self.num_heads, K=self.num_kv_heads, J=self.num_kv_heads)
        options = dict(rope_base=rope_base, normed=normed, gain=gain)
        flops = TiedSizes(**heads, R=0, H=self.key_dim, **options).flops()
        return DecodeFlops(flops.per_query + self.extra_flops, flops.per_key)

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "MFAKR":
        return MFAKR(self, d_model, rngs=rngs)


class MFAKR(Mechanism):
    """Projections to queries and keys, and the map from keys to values."""

    packable = ("base_key", "query", "query_down")

    def __init__(self, config: MFAKRConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, K=c.num_kv_heads, H=c.key_dim)
        self.query = self.query_weight("N H", d_model, rngs=rngs, **sizes)
        self.base_key = weight("D -> K H", rngs, **sizes)
        self.value_map = weight("C -> H", rngs, C=c.key_dim, H=c.key_dim)
        self.value_gate = weight("H", rngs, init="zeros", H=c.key_dim)
        self.query_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.key_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.add_query_latent(d_model, rngs=rngs)

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        q_BTNH = self.product(self.query_input(x_BTD), "query")
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, positions.rotary)
        return q_BTNH, {"base_key": self.product(x_BTD, "base_key")}

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTKH = raw["base_key"]
        return normalise_and_rotate(k_BTKH, self.key_norm, positions.rotary), k_BTKH

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        return cache_layouts.TiedInputs(
            query=q_BTNH,
            gain=gain_of(self.key_norm),
            norm_epsilon=None if self.key_norm is None else self.config.norm_epsilon,
            rope_base=rope_base,
            scale=self.config.scale,
        )

    def combine(self, o_BTNV: jax.Array, positions: Positions) -> jax.Array:
        """Applies v = c + a * (c M) to the weighted sums of c."""
        del positions
        gate_111V = self.value_gate[...].reshape(1, 1, 1, -1)
        return o_BTNV + gate_111V * linear(o_BTNV, self.value_map[...])
