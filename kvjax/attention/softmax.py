"""Softmax attention of the training pass, over expanded keys and values: which library runs it.

XLA everywhere; splash attention, a Pallas kernel, on TPUs; cuDNN on NVIDIA GPUs. The kernels never
hold logits [T, S]; nothing here was run on a TPU: splash is compiled ahead of time for v4, v5e, v5p
and v6e, and run by the interpreter.

Context parallelism splits T over the mesh's `sequence` axis. Cut in order, the last device would
have nearly twice the mean of causal work; `zigzag` gives every device a chunk from both ends.
"""

from collections.abc import Callable
import dataclasses
import functools
import math

from absl import logging
import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from kvjax.errors import UserError

# What splash keeps for its backward pass is saved under this name: `jax.checkpoint` with a policy
# `save_only_these_names(RESIDUALS)` does not run its forward pass again.
RESIDUALS = "softmax_attention"

_LANES = 128  # of a TPU's vector unit: splash's blocks are multiples of it
_BLOCK = 1024  # queries and keys of a block of splash
_WIDE = 1024  # bytes of a token's key and value in one head; over it, blocks of half the length
_WIDEST = 2176  # which compile up to this, (576 + 512) in bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """What an implementation is given beside queries, keys and values."""

    causal: bool
    scale: float
    query_chunk: int
    query_positions_T: np.ndarray | None  # None: 0..T-1
    key_positions_S: np.ndarray | None
    query_segments_BT: jax.Array | None
    segments_BS: jax.Array | None
    mesh: jax.sharding.Mesh | None


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
        copies in (1, _ways(mesh, "sequence")) and T % copies == N % K == 0 and H == k_BSKH.shape[3]
    )
    if not fit or k_BSKH.shape[:3] != v_BSKV.shape[:3]:
        shapes = f"{q_BTNH.shape}, {k_BSKH.shape} and {v_BSKV.shape}"
        raise ValueError(f"queries, keys and values {shapes} do not fit [BTNH], [BSKH], [BSKV]")
    if segments_BS is None and query_segments_BT is not None:
        raise ValueError("query_segments_BT: the keys' segments_BS are needed too")
    if segments_BS is not None and query_segments_BT is None:
        query_segments_BT = segments_BS
    options = _Options(
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


def zigzag(length: int, shards: int) -> np.ndarray:
    """[length] int32 position of the token at each place of a row that is split over devices.

    The row is cut in 2·shards chunks; device i has chunks i and 2·shards - 1 - i, as in Llama 3
    (arXiv:2407.21783, section 3.3.2): of causal attention all have the same work.

    Raises:
      UserError: 2·shards does not divide the length.
    """
    chunks = 2 * shards
    if length % chunks:
        below = length // chunks * chunks
        near = f"{below} or {below + chunks}" if below else f"{chunks}"
        raise UserError(
            f"config.mesh.sequence = {shards} cuts rows in {chunks} chunks, two per device, and "
            f"{length} tokens are not divided by {chunks}; the nearest length is {near}"
        )
    positions = np.arange(length, dtype=np.int32).reshape(chunks, -1)
    order = [chunk for i in range(shards) for chunk in (i, chunks - 1 - i)]
    return positions[order].reshape(-1)


def _positions(positions: np.ndarray | None, length: int) -> np.ndarray | None:
    """Positions as int32; None if they are 0, 1, 2.."""
    if positions is None:
        return None
    positions = np.asarray(positions)  # of a tracer this raises
    if positions.shape != (length,) or not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(f"positions {positions.dtype}{positions.shape}: must be int [{length}]")
    return None if np.array_equal(positions, np.arange(length)) else positions.astype(np.int32)


# -- which one -------------------------------------------------------------------------------------


def _default(q_BTNH, k_BSKH, v_BSKV, options: _Options) -> str:
    """The implementation that None stands for."""
    name = {"tpu": "splash", "gpu": "cudnn"}.get(_platform(options.mesh))
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


def _platform(mesh: jax.sharding.Mesh | None) -> str:
    if mesh is not None:
        return mesh.devices.flat[0].platform
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).platform


@functools.cache
def _say(message: str) -> None:
    """Log a message once."""
    logging.info("%s", message)


def _refuse(name: str, reason: str) -> None:
    raise NotImplementedError(f"{name} attention: {reason}; the implementation 'xla' takes this")


def _ways(mesh: jax.sharding.Mesh | None, *names: str) -> int:
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in names)


# -- XLA -------------------------------------------------------------------------------------------


def _xla(q_BTNH, k_BSKH, v_BSKV, options: _Options) -> jax.Array:
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
    query_positions, key_positions = _both_positions(o, T, S)
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


def _both_positions(options: _Options, T: int, S: int) -> tuple[np.ndarray, np.ndarray]:
    query_positions, key_positions = options.query_positions_T, options.key_positions_S
    return (
        np.arange(T, dtype=np.int32) if query_positions is None else query_positions,
        np.arange(S, dtype=np.int32) if key_positions is None else key_positions,
    )


