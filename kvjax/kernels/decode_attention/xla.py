"""Decode attention in plain JAX: tiles of the cache, an online softmax.

Temporary memory is that of a tile. What is done with a tile is in `bodies`. The number of tiles
follows the longest sequence, not the capacity. Products of a float32 model are in the device's
highest precision, those of a bfloat16 model in its default.

On CPU a slice of an array is copied before a product reads it, at a third of the speed of reading
the array itself. A single query per sequence there takes its logits tile by tile only where a tile
is expanded, and everything else from the whole cache, as long as sequences fill a quarter of it:
its temporaries are the logits.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.bodies import BLOCK
from kvjax.kernels.decode_attention.bodies import BODIES
from kvjax.kernels.decode_attention.operands import Operands
from kvjax.layers import sinusoid

_MASKED = -1e30  # finite, so that a tile with nothing to see leaves the sums as they are


def decode_attention(
    operands: Operands,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    block: int = BLOCK,
) -> jax.Array:
    """See `api.decode_attention`: [B, T, N, Hv], in float32 or wider.

    Args:
      block: tokens per tile.
    """
    wide = jnp.promote_types(operands.query.dtype, jnp.float32)
    T = operands.query.shape[1]
    S = next(iter(cache.values())).shape[-1]
    is_wide = all(array.dtype == wide for array in cache.values())
    in_tiles = lambda *args: tiled(*args, block)
    at_once = lambda *args: whole(*args, block)

    def on_cpu(operands, cache, first_B):
        if S <= 4 * block:
            return whole(operands, cache, first_B, block)
        short = 4 * jnp.max(first_B) < S
        return jax.lax.cond(short, in_tiles, at_once, operands, cache, first_B)

    with jax.default_matmul_precision("highest" if operands.query.dtype == wide else None):
        arguments = (operands, dict(cache), first_B)
        if T > 1 or not is_wide:  # a conversion would copy the whole cache
            return in_tiles(*arguments)
        return jax.lax.platform_dependent(*arguments, cpu=on_cpu, default=in_tiles)


def tiled(operands, cache, first_B: jax.Array, block: int) -> jax.Array:
    """Everything tile by tile, with an online softmax."""
    problem = _Problem(operands, cache, first_B, block)
    B, T, N = operands.query.shape[:3]
    body = problem.body

    def step(i, carry):
        max_BNT, sum_BNT, outputs = carry
        start, tile = problem.tile(i)
        z_BNTs, seen_BNTs = problem.masked(body.logits(tile, start), start, i * problem.block)
        new_max_BNT = jnp.maximum(max_BNT, jnp.max(z_BNTs, axis=-1))
        p_BNTs = jnp.where(seen_BNTs, jnp.exp(z_BNTs - new_max_BNT[..., None]), 0)
        decay_BNT = jnp.exp(max_BNT - new_max_BNT)
        added = body.weigh(p_BNTs, tile)
        outputs = tuple(o * decay_BNT[..., None] + a for o, a in zip(outputs, added, strict=True))
        return new_max_BNT, sum_BNT * decay_BNT + jnp.sum(p_BNTs, axis=-1), outputs

    zeros = lambda *shape: jnp.zeros((B, N, T, *shape), problem.wide)
    carry = (zeros() + _MASKED, zeros(), tuple(zeros(width) for width in body.widths(cache)))
    _, sum_BNT, outputs = problem.for_tiles(step, carry)
    return problem.finish(outputs, sum_BNT)


def whole(operands, cache, first_B: jax.Array, block: int) -> jax.Array:
    """All logits first; only keys that must be expanded are taken tile by tile."""
    problem = _Problem(operands, cache, first_B, block)
    B, T, N = operands.query.shape[:3]
    body = problem.body
    if body.expands:

        def step(i, z_BNTS):
            start, tile = problem.tile(i)
            z_BNTs = body.logits(tile, start)
            return jax.lax.dynamic_update_slice_in_dim(z_BNTS, z_BNTs, start, axis=-1)

        z_BNTS = problem.for_tiles(step, jnp.zeros((B, N, T, problem.S), problem.wide))
    else:
        z_BNTS = body.logits(cache, jnp.zeros((), jnp.int32))
    z_BNTS, seen_BNTS = problem.masked(z_BNTS, jnp.zeros((), jnp.int32), 0)
    p_BNTS = jnp.exp(z_BNTS - jnp.max(z_BNTS, axis=-1, keepdims=True))
    p_BNTS = jnp.where(seen_BNTS, p_BNTS, 0)
    return problem.finish(body.weigh(p_BNTS, cache), jnp.sum(p_BNTS, axis=-1))


class _Problem:
    """One call's arrays, with what both ways of going through a cache share."""

    def __init__(self, operands, cache, first_B, block):
        self.operands, self.cache, self.first_B = operands, cache, first_B
        self.wide = jnp.promote_types(operands.query.dtype, jnp.float32)
        self.S = next(iter(cache.values())).shape[-1]
        self.block = min(block, self.S)
        to_wide = lambda x: x.astype(self.wide)
        self.body = BODIES[type(operands)](jax.tree.map(to_wide, operands))
        self.T = operands.query.shape[1]

    def tile(self, i) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The first slot of tile i, and the tile; the last may overlap the one before."""
        start = jnp.minimum(i * self.block, self.S - self.block)
        read = lambda array: jax.lax.dynamic_slice_in_dim(array, start, self.block, axis=-1)
        return start, {name: read(array).astype(self.wide) for name, array in self.cache.items()}

    def for_tiles(self, step, carry):
        """`step(i, carry)` over the tiles that any sequence has reached."""
        if self.S == self.block:
            return step(0, carry)
        reached = -(-(jnp.max(self.first_B) + self.T) // self.block)
        return jax.lax.fori_loop(0, jnp.minimum(reached, -(-self.S // self.block)), step, carry)

    def masked(self, z_BNTs, start, new) -> tuple[jax.Array, jax.Array]:
        """Scaled and biased logits of slots from `start`, and which count.

        What a query does not see does not count, nor slots before `new`: another tile had them.
        """
        slot_s = start + jnp.arange(z_BNTs.shape[-1], dtype=jnp.int32)
        z_BNTs = self.operands.scale * z_BNTs
        bias = getattr(self.operands, "bias", None)
        if bias is not None:
            encoding_sC = sinusoid.encoding(slot_s, bias.weights.shape[0]).astype(self.wide)
            z_BNTs = z_BNTs + (encoding_sC @ bias.weights.astype(self.wide))[None, None, None]
        last_BT = self.first_B[:, None] + jnp.arange(self.T, dtype=self.first_B.dtype)[None]
        seen_BTs = (slot_s[None, None] >= new) & (slot_s[None, None] <= last_BT[..., None])
        seen_BNTs = jnp.broadcast_to(seen_BTs[:, None], z_BNTs.shape)
        return jnp.where(seen_BNTs, z_BNTs, _MASKED), seen_BNTs

    def finish(self, outputs: tuple[jax.Array, ...], sum_BNT: jax.Array) -> jax.Array:
        o_BNTV = self.body.finish(tuple(o / sum_BNT[..., None] for o in outputs))
        return jnp.moveaxis(o_BNTV, 1, 2)
