"""Splash attention, JAX's Pallas kernel for TPUs, as an implementation of softmax attention.

Tests compile it ahead of time for v4, v5e, v5p and v6e, and run it by the interpreter.
"""

import functools

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as splash_mask,
)
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from kvjax.kernels.softmax_attention.placement import (
    RESIDUALS,
    Options,
    both_positions,
    check_division,
    not_taken,
    on_every_device,
    platform,
    sort_tokens,
    ways,
)

_LANES = 128  # of a TPU's vector unit: splash's blocks are multiples of it
_BLOCK = 1024  # queries and keys of a block of splash
_WIDE = 1024  # bytes of a token's key and value in one head; over it, blocks of half the length
_WIDEST = 2176  # which compile up to this, (576 + 512) in bfloat16


def check_splash(q_BTNH, k_BSKH, v_BSKV, options: Options) -> None:
    """Raises NotImplementedError with what splash attention does not take, and what it does."""
    refuse = functools.partial(not_taken, "splash")
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    dtypes = {x.dtype for x in (q_BTNH, k_BSKH, v_BSKV)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        shown = ", ".join(sorted(map(str, dtypes)))
        refuse(f"dtypes {shown}: must be bfloat16 or float32, of all three the same")
    check_division("splash", q_BTNH, k_BSKH, options.mesh)
    sequence = ways(options.mesh, "sequence")
    if T % (_LANES * sequence):
        parts = f" x sequence = {sequence} devices" if sequence > 1 else ""
        refuse(f"{T} queries are not a multiple of {_LANES}{parts}")
    if S % _LANES:
        refuse(f"{S} keys are not a multiple of {_LANES}")
    if (size := _row_bytes(k_BSKH, v_BSKV)) > _WIDEST:
        refuse(f"a key and a value of {size} bytes are over {_WIDEST}, which fit a TPU's VMEM")
    if options.key_positions_S is not None and options.causal:
        if not np.array_equal(np.sort(options.key_positions_S), np.arange(S)):
            refuse("key_positions_S must be 0 .. S - 1 in some order")


def splash_attention(q_BTNH, k_BSKH, v_BSKV, options: Options) -> jax.Array:
    """The Pallas kernel for TPUs, on every device its part of batch, queries and heads.

    In float32 its products are the TPU's default ones, of bfloat16 parts, as XLA's are.
    """
    check_splash(q_BTNH, k_BSKH, v_BSKV, options)
    (T, N), S = q_BTNH.shape[1:3], k_BSKH.shape[1]
    mesh, interpret = options.mesh, platform(options.mesh) != "tpu"
    sequence, tensor = ways(mesh, "sequence"), ways(mesh, "tensor")
    if options.causal:
        positions_T = both_positions(options, T, S)[0]
        head_mask, parts = _Causal(positions_T, S, options.window), sequence
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
    ordered = (
        options.key_positions_S if options.causal or options.segment_ids_BS is not None else None
    )

    def attend(kernel, q_BTNH, k_BSKH, v_BSKV, query_segment_ids_BT, segment_ids_BS):
        q_BTNH = (q_BTNH.astype(jnp.float32) * options.scale).astype(q_BTNH.dtype)
        q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH, *map(in_order, (k_BSKH, v_BSKV))))
        if segment_ids_BS is None:
            o_BNTV = jax.vmap(kernel)(q, k, v)
        else:
            ids = splash.SegmentIds(query_segment_ids_BT, in_order(segment_ids_BS))
            o_BNTV = jax.vmap(kernel)(q, k, v, ids)
        return o_BNTV.swapaxes(1, 2)

    in_order = functools.partial(sort_tokens, ordered)
    blocks = None
    if mesh is not None and mesh.size > 1:
        axis = "sequence" if parts > 1 else None
        blocks = kernel.manual_sharding_spec(NamedSharding(mesh, P(None, axis)))
    return on_every_device(attend, q_BTNH, k_BSKH, v_BSKV, options, (kernel,), (blocks,))


# -- masks -----------------------------------------------------------------------------------------


class _Causal(splash_mask.Mask):
    """Which keys, in order, a query sees, for splash: never an array [T, S].

    The kernel computes a block's mask from the queries' positions (`q_sequence`) and the keys'
    places. The host asks of every block only whether some and whether all of it is seen, and so
    gets two elements that answer that rather than a million: a second in all at [128K, 128K].
    """

    def __init__(self, positions_T: np.ndarray, S: int, window: int = 0):
        self.q_sequence = positions_T
        self.mask_function = _sees(window)  # one object: the library's caches and jit's find it
        self._key = (S, positions_T.tobytes(), window)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.q_sequence), self._key[0]

    def __getitem__(self, block) -> np.ndarray:
        positions, first, last = self.q_sequence[block[0]], block[1].start, block[1].stop - 1
        before = positions - (self._key[2] or np.inf)  # the last key that a query no longer sees
        some = (positions >= first) & (last > before)
        every = (positions >= last) & (first > before)
        return np.array([[some.any(), every.all()]])

    def __eq__(self, other) -> bool:
        return isinstance(other, _Causal) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Full(splash_mask.FullMask):
    """All keys, for splash; of a block one element says it."""

    def __getitem__(self, block) -> np.ndarray:
        return np.ones((1, 1), bool)


@functools.cache
def _sees(window: int):
    """Whether a query sees a key, of positions."""
    if not window:
        return lambda query, key: query >= key
    return lambda query, key: (query >= key) & (key > query - window)


# -- blocks ----------------------------------------------------------------------------------------


def _row_bytes(k_BSKH, v_BSKV) -> int:
    """Bytes of a token's key and value in one head."""
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
