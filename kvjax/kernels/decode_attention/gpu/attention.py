"""Decode attention as a Pallas kernel for Hopper GPUs: one query per sequence.

The cache is read once, as it lies. A block of the grid reads some heads of one sequence for a
split of its tokens (`kernel`); the splits are merged here by their log-sum-exp. What a block
multiplies is a plan (`plans`). Latents are weighed in the kernel, and expanded to values after.

Tests compile it ahead of time for an H200, and run it by the interpreter on a model of shared
memory in which products and copies are as late as a GPU's may be.
"""

from collections.abc import Mapping
import re

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention import tuning
from kvjax.kernels.decode_attention.gpu import kernel
from kvjax.kernels.decode_attention.gpu import plans
from kvjax.kernels.decode_attention.readings import Reading

_HOPPER = "H(20|100|200|800)"
CANDIDATES = dict(split=(256, 512, 1024, 2048, 4096, 8192))  # for tuning
_CAPACITY = 128  # divides the number of slots
_MULTIPROCESSORS = 132
# Blocks of the grid per multiprocessor that are wanted, and the tokens that one must be given for
# it: the first slabs of a split are waited for, and queries that turn are made once per split.
_WANTED = ((2, 256), (8, 1024))

Cache = Mapping[str, jax.Array]


def decode_attention(
    operands: Reading,
    cache: Cache,
    first_B: jax.Array,
    *,
    block: int | None = None,
    split: int | None = None,
    slots: int | None = None,
    together: int | None = None,
    interpret=False,
) -> jax.Array:
    """See `api.decode_attention`: [B, 1, N, Hv] in float32.

    Args:
      block: tokens of a tile, 64 or 128.
      split: tokens that a block of the grid reads, a multiple of `block`; None: what `tuned.json`
        has, or as many splits as fill the GPU.
      slots: slabs of 64 channels by `block` tokens that a block of the grid holds or awaits.
      together: products that are in flight at once, from 1 to `slots`.
      interpret: False, or `plgpu.InterpretGPUParams`.

    Raises:
      NotImplementedError: operands or shapes that this kernel does not take, and which it does.
      ValueError: sizes of block, split, slots and together that do not fit each other.
    """
    check(operands, cache)
    body = plans.BODIES[type(operands)](operands, cache)
    B, S = first_B.shape[0], next(iter(cache.values())).shape[-1]
    block = block or body.block
    default = dict(split=_split(B * body.groups, S, block))
    tuned = tuning.parameters(tuning.key("gpu", operands, cache), default=default, nearest=False)[
        "split"
    ]
    split = split or min(round_up(tuned, block), body.longest)
    channels = {name: array.reshape(B, -1, S) for name, array in cache.items()}
    o, maximum, total = kernel.attend(
        body.plan,
        channels | body.arrays(split),
        first_B,
        groups=body.groups,
        block=block,
        split=split,
        together=together or plans.TOGETHER,
        slots=slots or plans.slots(body.plan, block, "key_scale" in cache),
        interpret=interpret,
    )
    return body.finish(_merge(o, maximum, total, first_B, split))[:, None]


def check(operands: Reading, cache: Cache) -> None:
    """Raises NotImplementedError where `decode_attention` does not take these, and says why."""
    refusal = _refusal(operands, cache)
    if refusal is not None:
        raise NotImplementedError(f"the GPU kernel {refusal}; use 'xla'")


def _refusal(operands: Reading, cache: Cache) -> str | None:
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    if device.platform == "gpu" and not re.search(_HOPPER, device.device_kind):
        return f"needs Hopper's matrix instructions: here {device.device_kind}"
    if jax.config.jax_enable_x64:
        return "counts in 32 bits: here jax_enable_x64 is on"
    if type(operands) not in plans.BODIES:
        return f"does not read a cache of kind {operands.kind(cache)!r}"
    if operands.bias is not None:
        return "adds no bias to the logits"
    if operands.query.shape[1] != 1:
        return f"takes one query per sequence: here T = {operands.query.shape[1]}"
    for name, array in cache.items():
        dtype = np.dtype(jnp.float32 if name == "key_scale" else jnp.bfloat16)
        if array.dtype != dtype:
            return f"takes {name} in {dtype}: here {array.dtype}"
    S = next(iter(cache.values())).shape[-1]
    if S % _CAPACITY:
        return f"needs a capacity in multiples of {_CAPACITY}: here S = {S}"
    body = plans.BODIES[type(operands)](operands, cache)
    if body.refusal is not None:
        return body.refusal
    queries = f"for {body.plan.columns} queries"
    if not plans.slots(body.plan, body.block, "key_scale" in cache):
        return f"has no shared memory {queries} on {len(body.plan.keys)} slabs of keys"
    if body.plan.registers(body.block) > plans.MOST_REGISTERS:
        return f"has no registers {queries} on {len(body.plan.values)} slabs of values"
    return None


def _split(blocks: int, S: int, block: int) -> int:
    """Tokens of a split, given the blocks of the grid that every split takes."""
    splits = max(
        min(-(-wanted * _MULTIPROCESSORS // blocks), S // tokens) for wanted, tokens in _WANTED
    )
    return -(-S // (max(splits, 1) * block)) * block


def _merge(
    o: jax.Array, maximum: jax.Array, total: jax.Array, first_B: jax.Array, split: int
) -> jax.Array:
    """[B, g, channels, columns]: the splits' sums, each weighed by its part of the softmax."""
    B, s, g, slabs, rows, n = o.shape
    starts_s = jnp.arange(s, dtype=first_B.dtype) * split
    reached_Bs = starts_s[None] <= first_B[:, None]  # nothing was written where not

    def where_reached(x, other):
        condition = reached_Bs.reshape(B, s, *(1,) * (x.ndim - 2))
        return jnp.where(jnp.broadcast_to(condition, x.shape), x, other)

    maximum_Bsgn = where_reached(maximum, -jnp.inf)
    weight_Bsgn = jnp.exp2(maximum_Bsgn - jnp.max(maximum_Bsgn, axis=1, keepdims=True))
    total_Bgn = jnp.sum(weight_Bsgn * where_reached(total, 0), axis=1)
    o_BsgVn = where_reached(o, 0).reshape(B, s, g, slabs * rows, n)
    o_BgVn = jnp.sum(weight_Bsgn[:, :, :, None] * o_BsgVn, axis=1)
    return o_BgVn / total_Bgn[:, :, None]
