"""Low-rank latents in place of keys, values or both, without a base.

Without RoPE the query is absorbed into rank space (thin keys, eq. 12). Under RoPE keys are rebuilt
and rotated, or the query is rotated in rank space (`rotating.py`).
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.cache_layouts import rotating, tiles
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    Bias,
    Cache,
    DecodeFlops,
    DecodeInputs,
    Tiles,
    pytree,
    repeat_heads,
    rotated,
    static,
)
from kvjax.layers.rope import Base


@pytree
class FactoredInputs(DecodeInputs):
    """key = key_scale·Rot(key expand_key), value = value expand_value.

    cache: key [B, J, R, S], or [B, K, H, S] rotated if expand_key is None; value [B, J, R, S] or
    [B, K, Hv, S]; key_scale [B, K, 1, S] float32 or wider, if expanded keys are normed.
    """

    query: jax.Array  # [B, T, N, H]
    expand_key: jax.Array | None = None  # [K, R, H]
    expand_value: jax.Array | None = None  # [K, R, Hv]
    bias: Bias | None = None
    scale: float = static()
    rope_base: Base | None = static()  # None: cached keys are rotated, or RoPE is off

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, v = cache["key"], cache["value"]
        if self.expand_key is not None:
            latent = repeat_heads(k, self.expand_key.shape[0])
            k = jnp.einsum("BSKR,KRH->BSKH", latent, self.expand_key)
        if self.rope_base is not None:
            k = rotated(k, self.rope_base)
        if "key_scale" in cache:
            k = k * cache["key_scale"]
        if self.expand_value is not None:
            latent = repeat_heads(v, self.expand_value.shape[0])
            v = jnp.einsum("BSKR,KRV->BSKV", latent, self.expand_value)
        return self.query, k, v

    def tiles(self) -> "_Tiles":
        return _Tiles(self)


class _Tiles(Tiles):
    def __init__(self, inputs: FactoredInputs):
        self.inputs = inputs
        self.q_BNTH = jnp.moveaxis(inputs.query, 2, 1)
        self.large_logits, self.absorbed = inputs.rope_base is not None, None
        if inputs.expand_key is None:
            return
        N, T = self.q_BNTH.shape[1:3]
        if inputs.rope_base is None:
            self.q_BNTH = tiles.by_kv_head(self.q_BNTH, inputs.expand_key, "BKrH,KRH->BKrR")
        elif rotating.rotates_query(N * T, inputs.expand_key.shape[0]):
            self.absorbed = rotating.absorb_query(self.q_BNTH[:, :, 0], inputs.expand_key)

    def widths(self, cache: Cache) -> tuple[int, ...]:
        return (cache["value"].shape[2],)

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        return tiles.scaled(self._products(tile["key"], start), tile)

    def _products(self, key_BJRs: jax.Array, start: jax.Array) -> jax.Array:
        inputs = self.inputs
        if inputs.rope_base is None:  # latents: the query is in rank space
            return tiles.dot(self.q_BNTH, key_BJRs)
        latent_BKRs = tiles.spread(key_BJRs, inputs.expand_key.shape[0])
        if self.absorbed is not None:
            w_BKRs = rotating.rank_space_queries(
                self.absorbed, start, latent_BKRs.shape[-1], inputs.rope_base
            )
            return jnp.sum(w_BKRs * latent_BKRs, axis=2)[:, :, None]
        k_BKHs = jnp.einsum("BKRs,KRH->BKHs", latent_BKRs, inputs.expand_key)
        return tiles.dot(self.q_BNTH, tiles.rotate(k_BKHs, start, inputs.rope_base))

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        return (tiles.weighted_sum(p_BNTs, tile["value"]),)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        if self.inputs.expand_value is None:
            return outputs[0]
        return tiles.by_kv_head(outputs[0], self.inputs.expand_value, "BKrR,KRV->BKrV")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactoredSizes:
    """N query heads, K KV heads, J latents of rank R (keys) and Rv (values); 0: not factored."""

    N: int
    K: int
    J: int
    R: int = 64
    Rv: int = 0
    H: int = 128
    Hv: int = 128
    rope_base: Base | None = 10_000.0
    scaled: bool = True  # expanded keys are normed: the cache has "key_scale", 1/rms

    def example(self, draw: Callable[..., jax.Array], B: int) -> FactoredInputs:
        def expand(rank, dim):
            return draw(self.K, rank, dim) / rank**0.5 if rank else None

        return FactoredInputs(
            query=draw(B, 1, self.N, self.H),
            expand_key=expand(self.R, self.H),
            expand_value=expand(self.Rv, self.Hv),
            scale=self.H**-0.5,
            rope_base=self.rope_base if self.R else None,
        )

    def fields(self) -> dict[str, tuple[int, ...]]:
        fields = dict(key=(self.J, self.R) if self.R else (self.K, self.H))
        fields |= dict(value=(self.J, self.Rv) if self.Rv else (self.K, self.Hv))
        return fields | (dict(key_scale=(self.K, 1)) if self.scaled and self.R else {})

    def flops(self) -> DecodeFlops:
        N, K, R, H = self.N, self.K, self.R, self.H
        per_query = 2 * N * self.Rv * self.Hv  # the output's expansion
        per_key = 2 * N * (self.Rv or self.Hv) + (N if self.scaled else 0)
        if not R:
            return DecodeFlops(per_query, per_key + 2 * N * H)
        if self.rope_base is None:
            return DecodeFlops(per_query + 2 * N * R * H, per_key + 2 * N * R)
        if rotating.rotates_query(N, K):
            per_head = rotating.flops(R, H, self.rope_base)
            return DecodeFlops(per_query + 3 * N * R * H, per_key + N * per_head)
        return DecodeFlops(per_query, per_key + 2 * N * H + K * H * (2 * R + 3))  # rebuilt, rotated
