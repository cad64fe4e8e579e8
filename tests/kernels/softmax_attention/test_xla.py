"""Softmax attention by XLA is NumPy's: in any order, in chunks, with segments, with copies."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.softmax_attention.api import softmax_attention, zigzag
from tests.kernels.softmax_attention import cases

B, T, S, N, K, H, HV = 3, 8, 12, 6, 2, 5, 7
ORDERS = ("in order", "queries", "both")

# Chunks of queries, whether causal, order, segments, window, copies of the keys, scale, soft cap.
CASES = [
    (0, True, "in order", False, 0, 1, None, 0.0),
    (3, True, "in order", True, 5, 1, None, 0.0),
    (3, True, "in order", True, 5, 1, 0.8, 1.1),
    (3, True, "both", True, 3, 1, 0.3, 0.0),
    (0, False, "queries", True, 0, 1, None, 0.6),
    (0, True, "both", True, 0, 2, None, 0.0),
    (3, True, "queries", False, 4, 2, None, 0.9),
    (3, False, "in order", True, 0, 2, 0.3, 0.0),
]
EVERY = itertools.product(
    (0, 3), (True, False), ORDERS, (False, True), (0, 1, 5), (1, 2), (None,), (0, 0.7)
)


def _segments(length, seed):
    return np.random.default_rng(seed).integers(0, 3, (B, length))


def test_equals_numpy(x64):
    for case in CASES:
        _check(jnp.float64, *case)
    # In float32 without a soft cap jax.nn's attention, as in training; with one, ours.
    _check(jnp.float32, *CASES[1])
    _check(jnp.float32, *CASES[2])


@pytest.mark.slow
def test_equals_numpy_in_every_combination(x64):
    for query_chunk, causal, *case in EVERY:
        _check(jnp.float64, query_chunk, causal, *case)


def _check(dtype, query_chunk, causal, order, segmented, window, copies, scale, softcap):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, *shape)) for shape in ((T, N, H), (S, K, H), (S, K, HV)))
    t, s = np.arange(T), np.arange(S)
    options = dict(causal=causal, query_chunk=query_chunk, window=window, scale=scale)
    options |= dict(softcap=softcap)
    if window and not causal:
        with pytest.raises(ValueError, match=f"window = {window}: needs causal attention"):
            softmax_attention(*map(jnp.asarray, (q, k, v)), causal=False, window=window)
        return
    if order != "in order":
        t = options["query_positions_T"] = zigzag(T, 2)
    if order == "both":
        s = options["key_positions_S"] = np.random.default_rng(2).permutation(S)
    far = t[:, None] - s[None]
    sees = np.broadcast_to(((far >= 0) & (far < (window or S))) | (not causal), (B, T, S))
    if segmented:
        query_segments, key_segments = _segments(T, 1), _segments(S, 3)
        sees = sees & (query_segments[:, :, None] == key_segments[:, None])
        options |= dict(query_segment_ids_BT=query_segments, segment_ids_BS=key_segments)
    if copies > 1:
        options["mesh"] = cases.mesh(sequence=copies)

    def tiled(x):
        return np.concatenate([x] * copies)

    attend = jax.jit(functools.partial(softmax_attention, **options, implementation="xla"))
    o = attend(*(jnp.asarray(x, dtype) for x in (q, tiled(k), tiled(v))))
    assert o.dtype == dtype and o.shape == (B, T, N, HV)
    seen = sees.any(axis=2)  # outputs of queries that see no key are undefined
    assert seen.any()
    expected = cases.numpy(q, k, v, np.where(seen[..., None], sees, True), scale, softcap)
    tolerance = 64 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(o[seen], expected[seen], rtol=tolerance, atol=tolerance)


def test_queries_have_the_segments_of_the_keys_if_not_told_otherwise(x64):
    q, k, v, _ = (
        jnp.asarray(np.asarray(x, np.float64)) for x in cases.arrays(2, 2, 2, 6, 8, length=16)
    )
    segments = np.random.default_rng(1).integers(0, 3, (2, 16))
    options = dict(causal=True, segment_ids_BS=segments)
    o = softmax_attention(q, k, v, **options)
    same = softmax_attention(q, k, v, query_segment_ids_BT=segments, **options)
    np.testing.assert_array_equal(o, same)
    other = softmax_attention(
        q, k, v, query_segment_ids_BT=segments[:, :1] + segments * 0, **options
    )
    assert np.abs(o - other).max() > 0.1
