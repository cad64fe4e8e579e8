"""Tensor product attention (TPA, arXiv 2501.06425, equations 3.1 to 3.6).

    k_n = 1/R sum_r a_nr Rot(b_r)        v_n = 1/R' sum_r c_nr d_r        a, b, c, d linear in x

with N heads and ranks R and R' of keys and values. Queries are products of rank R_Q, or dense (the
paper's "KV-only"). Cache: a, b (rotated), c and d, (R + R')·N + R·H + R'·Hv elements. RoPE is
linear, so it applies to b_r before the sum; each key's 1/rms is multiplied into a_n.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import (
    Mechanism,
    MechanismConfig,
    check_common,
    gain_of,
    head_norm,
    normalise_and_rotate,
    require,
    times_gain,
)
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.tensor_product import TensorProductSizes
from kvjax.layers.norm import inverse_rms
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPAConfig(MechanismConfig):
    """Sizes N, the three ranks, H and Hv."""

    query_factors: int  # rank of queries, R_Q; 0: dense queries ("KV-only")
    key_rank: int  # rank of keys, R
    value_rank: int  # rank of values, R'
    key_dim: int  # channels of a key, H
    value_dim: int  # channels of a value, Hv

    def __post_init__(self):
        check_common(self, "key_rank", "value_rank", "value_dim")
        for key, dim, least, note in (
            ("query_factors", "key_dim", 0, " (0: dense queries)"),
            ("key_rank", "key_dim", 1, ""),
            ("value_rank", "value_dim", 1, ""),
        ):
            channels = getattr(self, dim)
            most = max(self.num_heads, channels)
            allowed = (
                f"must lie in [{least}, {most}]{note}, the larger of num_heads = {self.num_heads} "
                f"and {dim} = {channels}"
            )
            require(least <= getattr(self, key) <= most, key, getattr(self, key), allowed)
        allowed = f"must be 0 with query_factors = {self.query_factors}, or set query_factors = 0"
        fits = not (self.query_factors and self.query_rank)
        require(fits, "query_rank", self.query_rank, allowed)

    @property
    def title(self) -> str:
        return f"TPA, ranks {self.key_rank} and {self.value_rank}"

    def entry(self) -> dict[str, Field]:
        N, R, Rv = self.num_heads, self.key_rank, self.value_rank
        return dict(
            key_head=Field("N R", (N, R)),
            value_head=Field("N R", (N, Rv)),
            key_factor=Field("R H", (R, self.key_dim)),
            value_factor=Field("R H", (Rv, self.value_dim)),
        )

    @property
    def extra_flops(self) -> int:
        keys = (self.query_factors + self.key_rank) * self.key_dim
        return 2 * self.num_heads * (keys + self.value_rank * self.value_dim)

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        ranks = dict(N=self.num_heads, R=self.key_rank, Rv=self.value_rank)
        flops = TensorProductSizes(**ranks, H=self.key_dim, Hv=self.value_dim).flops()
        new_token = 2 * self.num_heads * self.query_factors * self.key_dim
        if self.qk_norm != "none":  # expands the new token's keys for their 1/rms
            new_token += self.num_heads * self.key_dim * (2 * self.key_rank + 3)
        return DecodeFlops(flops.per_query + new_token, flops.per_key)

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "TPA":
        return TPA(self, d_model, rngs=rngs)


class TPA(Mechanism):
    """Projections to head factors and channel factors of queries, keys and values."""

    packable = (
        "key_head",
        "key_factor",
        "value_head",
        "value_factor",
        "query",
        "query_head",
        "query_factor",
        "query_down",
    )

    def __init__(self, config: TPAConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config

        def factors(R: int, H: int):
            sizes = dict(D=d_model, N=c.num_heads, R=R, H=H)
            return weight("D -> N R", rngs, **sizes), weight("D -> R H", rngs, **sizes)

        if c.query_factors:
            self.query_head, self.query_factor = factors(c.query_factors, c.key_dim)
        else:
            sizes = dict(D=d_model, N=c.num_heads, H=c.key_dim)
            self.query = self.query_weight("N H", d_model, rngs=rngs, **sizes)
        self.key_head, self.key_factor = factors(c.key_rank, c.key_dim)
        self.value_head, self.value_factor = factors(c.value_rank, c.value_dim)
        self.query_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.key_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.add_query_latent(d_model, rngs=rngs)

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        c = self.config
        if c.query_factors:
            factors = (self.product(x_BTD, name) for name in ("query_head", "query_factor"))
            q_BTNH = _product(*factors) / c.query_factors
        else:
            q_BTNH = self.product(self.query_input(x_BTD), "query")
        raw = {name: self.product(x_BTD, name) for name in c.entry()}
        raw["key_head"] = raw["key_head"] / c.key_rank
        raw["value_head"] = raw["value_head"] / c.value_rank
        return normalise_and_rotate(q_BTNH, self.query_norm, positions.rotary), raw

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTNH = _product(raw["key_head"], raw["key_factor"])
        k_BTNH = normalise_and_rotate(k_BTNH, self.key_norm, positions.rotary)
        return k_BTNH, _product(raw["value_head"], raw["value_factor"])

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        """Returns head factors times each key's 1/rms, and rotated channel factors."""
        c, entry = self.config, dict(raw)
        head_BTNR, factor_BTRH = raw["key_head"], raw["key_factor"]
        if c.qk_norm != "none":
            scale_BTN1 = inverse_rms(_product(head_BTNR, factor_BTRH), c.norm_epsilon)
            entry["key_head"] = (head_BTNR * scale_BTN1).astype(head_BTNR.dtype)
        factor_BTRH = times_gain(factor_BTRH, gain_of(self.key_norm))
        entry["key_factor"] = normalise_and_rotate(factor_BTRH, None, positions.rotary)
        return entry

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        return cache_layouts.TensorProductInputs(query=q_BTNH, scale=self.config.scale)


def _product(head_BTNR: jax.Array, factor_BTRH: jax.Array) -> jax.Array:
    """Returns the sum of R outer products, [B, T, N, H]."""
    return jnp.einsum("BTNR,BTRH->BTNH", head_BTNR, factor_BTRH)
