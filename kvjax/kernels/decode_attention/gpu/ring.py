"""A ring of shared-memory slots through which a GPU kernel reads the cache.

A slab is 64 channels of a tile, the unit of a bulk copy (TMA). A slot holds one slab at a time:

    load         the copy starts                       the slot must be free
    wait_slab    full[slot] completes: it has arrived  copy -> products, loads and stores
    (products)   wgmma reads the slab                  the caller waits for them (wgmma_wait)
    release      commit_smem, then the next load       every warp's accesses -> the next copy

The kernel is a single warpgroup that both uses slabs and starts copies, so a slot is refilled as
soon as the product that read it has been waited for. Each copy is waited for exactly once, which
keeps the barriers' phases in step with the slots.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

ROWS = 64  # channels of a slab: the rows of one wgmma, and the width of a 128-byte swizzle in bf16


@dataclasses.dataclass(frozen=True)
class Slab:
    """64 channels of a cached array [B, channels, S]."""

    name: str
    row: int  # first channel, relative to the program's first
    stride: int  # channels between the first rows of neighbouring programs
    sharing: int = 1  # neighbouring programs that read the same channels


def slabs(name: str, channels: int, sharing: int = 1) -> tuple[Slab, ...]:
    """Returns all slabs of the `channels` that one program reads."""
    return tuple(Slab(name, row, channels, sharing) for row in range(0, channels, ROWS))


def pin_here(x) -> jax.Array:
    """Returns x behind an optimization barrier.

    Without it LLVM hoists every slab's address out of the loop, and the addresses fill registers.
    """
    return lax.optimization_barrier(jnp.asarray(x, jnp.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The slabs of all tiles of a split, in the order in which the kernel uses them.

    Slab i of tile t has index i + t·len(order) in the whole sequence of slabs; methods take it as
    (t, i), where i may run past the tile's end: (t, i + len(order)) is (t + 1, i).
    """

    order: tuple[Slab, ...]  # slabs of one tile
    slots: int
    tile_kv: int  # tokens of a tile
    # Cache arrays by name, [B, channels, S]; "ring" [slots, 64, tile_kv]; barriers "full" [slots].
    ref: Mapping
    sequence: jax.Array  # of this program, as head_tile
    head_tile: jax.Array
    start: jax.Array  # first token of the split
    tiles: jax.Array  # of the split, up to the one with the sequence's new token

    def load(self, t, i: int) -> None:
        """Starts the copy of slab i of tile t into its slot, unless the split ends before tile t.

        The slot must be free: the slab that it held before has been released.
        """
        slot = self._slot(t, i)
        ahead, i = divmod(i, len(self.order))  # i may run past the tile: slab i of tile t + ahead

        @pl.when(t + ahead < self.tiles)
        def _():
            slab = self.order[i]
            # Neighbouring programs share a base's channels: `sharing` of them have the same row.
            row = lax.div(pin_here(self.head_tile), slab.sharing) * slab.stride + slab.row
            token = self.start + (t + ahead) * self.tile_kv
            plgpu.copy_gmem_to_smem(  # [64, tile_kv]
                self.ref[slab.name].at[self.sequence, pl.ds(row, ROWS), pl.ds(token, self.tile_kv)],
                self.ref["ring"].at[slot],
                self.ref["full"].at[slot],
            )

    def wait_slab(self, t, i: int):
        """Waits for a slab's copy and returns its slot, [64, tile_kv]: once per slab, in order."""
        plgpu.barrier_wait(self.ref["full"].at[self._slot(t, i)])
        return self.slab(t, i)

    def slab(self, t, i: int):
        """Returns the slot, [64, tile_kv], of a slab that has been waited for and not released."""
        return self.ref["ring"].at[self._slot(t, i)]

    def release(self, t, *indices: int) -> None:
        """Refills the slots of these slabs with the slabs that come `slots` later.

        Every product that reads the slabs must have been waited for.
        """
        # Every warp's accesses to the slots -> the copies that overwrite them.
        plgpu.commit_smem()
        for i in indices:
            self.load(t, i + self.slots)

    def stage(self, t, indices: Sequence[int]) -> None:
        """Casts slabs in int8, see `StagedRing`; slabs in bfloat16 are used where they are."""

    def _slot(self, t, i: int):
        # (t · slabs + i) mod slots; i is reduced first, in Python.
        return lax.rem(pin_here(t) * len(self.order) + i % self.slots, self.slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedRing(Ring):
    """A ring of slabs in int8, which `stage` casts to bfloat16 for the products.

        load         as above
        stage        full[slot] completes; slab -> registers -> staged[i mod stages]; commit_smem;
                     the slot is refilled
        (products)   wgmma reads staged[i mod stages]; the caller waits for them before it stages
                     the next slabs there

    `ref["staged"]` is [stages, 64, tile_kv] bfloat16.
    """

    def stage(self, t, indices: Sequence[int]) -> None:
        """Casts these slabs, of which no two have the same place; then refills their slots.

        Every product must have been waited for.
        """
        rows = 256 // self.tile_kv  # of a warp, whose threads have 8 neighbours each
        tiling = plgpu.Tiling(((4 * rows, self.tile_kv), (rows, self.tile_kv), (8,)))
        places = dict(warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
        layout = plgpu.Layout.TILED(tiling, **places)
        for i in indices:
            slot = self._slot(t, i)
            plgpu.barrier_wait(self.ref["full"].at[slot])  # its copy has arrived
            slab = plgpu.load(self.ref["ring"].at[slot], layout=layout)
            self.slab(t, i)[...] = slab.astype(jnp.bfloat16)  # exact: at most 127
        # Stores to `staged` -> the products; every warp's loads of the slots -> their next copies.
        plgpu.commit_smem()
        for i in indices:
            self.load(t, i + self.slots)

    def wait_slab(self, t, i: int):
        """Returns a slab that has been staged, [64, tile_kv] bfloat16."""
        return self.slab(t, i)

    def slab(self, t, i: int):
        del t
        staged = self.ref["staged"]
        return staged.at[pin_here(i % staged.shape[0])]

    def release(self, t, *indices: int) -> None:
        """The slabs' slots have been refilled; the caller has waited for the products."""
