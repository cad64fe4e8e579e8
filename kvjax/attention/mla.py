"""Multi-head latent attention, twice.

`mla` (DeepSeek-V2): a normed latent shared by all heads, and one decoupled RoPE key. Keys and
values are linear in the cached entry, so decoding absorbs their weights into query and output.

`mla_paper` (LRKV section 5, no RoPE key mentioned): keys rebuilt per head from the latent, then
normed and rotated. The latent alone is cached; decoding rebuilds, so it is compute-bound.
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
from kvjax.layers.norm import Norm
from kvjax.layers.rope import Rotary
from kvjax.layers.weight import linear
from kvjax.layers.weight import weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class RebuiltLatentConfig:
    """`mla_paper`: C cached elements per token and layer."""

    num_heads: int  # N
    latent_dim: int  # C
    key_dim: int  # H
    value_dim: int  # Hv
    qk_norm: str = "rms"
    bias: bool = False  # on the output only
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        check_common(self)
        for key in ("latent_dim", "key_dim", "value_dim"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")

    @property
    def rope_dim(self) -> int:
        return self.key_dim

    @property
    def query_dim(self) -> int:
        return self.key_dim

    def entry(self) -> dict[str, Field]:
        return {"latent": Field((self.latent_dim,))}

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "RebuiltLatent":
        return RebuiltLatent(self, d_model, rngs=rngs)


class RebuiltLatent(nnx.Module):
    """`mla_paper`: W_K,h = W_down W_up,h (LRKV Table 1)."""

    def __init__(self, config: RebuiltLatentConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, C=c.latent_dim, H=c.key_dim)
        self.query = weight("D -> N H", rngs, **sizes)
        self.query_norm = head_norm(c.key_dim, c.qk_norm, epsilon=c.norm_epsilon, rngs=rngs)
        self.key_norm = head_norm(c.key_dim, c.qk_norm, epsilon=c.norm_epsilon, rngs=rngs)
        self.down = weight("D -> C", rngs, **sizes)
        self.up_key = weight("C -> N H", rngs, **sizes)
        self.up_value = weight("C -> N H", rngs, **sizes | dict(H=c.value_dim))

    def project(self, x_BTD: jax.Array, rotary: Rotary | None) -> tuple[jax.Array, dict]:
        q_BTNH = linear(x_BTD, self.query[...])
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, rotary)
        return q_BTNH, {"latent": linear(x_BTD, self.down[...])}

    def keys_values(self, raw: dict, rotary: Rotary | None) -> tuple[jax.Array, jax.Array]:
        k_BTNH = linear(raw["latent"], self.up_key[...])
        k_BTNH = normalise_and_rotate(k_BTNH, self.key_norm, rotary)
        return k_BTNH, linear(raw["latent"], self.up_value[...])

    def encode(self, raw: dict, rotary: Rotary | None) -> dict[str, jax.Array]:
        return {"latent": raw["latent"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """`mla`: C + P cached elements per token and layer."""

    num_heads: int  # N
    latent_dim: int  # C
    rope_key_dim: int  # P, one rotated key for all heads
    key_dim: int  # H of the part of a key that comes from the latent
    value_dim: int  # Hv
    qk_norm: str = "rms"  # of the query and of the RoPE key; the latent is always normed
    bias: bool = False  # on the output only
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        check_common(self)
        for key in ("latent_dim", "rope_key_dim", "key_dim", "value_dim"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")

    @property
    def rope_dim(self) -> int:
        return self.rope_key_dim

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rope_key_dim

    def entry(self) -> dict[str, Field]:
        return {"latent": Field((self.latent_dim,)), "rope_key": Field((self.rope_key_dim,))}

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Latent":
        return Latent(self, d_model, rngs=rngs)


class Latent(nnx.Module):
    """`mla`: content keys and values from a normed latent, position from one shared key."""

    def __init__(self, config: LatentConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        sizes = dict(D=d_model, N=c.num_heads, C=c.latent_dim, H=c.key_dim, P=c.rope_key_dim)
        self.query = weight("D -> N H", rngs, **sizes)
        self.down = weight("D -> C", rngs, **sizes)
        self.up_key = weight("C -> N H", rngs, **sizes)
        self.up_value = weight("C -> N H", rngs, **sizes | dict(H=c.value_dim))
        self.rope_query = weight("D -> N P", rngs, **sizes)
        self.rope_key = weight("D -> P", rngs, **sizes)
        norm = dict(epsilon=c.norm_epsilon, rngs=rngs)
        gain = c.qk_norm == "rms_gain"
        self.latent_norm = Norm(c.latent_dim, kind="rms", gain=gain, bias=False, axis="C", **norm)
        self.query_norm = head_norm(c.key_dim, c.qk_norm, **norm)
        self.rope_query_norm = head_norm(c.rope_key_dim, c.qk_norm, **norm)
        self.rope_key_norm = head_norm(c.rope_key_dim, c.qk_norm, **norm)

    def project(self, x_BTD: jax.Array, rotary: Rotary | None) -> tuple[jax.Array, dict]:
        q_BTNH = linear(x_BTD, self.query[...])
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, None)
        q_BTNP = linear(x_BTD, self.rope_query[...])
        q_BTNP = normalise_and_rotate(q_BTNP, self.rope_query_norm, rotary)
        k_BT1P = linear(x_BTD, self.rope_key[...])[:, :, None]
        raw = {
            "latent": self.latent_norm(linear(x_BTD, self.down[...])),
            "rope_key": normalise_and_rotate(k_BT1P, self.rope_key_norm, rotary)[:, :, 0],
        }
        return jnp.concatenate([q_BTNH, q_BTNP], axis=-1), raw

    def keys_values(self, raw: dict, rotary: Rotary | None) -> tuple[jax.Array, jax.Array]:
        k_BTNH = linear(raw["latent"], self.up_key[...])
        k_BT1P = raw["rope_key"][:, :, None]
        k_BTNP = jnp.broadcast_to(k_BT1P, k_BTNH.shape[:3] + k_BT1P.shape[3:])
        v_BTNH = linear(raw["latent"], self.up_value[...])
        return jnp.concatenate([k_BTNH, k_BTNP], axis=-1), v_BTNH

    def encode(self, raw: dict, rotary: Rotary | None) -> dict[str, jax.Array]:
        return dict(raw)
