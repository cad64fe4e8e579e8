"""Scores of low-rank keys under RoPE, without rebuilding the keys.

A key at position t is k(t) = Rot_t(r(t) · expand), with a latent r(t) of rank R. Rotations are
orthogonal, so

    q · k(t) = r(t) · w(t),    w(t) = expand · Rot_-t(q)             # LRKV eq. 3, exact under RoPE

`absorb_query` computes a = conj(q) · expand once per step, with channel pairs as complex numbers.
`rank_space_queries` then computes w(t) for all positions of a tile by two matrix products: the
tile's table of cosines and sines has a low rank E (57 of 128 for 512 tokens; `rope.basis`). A
cached token costs 2 R E + 2 R FLOPs per head, and a tile R H (3 + 2 E), instead of 2 R H per token
to rebuild its key. The GPU kernel makes the basis for a whole split. The TPU kernels let the vector
unit do as little as possible per key. On v5e and v5p, and wherever query heads share a KV head,
they have a basis of 128 tokens, and multiply latents with it on the matrix unit, which leaves
E = 32 multiply-adds. Otherwise they use the full table, 2 R H on the matrix unit, which saves no
FLOPs and leaves R multiply-adds, not H.

The bytes that are read do not change: 5,192 per cached token and layer at d36, where MHA has 9,216.
FLOPs of the residual's logits per head and cached token, without padding (H = 128, R = 64, RoPE
base 10,000):

    plain JAX   9,296  2 R E + 2 R + R H (3 + 2 E) / 512, E = 57 (tiles of 512 tokens)
    GPU         9,368  2 R · 64 + 2 · 64 + R H (3 + 2 · 64) / 1,024 (splits of 1,024 tokens)
    TPU         8,262  2 R E + 2 R H E / 128 + 2 E + 3 R H / 4,096, E = 32 (tiles of 4,096 tokens)
    v4, v6e    16,518  2 R H + 2 R + 3 R H / 4,096 (on v4 3 R H / 1,024)

Tile sizes, each with its constraints in a comment there:

    plain JAX  TILE_KV in `cache_layouts/tiles.py`; `flops` below follows it
    TPU        SHORTEST_TILE_KV, DEFAULT_SCORE_TILE in `tpu/attention.py`, or tuned.json
    GPU        TILE_KV, LATENT_TILE_KV, ROTATED_TILE_KV in `gpu/plans.py`
               of splits: `_SPLITS` in `gpu/adapters.py`
"""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention.cache_layouts import tiles
from kvjax.layers import rope


def rotates_query(queries: int, K: int) -> bool:
    """Returns True if each KV head has one query: rotating it is cheaper than rebuilding the keys.

    Plain JAX and `flops` rebuild and rotate the keys otherwise; the TPU and GPU kernels never do.
    """
    return queries == K


def absorb_query(q_BKH: jax.Array, expand_KRH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a = conj(q) · expand in complex channel pairs: real and imaginary part [B, K, R, F].

    q is rotated to its own position. The logit of a key at position t is the dot product of its
    latent with Re(sum_j a_j e^{i t theta_j}).
    """
    q1_BK1F, q2_BK1F = jnp.split(q_BKH[:, :, None], 2, axis=-1)
    b1_1KRF, b2_1KRF = jnp.split(expand_KRH[None], 2, axis=-1)
    shape = (*q_BKH.shape[:2], expand_KRH.shape[1], q1_BK1F.shape[-1])
    q1, q2, b1, b2 = (jnp.broadcast_to(x, shape) for x in (q1_BK1F, q2_BK1F, b1_1KRF, b2_1KRF))
    return q1 * b1 + q2 * b2, q1 * b2 - q2 * b1


def rank_space_queries(
    absorbed: tuple[jax.Array, jax.Array], start: jax.Array, length: int, base: rope.Base
) -> jax.Array:
    """Returns w(t), the query in rank space, for every position of a tile: [B, K, R, s].

    w(t) = sum_j Re a_j cos(t theta_j) - Im a_j sin(t theta_j).

    Args:
      absorbed: a, from `absorb_query`.
      start: the tile's first position.
      length: tokens of the tile.
    """
    real, imaginary = absorbed
    F = real.shape[-1]
    angles = rope.rotary(start[None, None], 2 * F, base)  # rotates a to the tile's start
    cos, sin = (jnp.broadcast_to(a[0][None, None].astype(real.dtype), real.shape) for a in angles)
    rotated = (real * cos - imaginary * sin, -(imaginary * cos + real * sin))
    left_HE, right_Es = rope.basis(2 * F, base, length, _tolerance(real.dtype))
    a_BKRE = jnp.einsum(
        "BKRH,HE->BKRE", jnp.concatenate(rotated, axis=-1), jnp.asarray(left_HE, real.dtype)
    )
    return jnp.einsum("BKRE,Es->BKRs", a_BKRE, jnp.asarray(right_Es, real.dtype))


def _tolerance(dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 8


def flops(R: int, H: int, base: rope.Base) -> float:
    """Returns FLOPs per head and key of `rank_space_queries` and the product with the latents.

    Of plain JAX, with tiles of `tiles.TILE_KV` tokens; the module's docstring has the kernels'.
    """
    E = rope.basis(H, base, tiles.TILE_KV, _tolerance(np.float32))[0].shape[1]
    per_tile = R * H * (3 + 2 * E)  # the rotation, and the product with the basis
    return per_tile / tiles.TILE_KV + 2 * R * E + 2 * R
