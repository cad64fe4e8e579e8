"""One program of the GPU decode kernel: its queries, the scores and the values of each tile.

The docstring of `kernel` has a diagram of buffers, barriers and stages.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.kernels.decode_attention.gpu import rank_space
from kvjax.kernels.decode_attention.gpu.plans import Plan
from kvjax.kernels.decode_attention.gpu.ring import ROWS, Ring, pin_here

MASKED = -1e30  # finite: a row of -inf alone would give NaN; exp2 of it is 0
_LOG2E = math.log2(math.e)
# A register layout for 16 rows of a slab: 4 rows of 64 elements per warp, 8 neighbours per thread.
_SIXTEEN_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of the grid."""

    plan: Plan
    ref: Mapping  # arguments, outputs and scratch by name; shapes in `kernel.attend`
    ring: Ring
    at: tuple[jax.Array, jax.Array, jax.Array]  # sequence, split, head tile
    first: jax.Array  # slot of the sequence's new token, the last visible one
    wgmma_in_flight: int

    def run(self) -> None:
        """Runs the tiles of the split and writes its outputs."""
        self.load_queries()  # also fills the ring
        n, layout = self.plan.columns, plgpu.Layout.WGMMA

        def zeros(rows):
            return plgpu.layout_cast(jnp.zeros((rows, n), jnp.float32), layout)

        maximum_n = plgpu.layout_cast(jnp.full((n,), MASKED, jnp.float32), layout.reduce(0))
        carry = maximum_n, zeros(self.ring.tile_kv), [zeros(ROWS) for _ in self.plan.values]
        maximum_n, total_sn, o = lax.fori_loop(0, self.ring.tiles, self.attend_tile, carry)
        # Written once, unnormalised: the caller merges splits by maximum and total.
        self.ref["maximum"].at[self.at][...] = maximum_n
        self.ref["total"].at[self.at][...] = jnp.sum(total_sn, axis=0)
        for i, o_Vn in enumerate(o):
            # [columns, 64], so that `combine` reads a head's channels in one piece.
            slab = self.ref["o"].at[*self.at, pl.ds(0, n), pl.ds(i * ROWS, ROWS)]
            transposed = plgpu.layout_cast(o_Vn, plgpu.Layout.WGMMA_TRANSPOSED)
            slab.transpose((1, 0))[...] = transposed

    def load_queries(self) -> None:
        """Loads the queries, and rotates them under RoPE, while the first slabs are being copied.

        The RoPE basis is needed here only, so it occupies the ring's last `basis_slots` slots until
        they are filled with slabs (int8: as many of `staged`).
        """
        plan, ref, ring = self.plan, self.ref, self.ring
        b, split, head_tile = self.at
        # Queries [keys, columns, 64] and the basis [H, 64] first: everything else waits for them.
        if plan.keys:
            plgpu.copy_gmem_to_smem(ref["query"].at[b, head_tile], ref["queries"], ref["ready"])
        free = ring.slots - (0 if plan.is_int8 else plan.basis_slots)
        places, begin = (ref["staged"], 0) if plan.is_int8 else (ref["ring"], free)
        basis = [places.at[begin + i] for i in range(plan.basis_slots)]  # [64, tile_kv = 64]
        for i, slot in enumerate(basis):
            rows = ref["basis"].at[pl.ds(i * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(rows, slot, ref["ready"])
        # Then the first slabs, into the slots without the basis, and two tiles' key scales.
        for i in range(free):
            ring.load(0, i)
        for t in range(2):
            self.load_scales(t)
        plgpu.barrier_wait(ref["ready"])  # copies of queries and basis -> the products with them
        if not plan.rotated:
            return

        @pl.loop(0, len(plan.rotated) * plan.group_size)
        def _(i):
            slab, r = lax.div(i, plan.group_size), lax.rem(i, plan.group_size)
            head = lax.div(slab, len(plan.rotated) // plan.heads)
            query = ref["rotated_query"].at[b, split, head_tile, head * plan.group_size + r]  # [H]
            row = head_tile * plan.rotated[0].stride + slab * ROWS  # of expand
            if plan.own_expand:
                row = (head_tile * len(plan.rotated) * plan.group_size + i) * ROWS
            rank_space.write_rank_query(i, query, ref["expand"], row, basis, ref["rank_queries"])

        # Stores to rank_queries -> the products of `add_rotated_scores`; and every warp has waited
        # for its last product with the basis -> the copies into its slots.
        plgpu.commit_smem()
        for i in range(free, ring.slots):
            ring.load(0, i)

    def attend_tile(self, t, carry):
        """Scores one tile and adds its weighted values: a step of the online softmax.

        `carry` has the maxima [columns], the sums of the weights by row of the tile, [tile_kv,
        columns] (added up over rows once, at the end), and the outputs, [64, columns] per slab.
        """
        plan, (maximum_n, total_sn, o) = self.plan, carry
        # Waits for the key slabs; releases those that are not values too.
        z_sn = self.masked(t, self.scores(t) * (plan.scale * _LOG2E))
        # Softmax in registers; the maximum over rows is a reduction over warps.
        new_n = jnp.maximum(maximum_n, jnp.max(z_sn, axis=0))
        decay_n = jnp.exp2(maximum_n - new_n)
        p_sn = jnp.exp2(z_sn - to_rows(new_n, z_sn))
        # wgmma takes its right operand from shared memory. The previous tile's products into it
        # were waited for when their accumulators were read.
        weights = self.ref["weights"]
        for i, name in enumerate(plan.scales_of_values or ("",)):
            scaled_sn = p_sn
            if name:  # weight 0 · NaN, the scale of a slot after the new token, would be NaN
                scaled_sn = self.masked(t, self.scaled(t, name, p_sn), 0.0)
            weights.at[i].transpose((1, 0))[...] = scaled_sn.astype(weights.dtype)
        # Store to weights -> the value products; loads of tile t's scales -> tile t + 2's copy.
        plgpu.commit_smem()
        self.load_scales(t + 2)
        total_sn = total_sn * to_rows(decay_n, z_sn) + p_sn  # float32, not the rounded weights
        # Waits for the value slabs and releases them.
        return new_n, total_sn, self.accumulate_values(t, o, decay_n)

    # -- keys -------------------------------------------------------------------------------------

    def scores(self, t) -> jax.Array:
        """Returns the unscaled scores of a tile, [tile_kv, columns], in float32."""
        plan, ring = self.plan, self.ring
        if plan.scales:  # copies of tile t's scales -> the loads of `scaled`
            plgpu.barrier_wait(self.ref["scales_full"].at[lax.rem(t, 2)])
        if plan.keys:
            z_sn = self.key_scores(t)
        else:
            zeros_sn = jnp.zeros((ring.tile_kv, plan.columns), jnp.float32)
            z_sn = plgpu.layout_cast(zeros_sn, plgpu.Layout.WGMMA)
        if plan.is_int8 and plan.rotated:
            part_sn = self.add_rotated_scores(t, jnp.zeros_like(z_sn))
            z_sn = z_sn + self.scaled(t, f"{plan.rotated[0].name}.scale", part_sn)
        elif plan.rotated:
            z_sn = self.add_rotated_scores(t, z_sn)
        return self.scaled(t, "key_scale", z_sn)

    def key_scores(self, t) -> jax.Array:
        """Returns the scores of keys that are not rotated here, and releases those slabs."""
        plan, ring = self.plan, self.ring
        last = len(plan.keys) - 1
        by_field = plan.keys_by_field if plan.is_int8 else (range(len(plan.keys)),)
        z_sn = None
        for indices in by_field:
            products = functools.partial(self.key_products, t, indices)
            part_sn = pl.run_scoped(products, plgpu.ACC((ring.tile_kv, plan.columns), jnp.float32))
            part_sn = self.scaled(t, f"{plan.keys[indices[0]].name}.scale", part_sn)
            z_sn = part_sn if z_sn is None else z_sn + part_sn
        if last >= plan.keys_reused_as_values:
            ring.release(t, last)
        return z_sn

    def key_products(self, t, indices: range, acc) -> jax.Array:
        """Returns the float32 sum [tile_kv, columns] of products of key slabs and queries."""
        plan, ring, queries = self.plan, self.ring, self.ref["queries"]
        kept, stages = len(plan.kept), plan.staged(self.wgmma_in_flight)
        for i in indices:
            is_kept = plan.keys[i] in plan.kept
            if plan.is_int8 and not is_kept and (i - indices[0]) % stages == 0:
                plgpu.wgmma_wait(0)  # products with the last slabs that were staged
                ring.stage(t, indices[i - indices[0] :][:stages])
            if is_kept:  # waited for with the scales
                at = lax.rem(t, 2) * kept + plan.kept.index(plan.keys[i])
                key = self.ref["kept"].at[at]
            else:
                key = ring.wait_slab(t, i)  # [64, tile_kv]; its copy has arrived
            plgpu.wgmma(acc, key.transpose((1, 0)), queries.at[pin_here(i)].transpose((1, 0)))
            # All products but the youngest are done: product i - 1 has read its slab, whose slot is
            # refilled while product i runs. Slabs that are values too stay.
            if not plan.is_int8 and i > plan.keys_reused_as_values:
                plgpu.wgmma_wait(1)
                ring.release(t, i - 1)
        return acc[...]  # waits for all products

    def add_rotated_scores(self, t, z_sn: jax.Array) -> jax.Array:
        """Adds the scores of the residual keys, head by head, each in its own column.

        Each product is of one slab of latents and one query head; `wgmma_in_flight` run at once.
        """
        plan, ring, group = self.plan, self.ring, self.plan.group_size
        column_sn, slabs_of_head = _iota(z_sn.shape, 1), len(plan.rotated) // plan.heads
        # From global memory: all programs read the same table [split, 64].
        table_sE = rank_space.load_table(self.ref, t * ring.tile_kv, ring.tile_kv)
        slabs_and_heads = [(i, r) for i in range(len(plan.rotated)) for r in range(group)]
        for batch in _batches(len(slabs_and_heads), self.wgmma_in_flight):
            pairs = [slabs_and_heads[j] for j in batch]

            def products(*accs, pairs=pairs):  # float32 [tile_kv, E] each
                for (i, r), acc in zip(pairs, accs, strict=True):
                    # The query heads of a KV head read the same slab; the first one waits for it.
                    get_slab = ring.slab if r else ring.wait_slab
                    latents = get_slab(t, len(plan.keys) + i)
                    rank_space.issue_wgmma(acc, latents, i * group + r, self.ref["rank_queries"])
                # The oldest accumulator is reduced over E while younger products run.
                return _load_in_order(accs, lambda c_sE: jnp.sum(c_sE * table_sE, axis=1))

            accs = [plgpu.ACC(table_sE.shape, jnp.float32) for _ in pairs]
            ring.stage(t, [len(plan.keys) + i for i, r in pairs if not r])
            for (i, r), z_s in zip(pairs, pl.run_scoped(products, *accs), strict=True):
                own_sn = column_sn == i // slabs_of_head * group + r
                z_sn = jnp.where(own_sn, z_sn + _to_columns(z_s, z_sn), z_sn)
            # All products of the batch are done; slabs are free if no query head still needs them.
            if done := [len(plan.keys) + i for i, r in pairs if r == group - 1]:
                ring.release(t, *done)
        return z_sn

    def scaled(self, t, name: str, z_sn: jax.Array) -> jax.Array:
        """Multiplies scores or weights with the scales of their KV heads, if there are any."""
        if (scales := self.plan.scales_of(name)) is None:
            return z_sn
        group = self.plan.heads * self.plan.group_size // scales.heads
        column_sn, first_row = _iota(z_sn.shape, 1), self.plan.row_of_scales(name)
        for k in range(scales.heads):
            row = self.ref["scales"].at[lax.rem(t, 2), first_row + k]  # [tile_kv]
            scale_s = plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(1))
            own_sn = (column_sn >= k * group) & (column_sn < (k + 1) * group)
            z_sn = jnp.where(own_sn, z_sn * _to_columns(scale_s, z_sn), z_sn)
        return z_sn

    def load_scales(self, t) -> None:
        """Starts the copies of tile t's scales, if there are any and the tile exists."""
        if not self.plan.scales:
            return
        b, _, head_tile = self.at
        slot, ref = lax.rem(t, 2), self.ref

        @pl.when(t < self.ring.tiles)
        def _():
            tokens = pl.ds(self.ring.start + t * self.ring.tile_kv, self.ring.tile_kv)
            for scales in self.plan.scales:
                row = lax.div(head_tile, scales.sharing) * scales.heads
                to = pl.ds(self.plan.row_of_scales(scales.name), scales.heads)
                plgpu.copy_gmem_to_smem(
                    ref[scales.name].at[b, pl.ds(row, scales.heads), tokens],
                    ref["scales"].at[slot, to],
                    ref["scales_full"].at[slot],
                )
            for i, slab in enumerate(self.plan.kept):
                row = lax.div(head_tile, slab.sharing) * slab.stride + slab.row
                plgpu.copy_gmem_to_smem(
                    ref[slab.name].at[b, pl.ds(row, ROWS), tokens],
                    ref["kept"].at[slot * len(self.plan.kept) + i],
                    ref["scales_full"].at[slot],
                )

    def masked(self, t, z_sn: jax.Array, other: float = MASKED) -> jax.Array:
        """Masks the scores or weights of slots after the sequence's new token."""
        slot_sn = self.ring.start + t * self.ring.tile_kv + _iota(z_sn.shape, 0)
        return jnp.where(slot_sn <= self.first, z_sn, other)

    # -- values -----------------------------------------------------------------------------------

    def accumulate_values(self, t, o, decay_n: jax.Array) -> list[jax.Array]:
        """Returns o · decay + values · weights for every value slab, [64, columns] each."""
        plan, ring, weights = self.plan, self.ring, self.ref["weights"]  # [1, columns, tile_kv]
        # Keys that are values have been waited for, and kept, by `scores`.
        reused, scales = plan.keys_reused_as_values, plan.scales_of_values
        begin = 0 if reused else len(plan.order) - len(plan.values)
        out = []
        for batch in _batches(len(o), self.wgmma_in_flight):
            # Zeroed before the batch's products start, because the tests' `ptx.hazards` ignores
            # addresses and forbids any store while a product is in flight.
            if not reused:
                ring.stage(t, range(begin + batch[0], begin + batch[-1] + 1))
            for i in batch if not plan.is_int8 else ():
                get_slab = ring.slab if reused else ring.wait_slab
                self.zero_unwritten(t, get_slab(t, begin + i))

            def products(*accs, batch=batch):  # float32 [64, columns] each
                for acc, i in zip(accs, batch, strict=True):
                    value, name = ring.slab(t, begin + i), f"{plan.values[i].name}.scale"
                    own = weights.at[pin_here(scales.index(name) if scales else 0)]
                    plgpu.wgmma(acc, value, own.transpose((1, 0)))
                return _load_in_order(accs)

            accs = [plgpu.ACC(o[i].shape, jnp.float32) for i in batch]
            added = pl.run_scoped(products, *accs)  # waits for the batch's products
            ring.release(t, *(begin + i for i in batch))
            for i, added_Vn in zip(batch, added, strict=True):
                # Without the barrier LLVM moves all additions to the end of the tile, where all
                # accumulators are live at once and spill.
                out.append(lax.optimization_barrier(o[i] * to_rows(decay_n, o[i]) + added_Vn))
        return out

    def zero_unwritten(self, t, value) -> None:
        """Zeroes a value slab's tokens after the new one, since weight 0 · NaN would be NaN.

        Only the last tile of a sequence has such tokens.
        """
        token = self.ring.start + t * self.ring.tile_kv

        @pl.when(token + self.ring.tile_kv - 1 > self.first)
        def _():
            @pl.loop(0, ROWS, step=16)
            def _(row):
                rows = value.at[pl.ds(pl.multiple_of(row, 16), 16)]
                v_Vs = plgpu.load(rows, layout=_SIXTEEN_ROWS)
                slot_Vs = plgpu.broadcasted_iota(jnp.int32, v_Vs.shape, 1, layout=_SIXTEEN_ROWS)
                rows[...] = jnp.where(token + slot_Vs <= self.first, v_Vs, jnp.zeros_like(v_Vs))

            plgpu.commit_smem()  # stores of zeros -> the product that reads the slab


def _batches(count: int, size: int) -> list[range]:
    """Splits 0 .. count - 1 into consecutive ranges of at most `size`."""
    return [range(i, min(i + size, count)) for i in range(0, count, size)]


def _load_in_order(accs, then: Callable = lambda x: x) -> list[jax.Array]:
    """Returns `then` of each accumulator, oldest first, while younger products are in flight."""
    younger = range(len(accs) - 1, -1, -1)
    load = plgpu.wgmma_accumulator_load
    return [then(load(acc, wait_n=n)) for acc, n in zip(accs, younger, strict=True)]


def to_rows(x_n: jax.Array, like_sn: jax.Array) -> jax.Array:
    """Repeats x over the rows of `like_sn`."""
    return lax.broadcast_in_dim(x_n, like_sn.shape, [1])


def _to_columns(x_s: jax.Array, like_sn: jax.Array) -> jax.Array:
    """Repeats x over the columns of `like_sn`."""
    return lax.broadcast_in_dim(x_s, like_sn.shape, [0])


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
