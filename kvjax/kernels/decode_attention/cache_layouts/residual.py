"""A shared base and a low-rank residual per head: LRKV, LRKV x GQA.

Without RoPE on the residual, queries are absorbed into rank space, u = expand · q (LRKV eq. 3).
Under RoPE the query in rank space depends on the position: it is rotated by minus each key's
position, which costs less than rebuilding the keys (`rotating.py`, which also lists FLOPs and tile
sizes). If query heads share a KV head, plain JAX and `flops` rebuild its keys instead; the TPU and
GPU kernels always rotate queries.
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
from kvjax.layers import rope


@pytree
class ResidualInputs(DecodeInputs):
    """key = key_scale·(base_key + Rot(residual_key expand_key)), value as in LRKV eq. 2.

    cache: base_key [B, J, H, S], rotated; base_value [B, J, Hv, S]; residual_key and
    residual_value [B, K, R, S]; key_scale [B, K, 1, S] float32 or wider, where keys are normed.
    """

    query: jax.Array  # [B, T, N, H], for the base
    residual_query: jax.Array  # [B, T, N, H], for the residual; `query` if rope_base is given
    expand_key: jax.Array  # [K, R, H]
    expand_value: jax.Array  # [K, R, Hv]
    bias: Bias | None = None
    # `query` as the GPU kernel reads it, if `gpu.prepare` has written it.
    prepared: jax.Array | None = None
    scale: float = static()
    rope_base: rope.Base | None = static()  # None: the residual is not rotated
    # True: `query` and the cached base are in another basis than the residual and its query.
    separate_queries: bool = static(default=False)

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        c, K = cache, self.expand_key.shape[0]
        residual = jnp.einsum("BSKR,KRH->BSKH", c["residual_key"], self.expand_key)
        if self.rope_base is not None:
            residual = rotated(residual, self.rope_base)
        # Concatenated along channels, because base and residual may have different queries.
        query = jnp.concatenate([self.query, self.residual_query], axis=-1)
        k = jnp.concatenate([repeat_heads(c["base_key"], K), residual], axis=-1)
        if "key_scale" in c:
            k = k * c["key_scale"]
        v = repeat_heads(c["base_value"], K)
        return query, k, v + jnp.einsum("BSKR,KRV->BSKV", c["residual_value"], self.expand_value)

    def tiles(self) -> "_Tiles":
        return _Tiles(self)

    def kind(self, cache: Cache) -> str:
        rotates = "" if self.rope_base is None else "_rotated"
        return "residual" + rotates + ("_normed" if "key_scale" in cache else "")


class _Tiles(Tiles):
    def __init__(self, inputs: ResidualInputs):
        self.inputs = inputs
        self.q_BNTH = jnp.moveaxis(inputs.query, 2, 1)
        residual_q_BNTH = jnp.moveaxis(inputs.residual_query, 2, 1)
        self.residual_q_BNTH = residual_q_BNTH
        N, T = self.q_BNTH.shape[1:3]
        K = inputs.expand_key.shape[0]
        self.large_logits = inputs.rope_base is not None
        self.u_BNTR = self.absorbed = None
        if inputs.rope_base is None:  # LRKV eq. 3
            self.u_BNTR = tiles.by_kv_head(residual_q_BNTH, inputs.expand_key, "BKrH,KRH->BKrR")
        elif rotating.rotates_query(N * T, K):
            self.absorbed = rotating.absorb_query(residual_q_BNTH[:, :, 0], inputs.expand_key)

    def widths(self, cache: Cache) -> tuple[int, ...]:
        return cache["base_value"].shape[2], cache["residual_value"].shape[2]

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        return self.add_direct(self.tile_logits(tile, start), tile)

    def tile_logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        latent_BKRs = tile["residual_key"]
        if self.u_BNTR is None and self.absorbed is None:  # several queries share a rebuilt key
            k_BKHs = jnp.einsum("BKRs,KRH->BKHs", latent_BKRs, self.inputs.expand_key)
            k_BKHs = tiles.rotate(k_BKHs, start, self.inputs.rope_base)
            if self.inputs.separate_queries:  # `add_direct` adds the base
                return tiles.dot(self.residual_q_BNTH, k_BKHs)
            base_BKHs = tiles.spread(tile["base_key"], k_BKHs.shape[1])
            return tiles.dot(self.q_BNTH, base_BKHs + k_BKHs)
        if self.u_BNTR is not None:
            return tiles.dot(self.u_BNTR, latent_BKRs)
        w_BKRs = rotating.rank_space_queries(
            self.absorbed, start, latent_BKRs.shape[-1], self.inputs.rope_base
        )
        return jnp.sum(w_BKRs * latent_BKRs, axis=2)[:, :, None]

    def add_direct(self, z_BNTs: jax.Array, tile: Cache) -> jax.Array:
        rebuilt = self.u_BNTR is None and self.absorbed is None
        if not rebuilt or self.inputs.separate_queries:
            z_BNTs = z_BNTs + tiles.dot(self.q_BNTH, tile["base_key"])
        return tiles.scaled(z_BNTs, tile)

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        base, latent = tile["base_value"], tile["residual_value"]
        return tiles.weighted_sum(p_BNTs, base), tiles.weighted_sum(p_BNTs, latent)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        base_BNTV, latent_BNTR = outputs
        return base_BNTV + tiles.by_kv_head(latent_BNTR, self.inputs.expand_value, "BKrR,KRV->BKrV")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualSizes:
    """N query heads on K residuals of rank R on J bases."""

    N: int
    K: int
    J: int = 1
    R: int = 64
    H: int = 128
    Hv: int = 128
    rope_base: rope.Base | None = 10_000.0  # None: the residual is not rotated
    scaled: bool = True  # keys are normed: the cache has "key_scale", 1/rms

    def example(self, draw: Callable[..., jax.Array], B: int) -> ResidualInputs:
        query = draw(B, 1, self.N, self.H)
        rotates = self.rope_base is not None
        return ResidualInputs(
            query=query,
            residual_query=query if rotates else draw(B, 1, self.N, self.H),
            expand_key=draw(self.K, self.R, self.H) / self.R**0.5,
            expand_value=draw(self.K, self.R, self.Hv) / self.R**0.5,
            scale=self.H**-0.5,
            rope_base=self.rope_base,
        )

    def fields(self) -> dict[str, tuple[int, ...]]:
        fields = dict(
            base_key=(self.J, self.H),
            base_value=(self.J, self.Hv),
            residual_key=(self.K, self.R),
            residual_value=(self.K, self.R),
        )
        return fields | (dict(key_scale=(self.K, 1)) if self.scaled else {})

    def flops(self) -> DecodeFlops:
        N, K, R, H, Hv = self.N, self.K, self.R, self.H, self.Hv
        per_query = 2 * N * R * Hv  # the output's expansion, LRKV eq. 4
        per_key = 2 * N * (H + Hv) + 2 * N * R + (N if self.scaled else 0)
        if self.rope_base is None:  # LRKV eq. 3
            return DecodeFlops(per_query + 2 * N * R * H, per_key + 2 * N * R)
        if rotating.rotates_query(N, K):
            per_head = rotating.flops(R, H, self.rope_base)
            return DecodeFlops(per_query + 3 * N * R * H, per_key + N * per_head)
        return DecodeFlops(per_query, per_key + K * H * (2 * R + 4))  # rebuilt, rotated, added