def _mask(options: _Options, queries: slice, keys: slice, visible) -> jax.Array | None:
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


# -- splash attention ------------------------------------------------------------------------------


class _Causal(splash_mask.Mask):
    """Which keys, in order, a query sees, for splash: never an array [T, S].

    The kernel computes a block's mask from the queries' positions (`q_sequence`) and the keys'
    places. The host asks of every block only whether some and whether all of it is seen, and so
    gets two elements that answer that rather than a million: a second in all at [128K, 128K].
    """

    def __init__(self, positions_T: np.ndarray, S: int):
        self.q_sequence = positions_T
        self.mask_function = _sees  # one object: the library's caches and jit's find it again
        self._key = (S, positions_T.tobytes())

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.q_sequence), self._key[0]

    def __getitem__(self, block) -> np.ndarray:
        positions, first, last = self.q_sequence[block[0]], block[1].start, block[1].stop - 1
        return np.array([[positions.max() >= first, positions.min() >= last]])

    def __eq__(self, other) -> bool:
        return isinstance(other, _Causal) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Full(splash_mask.FullMask):
    """All keys, for splash; of a block one element says it."""

    def __getitem__(self, block) -> np.ndarray:
        return np.ones((1, 1), bool)


def _sees(query_positions, key_positions):
    return query_positions >= key_positions


