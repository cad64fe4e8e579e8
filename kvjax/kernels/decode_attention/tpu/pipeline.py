"""The pipeline that the TPU decode kernels share: blocks of a cache, an online softmax, a merge.

A grid step (b, p, i) takes block i of split p of sequence b, tokens on lanes. `parts` has what
a mechanism's kernel is made of: parts of a cache whose logits add up, each with its own values.

Logits, weights and sums by lane live in one array of [rows, 128], `work`: a row is 128 tokens of
one head. A part that works head by head is called between the heads of the others, so that vector
and matrix unit take turns at instructions rather than at phases; with `lag`, the values of block
i - 1 are weighed between the heads that score block i.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

LANES = 128
_MASKED = -1e30
_COMPILER_BYTES = 2**18  # of VMEM, for itself

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
        self.ref, self.first, self.stride, self.zero = ref, first, _padded(heads), zero

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
    round_up = lambda n, multiple: -(-n // multiple) * multiple
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
    scratch += [(name, rows(_padded(heads))) for name in ("maximum", "total", "decay")]
    outputs = [(f"{i}.out", part.values.out_dims) for i, part in enumerate(parts) if part.values]
    outputs.append(("log_sum_exp", (_padded(heads), LANES)))
    names = [name for name, _ in (*inputs, *outputs, *scratch)]

    def kernel(first_ref, *refs):
        plan.step(first_ref, dict(zip(names, refs, strict=True)))

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


def _padded(heads: int) -> int:
    return -(-heads // 8) * 8


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
        rows = lambda tokens: tokens // LANES * _padded(heads)
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

    def step(self, first_ref, refs: dict) -> None:
        b, p, i = (pl.program_id(axis) for axis in range(3))
        first, s, N = first_ref[b], self.block, self.heads
        reached, each = _blocks(first, s, pl.num_programs(1))
        mine = jnp.clip(reached - p * each, 0, each)  # blocks of this split
        hidden = lambda x: jnp.minimum(x, 0) if self.lag else 0
        logits = Rows(refs["logits"], 0, N)  # and, after the softmax, weights
        parts = [
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
        weighing = [part for part in parts if part.values is not None]

        def go_through(start, scored: list["_Bound"], weighed: list["_Bound"]) -> None:
            tokens = pl.ds(start, self.scored)
            takers = [part.keys.score(part.refs, tokens, part.scores) for part in scored]
            takers += [part.values.weigh(part.refs, tokens, part.weights) for part in weighed]
            for n in range(N):
                for take in takers:
                    if take is not None:
                        take(n)
            if scored:
                self._add_up(refs, tokens, parts, logits, first - (p * each + i) * s)

        def block(*, score: bool, weigh: bool) -> None:
            for start in range(0, s, self.scored):
                go_through(start, parts if score else [], weighing if weigh else [])

        @pl.when(i == 0)
        def _():
            refs["maximum"][...] = jnp.full_like(refs["maximum"], _MASKED)
            for name in ("total", "work", "logits"):
                refs[name][...] = jnp.zeros_like(refs[name])
            for part in parts:
                part.keys.start(part.refs)
            for part in weighing:
                part.values.start(part.refs)

        @pl.when(i < mine)
        def _():
            for part in parts:
                part.keys.turn(part.refs)
            block(score=True, weigh=self.lag)  # of the block before the first, all weights are zero
            self._softmax(refs, logits, Rows(refs["work"], 0, N))
            for part in weighing:
                part.values.rescale(part.refs, refs["decay"])
            if not self.lag:
                block(score=False, weigh=True)

        if self.lag:

            @pl.when(i == mine)
            def _():
                @pl.loop(0, s, step=self.scored)
                def _(start):
                    go_through(pl.multiple_of(start, LANES), [], weighing)

        @pl.when(i == pl.num_programs(2) - 1)
        def _():
            total = refs["total"][...]
            refs["log_sum_exp"][0, 0] = refs["maximum"][...] + jnp.log(total)
            refs["total"][...] = jnp.where(total > 0, 1 / total, 0)
            for part in weighing:
                part.values.finish(part.refs, refs["total"])

    def _add_up(self, refs, tokens: pl.Slice, parts: list["_Bound"], logits: Rows, last) -> None:
        """Logits of these tokens: the parts' scores, scaled; masked after slot `last`."""
        N = self.heads
        K = refs["key_scale"].shape[1] if "key_scale" in refs else 0
        for c, (column, at) in enumerate(columns(tokens)):
            z = self.scale * sum(part.scores[c, 0, N] for part in parts)
            if K:
                scale_K = refs["key_scale"][0, :, 0, at]
                z = z * (scale_K if K == N else jnp.repeat(scale_K, N // K, axis=0))
            slot = at.start + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
            logits[column, 0, N] = jnp.where(slot <= last, z, _MASKED)

    def _softmax(self, refs, logits: Rows, weights: Rows) -> None:
        """Weights of a block; what older blocks' sums are to be multiplied by, to `decay`."""
        N, columns = self.heads, range(self.block // LANES)
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
