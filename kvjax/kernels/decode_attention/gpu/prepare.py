"""The GPU kernel before decode attention: new queries, keys and values of MHA and GQA.

Grid (B, K + K + N): a program norms and rotates a key, or copies a value, into the sequence's slot
of the cache, in place; or norms and rotates a query and writes it as `kernel` reads it. A program
is one warpgroup, which holds 64 channels at a time in the layout of a column of wgmma's rows.

It replaces nine programs of XLA. Rounding is the model's: to bfloat16 after the norm, and again
after RoPE.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention.gpu.plans import COLUMNS
from kvjax.kernels.decode_attention.gpu.ring import ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Sizes, and where the product of the input with all projections has keys, values, queries.

    Attributes:
      key, value, query: first channel of all heads' keys, values and queries.
      epsilon: of the RMSNorm of queries and keys; None: they are not normed.
    """

    N: int
    K: int
    H: int
    Hv: int
    key: int
    value: int
    query: int
    epsilon: float | None

    @property
    def columns(self) -> int:
        """Queries of a KV head, padded as `kernel` reads them."""
        return round_up(self.N // self.K, COLUMNS)


def takes(H: int, Hv: int) -> bool:
    """Returns True for heads whose halves, which RoPE pairs, are whole slabs of 64 channels."""
    return H % (2 * ROWS) == 0 and Hv % ROWS == 0


@functools.partial(jax.jit, static_argnames=("heads", "interpret"))
def prepare(
    product_BE: jax.Array,
    key_BKHS: jax.Array,
    value_BKHS: jax.Array,
    first_B: jax.Array,
    counts_B: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    *,
    heads: Heads,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends one token per sequence to the cache, and returns its queries and the cache.

    Args:
      product_BE: the layer's input times all projections, bfloat16.
      key_BKHS, value_BKHS: the cache, bfloat16, which is updated in place.
      first_B: slot of each sequence's new token; S: the cache is full, and nothing is appended.
      counts_B: 1, or 0 for a sequence that appends nothing.
      rotary: cosines and sines of the new tokens' positions, [B, H/2] float32; None: no RoPE.

    Returns:
      Queries [B, K, H/64, columns, 64], zero beyond a KV head's own, and both caches.
    """
    h, S = heads, key_BKHS.shape[-1]
    row_layout = plgpu.Layout.WGMMA.reduce(1)  # [64], of which every warp holds 16
    group = h.N // h.K

    def load(ref, *at):  # [64] float32
        return plgpu.load(ref.at[at], layout=row_layout, optimized=False).astype(jnp.float32)

    def kernel(product, first, counts, *refs):
        cos, sin = refs[:2] if rotary else (None, None)
        key, value, queries = refs[-3:]
        b, i = lax.axis_index("sequence"), lax.axis_index("head")
        slot, bf16 = first[b], product_BE.dtype
        appends = (counts[b] > 0) & (slot < S)

        def normed_and_rotated(start):
            """Yields (channel, [64] bfloat16) of a head's channels, which begin at `start`."""
            x = [load(product, b, pl.ds(start + c, ROWS)) for c in range(0, h.H, ROWS)]
            if h.epsilon is not None:
                squares = functools.reduce(jnp.add, [x_H * x_H for x_H in x])
                inverse = lax.rsqrt(jnp.sum(squares, axis=0) / h.H + h.epsilon)
                x = [(x_H * inverse).astype(bf16).astype(jnp.float32) for x_H in x]
            second = len(x) // 2  # slabs of the pairs' first channels, then of their second
            for j in range(second) if rotary else ():
                angles = b, pl.ds(j * ROWS, ROWS)
                (x1, x2), c, s = (x[j], x[second + j]), load(cos, *angles), load(sin, *angles)
                x[j], x[second + j] = x1 * c - x2 * s, x2 * c + x1 * s
            return enumerate(x_H.astype(bf16) for x_H in x)

        @pl.when((i < h.K) & appends)
        def _():
            for slab, x_H in normed_and_rotated(h.key + i * h.H):
                key.at[b, i, pl.ds(slab * ROWS, ROWS), slot][...] = x_H

        @pl.when((i >= h.K) & (i < 2 * h.K))
        def _():
            k = i - h.K
            zero_H = plgpu.layout_cast(jnp.zeros((ROWS,), bf16), row_layout)
            for column in range(group, h.columns):
                for slab in range(h.H // ROWS):
                    queries.at[b, k, slab, column][...] = zero_H

            @pl.when(appends)
            def _():
                for c in range(0, h.Hv, ROWS):
                    x_H = load(product, b, pl.ds(h.value + k * h.Hv + c, ROWS)).astype(bf16)
                    value.at[b, k, pl.ds(c, ROWS), slot][...] = x_H

        @pl.when(i >= 2 * h.K)
        def _():
            n = i - 2 * h.K
            k, column = lax.div(n, group), lax.rem(n, group)
            for slab, x_H in normed_and_rotated(h.query + n * h.H):
                queries.at[b, k, slab, column][...] = x_H

    B = product_BE.shape[0]
    shape = (B, h.K, h.H // ROWS, h.columns, ROWS)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, product_BE.dtype),
        grid=(B, 2 * h.K + h.N),
        grid_names=("sequence", "head"),
        interpret=interpret or None,
        kernel_name="prepare",
    )
    key, value = jax.new_ref(key_BKHS), jax.new_ref(value_BKHS)
    queries = run(product_BE, first_B, counts_B, *(rotary or ()), key, value)
    return queries, jax.freeze(key), jax.freeze(value)
