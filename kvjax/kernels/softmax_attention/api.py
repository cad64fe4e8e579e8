"""Softmax attention of the training pass, over expanded keys and values: which library runs it.

XLA everywhere; splash attention, a Pallas kernel, on TPUs (splash.py); cuDNN on NVIDIA GPUs. The
kernels never hold logits [T, S]. Nothing here was run on a TPU, nor cuDNN on several GPUs.
"""

from collections.abc import Callable
import dataclasses
import functools

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.softmax_attention.placement import Options
from kvjax.kernels.softmax_attention.placement import both_positions
from kvjax.kernels.softmax_attention.placement import check_division
from kvjax.kernels.softmax_attention.placement import not_taken
from kvjax.kernels.softmax_attention.placement import on_every_device
from kvjax.kernels.softmax_attention.placement import platform
from kvjax.kernels.softmax_attention.placement import sort_tokens
from kvjax.kernels.softmax_attention.placement import ways
from kvjax.kernels.softmax_attention.placement import zigzag
from kvjax.kernels.softmax_attention.splash import RESIDUALS
from kvjax.kernels.softmax_attention.splash import check_splash
from kvjax.kernels.softmax_attention.splash import splash_attention

__all__ = ["RESIDUALS", "softmax_attention", "sort_tokens", "zigzag"]


def softmax_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    *,
    causal: bool,
    scale: float | None = None,
    implementation: str | None = None,
    query_chunk: int = 0,
    query_positions_T: np.ndarray | None = None,
    key_positions_S: np.ndarray | None = None,
    segments_BS: jax.Array | None = None,
    query_segments_BT: jax.Array | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
    """softmax(scale · q k^T) v of the training pass: [B, T, N, Hv], in the queries' dtype.

    A query that sees no key at all has an undefined output.

    Args:
      q_BTNH: queries, N heads.
      k_BSKH, v_BSKV: keys and values, K heads, K dividing N; key and value dims may differ.
      causal: whether a query sees the keys up to its own position only.
      scale: 1/sqrt(H) if not given. Splash has none: it is multiplied into the queries in float32,
        which are then rounded to their dtype once more.
      implementation: "xla", which takes everything; "splash", on TPUs (elsewhere it is
        interpreted); "cudnn"; None: that of the device compiled for, where it takes these arrays,
        and "xla" where not.
      query_chunk: "xla" alone: if positive and causal, queries go in chunks of this many, each
        against the keys it can see: half the work where masked logits are computed (CPU).
      query_positions_T, key_positions_S: where tokens stand in the row, on the host; 0, 1, 2.. if
        not given. Splash puts keys and values in order, a copy: in order already, they are faster.
      segments_BS, query_segments_BT: int32 segments; a query sees keys of its own alone. Queries
        have the keys' segments if not given.
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
    if segments_BS is None and query_segments_BT is not None:
        raise ValueError("query_segments_BT: the keys' segments_BS are needed too")
    if segments_BS is not None and query_segments_BT is None:
        query_segments_BT = segments_BS
    options = Options(
        causal=causal,
        scale=H**-0.5 if scale is None else scale,
        query_chunk=query_chunk,
        query_positions_T=_positions(query_positions_T, T),
        key_positions_S=_positions(key_positions_S, S),
        query_segments_BT=query_segments_BT,
        segments_BS=segments_BS,
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
        _say(str(error))
        return "xla"
    return name


@functools.cache
def _say(message: str) -> None:
    """Log a message once."""
    logging.info("%s", message)


# -- XLA -------------------------------------------------------------------------------------------


def _xla(q_BTNH, k_BSKH, v_BSKV, options: Options) -> jax.Array:
    """`jax.nn.dot_product_attention`; GSPMD divides it whichever way the arrays are split."""
    (B, T, _, _), S, Hv, o = q_BTNH.shape, k_BSKH.shape[1], v_BSKV.shape[-1], options
    copies = k_BSKH.shape[0] // B
    if copies > 1:  # the queries of a device are a row to its copy of the keys
        q_BTNH, t_BT = (_parts(x, copies) for x in (q_BTNH, o.query_segments_BT))
        s_BS = None if t_BT is None else jnp.tile(o.segments_BS, (copies, 1))
        o = dataclasses.replace(o, query_segments_BT=t_BT, segments_BS=s_BS)
    q, k, v = _equal_dims(q_BTNH, k_BSKH, v_BSKV)
    float64 = q.dtype == jnp.float64  # the library's softmax is float32 whatever its inputs are
    attend = _float64_attention if float64 else jax.nn.dot_product_attention
    attend = functools.partial(attend, scale=o.scale)
    in_order = copies == 1 and o.query_positions_T is None and o.key_positions_S is None
    if in_order and not (o.causal and 0 < o.query_chunk < T):
        mask = _mask(o, slice(T), slice(S), None)
        return attend(q, k, v, mask=mask, is_causal=o.causal)[..., :Hv]
    query_positions, key_positions = both_positions(o, T, S)
    query_positions = query_positions.reshape(copies, 1, -1).repeat(B if copies > 1 else 1, axis=1)
    query_positions = query_positions.reshape(-1, T // copies)
    length = chunk = T // copies
    if o.causal and 0 < o.query_chunk < length:
        chunk = o.query_chunk
    outputs = []
    for start in range(0, length, chunk):
        queries, keys = slice(start, min(start + chunk, length)), slice(S)
        visible = None
        if o.causal:
            t, s = query_positions[:, queries], key_positions
            if chunk < length:
                seen = np.flatnonzero(s <= t.max())
                keys = slice(int(seen[-1]) + 1 if seen.size else 1)
            visible = (t, s[keys])
        mask = _mask(o, queries, keys, visible)
        outputs.append(attend(q[:, queries], k[:, keys], v[:, keys], mask=mask))
    o_BTNV = jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]
    return (_whole(o_BTNV, copies) if copies > 1 else o_BTNV)[..., :Hv]


def _mask(options: Options, queries: slice, keys: slice, visible) -> jax.Array | None:
    """[B or 1, 1, T, S] which keys some queries see, by segment and positions (if there are)."""
    mask = None
    if visible is not None:
        t_BT, s_S = map(jnp.asarray, visible)
        mask = (s_S[None, None, :] <= t_BT[:, :, None])[:, None]
    if options.segments_BS is not None:
        t_BT, s_BS = options.query_segments_BT[:, queries], options.segments_BS[:, keys]
        same = (t_BT[:, :, None] == s_BS[:, None, :])[:, None]
        mask = same if mask is None else mask & same
    return mask


def _parts(x_BT: jax.Array | None, parts: int) -> jax.Array | None:
    """[parts·B, T/parts, ..]: part after part of all rows."""
    if x_BT is None:
        return None
    B, T, *rest = x_BT.shape
    x = x_BT.reshape(B, parts, T // parts, *rest)
    return x.swapaxes(0, 1).reshape(parts * B, T // parts, *rest)


def _whole(x_BT: jax.Array, parts: int) -> jax.Array:
    """The rows whose `_parts` these are."""
    PB, T, *rest = x_BT.shape
    x = x_BT.reshape(parts, PB // parts, T, *rest)
    return x.swapaxes(0, 1).reshape(PB // parts, parts * T, *rest)


def _equal_dims(*arrays: jax.Array, multiple: int = 1) -> list[jax.Array]:
    """Zeros behind the last dims, to the largest: the library refuses unequal ones."""
    dim = -(-max(x.shape[-1] for x in arrays) // multiple) * multiple
    pad = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, dim - x.shape[-1])])
    return [x if x.shape[-1] == dim else pad(x) for x in arrays]


def _float64_attention(q_BTNH, k_BSKH, v_BSKV, *, scale, mask=None, is_causal=False) -> jax.Array:
    """`jax.nn.dot_product_attention`, in float64 throughout."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    z_BKGTS = scale * jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)
    if is_causal:
        lower = jnp.tril(jnp.ones((T, S), bool))[None, None]
        mask = lower if mask is None else mask & lower
    if mask is not None:
        z_BKGTS = jnp.where(mask[:, :, None], z_BKGTS, -jnp.inf)
    o_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", jax.nn.softmax(z_BKGTS, axis=-1), v_BSKV)
    return o_BTKGV.reshape(B, T, N, -1)


