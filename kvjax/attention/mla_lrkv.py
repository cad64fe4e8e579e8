"""LRKV over MLA: a latent shared by all heads as the base, plus a low-rank residual per head.

    k_n = [c W_n^UK + m_n^K B_n^K, r]      v_n = c W_n^UV + m_n^V B_n^V

with c and r as in `mla.py` and residual latents m_n = x U_n of rank R (LRKV eq. 2, `grouped.py`),
which bypass the latent's bottleneck. LRKV's section 5 names the combination as future work
("hybridized with MLA for extreme memory constraints") without equations; these are ours.
Cache: C + P + 2·N·R elements. Decoding rebuilds no key, since residuals are not rotated:
2N(2C + P) + 4NR FLOPs per cached token. Rank 0 is the same model as `mla`.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import check_residual
from kvjax.attention.mla import MLA, MLAConfig
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.latent_residual import LatentResidualSizes
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLALRKVConfig(MLAConfig):
    """Sizes N, C, P, R, H and Hv."""

    rank: int  # rank of the residuals, R; 0: MLA
    residual_init: str = "linear"  # initial B: "linear" like every matrix, or "zeros" (as MLA)

    def __post_init__(self):
        super().__post_init__()
        check_residual(self, "MLA", ("linear", "zeros"))

    @property
    def title(self) -> str:
        return f"LRKV over a latent of {self.latent_dim}, rank {self.rank}"

    def entry(self) -> dict[str, Field]:
        if not self.rank:
            return super().entry()
        residual = Field("N R", (self.num_heads, self.rank))
        return super().entry() | {"residual_key": residual, "residual_value": residual}

    @property
    def absorbed(self) -> tuple[str, ...]:
        return super().absorbed + (("expand_key", "expand_value") if self.rank else ())

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        if not self.rank:
            return super().decode_flops(rope_base)
        shape = dict(N=self.num_heads, C=self.latent_dim, P=self.rope_key_dim, R=self.rank)
        return LatentResidualSizes(**shape, H=self.key_dim, Hv=self.value_dim).flops()

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "MLALRKV":
        return MLALRKV(self, d_model, rngs=rngs)


class MLALRKV(MLA):
    """MLA with a low-rank residual per head, computed from the input."""

    packable = (*MLA.packable, "latent_key", "latent_value")

    def __init__(self, config: MLALRKVConfig, d_model: int, *, rngs: nnx.Rngs):
        super().__init__(config, d_model, rngs=rngs)
        if config.rank:  # drawn last, so that models of equal seed share all other weights
            sizes = dict(D=d_model, N=config.num_heads, R=config.rank, H=config.key_dim)
            expand = dict(init=config.residual_init, rngs=rngs)
            self.latent_key = weight("D -> N R", rngs, **sizes)  # U
            self.latent_value = weight("D -> N R", rngs, **sizes)
            self.expand_key = weight("N: R -> H", **expand, **sizes)  # B, transposed
            self.expand_value = weight("N: R -> H", **expand, **sizes | dict(H=config.value_dim))

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        q_BTNH, raw = super().project(x_BTD, positions)
        if self.config.rank:
            raw["residual_key"] = self.product(x_BTD, "latent_key")
            raw["residual_value"] = self.product(x_BTD, "latent_value")
        return q_BTNH, raw

    def expand_latent(self, raw: dict) -> tuple[jax.Array, jax.Array]:
        k_BTNH, v_BTNH = super().expand_latent(raw)
        if not self.config.rank:
            return k_BTNH, v_BTNH
        k_BTNH += jnp.einsum("BTNR,NRH->BTNH", raw["residual_key"], self.expand_key[...])
        v_BTNH += jnp.einsum("BTNR,NRH->BTNH", raw["residual_value"], self.expand_value[...])
        return k_BTNH, v_BTNH

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        """Returns MLA's inputs, and the content query carried to rank space (LRKV eq. 3)."""
        mla = super().decode_inputs(q_BTNH, rope_base)
        if not self.config.rank:
            return mla
        wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        q_BTNH = q_BTNH[..., : self.config.key_dim]
        return cache_layouts.LatentResidualInputs(
            query=mla.query,
            rope_query=mla.rope_query,
            residual_query=jnp.einsum(
                "BTNH,NRH->BTNR", q_BTNH, self.expand_key[...], preferred_element_type=wide
            ),
            up_value=mla.up_value[0],
            expand_value=self.expand_value[...],
            scale=mla.scale,
        )
