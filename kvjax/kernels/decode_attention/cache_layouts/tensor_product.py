"""Keys and values that are sums of outer products: tensor product attention."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.cache_layouts.layout import (
    Cache,
    DecodeFlops,
    DecodeInputs,
    Tiles,
    pytree,
    static,
)


@pytree
class TensorProductInputs(DecodeInputs):
    """key = sum_r key_head[r] key_factor[r], value = sum_r value_head[r] value_factor[r].

    cache: key_head [B, N, R, S], key_factor [B, R, H, S], value_head [B, N, R', S], value_factor
    [B, R', Hv, S].
    """

    query: jax.Array  # [B, T, N, H]
    scale: float = static()

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        k = jnp.einsum("BSNR,BSRH->BSNH", cache["key_head"], cache["key_factor"])
        v = jnp.einsum("BSNR,BSRH->BSNH", cache["value_head"], cache["value_factor"])
        return self.query, k, v

    def tiles(self) -> "_Tiles":
        return _Tiles(self)


class _Tiles(Tiles):
    large_logits = True  # logits of all ranks are as large as a tile

    def __init__(self, inputs: TensorProductInputs):
        self.q_BNTH = jnp.moveaxis(inputs.query, 2, 1)

    def widths(self, cache: Cache) -> tuple[int, ...]:
        return (cache["value_factor"].shape[2],)

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        del start
        z_BNTRs = jnp.einsum("BNTH,BRHs->BNTRs", self.q_BNTH, tile["key_factor"])
        return jnp.sum(z_BNTRs * tile["key_head"][:, :, None], axis=3)

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        weights_BNTRs = p_BNTs[:, :, :, None] * tile["value_head"][:, :, None]
        return (jnp.einsum("BNTRs,BRVs->BNTV", weights_BNTRs, tile["value_factor"]),)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        return outputs[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorProductSizes:
    """N query heads, rank R of keys and Rv of values, key dim H, value dim Hv."""

    N: int
    R: int
    Rv: int
    H: int
    Hv: int

    def flops(self) -> DecodeFlops:
        keys = 2 * self.N * self.R * (self.H + 1)
        values = self.N * self.Rv * (1 + 2 * self.Hv)
        return DecodeFlops(0, keys + values)
