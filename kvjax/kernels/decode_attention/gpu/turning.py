"""Logits of LRKV's residual under RoPE, on a GPU: its keys turn with their position.

A head's queries in rank space over all tokens of a split are [R, P] times [P, split], as the table
of cosines and sines of the split is (`rope.basis`). So a slab of latents is multiplied with [R, P]
on the tensor core, and each token's row of the result with the token's row of the table.
"""

from collections.abc import Mapping
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.kernels.decode_attention.gpu.ring import ROWS
from kvjax.kernels.decode_attention.gpu.ring import here


def turn(i, query, expand, row, basis, turned) -> None:
    """turned <- (conj(q) B) basis, channel pairs as complex numbers: one slab, one query head.

    Args:
      i: which of the [64, 64] in "turned".
      query: [H] float32, turned back by the split's first slot.
      expand: [K·R, H], of which the slab's 64 rows begin at `row`.
      basis: [64, 64] for every 64 pairs' real parts, then for their imaginary parts.
      turned: [slabs·heads·64, P].
    """
    layout, pairs = plgpu.Layout.WGMMA, len(basis) * ROWS // 2
    load = functools.partial(plgpu.load, optimized=False)
    tile = turned.at[pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)]

    def pair(j):
        """First and second channels of 64 pairs: of the query in every row, of B."""
        for half in (pl.ds(j, ROWS), pl.ds(pairs + j, ROWS)):
            q_H = load(query.at[half], layout=layout.reduce(0))
            b_RH = load(expand.at[pl.ds(row, ROWS), half], layout=layout)
            yield lax.broadcast_in_dim(q_H, b_RH.shape, [1]), b_RH.astype(jnp.float32)

    def product(acc):
        for j in range(0, pairs, ROWS):
            (q1, b1), (q2, b2) = pair(j)
            real, imaginary = q1 * b1 + q2 * b2, q1 * b2 - q2 * b1
            for fold, columns in ((real, j // ROWS), (imaginary, (pairs + j) // ROWS)):
                tile[...] = fold.astype(tile.dtype)  # its place until the result is there
                plgpu.commit_smem()
                plgpu.wgmma(acc, tile, basis[columns])
                plgpu.wgmma_wait(0)
        return acc[...]

    turned_RP = pl.run_scoped(product, plgpu.ACC((ROWS, ROWS), jnp.float32))
    tile[...] = turned_RP.astype(tile.dtype)


def meet(acc, key, i: int, turned) -> None:
    """acc[s, P] <- a slab of latents turned, for one query head; asynchronous.

    Its rows times the table's, summed, are the logits.
    """
    rows = pl.ds(pl.multiple_of(here(i) * ROWS, ROWS), ROWS)
    plgpu.wgmma(acc, key.transpose((1, 0)), turned.at[rows])


def table(ref: Mapping, token, block: int) -> jax.Array:
    """The table's rows of a tile: [block, P]."""
    rows = ref["table"].at[pl.ds(token, block)]
    return plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
