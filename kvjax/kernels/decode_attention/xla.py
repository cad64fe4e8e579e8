"""Decode attention in plain JAX: tiles of the cache, an online softmax.

Temporary memory is that of a tile. What is done with a tile is in `readings`. The number of tiles
follows the longest sequence, not the capacity. Products over a float32 cache are in the device's
highest precision, those over a bfloat16 cache in its default: a query may be wider than its model.

On CPU a slice of an array is copied before a product reads it, at a third of the speed of reading
the array itself. A single query per sequence there takes its logits tile by tile only where a tile
is expanded, and everything else from the whole cache, as long as sequences fill a quarter of it:
its temporaries are the logits.
"""

from collections.abc import Mapping
import math

import jax
import jax.numpy as jnp

from kvjax.cache.stripes import Stripes
from kvjax.kernels.decode_attention.readings import Reading
from kvjax.kernels.decode_attention.readings.tiles import BLOCK

_MASKED = -1e30  # finite, so that a tile with nothing to see leaves the sums as they are


def decode_attention(
    operands: Reading,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    window: int = 0,
    causal: bool = True,
    block: int = BLOCK,
) -> jax.Array:
    """See `api.decode_attention`: [B, T, N, Hv], in float32 or wider.

    Args:
      causal: False: all T tokens see slots 0 .. first_B.
      block: tokens per tile.
    """
    how = dict(window=window, causal=causal, block=block)
    return partial(operands, cache, first_B, Stripes(), **how)[0]


