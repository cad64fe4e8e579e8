"""Multi-head latent attention (MLA), in two versions.

`mla` (DeepSeek-V2): a normed latent shared by all heads, and one decoupled RoPE key. Keys and
values are linear in the cached entry, so decoding absorbs their weights into query and output.

`mla_paper` (LRKV section 5, no RoPE key mentioned): keys rebuilt per head from the latent, then
normed and rotated. The latent alone is cached; decoding rebuilds, so it is compute-bound.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import check_common
from kvjax.attention.mechanism import gain_of
from kvjax.attention.mechanism import head_norm
from kvjax.attention.mechanism import normalise_and_rotate
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import readings
from kvjax.kernels.decode_attention.readings import DecodeFlops
from kvjax.kernels.decode_attention.readings.latent import LatentSizes
from kvjax.kernels.decode_attention.readings.rebuilt import RebuiltSizes
from kvjax.layers.norm import Norm
from kvjax.layers.rope import Base
from kvjax.layers.rope import Positions
from kvjax.layers.weight import linear
from kvjax.layers.weight import weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class RebuiltLatentConfig:
    """`mla_paper`: C cached elements per token and layer."""

    num_heads: int  # query heads, N
    latent_dim: int  # channels of the latent, C
    key_dim: int  # channels of a key, H
    value_dim: int  # channels of a value, Hv
    qk_norm: str = "rms"  # norm of queries and keys: "rms", "rms_gain" or "none"
    bias: bool = False  # on the output only
    norm_epsilon: float = 1e-6  # epsilon of the norms

    def __post_init__(self):
        check_common(self, "latent_dim", "key_dim", "value_dim")

    @property
    def rope_dim(self) -> int:
        return self.key_dim

    @property
    def query_dim(self) -> int:
        return self.key_dim

    @property
    def key_heads(self) -> int:
        return self.num_heads

    @property
    def scale(self) -> float:
        return self.query_dim**-0.5

    def entry(self) -> dict[str, Field]:
        return {"latent": Field("C", (self.latent_dim,))}

    needs_angles = False

    @property
    def absorbed(self) -> tuple[str, ...]:
        return ("up_key", "up_value")

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        """Every head's key is rebuilt from the latent, for every cached token."""
        shape = dict(N=self.num_heads, C=self.latent_dim, H=self.key_dim, Hv=self.value_dim)
        return RebuiltSizes(**shape, rope_base=rope_base, normed=self.qk_norm != "none").flops()

    @property
    def output_bias(self) -> bool:
        return self.bias

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

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        q_BTNH = linear(x_BTD, self.query[...])
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, positions.rotary)
        return q_BTNH, {"latent": linear(x_BTD, self.down[...])}

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTNH = linear(raw["latent"], self.up_key[...])
        k_BTNH = normalise_and_rotate(k_BTNH, self.key_norm, positions.rotary)
        return k_BTNH, linear(raw["latent"], self.up_value[...])

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        return {"latent": raw["latent"]}

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> readings.Reading:
        c = self.config
        return readings.RebuiltReading(
            query=q_BTNH,
            up_key=self.up_key[...],
            up_value=self.up_value[...],
            gain=gain_of(self.key_norm),
            scale=c.scale,
            rope_base=rope_base,
            norm_epsilon=None if self.key_norm is None else c.norm_epsilon,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """`mla`: C + P cached elements per token and layer."""

    num_heads: int  # query heads, N
    latent_dim: int  # channels of the latent, C
    rope_key_dim: int  # P, one rotated key for all heads
    key_dim: int  # channels of a key that come from the latent, H
    value_dim: int  # channels of a value, Hv
    qk_norm: str = "rms"  # norm of query and RoPE key; the latent is always normed
    bias: bool = False  # on the output only
    norm_epsilon: float = 1e-6  # epsilon of the norms

    def __post_init__(self):
        check_common(self, "latent_dim", "rope_key_dim", "key_dim", "value_dim")

    @property
    def rope_dim(self) -> int:
        return self.rope_key_dim

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rope_key_dim

    @property
    def key_heads(self) -> int:
        return self.num_heads

    @property
    def scale(self) -> float:
        return self.query_dim**-0.5

    def entry(self) -> dict[str, Field]:
        return {
            "latent": Field("C", (self.latent_dim,)),
            "rope_key": Field("P", (self.rope_key_dim,)),
        }

    needs_angles = False

    @property
    def absorbed(self) -> tuple[str, ...]:
        return ("up_key", "up_value")

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        del rope_base  # the rotated key is cached
        N, C = self.num_heads, self.latent_dim
        flops = LatentSizes(N=N, C=C, P=self.rope_key_dim, Hv=self.value_dim).flops()
        fold = 2 * N * C * self.key_dim  # the content query times up_key
        return DecodeFlops(flops.per_query + fold, flops.per_key)

    @property
    def output_bias(self) -> bool:
        return self.bias

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

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        q_BTNH = linear(x_BTD, self.query[...])
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, None)
        q_BTNP = linear(x_BTD, self.rope_query[...])
        q_BTNP = normalise_and_rotate(q_BTNP, self.rope_query_norm, positions.rotary)
        k_BT1P = linear(x_BTD, self.rope_key[...])[:, :, None]
        raw = {
            "latent": self.latent_norm(linear(x_BTD, self.down[...])),
            "rope_key": normalise_and_rotate(k_BT1P, self.rope_key_norm, positions.rotary)[:, :, 0],
        }
        return jnp.concatenate([q_BTNH, q_BTNP], axis=-1), raw

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTNH = linear(raw["latent"], self.up_key[...])
        k_BT1P = raw["rope_key"][:, :, None]
        k_BTNP = jnp.broadcast_to(k_BT1P, k_BTNH.shape[:3] + k_BT1P.shape[3:])
        v_BTNH = linear(raw["latent"], self.up_value[...])
        return jnp.concatenate([k_BTNH, k_BTNP], axis=-1), v_BTNH

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        return dict(raw)

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> readings.Reading:
        """The content query times up_key meets the latent itself (DeepSeek-V2, section 2.1)."""
        del rope_base  # the rotated key is cached
        q_BTNH, q_BTNP = jnp.split(q_BTNH, [self.config.key_dim], axis=-1)
        wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        fold = functools.partial(jnp.einsum, "BTNH,CNH->BTNC", preferred_element_type=wide)
        return readings.LatentReading(
            query=fold(q_BTNH, self.up_key[...]),
            rope_query=q_BTNP,
            up_value=self.up_value[...],
            scale=self.config.scale,
        )
