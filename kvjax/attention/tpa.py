"""Tensor product attention (TPA, arXiv 2501.06425, equations 3.1 to 3.6).

    k_n = 1/R sum_r a_nr Rot(b_r)        v_n = 1/R' sum_r c_nr d_r        a, b, c, d linear in x

with N heads, ranks R and R' of keys and values, and queries likewise of rank R_Q or, in the paper's
"KV-only", dense. Cache: a, b (rotated), c and d, (R + R')·N + R·H + R'·Hv elements. RoPE commutes
with the sum over r, and the norm of key n is folded into a_n. Variants: head factors a and c that
are the same for all tokens, channel factors b and d that are, and value factors that are the key's.
"""

import dataclasses
import math

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
)
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops
from kvjax.kernels.decode_attention.cache_layouts.tensor_product import TensorProductSizes
from kvjax.layers.norm import inverse_rms
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import linear, weight

FIXED = ("none", "heads", "channels")
FACTOR_INITS = ("linear", "xavier")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPAConfig(MechanismConfig):
    """N, the three ranks, H and Hv."""

    query_factors: int  # products of a query, R_Q; 0: queries are dense ("KV-only")
    key_rank: int  # products of a key, R
    value_rank: int  # products of a value, R'
    key_dim: int  # channels of a key, H
    value_dim: int  # channels of a value, Hv
    fixed: str = "none"  # factors of keys and values that no token changes: "heads", "channels"
    shared_factors: bool = False  # channel factors of values are those of keys, before RoPE
    # How factors start: "linear" like every matrix, or normal with "xavier"'s deviation in the
    # authors' code, where fans are those of a matrix in three dimensions (and draws uniform).
    factor_init: str = "linear"

    def __post_init__(self):
        check_common(self, "key_rank", "value_rank", "value_dim")
        dense = " (0: dense queries)"
        for key, dim, least, more in (
            ("query_factors", "key_dim", 0, dense),
            ("key_rank", "key_dim", 1, ""),
            ("value_rank", "value_dim", 1, ""),
        ):
            channels = getattr(self, dim)
            most = max(self.num_heads, channels)  # of a matrix of heads and channels
            of = f"more products hold nothing more of {self.num_heads} heads and {dim} = {channels}"
            allowed = f"must lie in [{least}, {most}]{more}: {of}"
            require(least <= getattr(self, key) <= most, key, getattr(self, key), allowed)
        allowed = "must be 0 where queries are sums of products (query_factors)"
        both = self.query_factors and self.query_rank
        require(not both, "query_rank", self.query_rank, allowed)
        for key, choices in (("fixed", FIXED), ("factor_init", FACTOR_INITS)):
            value = getattr(self, key)
            require(value in choices, key, repr(value), f"must be one of {choices}")
        fits = self.fixed == "none" or self.factor_init == "linear"
        allowed = f"must be 'linear' where fixed = {self.fixed!r}: its fans have no input"
        require(fits, "factor_init", repr(self.factor_init), allowed)
        if self.shared_factors:
            of = lambda rank, dim: f"{rank} of {dim} channels"
            keys, values = (self.key_rank, self.key_dim), (self.value_rank, self.value_dim)
            allowed = f"needs as many factors of values ({of(*values)}) as of keys ({of(*keys)})"
            require(keys == values, "shared_factors", True, allowed)
            allowed = "needs factors that tokens have (fixed = 'channels' has none)"
            require(self.fixed != "channels", "shared_factors", True, allowed)

    @property
    def title(self) -> str:
        return f"TPA, ranks {self.key_rank} and {self.value_rank}"

    @property
    def reads_factors(self) -> bool:
        """Whether gain and RoPE come when key factors are read: no token has its own, or values
        share them."""
        return self.shared_factors or self.fixed == "channels"

    @property
    def scales_keys(self) -> bool:
        """Whether a key's norm is cached by itself: head factors that are fixed cannot hold it."""
        return self.fixed == "heads" and self.qk_norm != "none"

    def entry(self) -> dict[str, Field]:
        N, R, Rv = self.num_heads, self.key_rank, self.value_rank
        fields = {}
        if self.fixed != "heads":
            fields |= dict(key_head=Field("N R", (N, R)), value_head=Field("N R", (N, Rv)))
        if self.fixed != "channels":
            fields["key_factor"] = Field("R H", (R, self.key_dim))
            if not self.shared_factors:
                fields["value_factor"] = Field("R H", (Rv, self.value_dim))
        if self.scales_keys:
            fields["key_scale"] = Field("N 1", (N, 1), wide=True)
        return fields

    @property
    def extra_flops(self) -> int:
        keys = (self.query_factors + self.key_rank) * self.key_dim
        return 2 * self.num_heads * (keys + self.value_rank * self.value_dim)

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        normed, reads = self.qk_norm != "none", self.reads_factors
        sizes = TensorProductSizes(
            **dict(N=self.num_heads, R=self.key_rank, Rv=self.value_rank),
            **dict(H=self.key_dim, Hv=self.value_dim),
            fixed_channels=self.fixed == "channels",
            rotates=reads and rope_base is not None,
            scaled=self.scales_keys,
            gain=self.shared_factors and self.qk_norm == "rms_gain",
        )
        flops = sizes.flops()
        once = 2 * self.num_heads * self.query_factors * self.key_dim
        if normed:  # the new token's key is made, for its norm
            once += self.num_heads * self.key_dim * (2 * self.key_rank + 3)
        return DecodeFlops(flops.per_query + once, flops.per_key)

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "TPA":
        return TPA(self, d_model, rngs=rngs)


