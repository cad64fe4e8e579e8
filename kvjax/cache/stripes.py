"""Which chip holds which token, if a cache is split over several chips.

A sequence is cut into stripes of consecutive tokens, dealt to n chips in turn: chip c holds stripes
c, c + n, c + 2n, ... side by side, in slots of its own. So a sequence of any length is spread to
within one stripe, where contiguous halves would leave the later chips idle until it reaches them;
what a token sees is still a prefix of every chip's slots; and a tile that divides a stripe holds
consecutive positions, as the rotating query of LRKV needs (`rope.basis`).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

AXIS = "cache"  # of a mesh: the chips that tokens of a cache are split over
MAX_STRIPE = 512  # tokens of a stripe, at most: a tile of `cache_layouts.tiles.TILE_KV`


@dataclasses.dataclass(frozen=True)
class Stripes:
    """What one chip holds: `Stripes()` is all of every sequence."""

    size: int = MAX_STRIPE
    chips: int = 1
    chip: jax.Array | int = 0

    def position(self, slot: jax.Array) -> jax.Array:
        """The position in its sequence of the token in a slot of this chip."""
        if self.chips == 1:
            return slot
        return (slot // self.size * self.chips + self.chip) * self.size + slot % self.size

    def num_held(self, tokens: jax.Array) -> jax.Array:
        """How many of a sequence's first `tokens` tokens are this chip's: its slots 0, 1, ..."""
        if self.chips == 1:
            return tokens
        round_ = self.size * self.chips
        here = jnp.clip(tokens % round_ - self.chip * self.size, 0, self.size)
        return tokens // round_ * self.size + here


def num_chips() -> int:
    """How many chips the mesh around this call splits caches over; 1 where it has no such axis."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def local_stripes(slots: int) -> Stripes:
    """What a chip with so many slots holds, within a `jax.shard_map` over the axis."""
    return Stripes(math.gcd(slots, MAX_STRIPE), num_chips(), jax.lax.axis_index(AXIS))


def spec(array: jax.Array) -> PartitionSpec:
    """How an array [..., S] of a cache is split: its tokens over the chips."""
    return PartitionSpec(*(None,) * (array.ndim - 1), AXIS)
