"""Placement of a cache's tokens on several chips (context-parallel decoding).

Each sequence is cut into stripes of consecutive tokens that go to the n chips in turn: chip c holds
stripes c, c + n, c + 2n, ... in consecutive slots. This round robin has three properties:

- at every length, the numbers of tokens on two chips differ by at most one stripe (with contiguous
  blocks, later chips would idle until the sequence reaches them);
- the tokens a query attends to are a prefix of every chip's slots;
- a tile that divides a stripe holds consecutive positions, which LRKV's rotated queries need
  (`rope.basis`).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

AXIS = "cache"  # mesh axis that a cache's tokens are sharded over
MAX_STRIPE = 512  # tokens per stripe; equal to a tile in plain JAX (`cache_layouts.tiles.TILE_KV`)


@dataclasses.dataclass(frozen=True)
class Stripes:
    """The stripes of one chip; `Stripes()` is a whole sequence on one chip."""

    size: int = MAX_STRIPE
    chips: int = 1
    chip: jax.Array | int = 0

    def position(self, slot: jax.Array) -> jax.Array:
        """Returns the sequence position of the token in a slot of this chip."""
        if self.chips == 1:
            return slot
        return (slot // self.size * self.chips + self.chip) * self.size + slot % self.size

    def num_held(self, tokens: jax.Array) -> jax.Array:
        """Returns how many of the first `tokens` tokens this chip holds: its slots 0, 1, ..."""
        if self.chips == 1:
            return tokens
        round_tokens = self.size * self.chips  # one stripe on every chip
        last_round = jnp.clip(tokens % round_tokens - self.chip * self.size, 0, self.size)
        return tokens // round_tokens * self.size + last_round


def num_chips() -> int:
    """Returns the size of the "cache" axis of the mesh in context; 1 without the axis."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def local_stripes(slots: int) -> Stripes:
    """Returns the stripes of the current chip, inside a `jax.shard_map` over the axis.

    Args:
      slots: length of the chip's part of the cache.
    """
    return Stripes(math.gcd(slots, MAX_STRIPE), num_chips(), jax.lax.axis_index(AXIS))


def spec(array: jax.Array) -> PartitionSpec:
    """Returns the sharding of a cache array [..., S]: tokens over the chips."""
    return PartitionSpec(*(None,) * (array.ndim - 1), AXIS)
