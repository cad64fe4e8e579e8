"""The pipeline that the TPU decode kernels share: blocks of a cache, an online softmax, a merge.

A grid step (b, p, i) takes block i of split p of sequence b, tokens on lanes. `parts` has what
a mechanism's kernel is made of: parts of a cache whose logits add up, each with its own values.

Logits, weights and sums by lane live in one array of [rows, 128], `work`: a row is 128 tokens of
one head. A part that works head by head is called between the heads of the others, so that vector
and matrix unit take turns at instructions rather than at phases; with `lag`, the values of block
i - 1 are weighed between the heads that score block i.
"""

from collections.abc import Sequence
import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention.tpu.part import LANES
from kvjax.kernels.decode_attention.tpu.part import Input
from kvjax.kernels.decode_attention.tpu.part import Part
from kvjax.kernels.decode_attention.tpu.part import Refs
from kvjax.kernels.decode_attention.tpu.part import Rows
from kvjax.kernels.decode_attention.tpu.part import columns
from kvjax.kernels.decode_attention.tpu.part import padded

_MASKED = -1e30
_COMPILER_BYTES = 2**18  # of VMEM, for itself


def vmem_bytes(
    parts: Sequence[Part], *, heads: int, key_scale: jax.Array | None, block: int, scored: int
) -> int:
    """What a kernel takes of VMEM: inputs and outputs twice, scratch, and one product at a time."""
    plan = _Plan(parts, heads=heads, block=block, scored=scored, lag=False, scale=1.0)
    scale = () if key_scale is None else (Input(key_scale, "keys"),)
    total = 4 * LANES * (plan.work_rows + plan.logit_rows)
    for x in (*(x for part in parts for x in part.named("inputs").values()), *scale):
        dims = x.array.shape if x.piece == "all" else x.array.shape[1:]
        dims = (*dims[:-1], block) if x.piece in ("keys", "values") else dims
        total += 2 * _tiled_bytes(dims, x.array.dtype)
    for part in parts:
        total += sum(_tiled_bytes(x.shape, x.dtype) for x in part.named("scratch").values())
        total += 2 * _tiled_bytes(part.values.out_dims, jnp.float32) if part.values else 0
    total += 4 * scored * max(part.keys.product_rows for part in parts)
    return total + _COMPILER_BYTES


