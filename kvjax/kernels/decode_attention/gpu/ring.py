"""How slabs of a cache are brought through shared memory, on a GPU.

A slab is 64 channels by the tokens of a tile, which one bulk copy (TMA) brings into a slot. A slot
is filled again as soon as its slab was used, by the warpgroup that used it, with what comes next.
"""

from collections.abc import Mapping
import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

ROWS = 64  # channels of a slab: wgmma's rows


@dataclasses.dataclass(frozen=True)
class Slab:
    """64 channels of a cached array [B, channels, S]."""

    name: str
    row: int  # the first channel, from where the block's begin
    stride: int  # channels from one block's to the next's
    sharing: int = 1  # neighbouring blocks that read the same channels


def slabs(name: str, channels: int, sharing: int = 1) -> tuple[Slab, ...]:
    """All slabs of the `channels` that a block of the grid reads."""
    return tuple(Slab(name, row, channels, sharing) for row in range(0, channels, ROWS))


def here(x) -> jax.Array:
    """x, from which nothing is computed before this: addresses made early fill the registers."""
    return lax.optimization_barrier(jnp.asarray(x, jnp.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The slabs of all tiles, in their order.

    Parts count on from a tile's first: part i + len(order) of tile t is part i of tile t + 1.
    """

    order: tuple[Slab, ...]  # of a tile
    slots: int
    block: int  # tokens of a tile
    ref: Mapping  # the arrays by name, "ring" [slots, 64, block], "full": a barrier per slot
    sequence: jax.Array
    group: jax.Array
    start: jax.Array  # the first token
    tiles: jax.Array

    def load(self, t, part: int) -> None:
        """Begins to read a slab, unless there is no such tile."""
        slot = self._slot(t, part)
        ahead, i = divmod(part, len(self.order))

        @pl.when(t + ahead < self.tiles)
        def _():
            slab = self.order[i]
            row = lax.div(here(self.group), slab.sharing) * slab.stride + slab.row
            token = self.start + (t + ahead) * self.block
            plgpu.copy_gmem_to_smem(
                self.ref[slab.name].at[self.sequence, pl.ds(row, ROWS), pl.ds(token, self.block)],
                self.ref["ring"].at[slot],
                self.ref["full"].at[slot],
            )

    def take(self, t, part: int):
        """A slab that has arrived, [64, block]. Every slab is taken once, in order."""
        plgpu.barrier_wait(self.ref["full"].at[self._slot(t, part)])
        return self.again(t, part)

    def again(self, t, part: int):
        """A slab that was taken and not released."""
        return self.ref["ring"].at[self._slot(t, part)]

    def release(self, t, *parts: int) -> None:
        """Begins to fill the slots of slabs with what comes next."""
        plgpu.commit_smem()  # every warp has read them
        for part in parts:
            self.load(t, part + self.slots)

    def _slot(self, t, part: int):
        return lax.rem(here(t) * len(self.order) + part % self.slots, self.slots)