def partial(
    operands: Reading,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    held: Stripes,
    *,
    window: int = 0,
    causal: bool = True,
    block: int = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the tokens that are held here: [B, T, N, Hv], and log-sum-exps [B, T, N].

    Where a query sees none of them, its output is finite and its log-sum-exp -inf.

    Args:
      first_B: position of each sequence's first new token, whoever holds it.
    """
    wide = jnp.promote_types(operands.query.dtype, jnp.float32)
    T = operands.query.shape[1]
    S = next(iter(cache.values())).shape[-1]
    is_wide = all(array.dtype == wide for array in cache.values())
    if held.chips > 1:  # no tile across stripes
        block = math.gcd(block, held.size)
    in_tiles = lambda *args: tiled(*args, block, held, window, causal)
    at_once = lambda *args: whole(*args, block, held)

    def on_cpu(operands, cache, first_B):
        if S <= 4 * block:
            return at_once(operands, cache, first_B)
        short = 4 * held.held(jnp.max(first_B)) < S
        return jax.lax.cond(short, in_tiles, at_once, operands, cache, first_B)

    with jax.default_matmul_precision("highest" if is_wide else None):
        arguments = (operands, dict(cache), first_B)
        # A conversion would copy the whole cache; a window sees some tiles of it only.
        if T > 1 or not is_wide or window:
            return in_tiles(*arguments)
        return jax.lax.platform_dependent(*arguments, cpu=on_cpu, default=in_tiles)


def tiled(
    operands,
    cache,
    first_B: jax.Array,
    block: int,
    held: Stripes = Stripes(),
    window: int = 0,
    causal: bool = True,
):
    """Everything tile by tile, with an online softmax; see `partial`."""
    problem = _Problem(operands, cache, first_B, block, held, window, causal)
    B, T, N = operands.query.shape[:3]
    tiles = problem.tiles

    def step(i, carry):
        max_BNT, sum_BNT, outputs = carry
        start, tile = problem.tile(i)
        z_BNTs, seen_BNTs = problem.masked(
            tiles.logits(tile, held.position(start)), start, i * problem.block
        )
        new_max_BNT = jnp.maximum(max_BNT, jnp.max(z_BNTs, axis=-1))
        p_BNTs = jnp.where(seen_BNTs, jnp.exp(z_BNTs - new_max_BNT[..., None]), 0)
        decay_BNT = jnp.exp(max_BNT - new_max_BNT)
        added = tiles.weigh(p_BNTs, tile)
        outputs = tuple(o * decay_BNT[..., None] + a for o, a in zip(outputs, added, strict=True))
        return new_max_BNT, sum_BNT * decay_BNT + jnp.sum(p_BNTs, axis=-1), outputs

    zeros = lambda *shape: jnp.zeros((B, N, T, *shape), problem.wide)
    carry = (zeros() + _MASKED, zeros(), tuple(zeros(width) for width in tiles.widths(cache)))
    max_BNT, sum_BNT, outputs = problem.for_tiles(step, carry)
    return problem.finish(outputs, max_BNT, sum_BNT)


def whole(operands, cache, first_B: jax.Array, block: int, held: Stripes = Stripes()):
    """All logits first; only keys that must be expanded are taken tile by tile; see `partial`."""
    problem = _Problem(operands, cache, first_B, block, held)
    B, T, N = operands.query.shape[:3]
    tiles = problem.tiles
    if tiles.expands:

        def step(i, z_BNTS):
            start, tile = problem.tile(i)
            z_BNTs = tiles.logits(tile, held.position(start))
            return jax.lax.dynamic_update_slice_in_dim(z_BNTS, z_BNTs, start, axis=-1)

        z_BNTS = problem.for_tiles(step, jnp.zeros((B, N, T, problem.S), problem.wide))
    else:
        z_BNTS = tiles.logits(cache, jnp.zeros((), jnp.int32))
    z_BNTS, seen_BNTS = problem.masked(z_BNTS, jnp.zeros((), jnp.int32), 0)
    max_BNT = jnp.max(z_BNTS, axis=-1)
    p_BNTS = jnp.where(seen_BNTS, jnp.exp(z_BNTS - max_BNT[..., None]), 0)
    return problem.finish(tiles.weigh(p_BNTS, cache), max_BNT, jnp.sum(p_BNTS, axis=-1))


class _Problem:
    """One call's arrays, with what both ways of going through a cache share."""

    def __init__(self, operands, cache, first_B, block, held, window=0, causal=True):
        self.operands, self.cache, self.first_B, self.held = operands, cache, first_B, held
        self.window, self.causal = window, causal
        self.wide = jnp.promote_types(operands.query.dtype, jnp.float32)
        self.S = next(iter(cache.values())).shape[-1]
        self.block = min(block, self.S)
        to_wide = lambda x: x.astype(self.wide)
        self.tiles = jax.tree.map(to_wide, operands).tiles()
        self.T = operands.query.shape[1]

    def tile(self, i) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The first slot of tile i, and the tile; the last may overlap the one before."""
        start = jnp.minimum(i * self.block, self.S - self.block)
        read = lambda array: jax.lax.dynamic_slice_in_dim(array, start, self.block, axis=-1)
        return start, {name: read(array).astype(self.wide) for name, array in self.cache.items()}

    def for_tiles(self, step, carry):
        """`step(i, carry)` over the tiles that any sequence has reached and still sees."""
        if self.S == self.block:
            return step(0, carry)
        first, reached = 0, -(-self.held.held(jnp.max(self.first_B) + self.T) // self.block)
        if self.window:
            before = jnp.maximum(jnp.min(self.first_B) + 1 - self.window, 0)
            first = self.held.held(before) // self.block
        return jax.lax.fori_loop(first, jnp.minimum(reached, -(-self.S // self.block)), step, carry)

    def masked(self, z_BNTs, start, new) -> tuple[jax.Array, jax.Array]:
        """Scaled and biased logits of slots from `start`, and which count.

        What a query does not see does not count, nor slots before `new`: another tile had them.
        """
        slot_s = start + jnp.arange(z_BNTs.shape[-1], dtype=jnp.int32)
        position_s = self.held.position(slot_s)
        z_BNTs = self.operands.scale * z_BNTs
        bias = self.operands.bias
        if bias is not None:
            z_BNTs = z_BNTs + bias.at(position_s, self.first_B, self.wide)
        after_T = jnp.arange(self.T, dtype=self.first_B.dtype) * self.causal
        last_BT = self.first_B[:, None] + after_T[None]
        seen_BTs = (slot_s[None, None] >= new) & (position_s[None, None] <= last_BT[..., None])
        if self.window:
            seen_BTs &= position_s[None, None] > last_BT[..., None] - self.window
        seen_BNTs = jnp.broadcast_to(seen_BTs[:, None], z_BNTs.shape)
        return jnp.where(seen_BNTs, z_BNTs, _MASKED), seen_BNTs

    def finish(self, outputs: tuple[jax.Array, ...], max_BNT, sum_BNT):
        """Outputs [B, T, N, Hv], and log-sum-exps [B, T, N]."""
        over_BNT = jnp.where(sum_BNT > 0, sum_BNT, 1)  # nothing seen: zeros, not NaN
        o_BNTV = self.tiles.finish(tuple(o / over_BNT[..., None] for o in outputs))
        log_sum_exp_BNT = jnp.where(sum_BNT > 0, max_BNT + jnp.log(over_BNT), -jnp.inf)
        return jnp.moveaxis(o_BNTV, 1, 2), jnp.moveaxis(log_sum_exp_BNT, 1, 2)
