"""The pipeline shared by all TPU decode kernels: tiles of a cache, online softmax, merged splits.

Grid (B, splits, tiles of a split). A grid step (b, p, i) attends to tile i of split p of sequence
b; tokens lie on lanes. A kernel is a list of components (`interfaces.Component`) whose scores add
up, each with its own keys and, possibly, values; `operators` has the concrete ones.

    HBM   cache arrays [B, ..., S]  --Pallas' double-buffered copies-->  VMEM [..., tile_kv]
    VMEM  logits      [rows, 128]   scores of a tile, then its softmax weights
          row_buffer  [rows, 128]   head-by-head components: weights, scores, sums per lane
          maximum, total, decay     [heads, 128], of the online softmax

    per tile:  keys.rotate                    rotates queries by the tile's position, under RoPE
               keys.score                     `score_tile` tokens at a time
               combine scores, mask, softmax  new maximum, weights, decay of earlier sums
               values.rescale, accumulate     sums = sums * decay + weights * values

Before a step Pallas waits for the copies of its tile and starts copying the tile of the next step,
even if that belongs to another sequence or split, so two tiles are in VMEM at once. Steps of one
sequence and split run in order on one core, so that scratch carries over; on chips with two cores
sequences and splits are divided between the cores. Within a step there are no barriers: a core's
reads and writes of VMEM happen in program order.

A row of `logits` and `row_buffer` is 128 tokens of one head. Components that work head by head (on
the vector unit) are interleaved with each other, so that instructions of the vector and the matrix
unit overlap. With `delay_values` the values of tile i - 1 are accumulated while tile i is scored,
so that the scheduler always has instructions of both units; the grid then has one step more:

    step i      0         1                 2                 3
    scores      tile 0    tile 1            tile 2
    values                tile 0            tile 1            tile 2 (`_accumulate_last_tile`)
"""

from collections.abc import Sequence
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from kvjax.kernels.decode_attention.tpu.buffers import BoundComponent, Layout
from kvjax.kernels.decode_attention.tpu.interfaces import (
    LANES,
    Component,
    Input,
    Rows,
    columns,
    padded,
)

_MASKED = -1e30  # finite: exp(-inf - -inf) is NaN


