"""Softmax attention by cuDNN, on NVIDIA GPUs.

Tests of several GPUs put XLA in its place, on CPUs.
"""

import functools

import jax
import jax.numpy as jnp

from kvjax.kernels.softmax_attention.placement import (
    Options,
    check_division,
    equal_dims,
    not_taken,
    on_every_device,
    ways,
)


def check(q_BTNH, k_BSKH, v_BSKV, options: Options) -> None:
    """Raises NotImplementedError with what cuDNN attention does not take, and what it does."""
    refuse = functools.partial(not_taken, "cudnn")
    T, S, dim = q_BTNH.shape[1], k_BSKH.shape[1], max(q_BTNH.shape[-1], v_BSKV.shape[-1])
    dtypes = {x.dtype for x in (q_BTNH, k_BSKH, v_BSKV)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        shown = ", ".join(sorted(map(str, dtypes)))
        refuse(f"dtypes {shown}: must be bfloat16 or float16, of all three the same")
    if (sequence := ways(options.mesh, "sequence")) > 1:
        refuse(f"a row cannot be split over sequence = {sequence} devices")
    if options.query_positions_T is not None or options.key_positions_S is not None:
        refuse("tokens must be in order, and positions (zig-zag) say that they are not")
    check_division("cudnn", q_BTNH, k_BSKH, options.mesh)
    if options.segment_ids_BS is not None:
        refuse("segments are not taken")
    if options.window:
        refuse(f"a window of {options.window} tokens is not taken")
    if options.causal and T != S:
        refuse(f"causal attention of {T} queries over {S} keys must be of as many as there are")
    if (device := _gpu()) is None:
        refuse("it is compiled with cuDNN itself, on a machine with an NVIDIA GPU, which is absent")
    most = 256 if float(device.compute_capability) >= 9 else 128
    if dim > most:
        refuse(f"a head dim of {dim} is over {most}, its limit on {device.device_kind}")


def _gpu() -> jax.Device | None:
    """This machine's GPU, if JAX runs on one."""
    device = jax.local_devices()[0]
    return device if device.platform == "gpu" else None


def softmax_attention(q_BTNH, k_BSKH, v_BSKV, options: Options) -> jax.Array:
    """`jax.nn.dot_product_attention` by cuDNN, on every device its part of batch and heads.

    Its own rule for several devices wants queries, keys and values split alike, and raises where
    fewer KV heads than devices are not; inside a `jax.shard_map` that rule is not asked.
    """
    check(q_BTNH, k_BSKH, v_BSKV, options)

    def attend(q_BTNH, k_BSKH, v_BSKV, *segments):
        q, k, v = equal_dims(q_BTNH, k_BSKH, v_BSKV, multiple=8)
        return jax.nn.dot_product_attention(
            q, k, v, scale=options.scale, is_causal=options.causal, implementation="cudnn"
        )[..., : v_BSKV.shape[-1]]

    return on_every_device(attend, q_BTNH, k_BSKH, v_BSKV, options)
