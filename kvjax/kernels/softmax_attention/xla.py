"""Softmax attention by XLA: `jax.nn.dot_product_attention`, which supports every option.

GSPMD partitions it for any sharding of the arrays.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.softmax_attention.placement import Options, all_positions, equal_dims


def softmax_attention(q_BTNH, k_BSKH, v_BSKV, options: Options) -> jax.Array:
    """See `api.softmax_attention`."""
    (B, T), S, Hv = q_BTNH.shape[:2], k_BSKH.shape[1], v_BSKV.shape[-1]
    copies = k_BSKH.shape[0] // B
    arrays = equal_dims(q_BTNH, k_BSKH, v_BSKV)
    in_order = options.query_positions_T is None and options.key_positions_S is None
    in_chunks = options.causal and 0 < options.query_chunk < T
    if copies == 1 and in_order and not (in_chunks or options.window):
        mask = _mask(options, slice(T), slice(S), None)
        o_BTNV = _attend(*arrays, options, mask=mask, is_causal=options.causal)
    elif copies == 1:
        t_T, s_S = all_positions(options, T, S)
        o_BTNV = _by_positions(*arrays, options, t_T[None], s_S)
    else:
        o_BTNV = _by_copies(*arrays, options, copies)
    return o_BTNV[..., :Hv]


def _by_copies(q_BTNH, k_CBSKH, v_CBSKV, options: Options, copies: int) -> jax.Array:
    """Attends with one copy of keys and values per shard of a row's queries.

    Every (shard, copy) becomes a row of the batch.
    """
    B, T = q_BTNH.shape[:2]
    t_T, s_S = all_positions(options, T, k_CBSKH.shape[1])
    t_CBT = t_T.reshape(copies, 1, -1).repeat(B, axis=1).reshape(copies * B, -1)
    if options.segment_ids_BS is not None:
        options = dataclasses.replace(
            options,
            query_segment_ids_BT=_split_rows(options.query_segment_ids_BT, copies),
            segment_ids_BS=jnp.tile(options.segment_ids_BS, (copies, 1)),
        )
    o_CBTNV = _by_positions(_split_rows(q_BTNH, copies), k_CBSKH, v_CBSKV, options, t_CBT, s_S)
    return _join_rows(o_CBTNV, copies)


def _by_positions(q, k, v, options: Options, t_BT: np.ndarray, s_S: np.ndarray) -> jax.Array:
    """Attends with tokens in any order; with chunks of queries, each to a slice of the keys.

    Args:
      t_BT: positions of queries, [B or 1, T], on the host.
      s_S: positions of keys, on the host.
    """
    T = q.shape[1]
    in_chunks = options.causal and 0 < options.query_chunk < T
    chunk = options.query_chunk if in_chunks else T
    outputs = []
    for start in range(0, T, chunk):
        queries, keys = slice(start, min(start + chunk, T)), slice(len(s_S))
        if in_chunks:
            keys = _visible_keys(s_S, t_BT[:, queries], options.window)
        positions = (t_BT[:, queries], s_S[keys]) if options.causal else None
        mask = _mask(options, queries, keys, positions)
        arrays = q[:, queries], k[:, keys], v[:, keys]
        outputs.append(_attend(*arrays, options, mask=mask))
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]


def _visible_keys(s_S: np.ndarray, t_BT: np.ndarray, window: int) -> slice:
    """Returns the shortest slice, never empty, that contains every key a query of t_BT sees."""
    visible = s_S <= t_BT.max()
    if window:
        visible &= s_S > t_BT.min() - window
    index = np.flatnonzero(visible)
    return slice(int(index[0]), int(index[-1]) + 1) if index.size else slice(1)


def _mask(options: Options, queries: slice, keys: slice, positions) -> jax.Array | None:
    """Returns the mask of visible keys, [B or 1, 1, T, S]; None if all are visible.

    Args:
      positions: of queries [B or 1, T] and keys [S], for the causal mask; None: not causal.
    """
    mask = None
    if positions is not None:
        t_BT, s_S = map(jnp.asarray, positions)
        t_BT1, s_11S = t_BT[:, :, None], s_S[None, None, :]
        mask = (s_11S <= t_BT1)[:, None]
        if options.window:
            mask = mask & (s_11S > t_BT1 - options.window)[:, None]
    if options.segment_ids_BS is not None:
        t_BT, s_BS = options.query_segment_ids_BT[:, queries], options.segment_ids_BS[:, keys]
        same = (t_BT[:, :, None] == s_BS[:, None, :])[:, None]
        mask = same if mask is None else mask & same
    return mask


def _split_rows(x_BT: jax.Array, n: int) -> jax.Array:
    """Splits each row of [B, T, ..] into n shards, [n·B, T/n, ..]; shard i of row b is i·B + b."""
    B, T, *rest = x_BT.shape
    x = x_BT.reshape(B, n, T // n, *rest)
    return x.swapaxes(0, 1).reshape(n * B, T // n, *rest)


def _join_rows(x_BT: jax.Array, n: int) -> jax.Array:
    """Inverts `_split_rows`."""
    nB, T, *rest = x_BT.shape
    x = x_BT.reshape(n, nB // n, T, *rest)
    return x.swapaxes(0, 1).reshape(nB // n, n * T, *rest)


def _attend(q, k, v, options: Options, *, mask=None, is_causal=False) -> jax.Array:
    """Calls JAX's attention; ours with a soft cap, and in float64, whose softmax JAX computes in
    float32.
    """
    arguments = dict(scale=options.scale, mask=mask, is_causal=is_causal)
    if q.dtype == jnp.float64 or options.softcap:
        return _attention(q, k, v, softcap=options.softcap, **arguments)
    return jax.nn.dot_product_attention(q, k, v, **arguments)


def _attention(
    q_BTNH, k_BSKH, v_BSKV, *, scale, mask=None, is_causal=False, softcap=0.0
) -> jax.Array:
    """Computes `jax.nn.dot_product_attention`; logits and softmax are float32 or wider."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKrH = q_BTNH.reshape(B, T, K, N // K, H)
    z_BKrTS = jnp.einsum("BTKrH,BSKH->BKrTS", q_BTKrH, k_BSKH, preferred_element_type=wide)
    z_BKrTS = scale * z_BKrTS
    if softcap:
        z_BKrTS = softcap * jnp.tanh(z_BKrTS / softcap)
    if is_causal:
        lower = jnp.tril(jnp.ones((T, S), bool))[None, None]
        mask = lower if mask is None else mask & lower
    if mask is not None:
        z_BKrTS = jnp.where(mask[:, :, None], z_BKrTS, -jnp.inf)
    p_BKrTS = jax.nn.softmax(z_BKrTS, axis=-1).astype(v_BSKV.dtype)
    o_BTKrV = jnp.einsum("BKrTS,BSKV->BTKrV", p_BKrTS, v_BSKV)
    return o_BTKrV.reshape(B, T, N, -1)