def _check_splash(q_BTNH, k_BSKH, v_BSKV, options: _Options) -> None:
    """Raises NotImplementedError with what splash attention does not take, and what it does."""
    refuse = functools.partial(_refuse, "splash")
    (B, T, N), (S, K) = q_BTNH.shape[:3], k_BSKH.shape[1:3]
    dtypes = {x.dtype for x in (q_BTNH, k_BSKH, v_BSKV)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        shown = ", ".join(sorted(map(str, dtypes)))
        refuse(f"dtypes {shown}: must be bfloat16 or float32, of all three the same")
    mesh = options.mesh
    sequence, rows, tensor = (_ways(mesh, a) for a in ("sequence", "data", "tensor"))
    rows *= _ways(mesh, "fsdp")
    if B % rows:
        refuse(f"a batch of {B} is not divided by data x fsdp = {rows} devices")
    if T % (_LANES * sequence):
        parts = f" x sequence = {sequence} devices" if sequence > 1 else ""
        refuse(f"{T} queries are not a multiple of {_LANES}{parts}")
    if S % _LANES:
        refuse(f"{S} keys are not a multiple of {_LANES}")
    if (size := _row_bytes(k_BSKH, v_BSKV)) > _WIDEST:
        refuse(f"a key and a value of {size} bytes are over {_WIDEST}, which fit a TPU's VMEM")
    if N % tensor or (K % tensor and tensor % K):
        refuse(f"{N} query heads on {K} KV heads are not divided by tensor = {tensor} devices")
    if options.key_positions_S is not None and options.causal:
        if not np.array_equal(np.sort(options.key_positions_S), np.arange(S)):
            refuse("key_positions_S must be 0 .. S - 1 in some order")


def _splash(q_BTNH, k_BSKH, v_BSKV, options: _Options) -> jax.Array:
    """The Pallas kernel for TPUs, on every device its part of batch, queries and heads.

    In float32 its products are the TPU's default ones, of bfloat16 parts, as XLA's are.
    """
    _check_splash(q_BTNH, k_BSKH, v_BSKV, options)
    (T, N), (S, K) = q_BTNH.shape[1:3], k_BSKH.shape[1:3]
    mesh, interpret = options.mesh, _platform(options.mesh) != "tpu"
    sequence, tensor = _ways(mesh, "sequence"), _ways(mesh, "tensor")
    if K % tensor:  # fewer KV heads than devices: each device has the one that its queries read
        k_BSKH, v_BSKV = (jnp.repeat(x, tensor // K, axis=2) for x in (k_BSKH, v_BSKV))
    if options.causal:
        head_mask, parts = _Causal(_both_positions(options, T, S)[0], S), sequence
    else:  # the same for every device
        head_mask, parts = _Full((T // sequence, S)), 1
    kernel = splash.make_splash_mha(
        splash_mask.MultiHeadMask([head_mask] * (N // tensor)),
        block_sizes=_block_sizes(T // sequence, S, _row_bytes(k_BSKH, v_BSKV)),
        head_shards=1,  # of masks: the heads' are all the same
        q_seq_shards=parts,
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )
    ordered = options.key_positions_S if options.causal or options.segments_BS is not None else None

    def attend(kernel, q_BTNH, k_BSKH, v_BSKV, query_segments_BT, segments_BS):
        q_BTNH = (q_BTNH.astype(jnp.float32) * options.scale).astype(q_BTNH.dtype)
        q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH, *map(in_order, (k_BSKH, v_BSKV))))
        if segments_BS is None:
            o_BNTV = jax.vmap(kernel)(q, k, v)
        else:
            ids = splash.SegmentIds(query_segments_BT, in_order(segments_BS))
            o_BNTV = jax.vmap(kernel)(q, k, v, ids)
        return o_BNTV.swapaxes(1, 2)

    in_order = functools.partial(sort_tokens, ordered)
    arrays = (q_BTNH, k_BSKH, v_BSKV, options.query_segments_BT, options.segments_BS)
    if mesh is None or mesh.size == 1:
        return attend(kernel, *arrays)
    axis = lambda name: name if name in mesh.axis_names else None
    batch = tuple(name for name in ("data", "fsdp") if name in mesh.axis_names) or None
    queries, keys = P(batch, axis("sequence"), axis("tensor")), P(batch, None, axis("tensor"))
    if k_BSKH.shape[0] > q_BTNH.shape[0]:
        keys = P(("sequence", *(batch or ())), None, axis("tensor"))
    split = axis("sequence") if parts > 1 else None
    blocks = kernel.manual_sharding_spec(NamedSharding(mesh, P(None, split)))
    segments = (None, None) if arrays[4] is None else (P(batch, axis("sequence")), P(batch))
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(blocks, queries, keys, keys, *segments),
        out_specs=queries,
        check_vma=False,  # the kernel's outputs do not say along which axes they differ
    )(kernel, *arrays)


def sort_tokens(positions_S: np.ndarray | None, x_BS: jax.Array) -> jax.Array:
    """[B, S, ..] with the token of position 0 first: slices, one for each run of positions."""
    if positions_S is None:
        return x_BS
    places = np.argsort(positions_S)
    starts = np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1)
    runs = zip(places[starts], np.diff(starts, append=len(places)), strict=True)
    parts = [jax.lax.slice_in_dim(x_BS, int(p), int(p + length), axis=1) for p, length in runs]
    return jnp.concatenate(parts, axis=1)


def _row_bytes(k_BSKH, v_BSKV) -> int:
    """Of a token's key and value in one head."""
    return k_BSKH.shape[-1] * k_BSKH.dtype.itemsize + v_BSKV.shape[-1] * v_BSKV.dtype.itemsize


def _block_sizes(T: int, S: int, row_bytes: int) -> splash.BlockSizes:
    """Queries and keys per grid step: of T queries (of one device) over S keys.

    The most that compiles for every TPU, v4's 16 MiB of VMEM being the least, with segments: few
    steps, each with products large enough to fill the matrix units. Logits of 512 keys at a time
    are in VMEM. The fused backward kernel, which does 5 products for the two kernels' 7, is not
    used: it writes a gradient of the queries for every block of keys, and visits blocks that the
    mask hides: memory and traffic that grow as T·S.
    """
    most = _BLOCK if row_bytes <= _WIDE else _BLOCK // 2
    block_q, block_kv = _divisor(T, most), _divisor(S, most)
    compute = _divisor(block_kv, _BLOCK // 2)
    return splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=compute,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )


def _divisor(length: int, most: int) -> int:
    """The largest multiple of a lane's width that divides the length and is at most `most`."""
    return max(n for n in range(_LANES, most + 1, _LANES) if length % n == 0)


# -- cuDNN -----------------------------------------------------------------------------------------


def _check_cudnn(q_BTNH, k_BSKH, v_BSKV, options: _Options) -> None:
    """Raises NotImplementedError with what cuDNN attention does not take, and what it does."""
    refuse = functools.partial(_refuse, "cudnn")
    T, S, dim = q_BTNH.shape[1], k_BSKH.shape[1], max(q_BTNH.shape[-1], v_BSKV.shape[-1])
    dtypes = {x.dtype for x in (q_BTNH, k_BSKH, v_BSKV)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        shown = ", ".join(sorted(map(str, dtypes)))
        refuse(f"dtypes {shown}: must be bfloat16 or float16, of all three the same")
    if options.query_positions_T is not None or options.key_positions_S is not None:
        refuse("tokens must be in order, and positions (zig-zag) say that they are not")
    if _ways(options.mesh, "sequence") > 1:
        refuse("a row cannot be split over sequence > 1 devices")
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


def _cudnn(q_BTNH, k_BSKH, v_BSKV, options: _Options) -> jax.Array:
    """`jax.nn.dot_product_attention` by cuDNN; it divides itself over batch and heads."""
    _check_cudnn(q_BTNH, k_BSKH, v_BSKV, options)
    q, k, v = _equal_dims(q_BTNH, k_BSKH, v_BSKV, multiple=8)
    o_BTNV = jax.nn.dot_product_attention(
        q, k, v, scale=options.scale, is_causal=options.causal, implementation="cudnn"
    )
    return o_BTNV[..., : v_BSKV.shape[-1]]


_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": _xla,
    "splash": _splash,
    "cudnn": _cudnn,
}
_CHECKS = {"splash": _check_splash, "cudnn": _check_cudnn}
