"""Decode attention as a Pallas kernel for Hopper GPUs: one query per sequence.

The cache is read once, without a transposed copy. A program (`kernel`) attends with some heads of
one sequence to one split of its tokens; `plans` has the sizes per cache layout. `combine` merges
the splits by their log-sum-exps, and expands LRKV's latents of values; MLA's are expanded by XLA.

Tests compile the kernel ahead of time for an H200, and run it in the interpreter on a model of
shared memory whose products and copies complete as late as a GPU allows.
"""

from collections.abc import Mapping
import re

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention import tuning
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.kernels.decode_attention.gpu import combine, kernel, plans

_HOPPER = "H(20|100|200|800)"  # device kinds that have wgmma and TMA
_TRIED_SPLITS = (256, 512, 1024, 2048, 4096, 8192)  # tokens of a split that --tune measures
_CAPACITY = plans.TILE_KV  # S is a multiple of the largest tile
_MULTIPROCESSORS = 132  # of an H100 or H200
# (programs per multiprocessor, minimum tokens of a split): 2 programs if their splits then have
# 256 tokens or more, and up to 8 if splits still have 1,024. Longer splits are better, because each
# waits for its first slabs and rotates its queries.
_PROGRAMS = ((2, 256), (8, 1024))

Cache = Mapping[str, jax.Array]


def decode_attention(
    inputs: DecodeInputs,
    cache: Cache,
    first_B: jax.Array,
    *,
    tile_kv: int | None = None,
    split: int | None = None,
    slots: int | None = None,
    wgmma_in_flight: int | None = None,
    interpret=False,
) -> jax.Array:
    """See `api.decode_attention`: [B, 1, N, Hv] in float32, each rounded to the queries' dtype.

    Args:
      tile_kv: tokens of a tile, 64 or 128 (64 where queries are rotated); None: the plan's, see
        TILE_KV in `plans`.
      split: tokens of a split, a multiple of `tile_kv`; None: from `tuned.json`, or enough
        splits to fill the GPU.
      slots: number of slabs, of 64 channels by `tile_kv` tokens, in a program's ring.
      wgmma_in_flight: products in flight at once, from 1 to `slots`.
      interpret: False, or `plgpu.InterpretGPUParams`.

    Raises:
      NotImplementedError: inputs or shapes that the kernel does not support; see `check`.
      ValueError: inconsistent sizes of tile, split, ring and products in flight.
    """
    check(inputs, cache)
    adapter = plans.ADAPTERS[type(inputs)](inputs, cache)
    B, S = first_B.shape[0], next(iter(cache.values())).shape[-1]
    tile_kv = tile_kv or adapter.tile_kv
    default = {"split": _split(B * adapter.head_tiles, S, tile_kv)}
    key = tuning.key("gpu", inputs, cache)
    tuned = tuning.parameters(key, default=default, nearest=False)
    split = split or min(round_up(tuned["split"], tile_kv), adapter.max_split)
    # Merges the head axes and channels into one axis, which the kernel cuts into slabs (a bitcast).
    channels = {name: array.reshape(B, -1, S) for name, array in cache.items()}
    splits = kernel.attend(
        adapter.plan,
        channels | adapter.arrays(split),
        first_B,
        head_tiles=adapter.head_tiles,
        tile_kv=tile_kv,
        split=split,
        wgmma_in_flight=wgmma_in_flight or plans.WGMMA_IN_FLIGHT,
        slots=slots or plans.slots(adapter.plan, tile_kv, "key_scale" in cache),
        interpret=interpret,
    )
    # Rounded as the model rounds it, so that no program of its own does so.
    options = dict(split=split, dtype=inputs.query.dtype, interpret=interpret)
    o_BNV = combine.combine(adapter.plan, *splits, first_B, adapter.expand, **options)
    return adapter.finish(o_BNV)[:, None].astype(jnp.float32)


def candidates(inputs: DecodeInputs, cache: Cache) -> dict[str, tuple[int, ...]]:
    """Returns the splits that --tune tries, up to the longest that the plan allows."""
    longest = plans.ADAPTERS[type(inputs)](inputs, cache).max_split
    return {"split": tuple(split for split in _TRIED_SPLITS if split <= longest)}


def check(inputs: DecodeInputs, cache: Cache) -> None:
    """Raises NotImplementedError, with the reason, for inputs that the kernel does not support."""
    refusal = _refusal(inputs, cache)
    if refusal is not None:
        raise NotImplementedError(f"the GPU kernel {refusal}; use 'xla'")


def _refusal(inputs: DecodeInputs, cache: Cache) -> str | None:
    # From shapes and dtypes alone, before anything is traced.
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    if device.platform == "gpu" and not re.search(_HOPPER, device.device_kind):
        return f"needs Hopper's matrix instructions: here {device.device_kind}"
    if jax.config.jax_enable_x64:
        return "counts in 32 bits: here jax_enable_x64 is on"
    if type(inputs) not in plans.ADAPTERS:
        return f"does not read a cache of kind {inputs.kind(cache)!r}"
    if inputs.bias is not None:
        return "adds no bias to the logits"
    if inputs.query.shape[1] != 1:
        return f"takes one query per sequence: here T = {inputs.query.shape[1]}"
    for name, array in cache.items():
        dtype = np.dtype(jnp.float32 if name == "key_scale" else jnp.bfloat16)
        if array.dtype != dtype:
            return f"takes {name} in {dtype}: here {array.dtype}"
    S = next(iter(cache.values())).shape[-1]
    if S % _CAPACITY:  # tiles would read past the end
        return f"needs a capacity in multiples of {_CAPACITY}: here S = {S}"
    adapter = plans.ADAPTERS[type(inputs)](inputs, cache)
    if adapter.refusal is not None:
        return adapter.refusal
    queries = f"for {adapter.plan.columns} queries"
    if not plans.slots(adapter.plan, adapter.tile_kv, "key_scale" in cache):
        return f"has no shared memory {queries} on {len(adapter.plan.keys)} slabs of keys"
    if adapter.plan.registers(adapter.tile_kv) > plans.MOST_REGISTERS:
        return f"has no registers {queries} on {len(adapter.plan.values)} slabs of values"
    return None


def _split(programs: int, S: int, tile_kv: int) -> int:
    """Returns the tokens of a split with which the grid fills the GPU.

    Args:
      programs: programs per split, sequences times head tiles.
    """
    splits = max(
        min(-(-target * _MULTIPROCESSORS // programs), S // tokens) for target, tokens in _PROGRAMS
    )
    return -(-S // (max(splits, 1) * tile_kv)) * tile_kv
