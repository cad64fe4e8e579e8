"""What every way of reading a cache says of itself.

Query head n reads KV head k(n) = n·K // N, which reads base j(k) = k·J // K. `cache` is a dict of
arrays whose last axis is the token: the entry of a mechanism, [B, *field.shape, S].
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import NamedTuple
from typing import Protocol

import jax
import jax.numpy as jnp

from kvjax.layers import rope
from kvjax.layers import sinusoid
from kvjax.layers.norm import inverse_rms

Cache = Mapping[str, jax.Array]
static = functools.partial(dataclasses.field, metadata=dict(static=True))


def reading(cls):
    """Makes a class of operands a frozen dataclass and a pytree; `static` fields are no leaves.

    Raises:
      TypeError: a number that is not `static`: it would become an array.
    """
    for name, kind in cls.__annotations__.items():
        made = isinstance(getattr(cls, name, None), dataclasses.Field)
        if kind in (float, int, bool, str) and not made:
            raise TypeError(f"{cls.__name__}.{name}: write `{name}: {kind.__name__} = static()`")
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@reading
class PositionBias:
    """A bias of every logit by the position s of its key: sum_c weights[c]·encoding[s, c].

    `encoding` is `kvjax.layers.sinusoid.encoding(s, C)`.
    """

    weights: jax.Array  # [C]

    def at(self, position_s: jax.Array, first_B: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[1, 1, 1, s] on the logits of keys at these positions."""
        del first_B  # it depends on the key alone
        encoding_sC = sinusoid.encoding(position_s, self.weights.shape[0]).astype(dtype)
        return (encoding_sC @ self.weights.astype(dtype))[None, None, None]


@reading
class SlopeBias:
    """A bias of every logit that falls with the distance of its key, by a slope for each head.

    ALiBi (arXiv 2108.12409): -slope·(t - s) for a query at t and a key at s. Of several queries all
    count from the first one: what a query's logits have in common leaves its softmax unchanged.
    """

    slopes: jax.Array  # [N]

    def at(self, position_s: jax.Array, first_B: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[B, N, 1, s] on the logits of keys at these positions."""
        distance_Bs = (first_B[:, None] - position_s[None]).astype(dtype)
        return (-self.slopes.astype(dtype)[None, :, None] * distance_Bs[:, None])[:, :, None]


Bias = PositionBias | SlopeBias


class DecodeFlops(NamedTuple):
    """FLOPs of decoding attention for one query token of one layer, 2 per multiply-add.

    Without the projections of the token itself, which are 2 per weight; softmax is not counted.
    """

    per_query: float  # folding the query into weights, expanding the output
    per_key: float  # for every cached token that the query sees


class Tiles(Protocol):
    """How a tile of the cache is read, in plain JAX, with what is made of the queries once.

    `logits` and `weigh` touch the tile, `finish` does not. All is in float32 or wider; heads come
    before tokens, [B, N, T, ...], and tokens of the tile last, [B, K, H, s]: consecutive ones, from
    position `start` on.
    """

    expands: bool  # whether `logits` makes something as large as a tile

    def widths(self, cache: Cache) -> tuple[int, ...]:
        """Channels of each array that `weigh` returns."""

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        """[B, N, T, s], neither scaled nor masked."""

    def weigh(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        """What is summed over all tiles, [B, N, T, width] each."""

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        """[B, N, T, Hv] of the sums."""


class Reading:
    """Base of all: the operands of decode attention besides the cache.

    A subclass declares `query` and `scale` again, and what else it needs: arrays are leaves,
    anything else is made by `static`.
    """

    query: jax.Array  # [B, T, N, H]
    scale: float  # what a logit is multiplied by
    bias: Bias | None = None
    rope_base: rope.Base | None = None  # of keys that are rotated when they are read

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The definition: queries [B, T, N, H], keys [B, S, K, H], values [B, S, K', Hv].

        K and K' divide N; they may differ.

        Args:
          cache: tokens second, [B, S, *field.shape], in float32 or wider, as the operands are.
        """
        raise NotImplementedError

    def tiles(self) -> Tiles:
        """The same, tile by tile, without ever having the keys and values of all tokens."""
        raise NotImplementedError

    def kind(self, cache: Cache) -> str:
        """What block sizes are tuned for, besides the sizes."""
        return type(self).__name__.removesuffix("Reading").lower()


class Sizes(Protocol):
    """The lengths of a reading's axes, for cost formulas.

    `reading` and `fields` are for profiling: only what is in `shapes.SHAPES` has them.
    """

    N: int  # query heads

    def reading(self, draw: Callable[..., jax.Array], B: int) -> Reading:
        """Operands for one query per sequence; `draw(*shape)` gives arrays."""

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the cache's arrays, per token."""

    def flops(self) -> DecodeFlops:
        """FLOPs of reading, without what the mechanism does to queries and new tokens before."""


# -- definitions -----------------------------------------------------------------------------------


def repeat_heads(x_BSKH: jax.Array, N: int) -> jax.Array:
    """Each KV head once for every query head that reads it."""
    return jnp.repeat(x_BSKH, N // x_BSKH.shape[2], axis=2)


def rotated(x_BSNH: jax.Array, base: rope.Base) -> jax.Array:
    """Keys at positions 0 .. S - 1."""
    S, H = x_BSNH.shape[1], x_BSNH.shape[-1]
    return rope.rotate(x_BSNH, rope.rotary(jnp.arange(S)[None], H, base))


def normed_and_rotated(x_BSNH: jax.Array, o) -> jax.Array:
    """[B, S, N, H] normed and rotated as a reading's norm_epsilon, gain and rope_base say."""
    if o.norm_epsilon is not None:
        x_BSNH = x_BSNH * inverse_rms(x_BSNH, o.norm_epsilon)
    if o.gain is not None:
        x_BSNH = x_BSNH * o.gain[None, None, None]
    return x_BSNH if o.rope_base is None else rotated(x_BSNH, o.rope_base)
