"""Decode attention for Ampere and Ada GPUs (A100, L4) in Pallas-Triton, from the plans of `plans`.

On Hopper it reads the int8 caches that Hopper's own kernel refuses.

Grid (head tiles, splits, B). A program attends with the query heads of a head tile to one split:

    once per split, LRKV under RoPE:
      rank query [E, 64]    = basis [H, E]ᵀ · folded query [64, H]ᵀ, for each slab and query head
    for every tile of tokens s:
      scores [rows, s]      = Σ over key slabs   queries [rows, 64] · slab [64, s]
        + a row at a time     Σ over E           (rank query · latents [64, s]) · table [E, s]
      weights [rows, s]       online softmax
      o [rows, 64]          = o · decay + weights · slabᵀ, for each value slab

Slabs of an int8 cache are cast to bfloat16 as they are read. The products of a field's slabs are
multiplied by its keys' scales, the weights of a value slab by its values' scales (`plans.Scales`).

A row is a query head, padded to 16 rows or the next power of two, which tensor cores want. The
query is folded with `expand` once per step, and the basis is rotated to each split's start, so that
the program itself rotates nothing (`cache_layouts.rotating`). Triton pipelines the copies of the
loop. The splits are merged in plain JAX.

JAX 0.11 calls Pallas-Triton deprecated; `attention.check` refuses if JAX no longer has it.
"""

from collections.abc import Mapping
import dataclasses
import functools
import itertools
import math
import re

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention import tuning
from kvjax.kernels.decode_attention.cache_layouts import (
    DecodeInputs,
    FactoredInputs,
    ResidualInputs,
    rotating,
)
from kvjax.kernels.decode_attention.gpu import adapters, plans
from kvjax.kernels.decode_attention.gpu.adapters import Cache
from kvjax.kernels.decode_attention.gpu.plans import Plan
from kvjax.kernels.decode_attention.gpu.ring import ROWS, Slab
from kvjax.layers import rope

TILE_KV = 64  # tokens
_FEWEST_ROWS = 16  # of an operand of tensor cores
_MULTIPROCESSORS = 108  # of an A100
_FEW_RANK_QUERIES = 4  # always fit into shared memory
_RANK_QUERY_BYTES = 65 * 128
_MOST_SUMS = 8 * 32 * 96  # float32 outputs of 8 warps, in 96 registers of a thread
_STAGES = 2  # tiles in shared memory: one is copied while the other one is used
# Bytes of shared memory of a program: A100, A30 (8.0) and Hopper, and others (8.6, 8.9).
_SHARED_BYTES = {r"\bA(100|30)\b|\bG?H\d+": 163 * 1024, "": 99 * 1024}
_OTHER_BYTES = 16 * 1024  # of a program: queries, weights, reductions
_MASKED = -1e30  # finite: a row of -inf alone would give NaN; exp2 of it is 0
_LOG2E = math.log2(math.e)


