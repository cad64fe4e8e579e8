"""Softmax attention by cuDNN, on NVIDIA GPUs.

Tests of sharding over GPUs run on CPUs, with XLA's attention in its place.
"""

import functools
import re

import jax
import jax.numpy as jnp

from kvjax.kernels.softmax_attention.placement import (
    Options,
    check_division,
    equal_dims,
    num_shards,
    on_every_device,
    refuse_arrays,
)


def check(q_BTNH, k_BSKH, v_BSKV, options: Options) -> None:
    """Raises NotImplementedError, with the reason, for arrays that cuDNN does not support."""
    refuse = functools.partial(refuse_arrays, "cudnn")
    T, S, dim = q_BTNH.shape[1], k_BSKH.shape[1], max(q_BTNH.shape[-1], v_BSKV.shape[-1])
    dtypes = {x.dtype for x in (q_BTNH, k_BSKH, v_BSKV)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        shown = ", ".join(sorted(map(str, dtypes)))
        refuse(f"dtypes {shown}: must be bfloat16 or float16, the same for all three")
    if (sequence := num_shards(options.mesh, "sequence")) > 1:
        refuse(f"a row cannot be split over sequence = {sequence} devices")
    if options.query_positions_T is not None or options.key_positions_S is not None:
        refuse("tokens must be in order, but positions permute them (zig-zag)")
    check_division("cudnn", q_BTNH, k_BSKH, options.mesh)
    if options.segment_ids_BS is not None:
        refuse("segment ids are not supported")
    if options.window:
        refuse(f"a window ({options.window} tokens) is not supported")
    if options.softcap:
        refuse(f"a soft cap of logits ({options.softcap:g}) is not supported")
    if options.causal and T != S:
        refuse(f"causal attention of {T} queries over {S} keys: must be equal numbers")
    if (device := _gpu()) is None:
        refuse("compiling it needs cuDNN and an NVIDIA GPU, which is absent")
    generation = _generation(device)
    if generation < 8:
        refuse(f"needs compute capability 8 (Ampere) or more, unlike {device.device_kind}")
    most = 256 if generation >= 9 else 128
    if dim > most:
        refuse(f"a head dim of {dim} is over {most}, its limit on {device.device_kind}")


def _gpu() -> jax.Device | None:
    """Returns this machine's GPU; None if JAX does not run on one."""
    device = jax.local_devices()[0]
    return device if device.platform == "gpu" else None


def _generation(device: jax.Device) -> int:
    """Returns the first number of the compute capability; 0 for a GPU that is not NVIDIA's."""
    number = re.match(r"(\d+)\.", str(device.compute_capability))
    return int(number[1]) if number else 0


def softmax_attention(q_BTNH, k_BSKH, v_BSKV, options: Options) -> jax.Array:
    """Calls `jax.nn.dot_product_attention` with cuDNN, on each device's shard of batch and heads.

    JAX's sharding rule for cuDNN requires queries, keys and values to be sharded equally, so it
    raises if there are fewer KV heads than devices; inside a `jax.shard_map` it does not apply.
    """
    check(q_BTNH, k_BSKH, v_BSKV, options)

    def attend(q_BTNH, k_BSKH, v_BSKV, *segments):
        q, k, v = equal_dims(q_BTNH, k_BSKH, v_BSKV, multiple=8)
        return jax.nn.dot_product_attention(
            q, k, v, scale=options.scale, is_causal=options.causal, implementation="cudnn"
        )[..., : v_BSKV.shape[-1]]

    return on_every_device(attend, q_BTNH, k_BSKH, v_BSKV, options)
