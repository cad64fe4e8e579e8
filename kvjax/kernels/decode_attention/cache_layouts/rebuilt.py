"""Keys rebuilt per head from a latent, normed and rotated: `mla_paper`."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.cache_layouts import tiles
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentTiles, expand_values
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    Cache,
    DecodeFlops,
    DecodeInputs,
    normed_and_rotated,
    pytree,
    static,
)
from kvjax.layers.rope import Base


@pytree
class RebuiltInputs(DecodeInputs):
    """key = Rot(norm(latent up_key)·gain), value = latent up_value; cache: latent [B, C, S]."""

    query: jax.Array  # [B, T, N, H]
    up_key: jax.Array  # [C, N, H]
    up_value: jax.Array  # [C, N, Hv]
    gain: jax.Array | None = None  # [H]
    scale: float = static()
    rope_base: Base | None = static()
    norm_epsilon: float | None = static()

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        k = normed_and_rotated(jnp.einsum("BSC,CNH->BSNH", cache["latent"], self.up_key), self)
        return self.query, k, jnp.einsum("BSC,CNV->BSNV", cache["latent"], self.up_value)

    def tiles(self) -> "_Tiles":
        return _Tiles(self)


class _Tiles(LatentTiles):
    large_logits = True

    def __init__(self, inputs: RebuiltInputs):
        self.inputs = inputs
        self.q_BNTH = jnp.moveaxis(inputs.query, 2, 1)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        return expand_values(outputs[0], self.inputs.up_value[None])

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        k_BNHs = jnp.einsum("BCs,CNH->BNHs", tile["latent"], self.inputs.up_key)
        return tiles.dot(self.q_BNTH, tiles.norm_and_rotate(k_BNHs, start, self.inputs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RebuiltSizes:
    """N query heads, a latent of C channels, keys of H channels and values of Hv."""

    N: int
    C: int
    H: int
    Hv: int
    rope_base: Base | None
    normed: bool

    def flops(self) -> DecodeFlops:
        N, C, H = self.N, self.C, self.H
        rotated_and_normed = 3 * N * H * ((self.rope_base is not None) + self.normed)
        return DecodeFlops(2 * N * C * self.Hv, 2 * N * (C * H + H + C) + rotated_and_normed)
