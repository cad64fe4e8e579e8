"""One Mosaic GPU kernel for every cache, read in slabs of 64 channels (`ring`).

A block of the grid is one warpgroup. It reads the slabs of a few KV heads for the tokens of a
split, tile by tile: those of the keys, then those of the values. Tokens are the rows of every
product, which are many, and query heads its columns, which are few and padded to eight: the tensor
core's smallest. A query that only some of a block's heads ask is zero in the other columns, so
that shared and private slabs sum into one accumulator. Two blocks share a multiprocessor where
they fit: one waits while the other works.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.kernels.decode_attention.gpu import turning
from kvjax.kernels.decode_attention.gpu.plans import Plan
from kvjax.kernels.decode_attention.gpu.ring import ROWS
from kvjax.kernels.decode_attention.gpu.ring import Ring
from kvjax.kernels.decode_attention.gpu.ring import here

_MASKED = -1e30
_LOG2E = math.log2(math.e)
# Four rows of 64 elements a warp, eight neighbours a thread.
_SIXTEEN_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


@functools.partial(
    jax.jit, static_argnames=("plan", "groups", "block", "split", "slots", "together", "interpret")
)  # a function of its own in the program: lowered once for all layers of a model
def attend(
    plan: Plan,
    arrays: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    groups: int,
    block: int,
    split: int,
    slots: int,
    together: int,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Every split's weighted values, maximum of its logits (to base 2) and sum of its weights.

    Args:
      arrays: the cache's, as [B, channels, S], "key_scale" [B, K, S] if keys are normed, and
        "query" [B, groups, keys, columns, 64]. Where the plan has slabs that turn, besides, with H
        padded to a multiple of 128, "turning_query" [B, splits, groups, query heads, H] float32,
        turned back by the split's first slot, "expand" [K·R, H], "basis" [H, 64], imaginary parts
        negated, and "table" [split, 64].
      first_B: the last slot of each sequence; one that is full and grows no more may say S.
      groups: blocks per sequence and split.
      block: tokens of a tile.
      split: tokens of a split.
      slots: of the ring.
      together: products that are in flight at once, each into sums of its own.

    Returns:
      float32 [B, splits, groups, values, 64, columns] and twice [B, splits, groups, columns]. What
      lies behind a sequence's last split is not written.

    Raises:
      ValueError: sizes that do not go together.
    """
    B, S = first_B.shape[0], arrays[plan.keys[0].name].shape[-1]
    splits, n = -(-S // split), plan.columns
    lent, fewest = plan.lent, plan.fewest_slots
    fits = 1 <= together <= slots >= fewest and not split % block
    if not fits or (plan.turning and block != ROWS):
        raise ValueError(
            f"block = {block}, split = {split}, slots = {slots}, together = {together}: a split is "
            f"a multiple of a block, and there are {fewest} slots or more, and as many as slabs "
            f"together; where keys turn a block is {ROWS}"
        )
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs = dict(
        o=f32((B, splits, groups, len(plan.values), ROWS, n)),
        maximum=f32((B, splits, groups, n)),
        total=f32((B, splits, groups, n)),
    )
    tiled = functools.partial(
        plgpu.SMEM,
        dtype=arrays["query"].dtype,
        transforms=(plgpu.TilingTransform((8, ROWS)), plgpu.SwizzleTransform(128)),
    )
    scratch = dict(
        ring=tiled((slots, ROWS, block)),
        queries=tiled((len(plan.keys), n, ROWS)),
        weights=tiled((1, n, block)),
        full=plgpu.Barrier(num_barriers=slots),
        ready=plgpu.Barrier(num_arrivals=1 + lent),
    )
    if plan.turning:
        scratch["turned"] = tiled((len(plan.turning) * plan.group * ROWS, ROWS))
    if "key_scale" in arrays:
        scratch["scales"] = plgpu.SMEM((2, plan.heads, block), jnp.float32)
        scratch["scales_full"] = plgpu.Barrier(num_barriers=2)
    names = ("first", *arrays, *outputs)

    def kernel(*refs, **scratch_refs):
        ref = dict(zip(names, refs, strict=True)) | scratch_refs
        b, split_index, group = (lax.axis_index(name) for name in ("sequence", "split", "group"))
        first, start = lax.min(ref["first"][b], S - 1), split_index * split
        ring = Ring(
            order=plan.order,
            slots=slots,
            block=block,
            ref=ref,
            sequence=b,
            group=group,
            start=start,
            tiles=lax.min(lax.div(first - start, block) + 1, split // block),
        )
        work = _Block(plan, ref, ring, (b, split_index, group), first, together)
        pl.when(first >= start)(lambda: work.run(lent))

    run = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(B, splits, groups),  # neighbours read the same base, the second from the L2 cache
        grid_names=("sequence", "split", "group"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
        kernel_name="decode_attention",
    )
    return run(first_B, *arrays.values())


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of the grid, at work."""

    plan: Plan
    ref: Mapping
    ring: Ring
    at: tuple[jax.Array, jax.Array, jax.Array]  # sequence, split, group
    first: jax.Array
    together: int  # products that are in flight at once

    def run(self, lent: int) -> None:
        self.prepare(lent)
        n, layout = self.plan.columns, plgpu.Layout.WGMMA
        zeros = lambda *shape: plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        maximum_n = plgpu.layout_cast(jnp.full((n,), _MASKED, jnp.float32), layout.reduce(0))
        carry = maximum_n, zeros(self.ring.block, n), [zeros(ROWS, n) for _ in self.plan.values]
        maximum_n, total_sn, o = lax.fori_loop(0, self.ring.tiles, self.tile, carry)
        self.ref["maximum"].at[self.at][...] = maximum_n
        self.ref["total"].at[self.at][...] = jnp.sum(total_sn, axis=0)
        for i, o_Vn in enumerate(o):
            self.ref["o"].at[*self.at, i][...] = o_Vn

    def prepare(self, lent: int) -> None:
        """Reads the queries while the ring fills; the basis that turns them is lent slots of it."""
        plan, ref, ring = self.plan, self.ref, self.ring
        b, split, group = self.at
        plgpu.copy_gmem_to_smem(ref["query"].at[b, group], ref["queries"], ref["ready"])
        own = ring.slots - lent
        basis = [ref["ring"].at[own + i] for i in range(lent)]
        for i, tile in enumerate(basis):
            rows = ref["basis"].at[pl.ds(i * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(rows, tile, ref["ready"])
        for part in range(own):
            ring.load(0, part)
        for t in range(2):
            self.load_scales(t)
        plgpu.barrier_wait(ref["ready"])
        if not plan.turning:
            return

        @pl.loop(0, len(plan.turning) * plan.group)
        def _(i):
            slab, g = lax.div(i, plan.group), lax.rem(i, plan.group)
            head = lax.div(slab, len(plan.turning) // plan.heads)
            query = ref["turning_query"].at[b, split, group, head * plan.group + g]
            row = group * plan.turning[0].stride + slab * ROWS
            turning.turn(i, query, ref["expand"], row, basis, ref["turned"])

        plgpu.commit_smem()
        for part in range(own, ring.slots):
            ring.load(0, part)

    def tile(self, t, carry):
        maximum_n, total_sn, o = carry
        z_sn = self.masked(t, self.logits(t) * (self.plan.scale * _LOG2E))
        new_n = jnp.maximum(maximum_n, jnp.max(z_sn, axis=0))
        decay_n = jnp.exp2(maximum_n - new_n)
        p_sn = jnp.exp2(z_sn - _to_rows(new_n, z_sn))
        weights = self.ref["weights"]
        weights.at[0].transpose((1, 0))[...] = p_sn.astype(weights.dtype)
        plgpu.commit_smem()
        return new_n, total_sn * _to_rows(decay_n, z_sn) + p_sn, self.weigh(t, o, decay_n)

    # -- keys -------------------------------------------------------------------------------------

    def logits(self, t) -> jax.Array:
        plan, ring, queries = self.plan, self.ring, self.ref["queries"]
        last = len(plan.keys) - 1

        def products(acc):
            for i in range(len(plan.keys)):
                key = ring.take(t, i)
                plgpu.wgmma(acc, key.transpose((1, 0)), queries.at[here(i)].transpose((1, 0)))
                if i > plan.held:
                    plgpu.wgmma_wait(1)
                    ring.release(t, i - 1)
            return acc[...]

        z_sn = pl.run_scoped(products, plgpu.ACC((ring.block, plan.columns), jnp.float32))
        if last >= plan.held:  # else it is a value too, and weighed before its slot is free
            ring.release(t, last)
        if plan.turning:
            z_sn = self.add_turning(t, z_sn)
        return self.scaled(t, z_sn) if "scales" in self.ref else z_sn

    def add_turning(self, t, z_sn: jax.Array) -> jax.Array:
        plan, ring = self.plan, self.ring
        column_sn, slabs_of_head = _iota(z_sn.shape, 1), len(plan.turning) // plan.heads
        table_sP = turning.table(self.ref, t * ring.block, ring.block)
        met = [(i, g) for i in range(len(plan.turning)) for g in range(plan.group)]
        for some in _runs(len(met), self.together):
            pairs = [met[j] for j in some]

            def products(*accs, pairs=pairs):
                for (i, g), acc in zip(pairs, accs, strict=True):
                    key = (ring.again if g else ring.take)(t, len(plan.keys) + i)
                    turning.meet(acc, key, i * plan.group + g, self.ref["turned"])
                return _one_by_one(accs, lambda w_sP: jnp.sum(w_sP * table_sP, axis=1))

            accs = [plgpu.ACC(table_sP.shape, jnp.float32) for _ in pairs]
            for (i, g), z_s in zip(pairs, pl.run_scoped(products, *accs), strict=True):
                own_sn = column_sn == i // slabs_of_head * plan.group + g
                z_sn = jnp.where(own_sn, z_sn + _to_columns(z_s, z_sn), z_sn)
            if done := [len(plan.keys) + i for i, g in pairs if g == plan.group - 1]:
                ring.release(t, *done)
        return z_sn

    def scaled(self, t, z_sn: jax.Array) -> jax.Array:
        """Logits times key_scale of their KV head."""
        slot, group = lax.rem(t, 2), self.plan.group
        plgpu.barrier_wait(self.ref["scales_full"].at[slot])
        column_sn = _iota(z_sn.shape, 1)
        for k in range(self.plan.heads):
            scales = self.ref["scales"].at[slot, k]
            scale_s = plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(1))
            own_sn = (column_sn >= k * group) & (column_sn < (k + 1) * group)
            z_sn = jnp.where(own_sn, z_sn * _to_columns(scale_s, z_sn), z_sn)
        plgpu.commit_smem()
        self.load_scales(t + 2)
        return z_sn

    def load_scales(self, t) -> None:
        if "scales" not in self.ref:
            return
        b, _, group = self.at
        slot = lax.rem(t, 2)

        @pl.when(t < self.ring.tiles)
        def _():
            heads = pl.ds(group * self.plan.heads, self.plan.heads)
            tokens = pl.ds(self.ring.start + t * self.ring.block, self.ring.block)
            scales, full = self.ref["scales"].at[slot], self.ref["scales_full"].at[slot]
            plgpu.copy_gmem_to_smem(self.ref["key_scale"].at[b, heads, tokens], scales, full)

    def masked(self, t, z_sn: jax.Array) -> jax.Array:
        slot_sn = self.ring.start + t * self.ring.block + _iota(z_sn.shape, 0)
        return jnp.where(slot_sn <= self.first, z_sn, _MASKED)

    # -- values -----------------------------------------------------------------------------------

    def weigh(self, t, o, decay_n: jax.Array) -> list[jax.Array]:
        plan, ring, weights = self.plan, self.ring, self.ref["weights"]
        begin = len(plan.order) - len(plan.values) if not plan.held else 0
        out = []
        for some in _runs(len(o), self.together):
            for i in some:  # before any product: nothing is stored while one is in flight
                self.clear(t, (ring.again if plan.held else ring.take)(t, begin + i))

            def products(*accs, some=some):
                for acc, i in zip(accs, some, strict=True):
                    value = ring.again(t, begin + i)
                    plgpu.wgmma(acc, value, weights.at[here(0)].transpose((1, 0)))
                return _one_by_one(accs)

            accs = [plgpu.ACC(o[i].shape, jnp.float32) for i in some]
            added = pl.run_scoped(products, *accs)
            ring.release(t, *(begin + i for i in some))
            for i, added_Vn in zip(some, added, strict=True):
                # Without a barrier LLVM adds all at the end, from as many more registers.
                out.append(lax.optimization_barrier(o[i] * _to_rows(decay_n, o[i]) + added_Vn))
        return out

    def clear(self, t, value) -> None:
        """Zeroes what the sequence has not reached: it may be NaN, and zero times NaN is NaN."""
        token = self.ring.start + t * self.ring.block

        @pl.when(token + self.ring.block - 1 > self.first)
        def _():
            @pl.loop(0, ROWS, step=16)
            def _(row):
                rows = value.at[pl.ds(pl.multiple_of(row, 16), 16)]
                v_rs = plgpu.load(rows, layout=_SIXTEEN_ROWS)
                slot_rs = plgpu.broadcasted_iota(jnp.int32, v_rs.shape, 1, layout=_SIXTEEN_ROWS)
                rows[...] = jnp.where(token + slot_rs <= self.first, v_rs, jnp.zeros_like(v_rs))

            plgpu.commit_smem()


def _runs(count: int, most: int) -> list[range]:
    """0 .. count - 1 in runs of at most so many."""
    return [range(i, min(i + most, count)) for i in range(0, count, most)]


def _one_by_one(accs, then: Callable = lambda x: x) -> list[jax.Array]:
    """`then` of every accumulator, of one while the products into the next are in flight."""
    left = range(len(accs) - 1, -1, -1)
    read = plgpu.wgmma_accumulator_load
    return [then(read(acc, wait_n=n)) for acc, n in zip(accs, left, strict=True)]


def _to_rows(x_n: jax.Array, like_sn: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x_n, like_sn.shape, [1])


def _to_columns(x_s: jax.Array, like_sn: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x_s, like_sn.shape, [0])


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
