"""The interface of a cache layout: inputs of decode attention, tiles, sizes and FLOPs.

Query head n uses KV head k(n) = n·K // N, which uses base j(k) = k·J // K. `cache` is a dict of
arrays [B, *field.shape, S]: the fields of a mechanism's cache entry, with tokens on the last axis.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from kvjax.layers import rope, sinusoid
from kvjax.layers.norm import inverse_rms

Cache = Mapping[str, jax.Array]
static = functools.partial(dataclasses.field, metadata=dict(static=True))


def pytree(cls):
    """Makes a class a frozen dataclass and a pytree; `static` fields are metadata, not leaves.

    Raises:
      TypeError: a number that is not `static`, which would become a traced array.
    """
    for name, kind in cls.__annotations__.items():
        is_static = isinstance(getattr(cls, name, None), dataclasses.Field)
        if kind in (float, int, bool, str) and not is_static:
            raise TypeError(f"{cls.__name__}.{name}: write `{name}: {kind.__name__} = static()`")
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@pytree
class PositionBias:
    """A bias on the logits that depends on key position s alone: sum_c weights[c] · encoding[s, c].

    `encoding` is `kvjax.layers.sinusoid.encoding(s, C)`.
    """

    weights: jax.Array  # [C]

    def at(self, position_s: jax.Array, first_B: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns the biases of keys at these positions, [1, 1, 1, s]."""
        del first_B  # depends on the key alone
        encoding_sC = sinusoid.encoding(position_s, self.weights.shape[0]).astype(dtype)
        return (encoding_sC @ self.weights.astype(dtype))[None, None, None]


@pytree
class SlopeBias:
    """ALiBi (arXiv 2108.12409): a bias -slope · (t - s) for a query at t and a key at s, per head.

    With several queries, distances are measured from the first query: a constant added to all
    logits of a query leaves its softmax unchanged.
    """

    slopes: jax.Array  # [N]

    def at(self, position_s: jax.Array, first_B: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns the biases of keys at these positions, [B, N, 1, s]."""
        distance_Bs = (first_B[:, None] - position_s[None]).astype(dtype)
        return (-self.slopes.astype(dtype)[None, :, None] * distance_Bs[:, None])[:, :, None]


Bias = PositionBias | SlopeBias


class DecodeFlops(NamedTuple):
    """FLOPs of decode attention for one query token of one layer, 2 per multiply-add.

    Projections of the token itself (2 FLOPs per weight) and the softmax are not counted.
    """

    per_query: float  # absorbing weights into the query, expanding the output
    per_key: float  # per cached token that the query sees


class Tiles(Protocol):
    """Decode attention over one tile of the cache in plain JAX, for queries of the constructor.

    All arrays are float32 or wider. Queries have heads before tokens, [B, N, T, ...]; tiles have
    s consecutive tokens on their last axis, [B, K, H, s], from position `start`.
    """

    large_logits: bool  # True if `logits` has temporaries as large as a tile

    def widths(self, cache: Cache) -> tuple[int, ...]:
        """Returns the number of channels of each array that `weighted_sums` returns."""

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        """Returns logits [B, N, T, s], neither scaled nor masked."""

    def tile_logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        """Returns the part of `logits` that has temporaries as large as the tile."""
        return self.logits(tile, start)

    def add_direct(self, z_BNTs: jax.Array, tile: Cache) -> jax.Array:
        """Completes `tile_logits`, of a tile or of the whole cache, to `logits`."""
        return z_BNTs

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        """Returns weighted sums over the tile, [B, N, T, width] each; the caller adds tiles."""

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the output [B, N, T, Hv] from the weighted means over all keys."""


class DecodeInputs:
    """Inputs of decode attention besides the cache: queries, absorbed weights, flags.

    A subclass is decorated with `pytree`, which uses the class's own annotations alone: it declares
    `query` and `scale` again, then its other inputs (arrays as leaves, the rest as `static()`).
    """

    query: jax.Array  # [B, T, N, H]
    scale: float  # factor of the logits
    bias: Bias | None = None
    rope_base: rope.Base | None = None  # of the rotation of cached keys; None: already rotated

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q [B, T, N, H], k [B, S, K, H], v [B, S, K', Hv] of equivalent plain attention.

        K and K' divide N and may differ.

        Args:
          cache: arrays [B, S, *field.shape], with tokens second, in float32 or wider like the
            inputs.
        """
        raise NotImplementedError

    def tiles(self) -> Tiles:
        """Returns the same attention tile by tile, without all keys and values in memory."""
        raise NotImplementedError

    def kind(self, cache: Cache) -> str:
        """Returns the name under which tile sizes are tuned."""
        return type(self).__name__.removesuffix("Inputs").lower()


class Sizes(Protocol):
    """Axis lengths of a cache layout, for cost formulas.

    `example` and `fields` are for profiling; only layouts in `shapes.SHAPES` have them.
    """

    N: int  # query heads

    def example(self, draw: Callable[..., jax.Array], B: int) -> DecodeInputs:
        """Returns inputs for one query per sequence, of arrays from `draw(*shape)`."""

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the cache's fields, per token."""

    def flops(self) -> DecodeFlops:
        """Returns the FLOPs of decode attention, without projections of queries and new tokens."""


# -- definitions -----------------------------------------------------------------------------------


def repeat_heads(x_BSKH: jax.Array, N: int) -> jax.Array:
    """Repeats each KV head for every query head that uses it."""
    return jnp.repeat(x_BSKH, N // x_BSKH.shape[2], axis=2)


def rotated(x_BSNH: jax.Array, base: rope.Base) -> jax.Array:
    """Rotates keys at positions 0 .. S - 1."""
    S, H = x_BSNH.shape[1], x_BSNH.shape[-1]
    return rope.rotate(x_BSNH, rope.rotary(jnp.arange(S)[None], H, base))


def normed_and_rotated(x_BSNH: jax.Array, inputs) -> jax.Array:
    """Norms and rotates keys [B, S, N, H] by `norm_epsilon`, `gain` and `rope_base` of `inputs`."""
    if inputs.norm_epsilon is not None:
        x_BSNH = x_BSNH * inverse_rms(x_BSNH, inputs.norm_epsilon)
    if inputs.gain is not None:
        x_BSNH = x_BSNH * inputs.gain[None, None, None]
    return x_BSNH if inputs.rope_base is None else rotated(x_BSNH, inputs.rope_base)
