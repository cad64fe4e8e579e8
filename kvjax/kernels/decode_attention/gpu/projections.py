"""Reads a new token's projections in the kernels that append it, 64 channels at a time.

A head's channels are a list of [64] float32, each in the layout of a column of wgmma's rows. They
are rounded as the model rounds them: to bfloat16 after the product, after a norm, and after RoPE.
"""

from collections.abc import Callable, Mapping, Sequence
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.kernels.decode_attention.gpu.ring import ROWS

COLUMN = plgpu.Layout.WGMMA.reduce(1)


class Projections:
    """One sequence's products of the layer's input with all projections."""

    def __init__(self, partials, b: jax.Array, first: Mapping[str, int]):
        """Keeps a reference to partial products [P, B, E], a sequence, and first channels."""
        self._partials, self._b, self._first = partials, b, first

    def slab(self, channel: int | jax.Array, layout=COLUMN) -> jax.Array:
        """Returns the sums of 64 channels' partial products."""
        at, P = (self._b, pl.ds(channel, ROWS)), self._partials.shape[0]
        parts = [load(self._partials, p, *at, layout=layout) for p in range(P)]
        return rounded(functools.reduce(jnp.add, parts))

    def start(self, name: str, head: int | jax.Array, dim: int) -> int | jax.Array:
        """Returns the first channel of a head in a projection whose heads have `dim` channels."""
        return self._first[name] + head * dim

    def head(self, name: str, head: int | jax.Array, dim: int) -> list[jax.Array]:
        """Returns a head's channels."""
        start = self.start(name, head, dim)
        return [self.slab(start + c) for c in range(0, dim, ROWS)]


def load(ref, *at, layout=COLUMN) -> jax.Array:
    """Returns an array [64] or [64, 64] in float32."""
    return plgpu.load(ref.at[at], layout=layout, optimized=False).astype(jnp.float32)


def rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def inverse_rms(x: list[jax.Array], dim: int, epsilon: float) -> jax.Array:
    """Returns 1/rms of a head's channels."""
    squares = functools.reduce(jnp.add, [x_H * x_H for x_H in x])
    return lax.rsqrt(jnp.sum(squares, axis=0) / dim + epsilon)


def normed(x: list[jax.Array], epsilon: float | None) -> list[jax.Array]:
    """Returns a head's channels over their root mean square; epsilon None: as they are."""
    if epsilon is None:
        return x
    inverse = inverse_rms(x, len(x) * ROWS, epsilon)
    return [rounded(x_H * inverse) for x_H in x]


def dispatch(index: jax.Array, works: Sequence[tuple[int, jax.Array | bool, Callable]]) -> None:
    """Calls the work of program `index`.

    Args:
      works: number of programs, condition, and a function of the number among these programs.
    """
    begin = 0
    for count, condition, work in works:
        mine = (index >= begin) & (index < begin + count) & condition
        if count:
            pl.when(mine)(functools.partial(work, index - begin))
        begin += count
