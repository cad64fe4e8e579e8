"""Buffers of the TPU decode kernels: the rows of each component, and the VMEM of all buffers."""

from collections.abc import Sequence
import math

import jax
import jax.numpy as jnp

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention.tpu.interfaces import (
    LANES,
    Component,
    Input,
    Refs,
    Rows,
    padded,
)

_COMPILER_BYTES = 2**18  # bytes of VMEM for the compiler's own use


class BoundComponent:
    """A component inside the kernel: its refs, and its rows of the buffers."""

    def __init__(self, component: Component, refs: Refs, *, scores: Rows, weights: Rows):
        self.keys, self.values, self.refs = component.keys, component.values, refs
        self.scores, self.weights = scores, weights


class Layout:
    """Row numbers in `row_buffer` and `logits`.

    `row_buffer` has a tile's weights, then scores and sums of components that work head by head;
    `logits` has a tile's logits, then scores of components that compute all heads at once.
    """

    def __init__(
        self, components: Sequence[Component], *, heads, tile_kv, score_tile, delay_values, scale
    ):
        self.components, self.heads = components, heads
        self.delay_values, self.scale = delay_values, scale
        self.tile_kv, self.score_tile = tile_kv, score_tile

        def rows(tokens):
            return tokens // LANES * padded(heads)

        buffer, logits = rows(tile_kv), rows(tile_kv)  # weights and logits of a tile
        self.scores, self.sums = [], []
        for c in components:
            # Scores of `score_tile` tokens only: `_combine_scores` adds them to the logits at once.
            by_head = c.keys.by_head
            self.scores.append(buffer if by_head else logits)
            buffer += by_head * rows(score_tile)
            logits += (not by_head) * rows(score_tile)
            self.sums.append(buffer)
            buffer += c.values.buffer_rows if c.values else 0
        self.buffer_rows, self.logit_rows = buffer, logits

    def bind(self, refs: dict, first, b, i) -> list["BoundComponent"]:
        """Binds the components to the kernel's refs.

        Args:
          refs: by name.
          first: slot of the sequence's new token.
          b, i: the sequence and the grid step. With `delay_values` the zeros of `Rows` are computed
            from `first`, b and i, by a different expression for each kind of rows.
        """
        N = self.heads

        def hidden_zero(x):
            return jnp.minimum(x, 0) if self.delay_values else 0

        logits = Rows(refs["logits"], 0, N)  # after the softmax: weights
        return [
            BoundComponent(
                component,
                {name[2:]: ref for name, ref in refs.items() if name.startswith(f"{n}.")}
                | {"sums": Rows(refs["row_buffer"], self.sums[n], 1, hidden_zero(first + b))},
                scores=Rows(refs["row_buffer"], self.scores[n], N, hidden_zero(first))
                if component.keys.by_head
                else Rows(refs["logits"], self.scores[n], N),
                weights=Rows(refs["row_buffer"], 0, N, hidden_zero(first + i))
                if component.values is not None and component.values.by_head
                else logits,
            )
            for n, component in enumerate(self.components)
        ]


def vmem_bytes(
    components: Sequence[Component],
    *,
    heads: int,
    key_scale: jax.Array | None,
    tile_kv: int,
    score_tile: int,
) -> int:
    """Returns the VMEM that a kernel takes: inputs and outputs twice, scratch, one product.

    And one KV head's values of a product, where they are transposed first.
    """
    layout = Layout(
        components,
        heads=heads,
        tile_kv=tile_kv,
        score_tile=score_tile,
        delay_values=False,  # these two change no size
        scale=1.0,
    )
    scale = () if key_scale is None else (Input(key_scale, "keys"),)
    total = 4 * LANES * (layout.buffer_rows + layout.logit_rows)
    for x in (*(x for c in components for x in c.named("inputs").values()), *scale):
        dims = x.array.shape if x.piece == "all" else x.array.shape[1:]
        dims = (*dims[:-1], tile_kv) if x.piece in ("keys", "values") else dims
        total += 2 * _tiled_bytes(dims, x.array.dtype)
    for c in components:
        total += sum(_tiled_bytes(x.shape, x.dtype) for x in c.named("scratch").values())
        if c.values is not None:
            total += 2 * _tiled_bytes(c.values.out_dims, jnp.float32)
            if c.values.copied:
                total += _tiled_bytes((score_tile, c.values.out_dims[-1]), c.values.dtype)
    total += 4 * score_tile * max(c.keys.product_rows for c in components)
    return total + _COMPILER_BYTES


def _tiled_bytes(dims: tuple[int, ...], dtype) -> int:
    """Returns the bytes of an array padded to whole tiles of 128 lanes by 8 words of sublanes."""
    size = jnp.dtype(dtype).itemsize
    *major, rows, lanes = (1, 1, *dims)
    rows = 1 if rows == 1 and size == 4 else round_up(rows, 32 // size)
    return math.prod(major) * rows * round_up(lanes, LANES) * size