def _tiled_bytes(dims: tuple[int, ...], dtype) -> int:
    """Bytes of an array whose last two dims fill tiles of 128 lanes and a word's sublanes."""
    size = jnp.dtype(dtype).itemsize
    *major, rows, lanes = (1, 1, *dims)
    rows = 1 if rows == 1 and size == 4 else round_up(rows, 32 // size)
    return math.prod(major) * rows * round_up(lanes, LANES) * size


def attend(
    parts: Sequence[Part],
    first_B: jax.Array,
    *,
    heads: int,
    capacity: int,
    scale: float,
    key_scale: jax.Array | None,
    block: int,
    scored: int,
    splits: int,
    lag: bool,
    vmem_bytes: int,
    interpret=False,
) -> tuple[list[jax.Array], jax.Array]:
    """Outputs [B, N, width] of the parts that have values, and log-sum-exps [B, N], in float32.

    Args:
      heads: N.
      capacity: S.
      key_scale: [B, K, 1, S], multiplies the logits.
      block: tokens of a grid step, a divisor of S; scored: tokens scored at once, one of block.
      splits: parts of every sequence that go through the grid by themselves.
      lag: whether the values of a block are weighed while the next is scored.
    """
    B, s, P = first_B.shape[0], block, splits
    of_parts = lambda attribute: [
        (f"{i}.{name}", x)
        for i, part in enumerate(parts)
        for name, x in part.named(attribute).items()
    ]
    inputs, scratch = of_parts("inputs"), of_parts("scratch")
    if key_scale is not None:
        inputs.append(("key_scale", Input(key_scale, "keys")))
    plan = _Plan(parts, heads=heads, block=s, scored=scored, lag=lag, scale=scale)
    rows = lambda count: pltpu.VMEM((count, LANES), jnp.float32)
    scratch += [("work", rows(plan.work_rows)), ("logits", rows(plan.logit_rows))]
    scratch += [(name, rows(padded(heads))) for name in ("maximum", "total", "decay")]
    outputs = [(f"{i}.out", part.values.out_dims) for i, part in enumerate(parts) if part.values]
    outputs.append(("log_sum_exp", (padded(heads), LANES)))
    names = [name for name, _ in (*inputs, *outputs, *scratch)]

    def kernel(first_ref, *refs):
        _Step(plan, first_ref, dict(zip(names, refs, strict=True))).run()

    steps = -(-capacity // (s * P))
    *values, log_sum_exp = pl.pallas_call(
        kernel,
        name="decode_attention",
        out_shape=[jax.ShapeDtypeStruct((B, P, *dims), jnp.float32) for _, dims in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, P, steps + lag),
            in_specs=[_spec(x, s, P, lag) for _, x in inputs],
            out_specs=[
                pl.BlockSpec((1, 1, *dims), lambda b, p, i, first, z=(0,) * len(dims): (b, p, *z))
                for _, dims in outputs
            ],
            scratch_shapes=[x for _, x in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        interpret=interpret,
    )(first_B, *(x.array for _, x in inputs))
    values = [x.reshape(B, P, heads, -1) for x in values]
    log_sum_exp_BPN = log_sum_exp[:, :, :heads, 0]
    log_sum_exp_BN = jax.nn.logsumexp(log_sum_exp_BPN, axis=1)
    if P == 1:
        return [x[:, 0] for x in values], log_sum_exp_BN
    share_BPN = jax.nn.softmax(log_sum_exp_BPN, axis=1)
    return [jnp.einsum("BPN,BPNV->BNV", share_BPN, x) for x in values], log_sum_exp_BN


def _blocks(first, s: int, P: int):
    """(blocks that a sequence has reached, blocks of each of its splits)."""
    reached = first // s + 1
    return reached, (reached + P - 1) // P


def _spec(x: Input, s: int, P: int, lag: bool) -> pl.BlockSpec:
    dims = x.array.shape[1:]

    def at(b, p, i, first):
        """Never behind the last block that the split has reached: it is not read again."""
        reached, each = _blocks(first[b], s, P)
        return jnp.minimum(p * each + jnp.clip(i, 0, each - 1), reached - 1)

    zeros = (0,) * (len(dims) - 1)
    if x.piece == "keys":
        return pl.BlockSpec((1, *dims[:-1], s), lambda b, p, i, f: (b, *zeros, at(b, p, i, f)))
    if x.piece == "values":
        behind = lambda b, p, i, f: (b, *zeros, at(b, p, i - lag, f))
        return pl.BlockSpec((1, *dims[:-1], s), behind)
    if x.piece == "block":
        return pl.BlockSpec((1, *dims), lambda b, p, i, f: (at(b, p, i, f), 0, *zeros))
    if x.piece == "sequence":
        return pl.BlockSpec((1, *dims), lambda b, p, i, f: (b, 0, *zeros))
    return pl.BlockSpec(x.array.shape, lambda b, p, i, f: (0, 0, *zeros))


class _Bound:
    """A part within a kernel."""

    def __init__(self, part: Part, refs: Refs, *, scores: Rows, weights: Rows):
        self.keys, self.values, self.refs = part.keys, part.values, refs
        self.scores, self.weights = scores, weights


class _Plan:
    """One kernel: where things are in `work`, and what a grid step does."""

    def __init__(self, parts: Sequence[Part], *, heads, block, scored, lag, scale):
        self.parts, self.heads, self.lag, self.scale = parts, heads, lag, scale
        self.block, self.scored = block, scored
        rows = lambda tokens: tokens // LANES * padded(heads)
        # `work` has weights, then scores and sums of the parts that go head by head. `logits` has
        # those of the block, then scores of the parts that take all heads at once.
        work, logits = rows(block), rows(block)
        self.scores, self.sums = [], []
        for part in parts:
            by_head = part.keys.by_head
            self.scores.append(work if by_head else logits)
            work, logits = work + by_head * rows(scored), logits + (not by_head) * rows(scored)
            self.sums.append(work)
            work += part.values.work_rows if part.values else 0
        self.work_rows, self.logit_rows = work, logits

    def bind(self, refs: dict, first, b, i) -> list["_Bound"]:
        """The parts, each with what is its own of the kernel's memory.

        Args:
          first, b, i: the sequence's last slot, its number and the grid step; with a lag the zeros
            of `Rows` are made of them.
        """
        N = self.heads
        hidden = lambda x: jnp.minimum(x, 0) if self.lag else 0
        logits = Rows(refs["logits"], 0, N)  # and, after the softmax, weights
        return [
            _Bound(
                part,
                {name[2:]: ref for name, ref in refs.items() if name.startswith(f"{n}.")}
                | dict(sums=Rows(refs["work"], self.sums[n], 1, hidden(first + b))),
                scores=Rows(refs["work"], self.scores[n], N, hidden(first))
                if part.keys.by_head
                else Rows(refs["logits"], self.scores[n], N),
                weights=Rows(refs["work"], 0, N, hidden(first + i))
                if part.values is not None and part.values.by_head
                else logits,
            )
            for n, part in enumerate(self.parts)
        ]


class _Step:
    """A grid step: block i of split p of sequence b."""

    def __init__(self, plan: _Plan, first_ref, refs: dict):
        self.plan, self.refs = plan, refs
        b, self.p, self.i = (pl.program_id(axis) for axis in range(3))
        self.first = first_ref[b]
        reached, self.each = _blocks(self.first, plan.block, pl.num_programs(1))
        self.mine = jnp.clip(reached - self.p * self.each, 0, self.each)  # blocks of this split
        self.logits = Rows(refs["logits"], 0, plan.heads)
        self.parts = plan.bind(refs, self.first, b, self.i)
        self.weighing = [part for part in self.parts if part.values is not None]

    def run(self) -> None:
        pl.when(self.i == 0)(self._begin)
        pl.when(self.i < self.mine)(self._take_block)
        if self.plan.lag:
            pl.when(self.i == self.mine)(self._weigh_last_block)
        pl.when(self.i == pl.num_programs(2) - 1)(self._finish)

    def _begin(self) -> None:
        """Before the split's first block: nothing was seen yet."""
        refs = self.refs
        refs["maximum"][...] = jnp.full_like(refs["maximum"], _MASKED)
        for name in ("total", "work", "logits"):
            refs[name][...] = jnp.zeros_like(refs[name])
        for part in self.parts:
            part.keys.start(part.refs)
        for part in self.weighing:
            part.values.start(part.refs)

    def _take_block(self) -> None:
        """Scores a block's keys, and weighs its values, or with a lag those of the block before."""
        lag = self.plan.lag
        for part in self.parts:
            part.keys.turn(part.refs)
        # Before the first block there is none: all weights are zero.
        self._go_through_block(self.parts, self.weighing if lag else [])
        self._softmax()
        for part in self.weighing:
            part.values.rescale(part.refs, self.refs["decay"])
        if not lag:
            self._go_through_block([], self.weighing)

    def _weigh_last_block(self) -> None:
        """With a lag, one grid step more than blocks: a real loop, since nothing is scored."""

        @pl.loop(0, self.plan.block, step=self.plan.scored)
        def _(start):
            self._go_through(pl.multiple_of(start, LANES), [], self.weighing)

    def _finish(self) -> None:
        """After the last block: sums become outputs."""
        refs = self.refs
        total = refs["total"][...]
        refs["log_sum_exp"][0, 0] = refs["maximum"][...] + jnp.log(total)
        refs["total"][...] = jnp.where(total > 0, 1 / total, 0)
        for part in self.weighing:
            part.values.finish(part.refs, refs["total"])

    def _go_through_block(self, scored: list[_Bound], weighed: list[_Bound]) -> None:
        for start in range(0, self.plan.block, self.plan.scored):
            self._go_through(start, scored, weighed)

    def _go_through(self, start, scored: list[_Bound], weighed: list[_Bound]) -> None:
        """Scores and weighs the tokens from `start` on: of all parts head by head, interleaved."""
        tokens = pl.ds(start, self.plan.scored)
        takers = [part.keys.score(part.refs, tokens, part.scores) for part in scored]
        takers += [part.values.weigh(part.refs, tokens, part.weights) for part in weighed]
        for n in range(self.plan.heads):
            for take in takers:
                if take is not None:
                    take(n)
        if scored:
            last = self.first - (self.p * self.each + self.i) * self.plan.block
            self._add_up(tokens, last)

    def _add_up(self, tokens: pl.Slice, last) -> None:
        """Logits of these tokens: the parts' scores, scaled; masked after slot `last`."""
        N, refs = self.plan.heads, self.refs
        K = refs["key_scale"].shape[1] if "key_scale" in refs else 0
        for c, (column, at) in enumerate(columns(tokens)):
            z = self.plan.scale * sum(part.scores[c, 0, N] for part in self.parts)
            if K:
                scale_K = refs["key_scale"][0, :, 0, at]
                z = z * (scale_K if K == N else jnp.repeat(scale_K, N // K, axis=0))
            slot = at.start + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
            self.logits[column, 0, N] = jnp.where(slot <= last, z, _MASKED)

    def _softmax(self) -> None:
        """Weights of a block; what older blocks' sums are to be multiplied by, to `decay`."""
        refs, logits, N = self.refs, self.logits, self.plan.heads
        weights, columns = Rows(refs["work"], 0, N), range(self.plan.block // LANES)
        head, by_head = slice(0, N), any(p.values and p.values.by_head for p in self.parts)
        largest = functools.reduce(jnp.maximum, (logits[c, 0, N] for c in columns))
        old = refs["maximum"][head]
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