def attend(
    components: Sequence[Component],
    first_B: jax.Array,
    *,
    heads: int,
    capacity: int,
    scale: float,
    key_scale: jax.Array | None,
    tile_kv: int,
    score_tile: int,
    splits: int,
    delay_values: bool,
    vmem_bytes: int,
    interpret=False,
) -> tuple[list[jax.Array], jax.Array]:
    """Returns outputs [B, N, width] of components with values, and log-sum-exps [B, N], float32.

    Args:
      components: their scores add up before the softmax.
      first_B: slot of each sequence's new token, the last that is seen.
      heads: N.
      capacity: S.
      scale: factor of the scores.
      key_scale: [B, K, 1, S], another factor of the scores, per token and KV head; None: 1.
      tile_kv: tokens of a grid step, a divisor of S.
      score_tile: tokens that are scored at once, a divisor of `tile_kv`.
      splits: runs of tiles into which every sequence is cut; merged here.
      delay_values: True to accumulate a tile's values while the next tile is scored.
      vmem_bytes: limit that the compiler is given.
    """
    B, s, X = first_B.shape[0], tile_kv, splits

    def named(attribute):
        return [
            (f"{i}.{name}", x)
            for i, component in enumerate(components)
            for name, x in component.named(attribute).items()
        ]

    def rows(count):
        return pltpu.VMEM((count, LANES), jnp.float32)

    # Refs of a component have its number before their names: "0.keys", "1.out".
    inputs, scratch = named("inputs"), named("scratch")
    if key_scale is not None:
        inputs.append(("key_scale", Input(key_scale, "keys")))  # [1, K, 1, tile_kv]
    layout = Layout(
        components,
        heads=heads,
        tile_kv=s,
        score_tile=score_tile,
        delay_values=delay_values,
        scale=scale,
    )
    # Buffers of float32 [rows, 128]; every lane of maximum, total and decay has the head's number.
    scratch += [("row_buffer", rows(layout.buffer_rows)), ("logits", rows(layout.logit_rows))]
    scratch += [(name, rows(padded(heads))) for name in ("maximum", "total", "decay")]
    # Outputs [1, 1, *dims] of each sequence and split, written in its last grid step.
    outputs = [(f"{i}.out", c.values.out_dims) for i, c in enumerate(components) if c.values]
    outputs.append(("log_sum_exp", (padded(heads), LANES)))
    names = [name for name, _ in (*inputs, *outputs, *scratch)]

    def kernel(first_ref, *refs):  # first_ref: [B] int32 in SMEM; refs: blocks of `_spec`, scratch
        _Step(layout, first_ref, dict(zip(names, refs, strict=True))).run()

    steps = -(-capacity // (s * X))
    *values, log_sum_exp = pl.pallas_call(
        kernel,
        name="decode_attention",
        out_shape=[jax.ShapeDtypeStruct((B, X, *dims), jnp.float32) for _, dims in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,  # first_B: index maps need it before the copies
            grid=(B, X, steps + delay_values),
            in_specs=[_spec(x, s, X, delay_values) for _, x in inputs],
            out_specs=[
                pl.BlockSpec((1, 1, *dims), lambda b, p, i, first, z=(0,) * len(dims): (b, p, *z))
                for _, dims in outputs
            ],
            scratch_shapes=[x for _, x in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            # Cores may divide sequences and splits, not the tiles of a split.
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes,
        ),
        interpret=interpret,
    )(first_B, *(x.array for _, x in inputs))
    values = [x.reshape(B, X, heads, -1) for x in values]
    # Outputs of a split are normalised: its log-sum-exp is its share of the softmax.
    log_sum_exp_BXN = log_sum_exp[:, :, :heads, 0]
    log_sum_exp_BN = jax.nn.logsumexp(log_sum_exp_BXN, axis=1)
    if X == 1:
        return [x[:, 0] for x in values], log_sum_exp_BN
    share_BXN = jax.nn.softmax(log_sum_exp_BXN, axis=1)
    return [jnp.einsum("BXN,BXNV->BNV", share_BXN, x) for x in values], log_sum_exp_BN


def _tile_counts(first, s: int, X: int):
    """Returns the tiles that a sequence has reached, and the tiles of each of its splits.

    Splits are equal parts of the reached tiles, not of the capacity, so that both cores have work.
    """
    reached = first // s + 1
    return reached, (reached + X - 1) // X


def _spec(x: Input, s: int, X: int, delay_values: bool) -> pl.BlockSpec:
    """Returns the block of an input that each grid step sees."""
    dims = x.array.shape[1:]  # x.array: [B, *dims], of a cache array [B, ..., S]

    def tile(b, p, i, first):
        # Past the split's end the index stays at its last tile. Pallas copies a block only if its
        # index changes, so tiles that a sequence has not reached are never read.
        reached, per_split = _tile_counts(first[b], s, X)
        return jnp.minimum(p * per_split + jnp.clip(i, 0, per_split - 1), reached - 1)

    zeros = (0,) * (len(dims) - 1)
    if x.piece == "keys":  # [1, ..., tile_kv]
        return pl.BlockSpec((1, *dims[:-1], s), lambda b, p, i, f: (b, *zeros, tile(b, p, i, f)))
    if x.piece == "values":  # [1, ..., tile_kv] of the previous tile if delayed
        return pl.BlockSpec(
            (1, *dims[:-1], s), lambda b, p, i, f: (b, *zeros, tile(b, p, i - delay_values, f))
        )
    if x.piece == "tile":  # [1, *dims]
        return pl.BlockSpec((1, *dims), lambda b, p, i, f: (tile(b, p, i, f), 0, *zeros))
    if x.piece == "sequence":  # [1, *dims], copied once per sequence
        return pl.BlockSpec((1, *dims), lambda b, p, i, f: (b, 0, *zeros))
    # "all": the whole array, copied once.
    return pl.BlockSpec(x.array.shape, lambda b, p, i, f: (0, 0, *zeros))


class _Step:
    """A grid step: tile i of split p of sequence b."""

    def __init__(self, layout: Layout, first_ref, refs: dict):
        self.layout, self.refs = layout, refs
        b, self.p, self.i = (pl.program_id(axis) for axis in range(3))
        self.first = first_ref[b]
        reached, self.per_split = _tile_counts(self.first, layout.tile_kv, pl.num_programs(1))
        # Tiles of this split that the sequence has reached.
        self.num_tiles = jnp.clip(reached - self.p * self.per_split, 0, self.per_split)
        self.logits = Rows(refs["logits"], 0, layout.heads)
        self.components = layout.bind(refs, self.first, b, self.i)
        self.with_values = [c for c in self.components if c.values is not None]

    def run(self) -> None:
        pl.when(self.i == 0)(self._initialise)
        pl.when(self.i < self.num_tiles)(self._attend_tile)  # steps past the end do nothing
        if self.layout.delay_values:
            pl.when(self.i == self.num_tiles)(self._accumulate_last_tile)
        pl.when(self.i == pl.num_programs(2) - 1)(self._finish)

    def _initialise(self) -> None:
        """Resets the softmax and the sums before the split's first tile."""
        refs = self.refs
        refs["maximum"][...] = jnp.full_like(refs["maximum"], _MASKED)
        # VMEM has the previous split's values or is uninitialised, and NaN would survive any decay.
        for name in ("total", "row_buffer", "logits"):
            refs[name][...] = jnp.zeros_like(refs[name])
        for c in self.components:
            c.keys.start(c.refs)
        for c in self.with_values:
            c.values.start(c.refs)

    def _attend_tile(self) -> None:
        """Scores the tile's keys, and accumulates its values, or the previous tile's if delayed."""
        delayed = self.layout.delay_values
        # 1. Queries for this tile's position, into scratch that `score` reads.
        for c in self.components:
            c.keys.rotate(c.refs)
        # 2. Scores, interleaved with the previous tile's values, whose weights are still in place
        # (in the first step the zeros of `_initialise`).
        self._run_tile(self.components, self.with_values if delayed else [])
        # 3. Replaces logits by weights; multiplies sums of earlier tiles by the decay.
        self._softmax()
        for c in self.with_values:
            c.values.rescale(c.refs, self.refs["decay"])
        # 4. This tile's values, unless the next step accumulates them.
        if not delayed:
            self._run_tile([], self.with_values)

    def _accumulate_last_tile(self) -> None:
        """Accumulates the last tile's delayed values, in the extra grid step.

        A rolled loop: there is no scoring to overlap with.
        """

        @pl.loop(0, self.layout.tile_kv, step=self.layout.score_tile)
        def _(start):
            self._run_heads(pl.multiple_of(start, LANES), [], self.with_values)

    def _finish(self) -> None:
        """Writes outputs and log-sum-exps after the split's last tile."""
        refs = self.refs
        total = refs["total"][...]
        refs["log_sum_exp"][0, 0] = refs["maximum"][...] + jnp.log(total)
        refs["total"][...] = jnp.where(total > 0, 1 / total, 0)  # a split may have no tile
        for c in self.with_values:
            c.values.finish(c.refs, refs["total"])

    def _run_tile(self, score: list[BoundComponent], accumulate: list[BoundComponent]) -> None:
        for start in range(0, self.layout.tile_kv, self.layout.score_tile):
            self._run_heads(start, score, accumulate)

    def _run_heads(
        self, start, score: list[BoundComponent], accumulate: list[BoundComponent]
    ) -> None:
        """Scores and accumulates `score_tile` tokens from `start` on, interleaved by head."""
        tokens = pl.ds(start, self.layout.score_tile)
        # All heads at once on the matrix unit, or a function to run head by head below.
        by_head = [c.keys.score(c.refs, tokens, c.scores) for c in score]
        by_head += [c.values.accumulate(c.refs, tokens, c.weights) for c in accumulate]
        # Head n of all components, then head n + 1, so that the scheduler can overlap them.
        for n in range(self.layout.heads):
            for run_head in by_head:
                if run_head is not None:  # None: already done for all heads
                    run_head(n)
        if score:  # slot of the new token, relative to this tile
            last = self.first - (self.p * self.per_split + self.i) * self.layout.tile_kv
            self._combine_scores(tokens, last)

    def _combine_scores(self, tokens: pl.Slice, last) -> None:
        """Adds and scales the components' scores of these tokens; masks slots after `last`."""
        N = self.layout.heads

        def scaled(z, refs, name, at):
            """Multiplies [N, 128] by a scale per KV head and token, if there is one."""
            if name not in refs:
                return z
            scale_K = refs[name][0, :, 0, at]  # [K, 128]
            K = scale_K.shape[0]
            return z * (scale_K if K in (1, N) else jnp.repeat(scale_K, N // K, axis=0))

        for c, (column, at) in enumerate(columns(tokens)):  # z: [N, 128]
            parts = [scaled(x.scores[c, 0, N], x.refs, "keys.scale", at) for x in self.components]
            z = scaled(self.layout.scale * sum(parts), self.refs, "key_scale", at)
            slot = at.start + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
            self.logits[column, 0, N] = jnp.where(slot <= last, z, _MASKED)

    def _softmax(self) -> None:
        """Replaces a tile's logits by weights, and stores the factor of earlier sums in `decay`."""
        refs, logits, N = self.refs, self.logits, self.layout.heads
        weights, columns = Rows(refs["row_buffer"], 0, N), range(self.layout.tile_kv // LANES)
        head = slice(0, N)
        # Head-by-head values read a copy of the weights in `row_buffer`, whose reads the scheduler
        # keeps in order (`Rows`); the others read `logits`.
        by_head = any(c.values and c.values.by_head for c in self.components)
        # The maximum over columns is elementwise; only then the reduction over 128 lanes follows.
        largest = functools.reduce(jnp.maximum, (logits[c, 0, N] for c in columns))
        old = refs["maximum"][head]  # [N, 128], as new, decay and total
        new = jnp.maximum(old, jnp.max(largest, axis=1, keepdims=True))
        total = jnp.zeros_like(new)
        for c in columns:
            weight = jnp.exp(logits[c, 0, N] - new)
            logits[c, 0, N] = weight
            if by_head:
                weights[c, 0, N] = weight
            total += weight
        decay = jnp.exp(old - new)
        refs["maximum"][head] = new
        refs["decay"][head] = decay
        refs["total"][head] = refs["total"][head] * decay + jnp.sum(total, axis=1, keepdims=True)