# -- cuDNN -----------------------------------------------------------------------------------------


def _check_cudnn(q_BTNH, k_BSKH, v_BSKV, options: Options) -> None:
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
    if options.segments_BS is not None:
        refuse("segments are not taken")
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


def _cudnn(q_BTNH, k_BSKH, v_BSKV, options: Options) -> jax.Array:
    """`jax.nn.dot_product_attention` by cuDNN, on every device its part of batch and heads.

    Its own rule for several devices wants queries, keys and values split alike, and raises where
    fewer KV heads than devices are not; inside a `jax.shard_map` that rule is not asked. Not run on
    several GPUs: tests put XLA in cuDNN's place, on CPUs.
    """
    _check_cudnn(q_BTNH, k_BSKH, v_BSKV, options)

    def attend(q_BTNH, k_BSKH, v_BSKV, *segments):
        q, k, v = _equal_dims(q_BTNH, k_BSKH, v_BSKV, multiple=8)
        return jax.nn.dot_product_attention(
            q, k, v, scale=options.scale, is_causal=options.causal, implementation="cudnn"
        )[..., : v_BSKV.shape[-1]]

    return on_every_device(attend, q_BTNH, k_BSKH, v_BSKV, options)


_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": _xla,
    "splash": splash_attention,
    "cudnn": _cudnn,
}
_CHECKS = {"splash": check_splash, "cudnn": _check_cudnn}
