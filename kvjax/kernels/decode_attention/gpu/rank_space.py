"""Scores of LRKV's residual keys under RoPE, in rank space, on a GPU.

Under RoPE the query in rank space depends on the position. Over the tokens of a split it is a
product [R, P] · [P, split] of low rank P, because the split's table of cosines and sines is
(`rope.basis`). The kernel computes the [R, P] matrix of each query head once per split
(`rotate_query`), multiplies it with slabs of latents on the tensor cores (`issue_wgmma`), and takes
the dot product of each token's row with the token's row of the table.
"""

from collections.abc import Mapping
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.kernels.decode_attention.gpu.ring import ROWS, pin_here


def rotate_query(i, query, expand, row, basis, rank_queries) -> None:
    """Writes (conj(q) B) basis of one slab and query head, with channel pairs as complex numbers.

    Args:
      i: index of the [64, 64] block of `rank_queries` that is written.
      query: [H] float32 in global memory, rotated by minus the position of the split's first token.
      expand: [K·R, H] in global memory; the slab's 64 rows begin at `row`.
      basis: shared memory [64, 64] for every 64 channel pairs' real parts, then for their
        imaginary parts.
      rank_queries: shared memory [slabs · query heads · 64, P].
    """
    layout, pairs = plgpu.Layout.WGMMA, len(basis) * ROWS // 2
    load = functools.partial(plgpu.load, optimized=False)
    out = rank_queries.at[pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)]

    def load_pairs(j):
        """First and second channels of pairs j .. j + 63: (query in every row, expand) of each."""
        for half in (pl.ds(j, ROWS), pl.ds(pairs + j, ROWS)):
            q_H = load(query.at[half], layout=layout.reduce(0))
            b_RH = load(expand.at[pl.ds(row, ROWS), half], layout=layout)
            yield lax.broadcast_in_dim(q_H, b_RH.shape, [1]), b_RH.astype(jnp.float32)

    def product(acc):
        for j in range(0, pairs, ROWS):
            (q1, b1), (q2, b2) = load_pairs(j)
            real, imaginary = q1 * b1 + q2 * b2, q1 * b2 - q2 * b1
            for folded, column in ((real, j // ROWS), (imaginary, (pairs + j) // ROWS)):
                # wgmma reads its operands from shared memory: `out` holds them until the result.
                out[...] = folded.astype(out.dtype)
                plgpu.commit_smem()  # the store is visible to wgmma (async proxy)
                plgpu.wgmma(acc, out, basis[column])
                plgpu.wgmma_wait(0)  # before `out` is written again
        return acc[...]

    rank_query_RP = pl.run_scoped(product, plgpu.ACC((ROWS, ROWS), jnp.float32))
    out[...] = rank_query_RP.astype(out.dtype)


def issue_wgmma(acc, latents, i: int, rank_queries) -> None:
    """Starts acc [tile_kv, P] += latentsᵀ [tile_kv, 64] · rank_queries[i] [64, P].

    The dot product of each row with the token's row of the table is the token's score.
    """
    rows = pl.ds(pl.multiple_of(pin_here(i) * ROWS, ROWS), ROWS)
    plgpu.wgmma(acc, latents.transpose((1, 0)), rank_queries.at[rows])


def load_table(ref: Mapping, token, tile_kv: int) -> jax.Array:
    """Returns a tile's rows of the table of cosines and sines, [tile_kv, P], in registers."""
    rows = ref["table"].at[pl.ds(token, tile_kv)]
    return plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
