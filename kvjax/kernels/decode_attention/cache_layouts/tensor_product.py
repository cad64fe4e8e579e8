"""Keys and values that are sums of outer products: tensor product attention."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.cache_layouts import tiles
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    Cache,
    DecodeFlops,
    DecodeInputs,
    pytree,
    rotated,
    static,
)
from kvjax.layers.rope import Base


@pytree
class TensorProductInputs(DecodeInputs):
    """key = key_scale·sum_r key_head[r] Rot(gain·key_factor[r]), value likewise without these.

    cache: key_head [B, N, R, S], key_factor [B, R, H, S], value_head [B, N, R', S] and value_factor
    [B, R', Hv, S], but for those that are operands; key_scale [B, N, 1, S] where head factors are
    fixed and keys normed.
    """

    query: jax.Array  # [B, T, N, H]
    key_head: jax.Array | None = None  # [N, R], the same for all tokens
    value_head: jax.Array | None = None  # [N, R']
    key_factor: jax.Array | None = None  # [R, H]
    value_factor: jax.Array | None = None  # [R', Hv]
    gain: jax.Array | None = None  # [H], of factors that are cached without it
    shares: bool = static()  # value factors are the key's, before gain and rotation
    scale: float = static()
    rope_base: Base | None = static()  # of factors that are rotated when they are read

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        B, S = next(iter(cache.values())).shape[:2]

        def part(name: str) -> jax.Array:
            fixed = getattr(self, name)
            return cache[name] if fixed is None else jnp.broadcast_to(fixed, (B, S, *fixed.shape))

        product = lambda head, factor: jnp.einsum("BSNR,BSRH->BSNH", head, factor)
        key_factor = part("key_factor")
        value_factor = key_factor if self.shares else part("value_factor")
        if self.gain is not None:
            key_factor = key_factor * self.gain[None, None, None]
        if self.rope_base is not None:
            key_factor = rotated(key_factor, self.rope_base)
        k = product(part("key_head"), key_factor)
        if "key_scale" in cache:
            k = k * cache["key_scale"]
        return self.query, k, product(part("value_head"), value_factor)

    def tiles(self) -> "_Tiles":
        return _Tiles(self)


class _Tiles:
    expands = True  # logits of all ranks are as large as a tile

    def __init__(self, inputs: TensorProductInputs):
        self.inputs = inputs
        self.q_BNTH = jnp.moveaxis(inputs.query, 2, 1)

    def widths(self, cache: Cache) -> tuple[int, ...]:
        if self.inputs.value_factor is not None:  # what is weighed is the head factors
            return (self.inputs.value_factor.shape[0],)
        return (cache["key_factor" if self.inputs.shares else "value_factor"].shape[2],)

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        inputs = self.inputs
        s = next(iter(tile.values())).shape[-1]
        head_BNRs = _at_tokens(inputs.key_head, tile.get("key_head"), s)
        factor_BRHs = _at_tokens(inputs.key_factor, tile.get("key_factor"), s)
        if inputs.gain is not None:
            factor_BRHs = factor_BRHs * inputs.gain[None, None, :, None]
        if inputs.rope_base is not None:
            factor_BRHs = tiles.rotate(factor_BRHs, start, inputs.rope_base)
        B = max(head_BNRs.shape[0], factor_BRHs.shape[0])
        factor_BRHs = jnp.broadcast_to(factor_BRHs, (B, *factor_BRHs.shape[1:]))
        z_BNTRs = jnp.einsum("BNTH,BRHs->BNTRs", self.q_BNTH, factor_BRHs)
        head_BN1Rs = jnp.broadcast_to(head_BNRs, (B, *head_BNRs.shape[1:]))[:, :, None]
        z_BNTs = jnp.sum(z_BNTRs * head_BN1Rs, axis=3)
        return z_BNTs * tile["key_scale"] if "key_scale" in tile else z_BNTs

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        inputs, (*_, s) = self.inputs, p_BNTs.shape
        head_BNRs = _at_tokens(inputs.value_head, tile.get("value_head"), s)
        weights_BNTRs = p_BNTs[:, :, :, None] * head_BNRs[:, :, None]
        if inputs.value_factor is not None:
            return (jnp.sum(weights_BNTRs, axis=-1),)
        factor_BRVs = tile["key_factor" if inputs.shares else "value_factor"]
        return (jnp.einsum("BNTRs,BRVs->BNTV", weights_BNTRs, factor_BRVs),)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        (o_BNTV,) = outputs
        if self.inputs.value_factor is None:
            return o_BNTV
        return jnp.einsum("BNTR,RV->BNTV", o_BNTV, self.inputs.value_factor)


def _at_tokens(fixed: jax.Array | None, cached: jax.Array | None, s: int) -> jax.Array:
    """[B or 1, .., s]: what is cached, or the same at every token."""
    if fixed is None:
        return cached
    return jnp.broadcast_to(fixed[None, ..., None], (1, *fixed.shape, s))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorProductSizes:
    """N query heads, R products of a key, Rv of a value; factors are read as they lie, or not."""

    N: int
    R: int
    Rv: int
    H: int
    Hv: int
    fixed_channels: bool = False  # factors are the same for all tokens
    rotates: bool = False  # factors are rotated when they are read
    scaled: bool = False
    gain: bool = False

    def flops(self) -> DecodeFlops:
        N, R, Rv, H, Hv = self.N, self.R, self.Rv, self.H, self.Hv
        keys = 2 * N * R * H + 2 * N * R + N * self.scaled
        keys += R * H * (3 * self.rotates + self.gain)
        if self.fixed_channels:
            return DecodeFlops(2 * N * Rv * Hv, keys + 2 * N * Rv)
        return DecodeFlops(0, keys + N * Rv + 2 * N * Rv * Hv)
