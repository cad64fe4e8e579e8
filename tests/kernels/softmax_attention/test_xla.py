"""Softmax attention by XLA is NumPy's, in any order, in chunks, with segments."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.softmax_attention.api import softmax_attention
from kvjax.kernels.softmax_attention.api import zigzag
from tests import quick
from tests.kernels.softmax_attention import cases

ORDERS = ("in order", "queries", "both")


@pytest.mark.parametrize(
    "query_chunk, causal, order, segmented, window",
    quick.every(14, itertools.product((0, 3), (True, False), ORDERS, (False, True), (0, 1, 5))),
)
def test_xla_positions_and_segments(x64, query_chunk, causal, order, segmented, window):
    length = 16
    q, k, v, _ = (np.asarray(x, np.float64) for x in cases.arrays(2, 4, 2, 6, 8, length=length))
    t = s = np.arange(length)
    segments = np.random.default_rng(1).integers(0, 3, (2, length))
    if window and not causal:
        with pytest.raises(ValueError, match=f"window = {window}: is of causal attention"):
            softmax_attention(*map(jnp.asarray, (q, k, v)), causal=False, window=window)
        return
    options = dict(causal=causal, query_chunk=query_chunk, window=window)
    if order != "in order":
        t = options["query_positions_T"] = zigzag(length, 2)
        q = q[:, t]
    if order == "both":
        s = options["key_positions_S"] = np.random.default_rng(2).permutation(length)
        k, v = k[:, s], v[:, s]
    far = t[:, None] - s[None]
    sees = ((far >= 0) & (far < (window or length))) | (not causal)
    sees = np.broadcast_to(sees, (2, length, length))
    if segmented:
        sees = sees & (segments[:, t, None] == segments[:, None, s])
        options |= dict(query_segments_BT=segments[:, t], segments_BS=segments[:, s])
    attend = jax.jit(functools.partial(softmax_attention, **options))
    o = attend(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(o, cases.numpy(q, k, v, sees), rtol=1e-12, atol=1e-12)


def test_queries_have_the_segments_of_the_keys_if_not_told_otherwise(x64):
    q, k, v, _ = (
        jnp.asarray(np.asarray(x, np.float64)) for x in cases.arrays(2, 2, 2, 6, 8, length=16)
    )
    segments = np.random.default_rng(1).integers(0, 3, (2, 16))
    options = dict(causal=True, segments_BS=segments)
    o = softmax_attention(q, k, v, **options)
    same = softmax_attention(q, k, v, query_segments_BT=segments, **options)
    np.testing.assert_array_equal(o, same)
    other = softmax_attention(q, k, v, query_segments_BT=segments[:, :1] + segments * 0, **options)
    assert np.abs(o - other).max() > 0.1
