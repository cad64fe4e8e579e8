"""MHA, GQA, MQA, LRKV and LRKV x GQA: one family.

    K_k = Base^K[j(k)] + R^K_k B^K_k        V_k = Base^V[j(k)] + R^V_k B^V_k        # LRKV eq. 2

with N query heads reading K KV heads reading J bases, and R^K = X U^K of rank R (B is stored
transposed, [R, H]). J = K and rank 0 is MHA (K = N), GQA or MQA (K = 1); J = 1 and K = N with
rank R is LRKV.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import Field
from kvjax.attention.mechanism import check_common
from kvjax.attention.mechanism import head_norm
from kvjax.attention.mechanism import normalise_and_rotate
from kvjax.attention.mechanism import require
from kvjax.layers.norm import inverse_rms
from kvjax.layers.rope import Rotary
from kvjax.layers.rope import rotate
from kvjax.layers.weight import linear
from kvjax.layers.weight import weight

RESIDUAL_INITS = ("linear", "zeros")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """N, K, J, R, H and Hv of the family."""

    num_heads: int  # N
    num_kv_heads: int  # K, divides N
    num_bases: int  # J, divides K
    rank: int  # R; 0: KV heads of a base are equal, and are computed once
    key_dim: int  # H
    value_dim: int  # Hv
    qk_norm: str = "rms"
    bias: bool = False  # on queries, bases and the output
    residual_init: str = "linear"  # of B: "linear" like every matrix, or "zeros" (starts as MQA)
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        check_common(self)
        for key in ("num_kv_heads", "num_bases", "key_dim", "value_dim"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"must divide num_heads = {self.num_heads}",
        )
        require(
            self.num_kv_heads % self.num_bases == 0,
            "num_bases",
            self.num_bases,
            f"must divide num_kv_heads = {self.num_kv_heads}",
        )
        smaller = min(self.key_dim, self.value_dim)
        require(
            0 <= self.rank <= smaller,
            "rank",
            self.rank,
            f"must lie in [0, {smaller}], the smaller head dim (0 is MQA)",
        )
        require(
            self.residual_init in RESIDUAL_INITS,
            "residual_init",
            repr(self.residual_init),
            f"must be one of {RESIDUAL_INITS}",
        )

    @property
    def rope_dim(self) -> int:
        return self.key_dim

    @property
    def query_dim(self) -> int:
        return self.key_dim

    def entry(self) -> dict[str, Field]:
        fields = {
            "base_key": Field((self.num_bases, self.key_dim)),
            "base_value": Field((self.num_bases, self.value_dim)),
        }
        if self.rank:  # LRKV eq. 5: 2(H + N·R) elements per token
            fields["residual_key"] = Field((self.num_kv_heads, self.rank))
            fields["residual_value"] = Field((self.num_kv_heads, self.rank))
            if self.qk_norm != "none":
                fields["key_scale"] = Field((self.num_kv_heads,), jnp.dtype(jnp.float32))
        return fields

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Grouped":
        return Grouped(self, d_model, rngs=rngs)


class Grouped(nnx.Module):
    """The family's weights and its three projections."""

    def __init__(self, config: GroupedConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(
            D=d_model, N=c.num_heads, K=c.num_kv_heads, J=c.num_bases, R=c.rank, H=c.key_dim
        )
        value_sizes = sizes | dict(H=c.value_dim)
        self.query = weight("D -> N H", rngs, **sizes)
        self.base_key = weight("D -> J H", rngs, **sizes)  # LRKV eq. 1: W_shared
        self.base_value = weight("D -> J H", rngs, **value_sizes)
        bias = lambda axes, sizes: weight(axes, rngs, init="zeros", **sizes) if c.bias else None
        self.query_bias = bias("N H", sizes)
        self.base_key_bias = bias("J H", sizes)
        self.base_value_bias = bias("J H", value_sizes)
        self.query_norm = head_norm(c.key_dim, c.qk_norm, epsilon=c.norm_epsilon, rngs=rngs)
        self.key_norm = head_norm(c.key_dim, c.qk_norm, epsilon=c.norm_epsilon, rngs=rngs)
        # Drawn last, so that models of equal seed share every weight they have in common.
        if c.rank:
            expand = dict(init=c.residual_init)
            self.latent_key = weight("D -> K R", rngs, **sizes)  # LRKV eq. 1: U
            self.latent_value = weight("D -> K R", rngs, **sizes)
            self.expand_key = weight("K: R -> H", rngs, **expand, **sizes)  # B, transposed
            self.expand_value = weight("K: R -> H", rngs, **expand, **value_sizes)

    def project(self, x_BTD: jax.Array, rotary: Rotary | None) -> tuple[jax.Array, dict]:
        q_BTNH = _affine(x_BTD, self.query, self.query_bias)
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, rotary)
        raw = {
            "base_key": _affine(x_BTD, self.base_key, self.base_key_bias),
            "base_value": _affine(x_BTD, self.base_value, self.base_value_bias),
        }
        if self.config.rank:
            raw["residual_key"] = linear(x_BTD, self.latent_key[...])
            raw["residual_value"] = linear(x_BTD, self.latent_value[...])
        return q_BTNH, raw

    def keys_values(self, raw: dict, rotary: Rotary | None) -> tuple[jax.Array, jax.Array]:
        k_BTKH = normalise_and_rotate(self._whole_keys(raw), self.key_norm, rotary)
        v_BTKH = raw["base_value"]
        if self.config.rank:
            v_BTKH = _add_residual(v_BTKH, raw["residual_value"], self.expand_value)
        return k_BTKH, v_BTKH

    def encode(self, raw: dict, rotary: Rotary | None) -> dict[str, jax.Array]:
        """The bases and latents of LRKV eq. 5; with rank 0 the keys and values themselves.

        With a residual, what is rotated ahead is the base (times the norm's gain); the norm of
        the whole key is one positive number per token and KV head, kept in float32.
        """
        if not self.config.rank:
            k_BTJH, v_BTJH = self.keys_values(raw, rotary)
            return {"base_key": k_BTJH, "base_value": v_BTJH}
        entry = dict(raw)
        if self.key_norm is not None:
            scale_BTK1 = inverse_rms(self._whole_keys(raw), self.config.norm_epsilon)
            entry["key_scale"] = scale_BTK1[..., 0].astype(jnp.float32)
            if self.key_norm.gain is not None:
                entry["base_key"] = entry["base_key"] * self.key_norm.gain[...][None, None, None]
        if rotary is not None:
            entry["base_key"] = rotate(entry["base_key"], rotary)
        return entry

    def _whole_keys(self, raw: dict) -> jax.Array:
        """[B, T, K, H] keys before norm and rotation ([B, T, J, H] with rank 0)."""
        if not self.config.rank:
            return raw["base_key"]
        return _add_residual(raw["base_key"], raw["residual_key"], self.expand_key)


def _affine(x_BTD: jax.Array, w: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    y = linear(x_BTD, w[...])
    return y if bias is None else y + bias[...][None, None]


def _add_residual(base_BTJH: jax.Array, latent_BTKR: jax.Array, expand_KRH: nnx.Param) -> jax.Array:
    """[B, T, K, H]: each KV head's base plus its low-rank residual (LRKV eq. 2)."""
    residual_BTKH = jnp.einsum("BTKR,KRH->BTKH", latent_BTKR, expand_KRH[...])
    B, T, K, H = residual_BTKH.shape
    J = base_BTJH.shape[2]
    grouped = residual_BTKH.reshape(B, T, J, K // J, H)
    base = jnp.broadcast_to(base_BTJH[:, :, :, None], grouped.shape)
    return (base + grouped).reshape(B, T, K, H)
