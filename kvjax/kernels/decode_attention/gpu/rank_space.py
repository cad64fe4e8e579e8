"""Scores of LRKV's residual keys under RoPE, in rank space, on a GPU.

Under RoPE the query in rank space depends on the position (`cache_layouts.rotating`). Over the
tokens of a split it is a product [R, E] · [E, split] of low rank E, because the split's table of
cosines and sines has a low rank (`rope.basis`):

    once per split  rank_query [64, E]        = (conj(q) · expand) [64, H] · basis [H, E]
                                                                               `write_rank_query`
    per tile        coefficients [tile_kv, E] = latentsᵀ [tile_kv, 64] · rank_query  `issue_wgmma`
                    scores [tile_kv] += Σ over E of coefficients · table [tile_kv, E]  `load_table`

with E padded to 64. No key is rebuilt, and the tensor cores do all work that grows with R, but for
3 R H per split.

FLOPs per head and cached token, H = 128 and R = 64: 2 R · 64 for the coefficients, 2 · 64 for their
sum with the table, and R H (3 + 2 · 64) per split, in all 9,368 with splits of 1,024 tokens. The
padding of other products' columns to 8 comes on top (`adapters.COLUMNS`).
"""

from collections.abc import Mapping
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.kernels.decode_attention.gpu.ring import ROWS, pin_here


def write_rank_query(i, query, expand, row, basis, rank_queries) -> None:
    """Writes conj(q) · expand · basis of one slab and query head, channel pairs as complex numbers.

    It absorbs the query and changes its basis; nothing is rotated here.

    Args:
      i: index of the 64 rows of `rank_queries` that are written.
      query: [H] float32 in global memory, rotated by minus the position of the split's first token.
      expand: [K·R, H] in global memory; the slab's 64 rows begin at `row`.
      basis: shared memory [64, 64] for every 64 channel pairs' real parts, then for their
        imaginary parts.
      rank_queries: shared memory [slabs · query heads · 64, E].
    """
    layout, pairs = plgpu.Layout.WGMMA, len(basis) * ROWS // 2  # H / 2 pairs
    # Straight from global memory into registers: read once per split.
    load = functools.partial(plgpu.load, optimized=False)
    out = rank_queries.at[pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)]

    def load_pairs(j):
        """Yields (query in every row, expand), [64, 64] float32, of both channels of 64 pairs."""
        for half in (pl.ds(j, ROWS), pl.ds(pairs + j, ROWS)):
            q_H = load(query.at[half], layout=layout.reduce(0))
            expand_RH = load(expand.at[pl.ds(row, ROWS), half], layout=layout)
            yield lax.broadcast_in_dim(q_H, expand_RH.shape, [1]), expand_RH.astype(jnp.float32)

    def product(acc):  # float32 [64, E], summed over pairs and both their parts
        for j in range(0, pairs, ROWS):
            (q1, e1), (q2, e2) = load_pairs(j)
            # conj(q1 + i q2) (e1 + i e2)
            real, imaginary = q1 * e1 + q2 * e2, q1 * e2 - q2 * e1
            for absorbed, column in ((real, j // ROWS), (imaginary, (pairs + j) // ROWS)):
                # wgmma reads its operands from shared memory: `out` holds them until the result.
                out[...] = absorbed.astype(out.dtype)
                plgpu.commit_smem()  # store to `out` -> the product
                plgpu.wgmma(acc, out, basis[column])
                plgpu.wgmma_wait(0)  # the product's reads of `out` -> the next store to it
        return acc[...]

    rank_query_RE = pl.run_scoped(product, plgpu.ACC((ROWS, ROWS), jnp.float32))
    out[...] = rank_query_RE.astype(out.dtype)  # the caller commits it for `issue_wgmma`


def issue_wgmma(acc, latents, i: int, rank_queries) -> None:
    """Starts acc [tile_kv, E] += latentsᵀ [tile_kv, 64] · rank_queries[i] [64, E].

    The dot product of each row with the token's row of the table is the token's score. The caller
    waits for the product.

    Args:
      acc: float32 accumulator in registers.
      latents: a slab in the ring, [64, tile_kv], whose copy has arrived.
      i: index of 64 rows of `rank_queries`.
      rank_queries: shared memory [slabs · query heads · 64, E].
    """
    rows = pl.ds(pl.multiple_of(pin_here(i) * ROWS, ROWS), ROWS)
    plgpu.wgmma(acc, latents.transpose((1, 0)), rank_queries.at[rows])


def load_table(ref: Mapping, token, tile_kv: int) -> jax.Array:
    """Returns a tile's rows of the table of cosines and sines, [tile_kv, E], in registers."""
    rows = ref["table"].at[pl.ds(token, tile_kv)]
    return plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
