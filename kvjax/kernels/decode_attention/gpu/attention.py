"""Decode attention as Pallas kernels for GPUs: one query per sequence.

The cache is read once, without a transposed copy. A program (`kernel`) attends with some heads of
one sequence to one split of its tokens; `adapters` has a plan per cache layout. `combine` merges
the splits by their log-sum-exps, and expands LRKV's latents of values; MLA's are expanded by XLA.
These are for Hopper; on Ampere and Ada `triton` has one kernel instead, which Hopper runs too for
int8 caches that do not fit its own.

Tests compile the kernel ahead of time for an H200, and run it in the interpreter on a model of
shared memory whose products and copies complete as late as a GPU allows.
"""

from collections.abc import Mapping
import importlib
import re
import types

import jax
import jax.numpy as jnp

from kvjax.cache import quantized
from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention import tuning
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.kernels.decode_attention.gpu import adapters, combine, kernel, plans

# Device kinds by CUDA compute capability, for devices that are not there. Hopper has wgmma and TMA;
# the others are those that Pallas-Triton knows by name.
_KINDS = {9: "H(20|100|200|800)", 8: r"\b(A10|A30|A100|L4|L40|RTX 4090)\b"}
_TRIED_SPLITS = (256, 512, 1024, 2048, 4096, 8192)  # tokens of a split that --tune measures
_MULTIPROCESSORS = 132  # of an H100 or H200

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
        TILE_KV in `plans`. It, `slots` and `wgmma_in_flight` are of Hopper's kernel alone.
      split: tokens of a split, a multiple of `tile_kv`; None: from `tuned.json`, or enough
        splits to fill the GPU.
      slots: number of slabs, of 64 channels by `tile_kv` tokens, in a program's ring.
      wgmma_in_flight: products in flight at once, from 1 to `slots`.
      interpret: False, or `plgpu.InterpretGPUParams`; on Ampere a bool.

    Raises:
      NotImplementedError: inputs or shapes that the kernel does not support; see `check`.
      ValueError: inconsistent sizes of tile, split, ring and products in flight.
    """
    check(inputs, cache)
    if _takes_triton(inputs, cache):
        return _triton().decode_attention(inputs, cache, first_B, split=split, interpret=interpret)
    adapter = adapters.ADAPTERS[type(inputs)](inputs, cache)
    B, S = first_B.shape[0], next(iter(cache.values())).shape[-1]
    tile_kv = tile_kv or adapter.tile_kv
    programs = B * adapter.head_tiles
    default = {"split": plans.default_split(programs, S, tile_kv, _MULTIPROCESSORS)}
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
        slots=slots or plans.slots(adapter.plan, tile_kv),
        interpret=interpret,
    )
    # Rounded as the model rounds it, so that no program of its own does so; what `finish` expands
    # is rounded after that.
    dtype = jnp.dtype(jnp.float32) if adapter.expands else inputs.query.dtype
    options = dict(split=split, dtype=dtype, interpret=interpret)
    o_BNV = combine.combine(adapter.plan, *splits, first_B, adapter.expand, **options)
    return adapter.finish(o_BNV)[:, None].astype(jnp.float32)


def candidates(inputs: DecodeInputs, cache: Cache) -> dict[str, tuple[int, ...]]:
    """Returns the splits that --tune tries, up to the longest that the plan allows."""
    longest = adapters.ADAPTERS[type(inputs)](inputs, cache).max_split
    return {"split": tuple(split for split in _TRIED_SPLITS if split <= longest)}


def check(inputs: DecodeInputs, cache: Cache) -> None:
    """Raises NotImplementedError, with the reason, for inputs that the kernel does not support."""
    refusal = _refusal(inputs, cache)
    if refusal is not None:
        raise NotImplementedError(f"the GPU kernel {refusal}; use 'xla'")


def _refusal(inputs: DecodeInputs, cache: Cache) -> str | None:
    # From shapes and dtypes alone, before anything is traced.
    major = capability()
    if _takes_triton(inputs, cache):
        if (triton := _triton()) is None:
            return "needs Pallas-Triton, which this JAX no longer has"
        return triton.refusal(inputs, cache)
    if major not in (None, 9):
        kind = device_compiled_for().device_kind
        return f"takes GPUs of compute capability 8 (Ampere, Ada) and 9 (Hopper): here {kind}"
    return _hopper_refusal(inputs, cache)


def _hopper_refusal(inputs: DecodeInputs, cache: Cache) -> str | None:
    if reason := adapters.refusal(adapters.ADAPTERS, inputs, cache):
        return reason
    adapter = adapters.ADAPTERS[type(inputs)](inputs, cache)
    queries = f"for {adapter.plan.columns} queries"
    if not plans.slots(adapter.plan, adapter.tile_kv):
        return f"has no shared memory {queries} on {len(adapter.plan.keys)} slabs of keys"
    if adapter.plan.registers(adapter.tile_kv) > plans.MOST_REGISTERS:
        return f"has no registers {queries} on {len(adapter.plan.values)} slabs of values"
    return None


def device_compiled_for() -> jax.Device | jax.sharding.AbstractDevice:
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def capability() -> int | None:
    """Returns the major compute capability of the GPU compiled for; 0: unknown; None: no GPU."""
    device = device_compiled_for()
    if device.platform != "gpu":
        return None
    present = jax.devices()[0]
    if device.device_kind == present.device_kind:
        version = re.match(r"\d+", getattr(present, "compute_capability", ""))
        return int(version[0]) if version else 0
    return next((m for m, kinds in _KINDS.items() if re.search(kinds, device.device_kind)), 0)


def _takes_triton(inputs: DecodeInputs, cache: Cache) -> bool:
    """Returns True on Ampere and Ada, and on Hopper for int8 that its own kernel refuses."""
    major = capability()
    if major != 9 or quantized.cached_bits(cache) != 8:
        return major == 8
    return _hopper_refusal(inputs, cache) is not None


def _triton() -> types.ModuleType | None:
    """Returns the module for Ampere and Ada; None if JAX has dropped Pallas-Triton."""
    try:
        return importlib.import_module("kvjax.kernels.decode_attention.gpu.triton")
    except ImportError:
        return None