class TPA(Mechanism):
    """Factors by head and by channel, of queries, keys and values."""

    def __init__(self, config: TPAConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, H=c.key_dim)
        if c.query_factors:
            self.query_head, self.query_factor = self._factors(c.query_factors, rngs, **sizes)
        else:
            self.query = self.query_weight("N H", d_model, rngs=rngs, **sizes)
        fixed = dict(fixed=c.fixed)
        self.key_head, self.key_factor = self._factors(c.key_rank, rngs, **fixed, **sizes)
        sizes |= dict(H=c.value_dim)
        self.value_head, self.value_factor = self._factors(c.value_rank, rngs, **fixed, **sizes)
        if c.shared_factors:
            self.value_factor = None
        self.query_norm = head_norm(c.key_dim, c.qk_norm, epsilon=c.norm_epsilon, rngs=rngs)
        self.key_norm = head_norm(c.key_dim, c.qk_norm, epsilon=c.norm_epsilon, rngs=rngs)
        self.add_query_latent(d_model, rngs=rngs)

    def _factors(self, R: int, rngs: nnx.Rngs, *, fixed: str = "none", D: int, N: int, H: int):
        """The weights of R head factors and R channel factors.

        Fixed ones have no input: no matrices, they start as N(0, 1) and are AdamW's.
        """
        made = []
        # Xavier's fans are those of a view [D, ..] in three dimensions, as in the authors' code.
        kinds = (("heads", "N R", R * (N + D)), ("channels", "R H", H * (R + D)))
        for name, axes, fans in kinds:
            init = math.sqrt(2 / fans) if self.config.factor_init == "xavier" else "linear"
            text = axes if name == fixed else f"D -> {axes}"
            made.append(weight(text, rngs, init=init, D=D, N=N, R=R, H=H))
        return made

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        c = self.config
        if c.query_factors:
            factors = (linear(x_BTD, w[...]) for w in (self.query_head, self.query_factor))
            q_BTNH = _product(*factors) / c.query_factors
        else:
            q_BTNH = linear(self.query_input(x_BTD), self.query[...])
        raw = {}
        for name in c.entry().keys() - {"key_scale"}:
            raw[name] = self._mean(name, linear(x_BTD, getattr(self, name)[...]))
        return normalise_and_rotate(q_BTNH, self.query_norm, positions.rotary), raw

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTNH = normalise_and_rotate(self._whole_keys(raw), self.key_norm, positions.rotary)
        factor = "key_factor" if self.config.shared_factors else "value_factor"
        return k_BTNH, _product(self._part(raw, "value_head"), self._part(raw, factor))

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        """Factors; the norm of each key goes to its head factors, or stands beside fixed ones."""
        c, entry = self.config, dict(raw)
        if c.qk_norm != "none":
            scale_BTN1 = inverse_rms(self._whole_keys(raw), c.norm_epsilon)
            if c.scales_keys:
                entry["key_scale"] = scale_BTN1
            else:
                head_BTNR = raw["key_head"]
                entry["key_head"] = (head_BTNR * scale_BTN1).astype(head_BTNR.dtype)
        if not c.reads_factors:
            factor_BTRH, gain_H = raw["key_factor"], gain_of(self.key_norm)
            if gain_H is not None:
                factor_BTRH = factor_BTRH * gain_H[None, None, None]
            entry["key_factor"] = normalise_and_rotate(factor_BTRH, None, positions.rotary)
        return entry

    def decode_inputs(
        self, q_BTNH: jax.Array, rope_base: Base | None
    ) -> cache_layouts.DecodeInputs:
        c, gain_H = self.config, gain_of(self.key_norm)
        operands = {}
        if c.fixed == "heads":
            for name in ("key_head", "value_head"):
                operands[name] = self._mean(name, getattr(self, name)[...])
        if c.fixed == "channels":
            gain_1H = 1.0 if gain_H is None else gain_H[None]
            operands["key_factor"] = self.key_factor[...] * gain_1H
            operands["value_factor"] = self.value_factor[...]
        return cache_layouts.TensorProductInputs(
            query=q_BTNH,
            **operands,
            gain=gain_H if c.shared_factors else None,
            shares=c.shared_factors,
            scale=c.scale,
            rope_base=rope_base if c.reads_factors else None,
        )

    def _mean(self, name: str, factor: jax.Array) -> jax.Array:
        """A factor as it is used: that of heads holds the 1/R of the mean."""
        ranks = dict(key_head=self.config.key_rank, value_head=self.config.value_rank)
        return factor / ranks[name] if name in ranks else factor

    def _part(self, raw: dict, name: str) -> jax.Array:
        """[1 or B, 1 or T, ..]: factors of tokens, or fixed ones."""
        return raw[name] if name in raw else self._mean(name, getattr(self, name)[...][None, None])

    def _whole_keys(self, raw: dict) -> jax.Array:
        """[B, T, N, H] before norm and rotation."""
        return _product(self._part(raw, "key_head"), self._part(raw, "key_factor"))


def _product(head_BTNR: jax.Array, factor_BTRH: jax.Array) -> jax.Array:
    """[B, T, N, H]: the sum of R outer products."""
    B, T = (max(pair) for pair in zip(head_BTNR.shape[:2], factor_BTRH.shape[:2], strict=True))
    whole = lambda x: jnp.broadcast_to(x, (B, T, *x.shape[2:]))
    return jnp.einsum("BTNR,BTRH->BTNH", whole(head_BTNR), whole(factor_BTRH))
