"""Grouped latent attention (GLA; Zadouri, Strauss, Dao, arXiv 2505.21487, section 3).

    k_n = [c_j W_n^UK, r]      v_n = c_j W_n^UV      c_j = norm(x W_j^D),  r = Rot(norm(x W^KR))

MLA with J latents of C channels: head n reads latent j = n·J // N, and all heads read the rotated
key r of P channels. Cache: J·C + P elements. Decoding needs about 1/J of MLA's FLOPs per byte, and
with heads sharded over chips each chip stores only its own latents. J = 1 is the same model as
`mla`.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import check_divides
from kvjax.attention.mla import MLA, MLAConfig
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.layers.rope import Base


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLAConfig(MLAConfig):
    """Sizes N, J, C, P, H and Hv."""

    num_latents: int  # latents, J; divides num_heads
    latent_dim: int  # channels of each latent, C
    qk_norm: str = "rms"  # norm of query and RoPE key; latents are always normed, each separately

    def __post_init__(self):
        super().__post_init__()
        check_divides(self, "num_latents", "num_heads")

    @property
    def title(self) -> str:
        return f"GLA-{self.num_latents}, latents {self.latent_dim}"

    def entry(self) -> dict[str, Field]:
        latents = (self.num_latents, self.latent_dim)
        return super().entry() | {"latent": Field("J C", latents)}

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "GLA":
        return GLA(self, d_model, rngs=rngs)


class GLA(MLA):
    """Content keys and values from the latent of the head's group, position from one shared key."""

    latents = "J"

    def expand_latent(self, raw: dict) -> tuple[jax.Array, jax.Array]:
        return _expand(raw["latent"], self.up_key), _expand(raw["latent"], self.up_value)

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        """Absorbs up_key into the content query, whose product with a latent is then the logit."""
        del rope_base  # the cached key is already rotated
        q_BTNH, q_BTNP = jnp.split(q_BTNH, [self.config.key_dim], axis=-1)
        up_JCnH = _flatten_latents(self.up_key)
        B, T, N, H = q_BTNH.shape
        q_BTJnH = q_BTNH.reshape(B, T, up_JCnH.shape[0], -1, H)
        wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        query = jnp.einsum("BTJnH,JCnH->BTJnC", q_BTJnH, up_JCnH, preferred_element_type=wide)
        return cache_layouts.LatentInputs(
            query=query.reshape(B, T, N, -1),
            rope_query=q_BTNP,
            up_value=_flatten_latents(self.up_value),
            scale=self.config.scale,
        )


def _expand(latent_BTJC: jax.Array, up: nnx.Param) -> jax.Array:
    """Expands latents to all query heads, [B, T, N, H]."""
    up_JCnH = _flatten_latents(up)
    latent_BTJC = latent_BTJC.reshape(*latent_BTJC.shape[:2], *up_JCnH.shape[:2])
    x_BTJnH = jnp.einsum("BTJC,JCnH->BTJnH", latent_BTJC, up_JCnH)
    return x_BTJnH.reshape(*x_BTJnH.shape[:2], -1, x_BTJnH.shape[-1])


def _flatten_latents(up: nnx.Param) -> jax.Array:
    """Reshapes [J, C, n, H] or [G, J, C, n, H] to [latents, C, n, H]; n heads read each latent."""
    return up[...].reshape(-1, *up.shape[-3:])
