"""Decode attention in plain JAX: an online softmax over tiles of the cache.

Temporaries are as large as one tile of `tiles.TILE_KV` tokens. `cache_layouts` compute a tile's
logits and weighted sums. The number of tiles follows the longest sequence, not the capacity. Matrix
products over a float32 cache have the device's highest precision, over any other cache its default
precision, even if the query is wider. Tiles of a quantised cache are dequantised as they are read.

On CPU XLA copies a slice before a matrix product reads it, which takes three times as long as
reading the array itself. With one query per sequence the CPU therefore reads the whole cache at
once if the longest sequence fills a quarter of it; temporaries are then the logits of all tokens.
Only keys that must be rebuilt, and low-rank residuals of keys under RoPE, are processed by tiles.
"""

from collections.abc import Mapping
import math

import jax
import jax.numpy as jnp

from kvjax.cache import quantized
from kvjax.cache.stripes import Stripes
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.tiles import TILE_KV

_MASKED = -1e30  # finite, so that a tile without visible keys leaves the sums unchanged


def decode_attention(
    inputs: DecodeInputs,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    window: int = 0,
    softcap: float = 0.0,
    causal: bool = True,
    tile_kv: int = TILE_KV,
) -> jax.Array:
    """See `api.decode_attention`: [B, T, N, Hv], in float32 or wider.

    Args:
      causal: False: all T tokens see slots 0 .. first_B.
      tile_kv: tokens per tile; the formula `cache_layouts.rotating.flops` holds for the default.
    """
    options = dict(window=window, softcap=softcap, causal=causal, tile_kv=tile_kv)
    return attend_with_lse(inputs, cache, first_B, Stripes(), **options)[0]


def attend_with_lse(
    inputs: DecodeInputs,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    stripes: Stripes,
    *,
    window: int = 0,
    softcap: float = 0.0,
    causal: bool = True,
    tile_kv: int = TILE_KV,
) -> tuple[jax.Array, jax.Array]:
    """Attends to the tokens of this chip's stripes: [B, T, N, Hv], and log-sum-exps [B, T, N].

    If a query sees none of these tokens, its output is finite and its log-sum-exp is -inf.

    Args:
      first_B: position of each sequence's first new token, which any chip may hold.
      stripes: the positions that this chip holds.
    """
    wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
    T = inputs.query.shape[1]
    S = next(iter(cache.values())).shape[-1]
    is_wide = all(array.dtype == wide for array in cache.values())
    if stripes.chips > 1:  # no tile crosses a stripe
        tile_kv = math.gcd(tile_kv, stripes.size)

    def in_tiles(inputs, cache, first_B):
        options = dict(window=window, softcap=softcap, causal=causal)
        return attend_in_tiles(inputs, cache, first_B, tile_kv, stripes, **options)

    def at_once(inputs, cache, first_B):
        return attend_at_once(inputs, cache, first_B, tile_kv, stripes, softcap)

    def on_cpu(inputs, cache, first_B):
        if S <= 4 * tile_kv:
            return at_once(inputs, cache, first_B)
        short = 4 * stripes.num_held(jnp.max(first_B)) < S
        return jax.lax.cond(short, in_tiles, at_once, inputs, cache, first_B)

    with jax.default_matmul_precision("highest" if is_wide else None):
        arguments = (inputs, dict(cache), first_B)
        # Tiles avoid a cast of the whole cache, and skip tokens outside a window.
        if T > 1 or not is_wide or window:
            return in_tiles(*arguments)
        return jax.lax.platform_dependent(*arguments, cpu=on_cpu, default=in_tiles)


def attend_in_tiles(
    inputs,
    cache,
    first_B: jax.Array,
    tile_kv: int,
    stripes: Stripes = Stripes(),
    *,
    window: int = 0,
    softcap: float = 0.0,
    causal: bool = True,
):
    """Attends tile by tile with an online softmax; see `attend_with_lse`."""
    options = dict(window=window, softcap=softcap, causal=causal)
    problem = _Problem(inputs, cache, first_B, tile_kv, stripes, **options)
    B, T, N = inputs.query.shape[:3]
    tiles = problem.tiles

    def step(i, carry):  # one tile of the online softmax
        max_BNT, sum_BNT, outputs = carry
        start, tile = problem.tile(i)
        z_BNTs, visible_BNTs = problem.masked(
            tiles.logits(tile, stripes.position(start)), start, i * problem.tile_kv
        )
        new_max_BNT = jnp.maximum(max_BNT, jnp.max(z_BNTs, axis=-1))
        # `where`, since exp(_MASKED - _MASKED) is 1 in a tile that the query does not see.
        p_BNTs = jnp.where(visible_BNTs, jnp.exp(z_BNTs - new_max_BNT[..., None]), 0)
        decay_BNT = jnp.exp(max_BNT - new_max_BNT)
        added = tiles.weighted_sums(p_BNTs, tile)
        outputs = tuple(o * decay_BNT[..., None] + a for o, a in zip(outputs, added, strict=True))
        return new_max_BNT, sum_BNT * decay_BNT + jnp.sum(p_BNTs, axis=-1), outputs

    def zeros(*shape):
        return jnp.zeros((B, N, T, *shape), problem.wide)

    widths = tiles.widths(quantized.dequantized_shapes(cache))
    carry = (zeros() + _MASKED, zeros(), tuple(zeros(width) for width in widths))
    max_BNT, sum_BNT, outputs = problem.for_tiles(step, carry)
    return problem.finish(outputs, max_BNT, sum_BNT)


