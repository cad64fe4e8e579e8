"""The second GPU kernel of decode attention: merges a sequence's splits into outputs.

Grid (B, query heads, parts of the output's channels). One program is one warpgroup:

    max over splits              every split's maximum                      [splits, columns]
    share of a split             exp2(its maximum - max)                    SMEM [splits, columns]
    total over splits            Σ over splits   share · sum of weights     SMEM [columns]
    o [64 · parts]               Σ over splits   share · o of the split / total     float32
    o + latentᵀ · expand [R, 64] LRKV: adds the residual (LRKV eq. 4)

A decode step has four programs fewer per layer of LRKV with it, two of MHA, three of MLA. Splits
that a sequence does not reach were not written, so they are never read: their shares are 0, and the
loop over splits ends before them.

With programmatic dependent launch the kernel starts while the last programs of `kernel` still
run. `griddepcontrol_wait` returns when all stores of earlier kernels are visible; it precedes all
loads.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.kernels.decode_attention.gpu.plans import Plan
from kvjax.kernels.decode_attention.gpu.program import MASKED, to_rows
from kvjax.kernels.decode_attention.gpu.ring import ROWS

_AHEAD = 16  # splits whose loads are in flight at once; divides ROWS
_PARTS = 4  # 64 channels each, that one program merges at most
_PROGRAMS = 132  # multiprocessors; fewer parts per program if the grid would leave some empty


@functools.partial(jax.jit, static_argnames=("plan", "split", "dtype", "interpret"))
def combine(
    plan: Plan,
    o: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    first_B: jax.Array,
    expand_KRV: jax.Array | None = None,
    *,
    split: int,
    dtype: jnp.dtype,
    interpret=False,
) -> jax.Array:
    """Returns outputs [B, N, channels], averaged over splits by their softmax sums.

    Args:
      plan: of the kernel that wrote the splits.
      o, maximum, total: see `kernel.attend`.
      first_B: slot of each sequence's new token, int32.
      expand_KRV: None: all channels of a head tile are returned for each of its query heads. Else
        the first V channels are values and the others each KV head's R latents, which are
        multiplied by this matrix and added to the values.
      split: tokens of a split.
      dtype: of the outputs, which are summed in float32.
    """
    B, splits, head_tiles, n, channels = o.shape
    rows = maximum.shape[1]  # of splits, padded to a multiple of 64
    columns, group = plan.heads * plan.group_size, plan.group_size
    V, R = (channels, 0) if expand_KRV is None else expand_KRV.shape[::-1][:2]
    parts = _parts(B * head_tiles * columns, V // ROWS) if not R else 1
    wgmma, row_layout = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)  # [64, ..]; [64]
    load = functools.partial(plgpu.load, optimized=False)

    def kernel(first, o, maximum, total, *rest, shares, totals, sums):
        expand, out = rest if R else (None, *rest)
        b, head, part = (lax.axis_index(name) for name in ("sequence", "head", "part"))
        head_tile, column = lax.div(head, columns), lax.rem(head, columns)
        channel = part * parts * ROWS
        if not interpret:
            # Stores of the other kernel, and of whatever cast the weights -> the loads below.
            plgpu.griddepcontrol_wait()
        expand_RV = []
        for r in range(0, R, ROWS):
            of_head = expand.at[lax.div(head, group), pl.ds(r, ROWS), pl.ds(channel, ROWS)]
            expand_RV.append(load(of_head, layout=wgmma).astype(jnp.float32))
        # A split is reached if the sequence's new token is in it or after it.
        reached = lax.min(lax.div(first[b], split) + 1, splits)

        def of_splits(ref, i, other):  # [64, n] of 64 splits
            x_Xn = load(ref.at[b, pl.ds(i * ROWS, ROWS), head_tile], layout=wgmma)
            row_Xn = plgpu.broadcasted_iota(jnp.int32, x_Xn.shape, 0, layout=wgmma)
            return jnp.where(i * ROWS + row_Xn < reached, x_Xn, jnp.full_like(x_Xn, other))

        def add_maximum(i, max_n):
            return jnp.maximum(max_n, jnp.max(of_splits(maximum, i, MASKED), axis=0))

        def add_total(i, total_n):
            x_Xn = of_splits(maximum, i, MASKED)
            share_Xn = jnp.exp2(x_Xn - to_rows(max_n, x_Xn))
            shares[pl.ds(i * ROWS, ROWS)] = share_Xn
            return total_n + jnp.sum(share_Xn * of_splits(total, i, 0.0), axis=0)

        def filled(x):
            return plgpu.layout_cast(jnp.full((n,), x, jnp.float32), wgmma.reduce(0))

        # 64 splits at a time, so that registers do not grow with their number.
        blocks = lax.div(reached + (ROWS - 1), ROWS)
        max_n = lax.fori_loop(0, blocks, add_maximum, filled(MASKED))
        totals[...] = lax.fori_loop(0, blocks, add_total, filled(0.0))

        starts = [channel + i * ROWS for i in range(parts)]
        own = V + lax.div(column, group) * R  # the first of the KV head's latents
        starts += [own + r for r in range(0, R, ROWS)]

        def add_splits(i, sums_C):
            for x in range(_AHEAD):  # unrolled: all loads come before the first sum is ready
                x = i * _AHEAD + x
                at = (b, lax.min(x, reached - 1), head_tile, column)
                values = [load(o.at[*at, pl.ds(s, ROWS)], layout=row_layout) for s in starts]
                share = shares[x, column]
                sums_C = [s_C + share * v_C for s_C, v_C in zip(sums_C, values, strict=True)]
            return sums_C

        zero_C = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout)
        turns = lax.div(reached + (_AHEAD - 1), _AHEAD)
        sums_C = lax.fori_loop(0, turns, add_splits, [zero_C for _ in starts])
        inverse = 1 / totals[column]
        sums_C = [s_C * inverse for s_C in sums_C]
        for i, latent_R in enumerate(sums_C[parts:]):
            product_RV = expand_RV[i] * lax.broadcast_in_dim(latent_R, expand_RV[i].shape, [0])
            # The sum over rows has the layout of a row; through shared memory to that of a column.
            sums[...] = jnp.sum(product_RV, axis=0)
            sums_C[0] = sums_C[0] + plgpu.load(sums, layout=row_layout)
        for start, x_C in zip(starts[:parts], sums_C[:parts], strict=True):
            out.at[b, head, pl.ds(start, ROWS)][...] = x_C.astype(dtype)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((B, head_tiles * columns, V), dtype),
        scratch_types={
            "shares": plgpu.SMEM((rows, n), jnp.float32),
            "totals": plgpu.SMEM((n,), jnp.float32),
            "sums": plgpu.SMEM((ROWS,), jnp.float32),
        },
        grid=(B, head_tiles * columns, V // ROWS // parts),
        grid_names=("sequence", "head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
        kernel_name="combine_splits",
    )
    return run(first_B, o, maximum, total, *(() if expand_KRV is None else (expand_KRV,)))


def _parts(heads: int, count: int) -> int:
    """Returns how many of a head's `count` parts one program merges."""
    allowed = [p for p in range(1, _PARTS + 1) if count % p == 0]
    return max([p for p in allowed if heads * count // p >= _PROGRAMS], default=1)
