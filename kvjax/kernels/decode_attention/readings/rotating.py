"""A query that turns in rank space, where RoPE stands between it and the latents of low rank.

A key is Rot_t(latent B). Its product with a query is the latent's with B Rot_-t(q): the query is
folded into B once per step (`fold`), and from that a query in rank space follows for every position
(`query`), through a basis of the tile's cosines and sines whose rank is less than half of H
(`rope.basis`). No key is made.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention.readings import tiles
from kvjax.layers import rope


def turns_query(queries: int, K: int) -> bool:
    """Whether the one query of each KV head turns, tile by tile, instead of the latents' keys."""
    return queries == K


def fold(q_BKH: jax.Array, expand_KRH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """conj(q)·B with channel pairs as complex numbers, as real and imaginary [B, K, R, H/2].

    q is rotated already, so that a key's logit is Re(sum_j conj(q_j) B_j e^{i t theta_j}) times its
    latent.
    """
    q1_BK1F, q2_BK1F = jnp.split(q_BKH[:, :, None], 2, axis=-1)
    b1_1KRF, b2_1KRF = jnp.split(expand_KRH[None], 2, axis=-1)
    shape = (*q_BKH.shape[:2], expand_KRH.shape[1], q1_BK1F.shape[-1])
    q1, q2, b1, b2 = (jnp.broadcast_to(x, shape) for x in (q1_BK1F, q2_BK1F, b1_1KRF, b2_1KRF))
    return q1 * b1 + q2 * b2, q1 * b2 - q2 * b1


def query(
    folded: tuple[jax.Array, jax.Array], start: jax.Array, length: int, base: rope.Base
) -> jax.Array:
    """[B, K, R, s]: the query in rank space, as every position of a tile sees it.

    w(t) = sum_j Re G_j cos t·theta_j - Im G_j sin t·theta_j. The table of cosines and sines of a
    tile has a low rank (57 of 128 for 512 tokens): `rope.basis`.
    """
    real, imaginary = folded
    F = real.shape[-1]
    angles = rope.rotary(start[None, None], 2 * F, base)  # turns G to the tile's start
    cos, sin = (jnp.broadcast_to(a[0][None, None].astype(real.dtype), real.shape) for a in angles)
    turned = (real * cos - imaginary * sin, -(imaginary * cos + real * sin))
    left_HP, right_Ps = rope.basis(2 * F, base, length, _tolerance(real.dtype))
    g_BKRP = jnp.einsum(
        "BKRH,HP->BKRP", jnp.concatenate(turned, axis=-1), jnp.asarray(left_HP, real.dtype)
    )
    return jnp.einsum("BKRP,Ps->BKRs", g_BKRP, jnp.asarray(right_Ps, real.dtype))


def _tolerance(dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 8


def flops(R: int, H: int, base: rope.Base) -> float:
    """FLOPs of `query` and its product with the latents, per head and key."""
    P = rope.basis(H, base, tiles.TILE_KV, _tolerance(np.float32))[0].shape[1]
    per_tile = R * H * (3 + 2 * P)  # turning, and the product with the basis
    return per_tile / tiles.TILE_KV + 2 * R * P + 2 * R