def attend_at_once(
    inputs,
    cache,
    first_B: jax.Array,
    tile_kv: int,
    stripes: Stripes = Stripes(),
    softcap: float = 0.0,
):
    """Attends with all logits in memory; rebuilds keys, if necessary, tile by tile."""
    problem = _Problem(inputs, cache, first_B, tile_kv, stripes, softcap=softcap)
    B, T, N = inputs.query.shape[:3]
    tiles = problem.tiles
    if tiles.large_logits:

        def step(i, z_BNTS):
            start, tile = problem.tile(i)
            z_BNTs = tiles.tile_logits(tile, stripes.position(start))
            return jax.lax.dynamic_update_slice_in_dim(z_BNTS, z_BNTs, start, axis=-1)

        z_BNTS = problem.for_tiles(step, jnp.zeros((B, N, T, problem.S), problem.wide))
        z_BNTS = tiles.add_direct(z_BNTS, cache)
    else:
        z_BNTS = tiles.logits(cache, jnp.zeros((), jnp.int32))
    z_BNTS, visible_BNTS = problem.masked(z_BNTS, jnp.zeros((), jnp.int32), 0)
    max_BNT = jnp.max(z_BNTS, axis=-1)
    p_BNTS = jnp.where(visible_BNTS, jnp.exp(z_BNTS - max_BNT[..., None]), 0)
    return problem.finish(tiles.weighted_sums(p_BNTS, cache), max_BNT, jnp.sum(p_BNTS, axis=-1))


class _Problem:
    """Arrays and sizes of one call, shared by `attend_in_tiles` and `attend_at_once`."""

    def __init__(
        self, inputs, cache, first_B, tile_kv, stripes, *, window=0, softcap=0.0, causal=True
    ):
        self.inputs, self.cache, self.first_B, self.stripes = inputs, cache, first_B, stripes
        self.window, self.softcap, self.causal = window, softcap, causal
        self.wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
        self.S = next(iter(cache.values())).shape[-1]
        self.tile_kv = min(tile_kv, self.S)
        self.tiles = jax.tree.map(lambda x: x.astype(self.wide), inputs).tiles()
        self.T = inputs.query.shape[1]

    def tile(self, i) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the first slot of tile i, and the tile; the last two tiles may overlap."""
        start = jnp.minimum(i * self.tile_kv, self.S - self.tile_kv)
        tile = {
            name: jax.lax.dynamic_slice_in_dim(array, start, self.tile_kv, axis=-1)
            for name, array in self.cache.items()
        }
        return start, quantized.dequantize(tile, self.wide)

    def for_tiles(self, step, carry):
        """Runs `step(i, carry)` over the tiles in which at least one query sees a token."""
        if self.S == self.tile_kv:  # one tile needs no loop
            return step(0, carry)
        held = self.stripes.num_held(jnp.max(self.first_B) + self.T)
        first, stop = 0, jnp.minimum(-(-held // self.tile_kv), -(-self.S // self.tile_kv))
        if self.window:
            oldest = jnp.maximum(jnp.min(self.first_B) + 1 - self.window, 0)
            first = self.stripes.num_held(oldest) // self.tile_kv
        return jax.lax.fori_loop(first, stop, step, carry)

    def masked(self, z_BNTs, start, first_new) -> tuple[jax.Array, jax.Array]:
        """Returns scaled, biased, masked logits of slots from `start`, and the visible ones.

        Slots before `first_new` are masked too, since the previous tile contains them.
        """
        slot_s = start + jnp.arange(z_BNTs.shape[-1], dtype=jnp.int32)
        position_s = self.stripes.position(slot_s)
        z_BNTs = self.inputs.scale * z_BNTs
        if self.softcap:
            z_BNTs = self.softcap * jnp.tanh(z_BNTs / self.softcap)
        bias = self.inputs.bias
        if bias is not None:
            z_BNTs = z_BNTs + bias.at(position_s, self.first_B, self.wide)
        after_T = jnp.arange(self.T, dtype=self.first_B.dtype) * self.causal
        last_BT = self.first_B[:, None] + after_T[None]
        is_new_11s = slot_s[None, None] >= first_new
        visible_BTs = is_new_11s & (position_s[None, None] <= last_BT[..., None])
        if self.window:
            visible_BTs &= position_s[None, None] > last_BT[..., None] - self.window
        visible_BNTs = jnp.broadcast_to(visible_BTs[:, None], z_BNTs.shape)
        return jnp.where(visible_BNTs, z_BNTs, _MASKED), visible_BNTs

    def finish(self, outputs: tuple[jax.Array, ...], max_BNT, sum_BNT):
        """Returns outputs [B, T, N, Hv], and log-sum-exps [B, T, N]."""
        divisor_BNT = jnp.where(sum_BNT > 0, sum_BNT, 1)  # no visible key: zeros, not NaN
        o_BNTV = self.tiles.finish(tuple(o / divisor_BNT[..., None] for o in outputs))
        log_sum_exp_BNT = jnp.where(sum_BNT > 0, max_BNT + jnp.log(divisor_BNT), -jnp.inf)
        return jnp.moveaxis(o_BNTV, 1, 2), jnp.moveaxis(log_sum_exp_BNT, 1, 2)
