"""LRKV's decode attention as a Pallas kernel for TPUs: one query per sequence, exact under RoPE.

A grid step reads a block of the cache, tokens on lanes. Under RoPE the query meets the residual in
rank space: G = conj(q)·B, turned to the block's first slot once per block, times a constant table
of cosines and sines is a query per slot, so that a latent sees one multiply-add per element. The
values of block i - 1 are weighed in the step that scores block i, so that the vector unit's work
may overlap the matrix unit's; in today's static schedules it hardly does.

Nothing here was run on a TPU: it is compiled ahead of time for v4, v5e and v5p, and run by the
interpreter.
"""

from collections.abc import Mapping
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention.operands import Operands
from kvjax.kernels.decode_attention.operands import Residual
from kvjax.layers import rope

LANES = 128
BLOCK = 1024  # tokens of a grid step
_SCORED = 256  # tokens scored at once
_VMEM_BYTES = 60 * 2**20
_MASKED = -1e30


def decode_attention(
    operands: Operands,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    block: int = BLOCK,
    interpret=False,
) -> jax.Array:
    """See `api.decode_attention`: [B, 1, N, Hv] in float32.

    Args:
      block: tokens per grid step, rounded down to a divisor of the capacity.
      interpret: False, or `pltpu.InterpretParams`.

    Raises:
      NotImplementedError: operands or shapes that this kernel does not take, and which it does.
    """
    _check(operands, cache)
    base_BKV, latent_BKR, _ = residual(operands, cache, first_B, block=block, interpret=interpret)
    expand_KRV = operands.expand_value.astype(jnp.float32)
    return (base_BKV + jnp.einsum("BKR,KRV->BKV", latent_BKR, expand_KRV))[:, None]  # LRKV eq. 4


def _check(operands: Operands, cache: Mapping[str, jax.Array]) -> None:
    if not isinstance(operands, Residual) or operands.bias is not None:
        kind = type(operands).__name__
        raise NotImplementedError(f"the TPU kernel reads LRKV's cache, not {kind}'s: use 'xla'")
    T, N, H = operands.query.shape[1:]
    K, R = operands.expand_key.shape[:2]
    S, Hv = cache["base_key"].shape[-1], cache["base_value"].shape[2]
    if T != 1 or N != K:
        raise NotImplementedError(
            f"the TPU kernel takes one query per KV head: here {T} of {N} heads on {K}; use 'xla'"
        )
    if S % LANES or R % 16 or H % LANES or Hv % LANES:
        raise NotImplementedError(
            f"the TPU kernel needs a capacity and head dims in multiples of {LANES} and a rank in "
            f"multiples of 16: here S = {S}, H = {H}, Hv = {Hv}, R = {R}; use 'xla'"
        )


