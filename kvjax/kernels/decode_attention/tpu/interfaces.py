"""Interfaces of the TPU decode kernels: keys that are scored, values that are accumulated.

A component is one additive part of the scores, such as LRKV's base or its residual, with or without
its own values. `operators` has the concrete classes; `pipeline` calls them.
"""

from collections.abc import Callable, Mapping
import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from kvjax.foundation.rounding import round_up

LANES = 128  # of a vector register: the tokens of one row

Refs = Mapping[str, jax.Array]
ByHead = Callable[[int], None]  # scores or accumulates one head


def columns(tokens: pl.Slice) -> list[tuple[int, pl.Slice]]:
    """Splits tokens of a tile into runs of 128: (column of the tile, slice of the tokens)."""
    starts = [tokens.start + c * LANES for c in range(tokens.size // LANES)]

    def aligned(start):
        return start if isinstance(start, int) else pl.multiple_of(start, LANES)

    return [(start // LANES, pl.ds(aligned(start), LANES)) for start in starts]


@dataclasses.dataclass(frozen=True)
class Input:
    """An array that a component reads, and the piece of it that a grid step sees.

    Attributes:
      array: in HBM.
      piece: "keys" or "values": the tile of a cache array [B, *dims, S], of values the previous
        tile if the pipeline delays them; "tile": the tile's row of [tiles, *dims]; "sequence": the
        sequence's row of [B, *dims]; "all": the whole array.
    """

    array: jax.Array
    piece: str


@dataclasses.dataclass(frozen=True)
class Cached:
    """A component's cache array [B, K, rows, S].

    A quantised one is int8, or uint8 with two int4 in a byte, as `kvjax.cache.quantized` packs
    them. A score is multiplied by the scale of its key, and a softmax weight by the scale of its
    value, so that no tile is dequantised.

    Attributes:
      dtype: that products cast the array to.
      scale: [B, K, 1, S] float32; None if the array is not quantised.
    """

    array: jax.Array
    dtype: jnp.dtype
    scale: jax.Array | None = None

    @property
    def rows(self) -> int:
        """Channels of a token and KV head; a byte of uint8 has two."""
        return self.array.shape[2] * (2 if self.array.dtype == jnp.uint8 else 1)

    def inputs(self, piece: str) -> dict[str, Input]:
        """Returns the inputs "keys" and "keys.scale", or "values" and "values.scale"."""
        found = {piece: Input(self.array, piece)}
        if self.scale is not None:
            found[f"{piece}.scale"] = Input(self.scale, piece)
        return found


class Rows:
    """Rows of a buffer [rows, 128]: a row per head and column of 128 tokens.

    `zero` is a traced value that is always 0, which the compiler cannot know. It must assume that
    reads of these rows and writes of others may overlap, so it keeps their order, and instructions
    of the vector unit stay between the matrix unit's. For LRKV on v5p this reduced 3.55 bundles per
    token to 2.79 (static, d36: experiments/LOG.md).
    """

    def __init__(self, ref, first: int, heads: int, zero=0):
        self.ref, self.first, self.stride, self.zero = ref, first, padded(heads), zero

    def slice(self, column, head: int = 0, count: int = 1) -> pl.Slice:
        """Returns the rows of heads head .. head + count - 1, in a column of 128 tokens."""
        start = self.first + column * self.stride + head + self.zero
        aligned = head % 8 == 0 and not isinstance(start, int)
        return pl.ds(pl.multiple_of(start, 8) if aligned else start, count)

    # rows[column, head, count]: float32 [count, 128]
    def __getitem__(self, key) -> jax.Array:
        return self.ref[self.slice(*key), :]

    def __setitem__(self, key, value: jax.Array) -> None:
        self.ref[self.slice(*key), :] = value


class Keys:
    """Scores of one component. Methods get the component's inputs and scratch by name.

    Attributes:
      by_head: True if `score` goes head by head.
      product_rows: rows of the float32 product that `score` computes for all heads at once.
    """

    by_head = True
    product_rows = 0

    def __init__(self, inputs: dict[str, Input], scratch: dict[str, pltpu.VMEM] | None = None):
        self.inputs, self.scratch = inputs, scratch or {}

    # The order of calls in a grid step: start (first tile only), rotate, score.

    def start(self, refs: Refs) -> None:
        """Runs before a split's first tile."""

    def rotate(self, refs: Refs) -> None:
        """Runs before a tile is scored: rotates queries by the tile's position."""

    def score(self, refs: Refs, tokens: pl.Slice, scores: Rows) -> ByHead | None:
        """Writes the tokens' scores, or returns a function that writes one head's scores."""
        raise NotImplementedError


class Values:
    """Weighted sums of one component's values; refs["sums"] are its rows of `row_buffer`.

    Attributes:
      by_head: True if `accumulate` goes head by head.
      out_dims: shape of a sequence's output, refs["out"], of N·width elements.
      buffer_rows: rows of `row_buffer` that its sums occupy.
      copied: True if values are copied, those of a KV head and a product's tokens at a time.
    """

    by_head = False
    copied = False

    def __init__(
        self,
        inputs: dict[str, Input],
        *,
        out_dims: tuple[int, ...],
        scratch: dict[str, pltpu.VMEM] | None = None,
        buffer_rows: int = 0,
    ):
        self.inputs, self.scratch = inputs, scratch or {}
        self.out_dims, self.buffer_rows = out_dims, buffer_rows

    # The order of calls: start, then per tile rescale and accumulate, finish after the last tile.
    # With delayed values accumulate runs first, on the previous tile.

    def start(self, refs: Refs) -> None:
        """Runs before a split's first tile; `row_buffer` is zeroed already."""

    def accumulate(self, refs: Refs, tokens: pl.Slice, weights: Rows) -> ByHead | None:
        """Adds the tokens' weighted values, or returns a function that adds one head's values."""
        raise NotImplementedError

    def rescale(self, refs: Refs, decay: jax.Array) -> None:
        """Multiplies head n's sums by decay[n], a ref [heads, 128]."""
        raise NotImplementedError

    def finish(self, refs: Refs, inverse: jax.Array) -> None:
        """Writes head n's sums times inverse[n]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Component:
    """Keys, whose scores add up over components, and values, which share one softmax."""

    keys: Keys
    values: Values | None = None

    def named(self, attribute: str) -> dict:
        """Returns the "inputs" or the "scratch" of keys and values together."""
        operators = [self.keys] if self.values is None else [self.keys, self.values]
        return {name: x for side in operators for name, x in getattr(side, attribute).items()}


def padded(heads: int) -> int:
    """Rounds a number of heads up to a multiple of 8, the rows of a vector register."""
    return round_up(heads, 8)
