"""Attention on several devices equals one's; zig-zag gives all devices the same work."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from kvjax.foundation.errors import UserError
from kvjax.kernels.softmax_attention.api import softmax_attention, zigzag
from tests import quick
from tests.kernels.softmax_attention import cases

# -- several devices -------------------------------------------------------------------------------

# Implementation; axes; keys are in the order of the queries; KV heads of 4 query heads; causal.
MESHES = [
    ("splash", dict(sequence=2, tensor=2, fsdp=2), True, 2, True),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("xla", dict(sequence=2, tensor=2, fsdp=2), False, 2, True),
            ("splash", dict(sequence=4), False, 4, True),
            ("splash", dict(tensor=4, fsdp=2), True, 2, True),  # fewer KV heads than devices
            ("splash", dict(sequence=2, data=2), True, 2, False),
            ("xla", dict(sequence=4, data=2), True, 1, True),
            ("splash", dict(sequence=2), False, 4, True),
            ("splash", dict(sequence=4, data=2), True, 1, True),
            ("splash", dict(data=2, fsdp=2, tensor=2), False, 1, True),
            ("xla", dict(sequence=4), False, 4, True),
            ("xla", dict(tensor=4, fsdp=2), True, 2, True),
        )
    ),
]
LENGTH = 512  # on four devices a block of queries is of two chunks


@functools.cache
def _expected_on_one_device(K, causal):
    arrays, segments = cases.arrays(4, 4, K, 16, 24, length=LENGTH), cases.segments(4, LENGTH)
    return arrays, segments, cases.exact(arrays, causal=causal, segment_ids_BS=segments)


@pytest.mark.parametrize("implementation, sizes, keys_in_order, K, causal", MESHES, ids=str)
def test_several_devices_equal_one(small_blocks, implementation, sizes, keys_in_order, K, causal):
    """Output and gradients in zig-zag order on a mesh, put back in order."""
    mesh = cases.mesh(**sizes)
    arrays, segments, expected = _expected_on_one_device(K, causal)
    order = zigzag(LENGTH, mesh.shape["sequence"])
    keys = order if keys_in_order else np.arange(LENGTH)
    spec, whole = P(("data", "fsdp"), "sequence", "tensor"), P(("data", "fsdp"))
    placed = [
        jax.device_put(x[:, o], NamedSharding(mesh, s))
        for x, o, s in zip(
            arrays, (order, keys, keys, order), (spec, whole, whole, spec), strict=True
        )
    ]
    got = cases.run(
        placed,
        implementation=implementation,
        causal=causal,
        query_positions_T=order,
        key_positions_S=keys if keys_in_order else None,
        query_segment_ids_BT=segments[:, order],
        segment_ids_BS=segments[:, keys],
        mesh=mesh,
    )
    back = [x[:, np.argsort(o)] for x, o in zip(got, (order, order, keys, keys), strict=True)]
    cases.assert_near(back, expected, 64 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("implementation", quick.only(["xla"], ["xla", "splash"]))
@pytest.mark.parametrize("sequence", quick.only([2], [1, 2]))
def test_causality(small_blocks, implementation, sequence):
    """An output depends on a value if and only if its position is not later."""
    length = 512
    mesh = cases.mesh(sequence=sequence)
    order = zigzag(length, sequence)
    q, k, v, _ = cases.arrays(1, 2, 1, 8, 8, length=length)
    options = dict(causal=True, mesh=mesh, implementation=implementation)
    options |= dict(query_positions_T=order, key_positions_S=order)

    @jax.jit
    def reach(k, v, place):
        def f(k, v):
            return softmax_attention(q, k, v, **options)[0, place].sum()

        return [jnp.abs(x).sum((0, 2, 3)) for x in jax.grad(f, argnums=(0, 1))(k, v)]

    for place in (0, 127, 128, 200, 383, 384, 511):
        dk, dv = reach(k, v, place)
        visible = order <= order[place]
        np.testing.assert_array_equal(np.asarray(dv) != 0, visible)
        assert np.all(np.asarray(dk)[~visible] == 0)
        if visible.sum() > 1:
            assert np.all(np.asarray(dk)[visible] != 0)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "splash"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_copy_of_the_keys_for_each_device(small_blocks, implementation, causal):
    """Copies give the result of one array; their gradients come from their device's queries."""
    mesh, order = cases.mesh(sequence=2, fsdp=2, tensor=2), zigzag(LENGTH, 2)
    arrays, segments, expected = _expected_on_one_device(2, causal)
    copied = P(("sequence", "data", "fsdp"))
    q, k, v, w = (x[:, order] for x in arrays)
    k, v = (jax.device_put(jnp.tile(x, (2, 1, 1, 1)), NamedSharding(mesh, copied)) for x in (k, v))
    options = dict(causal=causal, mesh=mesh, segment_ids_BS=segments[:, order], query_chunk=100)
    options |= dict(query_positions_T=order, key_positions_S=order)
    got = cases.run((q, k, v, w), implementation=implementation, **options)
    got[2:] = [x.reshape(2, 4, *x.shape[1:]) for x in got[2:]]
    back = [*got[:2], *(x.sum(0) for x in got[2:])]
    back = [x[:, np.argsort(order)] for x in back]
    cases.assert_near(back, expected, 64 * np.finfo(np.float32).eps)
    first = cases.run(
        (q, k, v, w.at[:, LENGTH // 2 :].set(0)), implementation=implementation, **options
    )
    for copies, by_first in zip(got[2:], first[2:], strict=True):
        np.testing.assert_allclose(by_first[:4], copies[0], rtol=1e-5, atol=1e-5)
        assert np.all(by_first[4:] == 0)
        assert np.abs(copies[0] - copies[1]).max() > 0.1


# -- zig-zag ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_zigzag_gives_all_devices_the_same_work(shards):
    length = 32
    positions = zigzag(length, shards)
    assert sorted(positions) == list(range(length))
    work = (positions + 1).reshape(shards, -1).sum(axis=1)
    assert set(work) == {length * (length + 1) // 2 // shards}
    chunk = length // (2 * shards)
    for i, chunks in enumerate(positions.reshape(shards, 2, chunk)):
        first, second = i * chunk, (2 * shards - 1 - i) * chunk
        np.testing.assert_array_equal(chunks, [first + np.arange(chunk), second + np.arange(chunk)])


def test_zigzag_refuses_what_it_would_have_to_pad():
    with pytest.raises(UserError, match="sequence = 4 .* 8 chunks.* 1001 .* 1000 or 1008"):
        zigzag(1001, 4)
    with pytest.raises(UserError, match="nearest length is 8$"):
        zigzag(4, 4)