class Folded(adapters.Rotating):
    """Queries under RoPE that are folded once per step instead of in each program."""

    def rotated_arrays(self, split: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """Returns "folded" [B, g, slabs · r, 64, H], "basis" [splits, H, E] and "table" [E, s]."""
        q_BNH = self.query[:, 0].astype(jnp.float32)
        expand_NRH = self.expand_of_heads().astype(jnp.float32)
        folded = jnp.concatenate(rotating.absorb_query(q_BNH, expand_NRH), axis=-1)
        cosine_FE, sine_FE, table_Es = self.basis(split)
        cosine_1FE, sine_1FE = cosine_FE[None], sine_FE[None]
        starts_1X = np.arange(0, self.S, split, dtype=np.int32)[None]
        angles = rope.rotary(starts_1X, self.H, self.inputs.rope_base)
        cos_XF1, sin_XF1 = (a[0][..., None] for a in angles)
        # The product of e^(i start theta) and the basis, its imaginary parts negated.
        real = cosine_1FE * cos_XF1 - sine_1FE * sin_XF1
        basis_XHE = jnp.concatenate([real, -(cosine_1FE * sin_XF1 + sine_1FE * cos_XF1)], axis=1)
        return dict(
            folded=adapters.pad_halves(self.by_slab(folded), axis=-1).astype(dtype),
            basis=adapters.pad_halves(basis_XHE, axis=1).astype(dtype),
            table=jnp.asarray(table_Es, jnp.float32),
        )


class _Residual(Folded, adapters.ResidualAdapter):
    most_columns = 2  # a program's rank queries and sums stay in registers


class _Factored(Folded, adapters.FactoredAdapter):
    pass


ADAPTERS = adapters.ADAPTERS | {ResidualInputs: _Residual, FactoredInputs: _Factored}


@functools.partial(
    jax.jit, static_argnames=("plan", "head_tiles", "tile_kv", "split", "interpret")
)  # jitted, so that it is lowered once for all layers of a model
def attend(
    plan: Plan,
    arrays: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    head_tiles: int,
    tile_kv: int,
    split: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attends to every split of every sequence.

    Args:
      arrays: as of `kernel.attend`, but for residuals under RoPE: see `Folded`.
      split: tokens of a split, a multiple of `tile_kv`.

    Returns:
      Unnormalised outputs [B, splits, head_tiles, rows, channels], and the scores' maxima (base 2)
      and the sums of the weights [B, splits, head_tiles, rows], float32. Splits past a sequence's
      end are not written.
    """
    B, S = first_B.shape[0], arrays[plan.order[0].name].shape[-1]
    splits, n, arrays = -(-S // split), _rows(plan), dict(arrays)
    if plan.keys:
        rows = (0, n - plan.columns)
        arrays["query"] = jnp.pad(arrays["query"], ((0, 0), (0, 0), (0, 0), rows, (0, 0)))

    def kernel(*refs):
        ref = dict(zip(("first", *arrays, "o", "maximum", "total"), refs, strict=True))
        head_tile, x, b = (pl.program_id(axis) for axis in range(3))
        # A full cache that no longer grows has first = S.
        first, start = lax.min(ref["first"][b], S - 1), x * split
        program = _Program(plan, ref, (b, x, head_tile), first, start, n, tile_kv)
        # A split past the sequence's end has nothing to do.
        pl.when(first >= start)(functools.partial(program.run, split // tile_kv))

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    sums = B, splits, head_tiles, n
    run = pl.pallas_call(
        kernel,
        out_shape=(f32((*sums, len(plan.values) * ROWS)), f32(sums), f32(sums)),
        # Head tiles are innermost: neighbours read the same base, all but the first from L2.
        grid=(head_tiles, splits, B),
        compiler_params=plgpu.CompilerParams(num_warps=_warps(plan), num_stages=_stages(plan)),
        interpret=interpret,
        name="decode_attention",
    )
    return run(first_B, *arrays.values())


@dataclasses.dataclass(frozen=True)
class _Program:
    """One program of the grid."""

    plan: Plan
    ref: Mapping  # arguments and outputs by name
    at: tuple[jax.Array, jax.Array, jax.Array]  # sequence, split, head tile
    first: jax.Array  # slot of the sequence's new token, the last visible one
    start: jax.Array  # first token of the split
    n: int  # rows
    tile_kv: int

    def run(self, tiles: int) -> None:
        """Attends to the split's tiles up to the new token, and writes its sums."""
        plan, (b, _, head_tile), n = self.plan, self.at, self.n
        queries = [self.ref["query"].at[b, head_tile, jnp.int32(i)] for i in range(len(plan.keys))]
        queries = [plgpu.load(query) for query in queries]
        pairs = range(len(plan.rotated) * plan.group_size)
        step = functools.partial(self.attend_tile, queries, [self.rank_query(i) for i in pairs])
        carry = (
            jnp.full((n,), _MASKED, jnp.float32),
            jnp.zeros((n,), jnp.float32),
            [jnp.zeros((n, ROWS), jnp.float32) for _ in plan.values],
        )
        visible = self.first + 1 - self.start
        whole = lax.min(lax.div(visible, self.tile_kv), tiles)
        end = lax.min(lax.div(visible - 1, self.tile_kv) + 1, tiles)
        # Masks would keep the copies of the loop from being as wide as they can.
        carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
        carry = lax.fori_loop(whole, end, functools.partial(step, masked=True), carry)
        maximum_n, total_n, o = carry
        plgpu.store(self.ref["maximum"].at[self.at], maximum_n)
        plgpu.store(self.ref["total"].at[self.at], total_n)
        for i, o_nV in enumerate(o):
            plgpu.store(self.ref["o"].at[*self.at, :, pl.ds(i * ROWS, ROWS)], o_nV)

    def rank_query(self, i: int) -> jax.Array:
        """Returns the query in rank space over the split's basis, [E, 64], of a slab and head."""
        b, x, head_tile = self.at
        basis, folded = self.ref["basis"], self.ref["folded"]
        product_ER = jnp.zeros((ROWS, ROWS), jnp.float32)
        for c in range(0, basis.shape[1], ROWS):
            channels = pl.ds(c, ROWS)
            basis_HE = plgpu.load(basis.at[x, channels])
            folded_RH = plgpu.load(folded.at[b, head_tile, jnp.int32(i), :, channels])
            product_ER += _dot(basis_HE, folded_RH, 0, 1)
        return product_ER.astype(folded.dtype)

    def attend_tile(self, queries, rank_queries, t, carry, *, masked: bool):
        """Scores one tile and adds its weighted values: a step of the online softmax.

        Args:
          queries: [rows, 64] for each key slab.
          rank_queries: [E, 64] for each slab of residual keys and query head.
          carry: maxima and sums of the weights [rows], and outputs [rows, 64] per value slab.
          masked: True if slots after the new token must be ignored, whatever they hold.
        """
        maximum_n, total_n, o = carry
        token = self.start + t * self.tile_kv
        load = functools.cache(functools.partial(self.load, token))  # MLA: keys are values too
        scaled = functools.partial(self.scaled, token, masked=masked)
        z_ns = jnp.zeros((self.n, self.tile_kv), jnp.float32)
        of_slabs = zip(queries, self.plan.keys, strict=True)
        for name, of_field in itertools.groupby(of_slabs, lambda pair: pair[1].name):
            has_scale = self.plan.scales_of(f"{name}.scale") is not None
            # Products that are added to the sum at once take less shared memory.
            sum_ns = jnp.zeros_like(z_ns) if has_scale else z_ns
            for query_nH, slab in of_field:
                sum_ns += _dot(query_nH, load(slab))
            z_ns = z_ns + scaled(f"{name}.scale", sum_ns) if has_scale else sum_ns
        if self.plan.rotated:
            name = f"{self.plan.rotated[0].name}.scale"
            z_ns += scaled(name, self.rotated_scores(t, rank_queries, load))
        z_ns = scaled("key_scale", z_ns) * (self.plan.scale * _LOG2E)
        if masked:
            slot_ns = token + lax.broadcasted_iota(jnp.int32, z_ns.shape, 1)
            z_ns = jnp.where(slot_ns <= self.first, z_ns, _MASKED)
        new_n = jnp.maximum(maximum_n, jnp.max(z_ns, axis=1))
        decay_n = jnp.exp2(maximum_n - new_n)
        p_ns = jnp.exp2(z_ns - new_n[:, None])
        total_n = total_n * decay_n + jnp.sum(p_ns, axis=1)
        weights = functools.cache(lambda name: scaled(name, p_ns).astype(jnp.bfloat16))
        sums = []
        for o_nV, slab in zip(o, self.plan.values, strict=True):
            v_Vs = load(slab)
            if masked and self.plan.itemsize(slab) > 1:  # weight 0 · NaN would be NaN
                slot_Vs = token + lax.broadcasted_iota(jnp.int32, v_Vs.shape, 1)
                v_Vs = jnp.where(slot_Vs <= self.first, v_Vs, jnp.zeros_like(v_Vs))
            added_nV = _dot(weights(f"{slab.name}.scale"), v_Vs, 1, 1)
            sums.append(o_nV * decay_n[:, None] + added_nV)
        return new_n, total_n, sums

    def load(self, token: jax.Array, slab: Slab) -> jax.Array:
        """Returns a slab of the tile that begins at a token, [64, tile_kv] bfloat16."""
        b, _, head_tile = self.at
        row = lax.div(head_tile, slab.sharing) * slab.stride + slab.row
        ref = self.ref[slab.name].at[b, pl.ds(row, ROWS), pl.ds(token, self.tile_kv)]
        return plgpu.load(ref).astype(jnp.bfloat16)  # integers up to 127 are exact

    def rotated_scores(self, t, rank_queries, load) -> jax.Array:
        """Returns the scores of the residual keys under RoPE, each head's in its own row."""
        plan, group = self.plan, self.plan.group_size
        table_Es = plgpu.load(self.ref["table"].at[:, pl.ds(t * self.tile_kv, self.tile_kv)])
        slabs = len(plan.rotated) // plan.heads  # of a KV head
        z_ns = jnp.zeros((self.n, self.tile_kv), jnp.float32)
        for row in range(plan.heads * group):
            head, r = divmod(row, group)
            coefficients_Es = jnp.zeros_like(table_Es)
            for i in range(head * slabs, (head + 1) * slabs):
                coefficients_Es += _dot(rank_queries[i * group + r], load(plan.rotated[i]))
            z_s = jnp.sum(coefficients_Es * table_Es, axis=0)
            z_ns = self.in_rows(row, row + 1, z_s, z_ns)
        return z_ns

    def scaled(self, token: jax.Array, name: str, z_ns: jax.Array, *, masked: bool) -> jax.Array:
        """Multiplies scores or weights with the scales of their KV heads, if there are any."""
        if (scales := self.plan.scales_of(name)) is None:
            return z_ns
        b, _, head_tile = self.at
        first_row = lax.div(head_tile, scales.sharing) * scales.heads
        rows = self.plan.heads * self.plan.group_size // scales.heads  # that share a scale
        scale_ns = None
        for k in range(scales.heads):
            at = b, first_row + k, pl.ds(token, self.tile_kv)
            scale_s = plgpu.load(self.ref[name].at[at])
            if masked:  # weight 0 · NaN would be NaN
                slot_s = token + lax.broadcasted_iota(jnp.int32, scale_s.shape, 0)
                scale_s = jnp.where(slot_s <= self.first, scale_s, 0)
            if scale_ns is None:  # also of the rows that are padding
                scale_ns = jnp.broadcast_to(scale_s[None], z_ns.shape)
            else:
                scale_ns = self.in_rows(k * rows, (k + 1) * rows, scale_s, scale_ns)
        return z_ns * scale_ns

    def in_rows(self, begin: int, end: int, x_s: jax.Array, other_ns: jax.Array) -> jax.Array:
        """Returns x_s in rows begin .. end - 1, and `other_ns` in the others."""
        row_ns = lax.broadcasted_iota(jnp.int32, other_ns.shape, 0)
        own_ns = (row_ns >= begin) & (row_ns < end)
        return jnp.where(own_ns, jnp.broadcast_to(x_s[None], other_ns.shape), other_ns)


def _dot(a: jax.Array, b: jax.Array, axis_a: int = 1, axis_b: int = 0) -> jax.Array:
    """Returns the product of two matrices, summed over an axis of each, in float32."""
    dimensions = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def decode_attention(
    inputs: DecodeInputs,
    cache: Cache,
    first_B: jax.Array,
    *,
    split: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `attention.decode_attention`, whose `check` has passed."""
    adapter = ADAPTERS[type(inputs)](inputs, cache)
    B, S = first_B.shape[0], next(iter(cache.values())).shape[-1]
    tile_kv = _tile_kv(adapter.plan)
    programs = B * adapter.head_tiles
    default = {"split": plans.default_split(programs, S, tile_kv, _multiprocessors())}
    tuned = tuning.parameters(tuning.key("gpu", inputs, cache), default=default, nearest=False)
    split = split or min(round_up(tuned["split"], tile_kv), adapter.max_split)
    channels = {name: array.reshape(B, -1, S) for name, array in cache.items()}
    splits = attend(
        adapter.plan,
        channels | adapter.arrays(split),
        first_B,
        head_tiles=adapter.head_tiles,
        tile_kv=tile_kv,
        split=split,
        interpret=interpret,
    )
    o_BNV = _merge(adapter.plan, *splits, first_B, adapter.expand, split)
    return adapter.finish(o_BNV)[:, None]


def _multiprocessors() -> int:
    """Returns the multiprocessors of the GPU compiled for."""
    cores = getattr(_device(), "num_cores", None) or getattr(_device(), "core_count", None)
    return cores or _MULTIPROCESSORS


def refusal(inputs: DecodeInputs, cache: Cache) -> str | None:
    """Returns why the kernel does not take the inputs, or None."""
    if reason := adapters.refusal(ADAPTERS, inputs, cache):
        return reason
    plan = ADAPTERS[type(inputs)](inputs, cache).plan
    queries = len(plan.rotated) * plan.group_size
    if queries > _FEW_RANK_QUERIES and _pipeline(plan) + queries * _RANK_QUERY_BYTES > _shared():
        return f"has no shared memory for {queries} queries in rank space"
    if _sums(plan) > _MOST_SUMS:
        return f"has no registers for {plan.columns} queries on {len(plan.values)} slabs of values"
    return None


def _tile_kv(plan: Plan) -> int:
    """Returns the tokens of a tile: two tiles fit into the 99 KiB of an L4's shared memory."""
    return TILE_KV if _bytes(plan) <= 4 * 2 * ROWS else TILE_KV // 2


def _bytes(plan: Plan) -> int:
    """Returns the bytes of a token's slabs."""
    return ROWS * sum(plan.itemsize(slab) for slab in plan.order)


def _stages(plan: Plan) -> int:
    """Returns the stages of the pipeline; 1 (each tile is waited for) where two do not fit."""
    return _STAGES if _pipeline(plan) <= _shared() else 1


def _pipeline(plan: Plan) -> int:
    """Returns a program's bytes of shared memory with two stages, without queries in rank space."""
    return _STAGES * _bytes(plan) * _tile_kv(plan) + _OTHER_BYTES


def _shared() -> int:
    """Returns the shared memory of the GPU compiled for, in bytes."""
    kind = _device().device_kind
    return next(size for kinds, size in _SHARED_BYTES.items() if re.search(kinds, kind))


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _warps(plan: Plan) -> int:
    """Returns the warps of a program: twice as many if its sums would fill half the registers."""
    return 4 if _sums(plan) <= 128 * 96 else 8


def _rows(plan: Plan) -> int:
    """Returns the query heads of a program, padded."""
    return max(_FEWEST_ROWS, 1 << (plan.columns - 1).bit_length())


def _sums(plan: Plan) -> int:
    """Returns the float32 outputs of a program, which stay in registers."""
    return _rows(plan) * len(plan.values) * ROWS


def _merge(
    plan: Plan,
    o: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    first_B: jax.Array,
    expand_KRV: jax.Array | None,
    split: int,
) -> jax.Array:
    """Returns outputs [B, N, channels], averaged over splits by their softmax sums."""
    B, splits, g, _, _ = o.shape
    own = plan.heads * plan.group_size  # rows that are query heads
    o, maximum, total = o[:, :, :, :own], maximum[..., :own], total[..., :own]
    # Splits past a sequence's end were not written.
    start_X = jnp.arange(splits, dtype=jnp.int32) * split
    reached = (start_X[None] <= first_B[:, None])[:, :, None, None]
    maximum = jnp.where(reached, maximum, _MASKED)
    share = jnp.where(reached, jnp.exp2(maximum - jnp.max(maximum, axis=1, keepdims=True)), 0)
    total_Bgn = jnp.sum(jnp.where(reached, share * total, 0), axis=1)
    o_BgnC = jnp.sum(jnp.where(reached[..., None], share[..., None] * o, 0), axis=1)
    o_BgnC = o_BgnC / total_Bgn[..., None]
    if expand_KRV is None:
        return o_BgnC.reshape(B, g * own, -1)
    R, V = expand_KRV.shape[1:]
    k, r = plan.heads, plan.group_size
    # Of the latents of k KV heads, a query head's own.
    latents = o_BgnC[..., V:].reshape(B, g, k, r, k, R)
    own_BgrRk = jnp.diagonal(latents, axis1=2, axis2=4)
    expand_gkRV = expand_KRV.reshape(g, k, R, V).astype(jnp.float32)
    residual = jnp.einsum("BgrRk,gkRV->BgkrV", own_BgrRk, expand_gkRV)
    return o_BgnC[..., :V].reshape(B, g * own, V) + residual.reshape(B, g * own, V)
