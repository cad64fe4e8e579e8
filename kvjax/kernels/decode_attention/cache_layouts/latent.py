"""Latents that serve as key and value: absorbed MLA and GLA, MLRA, GTA, shared KV."""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.cache_layouts import tiles
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    Cache,
    DecodeFlops,
    DecodeInputs,
    Tiles,
    pytree,
    static,
)


@pytree
class LatentInputs(DecodeInputs):
    """key = [latent's first C', rope_key], value = latent up_value (DeepSeek-V2, section 2.1).

    cache: latent [B, .., C, S], where the axes ".." have J elements in all, and rope_key [B, P, S]
    if there is a `rope_query`. Query head n uses latent n·J // N.
    """

    query: jax.Array  # [B, T, N, C'], C' <= C: the content query times up_key
    rope_query: jax.Array | None = None  # [B, T, N, P]
    up_value: jax.Array | None = None  # [J, C, N/J, Hv]; None: the latent is the value
    # The queries as the GPU kernel reads them, if `gpu.prepare_latent` has written them.
    prepared: jax.Array | None = None
    scale: float = static()

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        B, S, *_, C = cache["latent"].shape
        latent = cache["latent"].reshape(B, S, -1, C)
        query, k, v = self.query, latent[..., : self.query.shape[-1]], latent
        if self.rope_query is not None:
            query = jnp.concatenate([query, self.rope_query], axis=-1)
            rope_key = cache["rope_key"][:, :, None]
            shared = jnp.broadcast_to(rope_key, (*k.shape[:3], rope_key.shape[-1]))
            k = jnp.concatenate([k, shared], axis=-1)
        if self.up_value is not None:
            v = jnp.einsum("BSJC,JCrV->BSJrV", latent, self.up_value)
            v = v.reshape(B, S, -1, v.shape[-1])
        return query, k, v

    def tiles(self) -> "LatentTiles":
        return LatentTiles(self)


def by_group(latent: jax.Array) -> jax.Array:
    """Reshapes a cached latent [B, .., C, S] to [B, J, C, S]."""
    return latent.reshape(latent.shape[0], -1, *latent.shape[-2:])


def with_zeros(query_BTNC: jax.Array, C: int) -> jax.Array:
    """Pads queries of C' channels to [B, T, N, C], for kernels that read all C of a latent."""
    missing = C - query_BTNC.shape[-1]
    return jnp.pad(query_BTNC, [(0, 0)] * 3 + [(0, missing)]) if missing else query_BTNC


class LatentTiles(Tiles):
    """Scores and sums of latents; values are expanded once, from the weighted sums."""

    large_logits = False

    def __init__(self, inputs: LatentInputs):
        self.inputs = inputs
        self.q_BNTC, self.q_BNTP = jnp.moveaxis(inputs.query, 2, 1), None
        if inputs.rope_query is not None:
            self.q_BNTP = jnp.moveaxis(inputs.rope_query, 2, 1)

    def widths(self, cache: Cache) -> tuple[int, ...]:
        return (cache["latent"].shape[-2],)

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        del start
        latent_BJCs = by_group(tile["latent"])
        z_BNTs = tiles.dot(self.q_BNTC, latent_BJCs[:, :, : self.q_BNTC.shape[-1]])
        if self.q_BNTP is None:
            return z_BNTs
        return z_BNTs + tiles.dot(self.q_BNTP, tile["rope_key"][:, None])

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        return (tiles.weighted_sum(p_BNTs, by_group(tile["latent"])),)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        (o_BNTC,) = outputs
        if self.inputs.up_value is None:
            return o_BNTC
        return expand_values(o_BNTC, self.inputs.up_value)


def expand_values(o_BNTC: jax.Array, up_JCrV: jax.Array) -> jax.Array:
    """Expands weighted sums of latents to values, [B, N, T, Hv]."""
    B, N, T, C = o_BNTC.shape
    o_BJrTC = o_BNTC.reshape(B, up_JCrV.shape[0], -1, T, C)
    return jnp.einsum("BJrTC,JCrV->BJrTV", o_BJrTC, up_JCrV).reshape(B, N, T, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """N query heads, J latents of C channels, a rotated key of P channels, values of Hv."""

    N: int
    C: int
    P: int = 64
    Hv: int = 128  # 0: the latent is the value
    J: int = 1
    key_channels: int | None = None  # number of leading latent channels in the key; None: all
    absorbed_channels: int = 0  # channels of the query before up_key is absorbed; 0: no up_key

    def example(self, draw: Callable[..., jax.Array], B: int) -> LatentInputs:
        heads, key = self.N // self.J, self.C if self.key_channels is None else self.key_channels
        return LatentInputs(
            query=draw(B, 1, self.N, key),
            rope_query=draw(B, 1, self.N, self.P) if self.P else None,
            up_value=draw(self.J, self.C, heads, self.Hv) / self.C**0.5 if self.Hv else None,
            scale=(key + self.P) ** -0.5,
        )

    def fields(self) -> dict[str, tuple[int, ...]]:
        fields = {"latent": (self.J, self.C) if self.J > 1 else (self.C,)}
        return fields | ({"rope_key": (self.P,)} if self.P else {})

    def flops(self) -> DecodeFlops:
        N, C = self.N, self.C
        key = C if self.key_channels is None else self.key_channels
        per_query = 2 * N * C * (self.absorbed_channels + self.Hv)
        return DecodeFlops(per_query, 2 * N * (key + C + self.P))
