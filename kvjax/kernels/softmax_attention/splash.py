"""Splash attention, JAX's Pallas kernel for TPUs, as an implementation of softmax attention.

Each kernel has a grid over heads and blocks of queries and keys, and is vmapped over the batch. One
head, with block_q = block_kv = 1024 and block_kv_compute = 512 (`_block_sizes`):

               keys  kv 0     kv 1     kv 2          HBM   q [T, H], k [S, H], v [S, Hv], o [T, Hv]
    queries  q 0     masked   -        -             VMEM  their blocks, prefetched
             q 1     full     masked   -                   logits [block_q, block_kv_compute]
             q 2     full     full     masked              accumulators [block_q, Hv] in float32

    forward   for each q block: online softmax over its kv blocks; saves log-sum-exps [T]
    dq        for each q block: recomputes logits, sums over kv blocks
    dkv       for each kv block: recomputes logits, sums over q blocks

Blocks marked "-" are skipped, "full" ones need no mask, and in "masked" ones the kernel computes
the mask from positions (`_Causal`). Logits [T, S] are never stored.

Tests compile it ahead of time for v4, v5e, v5p and v6e, and run it in the interpreter.
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
    all_positions,
    check_division,
    num_shards,
    on_every_device,
    platform,
    refuse_arrays,
    sort_tokens,
)

# Sizes of blocks; `_block_sizes` rounds them to divisors of T and S. They are limited by the 16 MiB
# of VMEM of v4 and v5e, which blocks of 2,048 tokens exceed (experiments/LOG.md).
_LANES = 128  # lanes of a TPU's vector register; blocks are multiples of it
_BLOCK = 1024  # queries and keys per block; logits of _BLOCK // 2 keys are in VMEM at once
_WIDE = 1024  # bytes of a token's key and value in one head; above it blocks have half the length
_WIDEST = 2176  # the most bytes that compile with half the length: (576 + 512) in bfloat16


def check_splash(q_BTNH, k_BSKH, v_BSKV, options: Options) -> None:
    """Raises NotImplementedError, with the reason, for arrays that splash does not support."""
    refuse = functools.partial(refuse_arrays, "splash")
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    dtypes = {x.dtype for x in (q_BTNH, k_BSKH, v_BSKV)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        shown = ", ".join(sorted(map(str, dtypes)))
        refuse(f"dtypes {shown}: must be bfloat16 or float32, the same for all three")
    check_division("splash", q_BTNH, k_BSKH, options.mesh)
    sequence = num_shards(options.mesh, "sequence")
    if T % (_LANES * sequence):
        parts = f" x sequence = {sequence} devices" if sequence > 1 else ""
        refuse(f"{T} queries are not a multiple of {_LANES}{parts}")
    if S % _LANES:
        refuse(f"{S} keys are not a multiple of {_LANES}")
    if (size := _row_bytes(k_BSKH, v_BSKV)) > _WIDEST:
        refuse(f"a key and a value of {size} bytes exceed {_WIDEST}, the most that fit VMEM")
    if options.key_positions_S is not None and options.causal:
        if not np.array_equal(np.sort(options.key_positions_S), np.arange(S)):
            refuse("key_positions_S must be 0 .. S - 1 in some order")


def splash_attention(q_BTNH, k_BSKH, v_BSKV, options: Options) -> jax.Array:
    """Runs the kernel on each device's shard of batch, queries and heads.

    Products of float32 arrays have the TPU's default precision (bfloat16 passes), as in XLA.
    """
    check_splash(q_BTNH, k_BSKH, v_BSKV, options)
    (T, N), S = q_BTNH.shape[1:3], k_BSKH.shape[1]
    mesh, interpret = options.mesh, platform(options.mesh) != "tpu"
    sequence, tensor = num_shards(mesh, "sequence"), num_shards(mesh, "tensor")
    if options.causal:  # a mask for each shard of the queries
        positions_T = all_positions(options, T, S)[0]
        head_mask, mask_shards = _Causal(positions_T, S, options.window), sequence
    else:  # one mask for all devices
        head_mask, mask_shards = _Full((T // sequence, S)), 1
    kernel = splash.make_splash_mha(
        splash_mask.MultiHeadMask([head_mask] * (N // tensor)),
        block_sizes=_block_sizes(T // sequence, S, _row_bytes(k_BSKH, v_BSKV)),
        head_shards=1,  # all heads have equal masks
        q_seq_shards=mask_shards,
        attn_logits_soft_cap=options.softcap or None,
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )
    order_matters = options.causal or options.segment_ids_BS is not None
    key_positions_S = options.key_positions_S if order_matters else None

    def attend(kernel, q_BTNH, k_BSKH, v_BSKV, query_segment_ids_BT, segment_ids_BS):
        # The kernel does not scale logits.
        q_BTNH = (q_BTNH.astype(jnp.float32) * options.scale).astype(q_BTNH.dtype)
        q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH, *map(in_order, (k_BSKH, v_BSKV))))
        if segment_ids_BS is None:
            o_BNTV = jax.vmap(kernel)(q, k, v)
        else:
            ids = splash.SegmentIds(query_segment_ids_BT, in_order(segment_ids_BS))
            o_BNTV = jax.vmap(kernel)(q, k, v, ids)
        return o_BNTV.swapaxes(1, 2)

    in_order = functools.partial(sort_tokens, key_positions_S)
    spec = None  # partition spec of the kernel's tables of blocks
    if mesh is not None and mesh.size > 1:
        axis = "sequence" if mask_shards > 1 else None
        spec = kernel.manual_sharding_spec(NamedSharding(mesh, P(None, axis)))
    return on_every_device(attend, q_BTNH, k_BSKH, v_BSKV, options, (kernel,), (spec,))


# -- masks -----------------------------------------------------------------------------------------


class _Causal(splash_mask.Mask):
    """A causal mask over sorted keys, with or without a window, without an array [T, S].

    The kernel computes a block's mask from the queries' positions (`q_sequence`) and the keys'
    indices. On the host the library only tests whether any or all elements of a block are visible,
    so `__getitem__` returns two elements, [any, all], instead of the block's million. Building the
    tables for 128K queries and keys then takes a second.
    """

    def __init__(self, positions_T: np.ndarray, S: int, window: int = 0):
        self.q_sequence = positions_T
        self.mask_function = _visible(window)  # one object per window, for the library's caches
        self._key = (S, positions_T.tobytes(), window)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.q_sequence), self._key[0]

    def __getitem__(self, block) -> np.ndarray:
        positions, first, last = self.q_sequence[block[0]], block[1].start, block[1].stop - 1
        too_old = positions - (self._key[2] or np.inf)  # the last key before a query's window
        sees_any = (positions >= first) & (last > too_old)
        sees_all = (positions >= last) & (first > too_old)
        return np.array([[sees_any.any(), sees_all.all()]])

    def __eq__(self, other) -> bool:
        return isinstance(other, _Causal) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Full(splash_mask.FullMask):
    """A mask in which every key is visible, with one element per block."""

    def __getitem__(self, block) -> np.ndarray:
        return np.ones((1, 1), bool)


@functools.cache
def _visible(window: int):
    """Returns a function of positions that is True if the query sees the key."""
    if not window:
        return lambda query, key: query >= key
    return lambda query, key: (query >= key) & (key > query - window)


# -- blocks ----------------------------------------------------------------------------------------


def _row_bytes(k_BSKH, v_BSKV) -> int:
    """Returns the bytes of a token's key and value in one head."""
    return k_BSKH.shape[-1] * k_BSKH.dtype.itemsize + v_BSKV.shape[-1] * v_BSKV.dtype.itemsize


def _block_sizes(T: int, S: int, row_bytes: int) -> splash.BlockSizes:
    """Returns queries and keys per grid step, for T queries of one device and S keys.

    They are the largest blocks that compile for every TPU, with segments, because large products
    fill the matrix units. The fused backward kernel, with 5 products instead of 7, is not used: it
    writes a gradient of the queries for every block of keys, masked or not, so its memory and
    traffic grow as T·S.
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
    """Returns the largest multiple of 128 that divides the length and is at most `most`."""
    return max(n for n in range(_LANES, most + 1, _LANES) if length % n == 0)
