"""The Mosaic GPU decode kernel: one kernel body for every cache layout that has an adapter.

Grid (B, splits, head tiles). One program (`program`) is one warpgroup of 4 warps. It attends with
the query heads of `plan.heads` KV heads (a head tile) of one sequence to the tokens of one split:

    HBM   cache arrays [B, channels, S], in slabs [64, tile_kv]   --TMA-->   ring[slot]
    SMEM  ring [slots, 64, tile_kv]          slabs, in the order of `plan.in_ring`, tile after tile
          staged [stages, 64, tile_kv]       int8: slabs that are cast to bfloat16 (`StagedRing`)
          kept [2 · slabs, 64, tile_kv]      int8: two tiles' slabs that are cached in bfloat16
          queries [keys, columns, 64]        queries, one column per query head, padded to 8
          rank_queries [.. · 64, 64]         LRKV under RoPE: queries in rank space (`rank_space`)
          weights [1, columns, tile_kv]      a tile's softmax weights, the second wgmma's operand;
                                             int8: for each field of values, times its scales
          scales [2, rows, tile_kv]          scales of two tiles: key_scale, and those of int8
    REGS  accumulators, 64 rows x columns    warp w holds rows 16 w .. 16 w + 15

    per tile:  scores  = Σ over key slabs    wgmma(slabᵀ, queries)        float32 [tile_kv, columns]
               scores += Σ over latents      wgmma(slabᵀ, rank_queries) · table, summed over E
               scores *= key_scale           where keys are normed; int8: each field's sum, too
               p       = exp2(scores - max)  online softmax to base 2
               o[slab] = o[slab] · decay  +  wgmma(slab, p)                float32 [64, columns]

Tokens are the rows of the scores, query heads their columns, padded to the tensor core's smallest
multiple, 8. A query that only some heads of the program need is zero in the other heads' columns,
so that shared and private slabs add up in one accumulator.

    slot     0      1      2      3      4          5 slots, 4 slabs per tile: key 0, 1, value 0, 1
    tile 0   key 0  key 1  val 0  val 1
    tile 1   key 1  val 0  val 1         key 0      slab i of tile t: slot (t · slabs + i) mod slots

The program alternates between copies and products: when it has waited for the product that reads a
slab, it starts the copy of the slab that comes `slots` later into the same slot (`Ring.release`).
All other slots hold slabs that have arrived or are being copied.

Barriers: `full[slot]` completes when the slot's copy has arrived; `ready` when the queries and the
RoPE basis have; `scales_full[t % 2]` when tile t's scales have. `commit_smem` makes the
threads' accesses to shared memory visible to later copies and products (the async proxy), and
synchronises the warps. `wgmma_wait(n)` returns when all but the n youngest products are done. Two
programs share a multiprocessor where they fit (`plans.slots`), so that one computes while the
other waits.
"""

from collections.abc import Mapping
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention.gpu.plans import Plan
from kvjax.kernels.decode_attention.gpu.program import Program
from kvjax.kernels.decode_attention.gpu.ring import ROWS, Ring, StagedRing


