"""Softmax attention of the training pass, over expanded keys and values: which library runs it.

XLA everywhere (xla.py); splash attention, a Pallas kernel, on TPUs (splash.py); cuDNN on NVIDIA
GPUs (cudnn.py). The kernels never hold logits [T, S].
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
    platform,
    sort_tokens,
    ways,
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
    implementation: str | None = None,
    query_chunk: int = 0,
    query_positions_T: np.ndarray | None = None,
    key_positions_S: np.ndarray | None = None,
    segment_ids_BS: jax.Array | None = None,
    query_segment_ids_BT: jax.Array | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
    """softmax(scale · q k^T) v of the training pass: [B, T, N, Hv], in the queries' dtype.

    A query that sees no key at all has an undefined output.

    Args:
      q_BTNH: queries, N heads.
      k_BSKH, v_BSKV: keys and values, K heads, K dividing N; key and value dims may differ.
      causal: whether a query sees the keys up to its own position only.
      window: if positive and causal, of those it sees the last `window`, its own being the last.
      scale: 1/sqrt(H) if not given. Splash has none: it is multiplied into the queries in float32,
        which are then rounded to their dtype once more.
      implementation: "xla", which takes everything; "splash", on TPUs (elsewhere it is
        interpreted); "cudnn"; None: that of the device compiled for, where it takes these arrays,
        and "xla" where not; the log says why, once.
      query_chunk: "xla" alone: if positive and causal, queries go in chunks of this many, each
        against the keys it can see: half the work where masked logits are computed (CPU).
      query_positions_T, key_positions_S: where tokens stand in the row, on the host; 0, 1, 2.. if
        not given. Splash puts keys and values in order, a copy: in order already, they are faster.
      segment_ids_BS, query_segment_ids_BT: int32; a query attends to keys of its own segment.
        Queries have the keys' segments if not given.
      mesh: of several devices that the (global) arrays lie on: batch over ("data", "fsdp"), T over
        "sequence", heads over "tensor"; keys and values are whole along S. None: one device, or
        inside a `jax.shard_map`. Keys and values of "sequence" times the batch, split over
        ("sequence", "data", "fsdp"), are a copy for each device, equal: their gradients are not
        summed here but where the caller made the copies, which may be of less than they are.

    Raises:
      NotImplementedError: the implementation does not take these arrays; the message says why.
    """
    T, N, H = q_BTNH.shape[1:]
    S, K = k_BSKH.shape[1:3]
    copies = k_BSKH.shape[0] / q_BTNH.shape[0]
    fit = (
        copies in (1, ways(mesh, "sequence")) and T % copies == N % K == 0 and H == k_BSKH.shape[3]
    )
    if not fit or k_BSKH.shape[:3] != v_BSKV.shape[:3]:
        shapes = f"{q_BTNH.shape}, {k_BSKH.shape} and {v_BSKV.shape}"
        raise ValueError(f"queries, keys and values {shapes} do not fit [BTNH], [BSKH], [BSKV]")
    if segment_ids_BS is None and query_segment_ids_BT is not None:
        raise ValueError("query_segment_ids_BT: the keys' segment_ids_BS are needed too")
    if segment_ids_BS is not None and query_segment_ids_BT is None:
        query_segment_ids_BT = segment_ids_BS
    if window and not causal:
        raise ValueError(f"window = {window}: is of causal attention")
    options = Options(
        causal=causal,
        window=window,
        scale=H**-0.5 if scale is None else scale,
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
    """Positions as int32; None if they are 0, 1, 2.."""
    if positions is None:
        return None
    positions = np.asarray(positions)  # of a tracer this raises
    if positions.shape != (length,) or not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(f"positions {positions.dtype}{positions.shape}: must be int [{length}]")
    return None if np.array_equal(positions, np.arange(length)) else positions.astype(np.int32)


# -- which one -------------------------------------------------------------------------------------


def _default(q_BTNH, k_BSKH, v_BSKV, options: Options) -> str:
    """The implementation that None stands for."""
    name = {"tpu": "splash", "gpu": "cudnn"}.get(platform(options.mesh))
    if name is None:
        return "xla"
    context = jax.sharding.get_abstract_mesh()
    if options.mesh is None and context.size > 1 and not context.are_all_axes_manual:
        return "xla"  # several devices, and nobody says how the arrays lie on them
    try:
        _CHECKS[name](q_BTNH, k_BSKH, v_BSKV, options)
    except NotImplementedError as error:
        log_once(__name__, logging.WARNING, f"attention in training: {error}")
        return "xla"
    return name


def _splash(*arguments) -> jax.Array:
    from kvjax.kernels.softmax_attention import splash  # Pallas takes its time to import

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
