"""Products with a tile of the cache in plain JAX, shared by cache layouts; see `layout.Tiles`.

N query heads of T tokens are K groups of N/K·T rows that share a key.
"""

import jax
import jax.numpy as jnp

from kvjax.cache import stripes
from kvjax.layers import rope

# Tokens of a tile. Equal to the longest stripe of a cache that is split over chips, so that a
# stripe is one tile; `xla` takes the gcd of both there. The FLOPs of `rotating` follow. LRKV under
# RoPE, 16K tokens, 2 CPU cores: 66 ms with tiles of 64 tokens, 29 to 38 ms with longer ones, up to
# 1,024 (experiments/LOG.md).
TILE_KV = stripes.MAX_STRIPE


def rows(x_BNTH: jax.Array, K: int) -> jax.Array:
    """Reshapes [B, N, T, H] to [B, K, N/K·T, H]."""
    B, N, T, H = x_BNTH.shape
    return x_BNTH.reshape(B, K, N // K * T, H)


def dot(q_BNTH: jax.Array, k_BKHs: jax.Array) -> jax.Array:
    """Returns logits [B, N, T, s], without repeating keys for each query head."""
    B, N, T, _ = q_BNTH.shape
    z_BKrs = jnp.einsum("BKrH,BKHs->BKrs", rows(q_BNTH, k_BKHs.shape[1]), k_BKHs)
    return z_BKrs.reshape(B, N, T, -1)


def weighted_sum(p_BNTs: jax.Array, v_BKVs: jax.Array) -> jax.Array:
    """Returns weighted sums of values, [B, N, T, V]."""
    B, N, T, _ = p_BNTs.shape
    # Values come first: on CPU that takes half as long where all heads share them.
    o_BKVr = jnp.einsum("BKVs,BKrs->BKVr", v_BKVs, rows(p_BNTs, v_BKVs.shape[1]))
    return jnp.moveaxis(o_BKVr, -1, 2).reshape(B, N, T, -1)


def scaled(z_BNTs: jax.Array, tile) -> jax.Array:
    """Multiplies logits with the key scales [B, K, 1, s] of their KV heads, if the tile has any."""
    if "key_scale" not in tile:
        return z_BNTs
    scale_BK1s = tile["key_scale"]
    return (rows(z_BNTs, scale_BK1s.shape[1]) * scale_BK1s).reshape(z_BNTs.shape)


def by_kv_head(x_BNTR: jax.Array, w_KRH: jax.Array, equation: str) -> jax.Array:
    """Multiplies every head's rows with its KV head's matrix: [B, N, T, ...]."""
    B, N, T, _ = x_BNTR.shape
    return jnp.einsum(equation, rows(x_BNTR, w_KRH.shape[0]), w_KRH).reshape(B, N, T, -1)


def spread(base_BJHs: jax.Array, K: int) -> jax.Array:
    """Repeats each base for the KV heads that use it: [B, J, H, s] to [B, K, H, s]."""
    B, J, H, s = base_BJHs.shape
    return jnp.broadcast_to(base_BJHs[:, :, None], (B, J, K // J, H, s)).reshape(B, K, H, s)


def rotate(x_BKHs: jax.Array, start: jax.Array, base: rope.Base) -> jax.Array:
    """Rotates the keys of the tile that starts at position `start` to their positions."""
    H, s = x_BKHs.shape[2:]
    angles = rope.rotary(start + jnp.arange(s, dtype=jnp.int32)[None], H, base)
    x1, x2 = jnp.split(x_BKHs, 2, axis=2)
    cos, sin = (jnp.broadcast_to(a[0].T.astype(x1.dtype), x1.shape) for a in angles)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=2)


def rotated_dot(
    q_BKH: jax.Array, k_BKHs: jax.Array, start: jax.Array, base: rope.Base
) -> jax.Array:
    """Returns logits [B, K, s] of one query per KV head with rotated keys, without storing them.

    In channel pairs q · Rot(k) = (q1 k1 + q2 k2) cos + (q2 k1 - q1 k2) sin: one pass over the tile.
    """
    H, s = k_BKHs.shape[2:]
    angles = rope.rotary(start + jnp.arange(s, dtype=jnp.int32)[None], H, base)
    k1, k2 = jnp.split(k_BKHs, 2, axis=2)
    cos, sin = (jnp.broadcast_to(a[0].T.astype(k1.dtype), k1.shape) for a in angles)
    q1, q2 = (jnp.broadcast_to(q[..., None], k1.shape) for q in jnp.split(q_BKH, 2, axis=-1))
    return jnp.sum((q1 * k1 + q2 * k2) * cos + (q2 * k1 - q1 * k2) * sin, axis=2)


def inverse_rms(x_BKHs: jax.Array, epsilon: float) -> jax.Array:
    """Returns 1 / rms over the channels, [B, K, s]."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x_BKHs), axis=2) + epsilon)


def norm_and_rotate(x_BKHs: jax.Array, start: jax.Array, inputs) -> jax.Array:
    """Norms and rotates [B, K, H, s] as `inputs.norm_epsilon`, `gain` and `rope_base` say."""
    if inputs.norm_epsilon is not None:
        scale_BKs = inverse_rms(x_BKHs, inputs.norm_epsilon)
        x_BKHs = x_BKHs * jnp.broadcast_to(scale_BKs[:, :, None], x_BKHs.shape)
    if inputs.gain is not None:
        x_BKHs = x_BKHs * inputs.gain[None, None, :, None]
    return x_BKHs if inputs.rope_base is None else rotate(x_BKHs, start, inputs.rope_base)