@functools.partial(
    jax.jit,
    static_argnames=(
        "plan",
        "head_tiles",
        "tile_kv",
        "split",
        "slots",
        "wgmma_in_flight",
        "interpret",
    ),
)  # jitted, so that it is lowered once for all layers of a model
def attend(
    plan: Plan,
    arrays: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    head_tiles: int,
    tile_kv: int,
    split: int,
    slots: int,
    wgmma_in_flight: int,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attends to every split of every sequence; the caller merges the splits.

    Args:
      plan: slabs and their roles.
      arrays: by name
        - the cache's arrays, [B, channels, S] bfloat16 or int8, with "key_scale" [B, K, S] float32
          where keys are normed, and "NAME.scale" [B, rows, S] float32 of int8;
        - "query" [B, head_tiles, keys, columns, 64] bfloat16, if the plan has keys;
        - if `plan.rotated`, with H padded to a multiple of 128: "rotated_query" [B, splits,
          head_tiles, query heads, H] float32, rotated by minus the position of the split's first
          token; "expand" [K·R, H], with `plan.own_expand` [head_tiles · slabs · query heads · 64,
          H]; "basis" [H, 64], its imaginary parts negated; "table" [split, 64] float32.
      first_B: slot of each sequence's new token, int32; S for a full cache that no longer grows.
      head_tiles: programs per sequence and split.
      tile_kv: tokens of a tile.
      split: tokens of a split, a multiple of `tile_kv`.
      slots: slots of the ring.
      wgmma_in_flight: products in flight at once, each with an accumulator of its own.

    Returns:
      Unnormalised outputs [B, splits, head_tiles, columns, value slabs · 64], and the maxima of the
      scores (base 2) and the sums of the weights, both [B, splits, head_tiles, columns] with the
      splits padded to a multiple of 64, all float32. Entries of splits past a sequence's end are
      not written.

    Raises:
      ValueError: inconsistent sizes of tile, split, ring and products in flight.
    """
    B, S = first_B.shape[0], arrays[plan.order[0].name].shape[-1]
    stages = plan.staged(wgmma_in_flight)
    splits, n = -(-S // split), plan.columns
    fewest = plan.fewest_slots
    if split % tile_kv or not 1 <= wgmma_in_flight <= slots >= fewest:
        raise ValueError(
            f"tile_kv = {tile_kv}, split = {split}, slots = {slots}, "
            f"wgmma_in_flight = {wgmma_in_flight}: split must be a multiple of tile_kv, slots at "
            f"least {fewest}, and wgmma_in_flight from 1 to slots"
        )
    if plan.rotated and tile_kv != ROWS:
        raise ValueError(
            f"tile_kv = {tile_kv}: must be {ROWS} where queries are rotated, since slots "
            f"[{ROWS}, tile_kv] of the ring hold the RoPE basis in pieces [{ROWS}, {ROWS}] "
            "(ROTATED_TILE_KV in gpu/plans.py)"
        )
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs = {
        "o": f32((B, splits, head_tiles, n, len(plan.values) * ROWS)),
        "maximum": f32((B, round_up(splits, ROWS), head_tiles, n)),
        "total": f32((B, round_up(splits, ROWS), head_tiles, n)),
    }
    # wgmma reads bfloat16 operands from tiles of 8 rows with a 128-byte swizzle.
    wgmma_operand = functools.partial(
        plgpu.SMEM,
        dtype=jnp.bfloat16,
        transforms=(plgpu.TilingTransform((8, ROWS)), plgpu.SwizzleTransform(128)),
    )
    scratch = {
        "ring": wgmma_operand((slots, ROWS, tile_kv)),
        "weights": wgmma_operand((len(plan.scales_of_values) or 1, n, tile_kv)),
        "full": plgpu.Barrier(num_barriers=slots),  # one per slot: each has one copy at a time
        # Queries, pieces of the basis.
        "ready": plgpu.Barrier(num_arrivals=bool(plan.keys) + plan.basis_slots),
    }
    if plan.is_int8:
        scratch["ring"] = plgpu.SMEM((slots, ROWS, tile_kv), jnp.int8)
        scratch["staged"] = wgmma_operand((stages, ROWS, tile_kv))
    if plan.kept:  # double-buffered, as scales
        scratch["kept"] = wgmma_operand((2 * len(plan.kept), ROWS, tile_kv))
    if plan.keys:
        scratch["queries"] = wgmma_operand((len(plan.keys), n, ROWS))
    if plan.rotated:  # [64, 64] for each slab of latents and query head
        rows = len(plan.rotated) * plan.group_size * ROWS
        scratch["rank_queries"] = wgmma_operand((rows, ROWS))
    if plan.scales:  # double-buffered: tile t in slot t % 2
        scratch["scales"] = plgpu.SMEM((2, plan.rows_of_scales, tile_kv), jnp.float32)
        copies = len(plan.scales) + len(plan.kept)
        scratch["scales_full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=2)
    names = ("first", *arrays, *outputs)

    def kernel(*refs, **scratch_refs):
        ref = dict(zip(names, refs, strict=True)) | scratch_refs
        b, split_index, head_tile = (
            lax.axis_index(name) for name in ("sequence", "split", "head_tile")
        )
        # A full cache that no longer grows has first = S.
        first, start = lax.min(ref["first"][b], S - 1), split_index * split
        ring = (StagedRing if plan.is_int8 else Ring)(
            order=plan.in_ring,
            slots=slots,
            tile_kv=tile_kv,
            ref=ref,
            sequence=b,
            head_tile=head_tile,
            start=start,
            # Tiles up to the one with the new token: later ones are neither copied nor computed.
            tiles=lax.min(lax.div(first - start, tile_kv) + 1, split // tile_kv),
        )
        at = (b, split_index, head_tile)
        program = Program(plan, ref, ring, at, first, wgmma_in_flight)
        if not interpret:  # `combine` may be launched once every program of this grid has started
            plgpu.griddepcontrol_launch_dependents()
        pl.when(first >= start)(program.run)  # a split past the sequence's end has nothing to do

    run = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        # Head tiles are innermost: neighbours read the same base, all but the first from L2.
        grid=(B, splits, head_tiles),
        grid_names=("sequence", "split", "head_tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
        kernel_name="decode_attention",
    )
    return run(first_B, *arrays.values())