def residual(
    operands: Residual,
    cache: Mapping[str, jax.Array],
    first_B: jax.Array,
    *,
    block: int = BLOCK,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted base values [B, K, Hv], weighted latents [B, K, R], log-sum-exp [B, K], float32."""
    B, _, N, H = operands.query.shape
    K, R = operands.expand_key.shape[:2]
    J, S = cache["base_key"].shape[1], cache["base_key"].shape[-1]
    Hv, dtype = cache["base_value"].shape[2], cache["base_key"].dtype
    s = next(b for b in range(min(block, S) // LANES * LANES, 0, -LANES) if S % b == 0)
    scored = _SCORED if s % _SCORED == 0 else LANES
    q_BJGH = operands.query[:, 0].reshape(B, J, N // J, H).astype(dtype)
    fold, turn, table = _fold(operands, s, S // s, dtype)

    # Index maps never go behind the last block that a sequence has reached: it is not read again.
    reached = lambda b, i, first: jnp.minimum(i, first[b] // s)
    before = lambda b, i, first: jnp.clip(i - 1, 0, first[b] // s)
    zeros = lambda shape: (0,) * len(shape)
    of_sequence = lambda *shape: pl.BlockSpec((1, *shape), lambda b, i, first: (b, *zeros(shape)))

    def tokens(index, *shape):
        return pl.BlockSpec(
            (1, *shape, s), lambda b, i, first: (b, *zeros(shape), index(b, i, first))
        )

    arguments = dict(
        query=(q_BJGH, of_sequence(J, N // J, H)),
        fold=(fold, of_sequence(*fold.shape[1:])),
        base_key=(cache["base_key"], tokens(reached, J, H)),
        residual_key=(cache["residual_key"], tokens(reached, K, R)),
        base_value=(cache["base_value"], tokens(before, J, Hv)),
        residual_value=(cache["residual_value"], tokens(before, K, R)),
    )
    if turn is not None:
        arguments["turn"] = (
            turn,
            pl.BlockSpec((1, 2, H // 2), lambda b, i, first: (reached(b, i, first), 0, 0)),
        )
        arguments["table"] = (table, pl.BlockSpec((H, s), lambda b, i, first: (0, 0)))
    if "key_scale" in cache:
        arguments["key_scale"] = (cache["key_scale"], tokens(reached, K, 1))
    scratch = dict(
        turned=pltpu.VMEM((K * R, H), dtype),
        logits=pltpu.VMEM((K, s), jnp.float32),
        weights=pltpu.VMEM((K, s), jnp.float32),  # of the block before
        maximum=pltpu.VMEM((K, LANES), jnp.float32),
        total=pltpu.VMEM((K, LANES), jnp.float32),
        decay=pltpu.VMEM((K, LANES), jnp.float32),
        base=pltpu.VMEM((K, Hv), jnp.float32),
        latent=pltpu.VMEM((K, R, LANES), jnp.float32),  # sums by lane
        scores=pltpu.VMEM((K, scored), jnp.float32),
    )
    outputs = ("o_base", "o_latent", "o_log_sum_exp")
    names = (*arguments, *outputs, *scratch)

    def kernel(first_ref, *refs):
        _kernel(first_ref, dict(zip(names, refs, strict=True)), operands.scale, scored)

    widths = (Hv, R, LANES)
    base_BKV, latent_BKR, log_sum_exp_BKL = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((B, K, width), jnp.float32) for width in widths],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, S // s + 1),
            in_specs=[spec for _, spec in arguments.values()],
            out_specs=[of_sequence(K, width) for width in widths],
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=interpret,
    )(first_B, *(array for array, _ in arguments.values()))
    return base_BKV, latent_BKR, log_sum_exp_BKL[..., 0]


def _fold(operands: Residual, s: int, blocks: int, dtype: jnp.dtype):
    """(fold, turn, table).

    Under RoPE: conj(q)·B as [B, 2, K·R, H/2], real and imaginary; cosines and sines of every
    block's first slot, [blocks, 2, H/2]; those of a block's slots, [H, s]. Without, the query in
    rank space [B, K, R, 1], None, None.
    """
    q_BKH = operands.residual_query[:, 0].astype(jnp.float32)
    b_KRH = operands.expand_key.astype(jnp.float32)
    if operands.rope_base is None:
        return jnp.einsum("BKH,KRH->BKR", q_BKH, b_KRH)[..., None], None, None  # LRKV eq. 3
    (K, R, H), B = b_KRH.shape, q_BKH.shape[0]
    shape = (B, K, R, H // 2)
    q1, q2 = (jnp.broadcast_to(x, shape) for x in jnp.split(q_BKH[:, :, None], 2, axis=-1))
    b1, b2 = (jnp.broadcast_to(x, shape) for x in jnp.split(b_KRH[None], 2, axis=-1))
    fold = jnp.stack([q1 * b1 + q2 * b2, q1 * b2 - q2 * b1], axis=1).reshape(B, 2, K * R, H // 2)
    angles = functools.partial(rope.rotary, dim=H, base=operands.rope_base)
    origins = angles(np.arange(blocks, dtype=np.int32)[None] * s)
    turn = jnp.stack([a[0].astype(jnp.float32) for a in origins], axis=1)
    slots = angles(np.arange(s, dtype=np.int32)[None])
    return fold, turn, jnp.concatenate([a[0].T for a in slots]).astype(dtype)


def _kernel(first_ref, ref: dict, scale: float, scored: int) -> None:
    """One grid step (b, i): scores block i, weighs the values of block i - 1."""
    b, i = pl.program_id(0), pl.program_id(1)
    _, K, R, s = ref["residual_key"].shape
    J, G = ref["query"].shape[1:3]
    first = first_ref[b]
    rotating = "table" in ref

    @pl.when(i == 0)
    def _():
        ref["maximum"][...] = jnp.full_like(ref["maximum"], _MASKED)
        for name in ("weights", "total", "base", "latent"):
            ref[name][...] = jnp.zeros_like(ref[name])

    if rotating:

        @pl.when(i * s <= first)
        def _():
            F = ref["fold"].shape[-1]
            real, imaginary = ref["fold"][0, 0], ref["fold"][0, 1]
            cos, sin = ref["turn"][0, 0:1, :], ref["turn"][0, 1:2, :]
            turned = ref["turned"]
            turned[:, :F] = (real * cos - imaginary * sin).astype(turned.dtype)
            turned[:, F:] = (-(imaginary * cos + real * sin)).astype(turned.dtype)

    def score_and_weigh(j, _):
        at = pl.ds(pl.multiple_of(j * scored, scored), scored)
        product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        if rotating:
            query = product(ref["turned"][...], ref["table"][:, at])  # of every slot, [K·R, scored]
        for base in range(J):
            shared = product(ref["query"][0, base], ref["base_key"][0, base, :, at])
            ref["logits"][base * G : (base + 1) * G, at] = shared
        for k in range(K):
            query_k = query[k * R : (k + 1) * R] if rotating else ref["fold"][0, k]
            latent = ref["residual_key"][0, k, :, at].astype(jnp.float32)
            ref["scores"][k : k + 1, :] = jnp.sum(query_k * latent, axis=0, keepdims=True)
            for c in range(scored // LANES):
                lanes = pl.ds(pl.multiple_of(j * scored + c * LANES, LANES), LANES)
                weight = jnp.broadcast_to(ref["weights"][k : k + 1, lanes], (R, LANES))
                value = ref["residual_value"][0, k, :, lanes].astype(jnp.float32)
                ref["latent"][k] += weight * value
        z = (ref["scores"][...] + ref["logits"][:, at]) * scale
        if "key_scale" in ref:
            z = z * ref["key_scale"][0, :, 0, at]
        slot = i * s + j * scored + jax.lax.broadcasted_iota(jnp.int32, (K, scored), 1)
        ref["logits"][:, at] = jnp.where(slot <= first, z, _MASKED)
        return ()

    @pl.when((i - 1) * s <= first)
    def _():
        jax.lax.fori_loop(0, s // scored, score_and_weigh, ())
        for base in range(J):
            rows = slice(base * G, (base + 1) * G)
            value = ref["base_value"][0, base]
            ref["base"][rows, :] += jax.lax.dot_general(
                ref["weights"][rows, :].astype(value.dtype),
                value,
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )

    @pl.when(i * s <= first)
    def _():
        z, old = ref["logits"][...], ref["maximum"][:, :1]
        new = jnp.maximum(old, jnp.max(z, axis=1, keepdims=True))
        decay, weights = jnp.exp(old - new), jnp.exp(z - new)
        ref["weights"][...] = weights
        ref["maximum"][...] = jnp.broadcast_to(new, ref["maximum"].shape)
        ref["total"][...] = ref["total"][...] * decay + jnp.sum(weights, axis=1, keepdims=True)
        ref["base"][...] *= decay
        ref["decay"][...] = jnp.broadcast_to(decay, ref["decay"].shape)
        for k in range(K):
            ref["latent"][k] *= jnp.broadcast_to(ref["decay"][k : k + 1, :], (R, LANES))

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        inverse = 1 / ref["total"][:, :1]
        ref["o_base"][0] = ref["base"][...] * inverse
        for k in range(K):
            ref["o_latent"][0, k : k + 1, :] = jnp.sum(ref["latent"][k].T, axis=0, keepdims=True)
        ref["o_latent"][0] *= inverse
        ref["o_log_sum_exp"][0] = ref["maximum"][...] + jnp.log(ref["total"][...])
