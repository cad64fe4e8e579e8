"""A latent that serves as key and value, and low-rank residuals per head: LRKV over MLA's latent.

Residuals are not rotated, so queries are absorbed into rank space (LRKV eq. 3 and 4).
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.cache_layouts import tiles
from kvjax.kernels.decode_attention.cache_layouts.latent import (
    LatentInputs,
    LatentSizes,
    LatentTiles,
)
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    Cache,
    DecodeFlops,
    DecodeInputs,
    Tiles,
    pytree,
    static,
)


@pytree
class LatentResidualInputs(DecodeInputs):
    """key = [latent, rope_key, residual_key], value = latent up_value + residual expand_value.

    cache: latent [B, C, S], rope_key [B, P, S], residual_key and residual_value [B, N, R, S].
    """

    query: jax.Array  # [B, T, N, C]: the content query times up_key
    rope_query: jax.Array  # [B, T, N, P]
    residual_query: jax.Array  # [B, T, N, R]: the content query times expand_key
    up_value: jax.Array  # [C, N, Hv]
    expand_value: jax.Array  # [N, R, Hv]
    scale: float = static()

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, k, v = self.latent_inputs().expand(cache)
        shared = jnp.broadcast_to(k, (*k.shape[:2], query.shape[2], k.shape[3]))
        k = jnp.concatenate([shared, cache["residual_key"]], axis=-1)
        residual = jnp.einsum("BSNR,NRV->BSNV", cache["residual_value"], self.expand_value)
        return jnp.concatenate([query, self.residual_query], axis=-1), k, v + residual

    def tiles(self) -> "_Tiles":
        return _Tiles(self)

    def latent_inputs(self) -> LatentInputs:
        """Returns the inputs of attention to the latent and the rotated key, without residuals."""
        return LatentInputs(
            query=self.query,
            rope_query=self.rope_query,
            up_value=self.up_value[None],
            scale=self.scale,
        )


class _Tiles(Tiles):
    large_logits = False

    def __init__(self, inputs: LatentResidualInputs):
        self.latent = LatentTiles(inputs.latent_inputs())
        self.q_BNTR = jnp.moveaxis(inputs.residual_query, 2, 1)
        self.expand_NRV = inputs.expand_value

    def widths(self, cache: Cache) -> tuple[int, ...]:
        return (*self.latent.widths(cache), cache["residual_value"].shape[-2])

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        residual_BNTs = tiles.dot(self.q_BNTR, tile["residual_key"])
        return self.latent.logits(tile, start) + residual_BNTs

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        residual_BNTR = tiles.weighted_sum(p_BNTs, tile["residual_value"])
        return (*self.latent.weighted_sums(p_BNTs, tile), residual_BNTR)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        *latent, residual_BNTR = outputs
        residual_BNTV = jnp.einsum("BNTR,NRV->BNTV", residual_BNTR, self.expand_NRV)
        return self.latent.finish(tuple(latent)) + residual_BNTV


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentResidualSizes:
    """N query heads, a latent of C channels, a rotated key of P channels, residuals of rank R."""

    N: int
    C: int
    P: int
    R: int
    H: int  # channels of the content query, before up_key and expand_key are absorbed
    Hv: int

    def flops(self) -> DecodeFlops:
        N, R = self.N, self.R
        latent = LatentSizes(N=N, C=self.C, P=self.P, Hv=self.Hv, absorbed_channels=self.H).flops()
        per_query = latent.per_query + 2 * N * R * (self.H + self.Hv)
        return DecodeFlops(per_query, latent.per_key + 4 * N * R)
