"""What a kernel's parts are made of: rows of its memory, keys that are scored, values weighed.

A part is a part of a cache: the parts' logits add up, and each has values of its own or none. The
concrete ones are in `parts`; `pipeline` calls them.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.foundation.rounding import round_up

LANES = 128

Refs = Mapping[str, jax.Array]
ByHead = Callable[[int], None]


def columns(tokens: pl.Slice) -> list[tuple[int, pl.Slice]]:
    """(column of the block, its tokens) of each 128 tokens."""
    starts = [tokens.start + c * LANES for c in range(tokens.size // LANES)]
    aligned = lambda at: at if isinstance(at, int) else pl.multiple_of(at, LANES)
    return [(at // LANES, pl.ds(aligned(at), LANES)) for at in starts]


@dataclasses.dataclass(frozen=True)
class Input:
    """An array that a part reads, and which piece of it a grid step sees.

    `piece`: "keys" or "values", the block of a cache array [B, *dims, S], that of values `lag`
    blocks behind; "block", its row of [blocks, *dims]; "sequence", its row of [B, *dims]; "all".
    """

    array: jax.Array
    piece: str


class Rows:
    """Rows of `work` for `heads` heads of any number of columns of 128 tokens.

    `zero` is 0, but unknown to the compiler, which therefore keeps reads of these rows between the
    writes of others: that is what holds the vector unit's work between the matrix unit's.
    """

    def __init__(self, ref, first: int, heads: int, zero=0):
        self.ref, self.first, self.stride, self.zero = ref, first, padded(heads), zero

    def slice(self, column, head: int = 0, count: int = 1) -> pl.Slice:
        start = self.first + column * self.stride + head + self.zero
        aligned = head % 8 == 0 and not isinstance(start, int)
        return pl.ds(pl.multiple_of(start, 8) if aligned else start, count)

    def __getitem__(self, key) -> jax.Array:
        return self.ref[self.slice(*key), :]

    def __setitem__(self, key, value: jax.Array) -> None:
        self.ref[self.slice(*key), :] = value


class Keys:
    """How logits come from one part of a cache. Methods get the part's inputs and scratch by name.

    Attributes:
      by_head: whether `score` goes head by head.
      product_rows: of the float32 product that `score` makes of the tokens for all heads.
    """

    by_head = True
    product_rows = 0

    def __init__(self, inputs: dict[str, Input], scratch: dict[str, pltpu.VMEM] | None = None):
        self.inputs, self.scratch = inputs, scratch or {}

    def start(self, refs: Refs) -> None:
        """Before a sequence's first block."""

    def turn(self, refs: Refs) -> None:
        """Before a block is scored."""

    def score(self, refs: Refs, tokens: pl.Slice, scores: Rows) -> ByHead | None:
        """Writes the logits of these tokens of the block, all at once or by head."""
        raise NotImplementedError


class Values:
    """How the same part's values are weighed; refs["sums"] are its rows of `work`.

    Attributes:
      by_head: whether `weigh` goes head by head.
      out_dims: of a sequence's output, refs["out"]: N·width elements.
      work_rows: of `work`, for its sums.
    """

    by_head = False

    def __init__(
        self,
        inputs: dict[str, Input],
        *,
        out_dims: tuple[int, ...],
        scratch: dict[str, pltpu.VMEM] | None = None,
        work_rows: int = 0,
    ):
        self.inputs, self.scratch = inputs, scratch or {}
        self.out_dims, self.work_rows = out_dims, work_rows

    def start(self, refs: Refs) -> None:
        """Before a sequence's first block; `work` is zeroed already."""

    def weigh(self, refs: Refs, tokens: pl.Slice, weights: Rows) -> ByHead | None:
        """Adds the weighted values of these tokens of the block, all at once or by head."""
        raise NotImplementedError

    def rescale(self, refs: Refs, decay: jax.Array) -> None:
        """Multiplies head n's sums by decay[n], a ref [heads, 128]."""
        raise NotImplementedError

    def finish(self, refs: Refs, inverse: jax.Array) -> None:
        """Writes head n's sums times inverse[n]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Part:
    """Keys of a cache, and values that the softmax over all parts' logits weighs."""

    keys: Keys
    values: Values | None = None

    def named(self, attribute: str) -> dict:
        """The inputs, or the scratch, of both."""
        both = [half for half in (self.keys, self.values) if half is not None]
        return {name: x for half in both for name, x in getattr(half, attribute).items()}


def padded(heads: int) -> int:
    """Rows that so many heads take: whole tiles of 8."""
    return round_up(heads, 8)
