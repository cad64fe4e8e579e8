"""Softmax attention of the training pass, over expanded keys and values: chooses an implementation.

splash.py, a Pallas kernel, on TPUs; cudnn.py on NVIDIA GPUs; xla.py everywhere else, and for arrays
that a kernel does not support. The kernels never store logits [T, S].
"""

from collections.abc import Callable
import logging

import jax
import numpy as np

from kvjax.foundation.logs import log_once
from kvjax.kernels.softmax_attention import cudnn, xla
from kvjax.kernels.softmax_attention.placement import (
    RESIDUALS,
    Options,
    num_shards,
    platform,
    sort_tokens,
    zigzag,
)

__all__ = ["RESIDUALS", "softmax_attention", "sort_tokens", "zigzag"]


def softmax_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    *,
    causal: bool,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    implementation: str | None = None,
    query_chunk: int = 0,
    query_positions_T: np.ndarray | None = None,
    key_positions_S: np.ndarray | None = None,
    segment_ids_BS: jax.Array | None = None,
    query_segment_ids_BT: jax.Array | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
    """Returns softmax(scale · q k^T) v, [B, T, N, Hv], in the queries' dtype.

    The output of a query that sees no key is undefined.

    Args:
      q_BTNH: queries, N heads.
      k_BSKH, v_BSKV: keys and values, K heads, K dividing N; key and value dims may differ.
      causal: True if a query sees only keys up to its own position.
      window: if positive and causal, a query sees only its own key and the window - 1 before it.
      scale: factor of the logits, 1/sqrt(H) by default. Splash has no factor, so queries are
        multiplied by it in float32 and rounded to their dtype again.
      softcap: c in c·tanh(z/c) of the scaled logits z; 0: none.
      implementation: "xla" (supports every argument), "splash" (for TPUs, interpreted elsewhere) or
        "cudnn". None: the kernel of the device compiled for if it supports the arguments, else
        "xla"; the reason is logged once.
      query_chunk: for "xla": if positive and causal, queries are processed in chunks of this many,
        each with its visible keys only. That halves the work on CPU, where XLA computes masked
        logits too.
      query_positions_T, key_positions_S: positions of the tokens in the row, on the host; by
        default 0, 1, 2... Splash sorts keys and values by position, which costs a copy.
      segment_ids_BS, query_segment_ids_BT: int32; a query attends to keys of its own segment.
        query_segment_ids_BT None: equal to segment_ids_BS.
      mesh: devices over which the (global) arrays are sharded: batch over ("data", "fsdp"), T over
        "sequence", heads over "tensor"; S is not sharded. None: one device, or inside a
        `jax.shard_map`. Keys and values may have "sequence" times the batch, sharded over
        ("sequence", "data", "fsdp"): equal copies, one per device along "sequence". The caller that
        copies smaller arrays before expanding them also sums smaller gradients.

    Raises:
      NotImplementedError: the implementation does not support the arguments; the message says why.
    """
    T, N, H = q_BTNH.shape[1:]
    S, K = k_BSKH.shape[1:3]
    copies = k_BSKH.shape[0] / q_BTNH.shape[0]
    fit = copies in (1, num_shards(mesh, "sequence")) and T % copies == N % K == 0
    if not fit or H != k_BSKH.shape[3] or k_BSKH.shape[:3] != v_BSKV.shape[:3]:
        shapes = f"{q_BTNH.shape}, {k_BSKH.shape} and {v_BSKV.shape}"
        raise ValueError(f"queries, keys and values {shapes} do not fit [BTNH], [BSKH], [BSKV]")
    if segment_ids_BS is None and query_segment_ids_BT is not None:
        raise ValueError("query_segment_ids_BT: the keys' segment_ids_BS are needed too")
    if segment_ids_BS is not None and query_segment_ids_BT is None:
        query_segment_ids_BT = segment_ids_BS
    if window and not causal:
        raise ValueError(f"window = {window}: needs causal attention")
    options = Options(
        causal=causal,
        window=window,
        scale=H**-0.5 if scale is None else scale,
        softcap=softcap,
        query_chunk=query_chunk,
        query_positions_T=_positions(query_positions_T, T),
        key_positions_S=_positions(key_positions_S, S),
        query_segment_ids_BT=query_segment_ids_BT,
        segment_ids_BS=segment_ids_BS,
        mesh=mesh,
    )
    arrays = (q_BTNH, k_BSKH, v_BSKV)
    name = implementation or _default(*arrays, options)
    if name not in _IMPLEMENTATIONS:
        known = ", ".join(_IMPLEMENTATIONS)
        raise ValueError(f"implementation = {name!r}: must be one of {known}")
    return _IMPLEMENTATIONS[name](*arrays, options)


def _positions(positions: np.ndarray | None, length: int) -> np.ndarray | None:
    """Returns positions as int32; None if they are 0, 1, 2..."""
    if positions is None:
        return None
    positions = np.asarray(positions)  # raises for a tracer
    if positions.shape != (length,) or not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(f"positions {positions.dtype}{positions.shape}: must be int [{length}]")
    return None if np.array_equal(positions, np.arange(length)) else positions.astype(np.int32)


# -- implementations -------------------------------------------------------------------------------


def _default(q_BTNH, k_BSKH, v_BSKV, options: Options) -> str:
    """Returns the name of the implementation that None stands for."""
    name = {"tpu": "splash", "gpu": "cudnn"}.get(platform(options.mesh))
    if name is None:
        return "xla"
    context = jax.sharding.get_abstract_mesh()
    if options.mesh is None and context.size > 1 and not context.are_all_axes_manual:
        return "xla"  # several devices, but the arrays' sharding is unknown without a mesh
    try:
        _CHECKS[name](q_BTNH, k_BSKH, v_BSKV, options)
    except NotImplementedError as error:
        log_once(__name__, logging.WARNING, f"attention in training: {error}")
        return "xla"
    return name


def _splash(*arguments) -> jax.Array:
    from kvjax.kernels.softmax_attention import splash  # importing Pallas is slow

    return splash.splash_attention(*arguments)


def _check_splash(*arguments) -> None:
    from kvjax.kernels.softmax_attention import splash

    splash.check_splash(*arguments)


_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": xla.softmax_attention,
    "splash": _splash,
    "cudnn": cudnn.softmax_attention,
}
_CHECKS = {"splash": _check_splash, "cudnn": cudnn.check}
