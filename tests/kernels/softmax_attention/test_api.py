"""Softmax attention by every implementation against float64, on one device and on several."""

import functools
import types

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from kvjax.foundation import logs
from kvjax.foundation.errors import UserError
from kvjax.kernels.softmax_attention import api
from kvjax.kernels.softmax_attention import cudnn as cudnn_lib
from kvjax.kernels.softmax_attention import splash
from kvjax.kernels.softmax_attention.api import softmax_attention
from kvjax.kernels.softmax_attention.api import zigzag
from tests import quick

AXES = ("data", "fsdp", "sequence", "tensor")
FLOAT32, BFLOAT16 = jnp.float32, jnp.bfloat16
T = 384  # three of the least blocks


@pytest.fixture
def small_blocks(monkeypatch):
    """Splash with blocks of 128, so that a short row has several."""
    monkeypatch.setattr(splash, "_divisor", lambda length, most: 128)


def _arrays(B, N, K, H, Hv, *, length=T, dtype=FLOAT32):
    """Queries, keys, values, and weights of the output, rounded to a dtype."""
    rng = np.random.default_rng(0)
    shapes = (length, N, H), (length, K, H), (length, K, Hv), (length, N, Hv)
    return [jnp.asarray(rng.standard_normal((B, *shape)), dtype) for shape in shapes]


def _segments(B, length=T):
    """[B, length] segments that end inside blocks and at their edges, in each row elsewhere."""
    ends = [[100, 128, 300], [1, 256, 257]]
    find = lambda row: np.searchsorted(ends[row % 2], np.arange(length), side="right")
    return np.stack([find(row) for row in range(B)])


def _numpy(q, k, v, sees_BTS, scale=None):
    """[B, T, N, Hv] in float64, head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    outputs = []
    for n in range(q.shape[2]):
        z = np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, n // group])
        z = np.where(sees_BTS, z * (scale or q.shape[-1] ** -0.5), -np.inf)
        p = np.exp(z - z.max(-1, keepdims=True))
        outputs.append(p / p.sum(-1, keepdims=True) @ v[:, :, n // group])
    return np.stack(outputs, axis=2)


def _run(arrays, **options):
    """The output, and the gradients of queries, keys and values."""

    def f(q, k, v, w):
        o = softmax_attention(q, k, v, **options)
        return (o.astype(jnp.float32 if o.dtype != jnp.float64 else o.dtype) * w).sum(), o

    gradients, o = jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [np.asarray(x, np.float64) for x in (o, *gradients)]


def _exact(arrays, **options):
    """The same in float64 by XLA."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        return _run(wide, implementation="xla", **options)


def _assert_near(got, expected, tolerance):
    for name, x, y in zip(("output", "dq", "dk", "dv"), got, expected, strict=True):
        worst = np.abs(x - y).max() / np.abs(y).max()
        assert worst < tolerance, (name, worst)


def _mesh(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)


# -- XLA -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_chunk", [0, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["in order", "queries", "both"])
@pytest.mark.parametrize("segmented", [False, True])
def test_xla_positions_and_segments(x64, query_chunk, causal, order, segmented):
    length = 16
    q, k, v, _ = (np.asarray(x, np.float64) for x in _arrays(2, 4, 2, 6, 8, length=length))
    t = s = np.arange(length)
    segments = np.random.default_rng(1).integers(0, 3, (2, length))
    options = dict(causal=causal, query_chunk=query_chunk)
    if order != "in order":
        t = options["query_positions_T"] = zigzag(length, 2)
        q = q[:, t]
    if order == "both":
        s = options["key_positions_S"] = np.random.default_rng(2).permutation(length)
        k, v = k[:, s], v[:, s]
    sees = np.broadcast_to((s[None] <= t[:, None]) | (not causal), (2, length, length))
    if segmented:
        sees = sees & (segments[:, t, None] == segments[:, None, s])
        options |= dict(query_segments_BT=segments[:, t], segments_BS=segments[:, s])
    attend = jax.jit(functools.partial(softmax_attention, **options))
    o = attend(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(o, _numpy(q, k, v, sees), rtol=1e-12, atol=1e-12)


def test_queries_have_the_segments_of_the_keys_if_not_told_otherwise(x64):
    q, k, v, _ = (jnp.asarray(np.asarray(x, np.float64)) for x in _arrays(2, 2, 2, 6, 8, length=16))
    segments = np.random.default_rng(1).integers(0, 3, (2, 16))
    options = dict(causal=True, segments_BS=segments)
    o = softmax_attention(q, k, v, **options)
    same = softmax_attention(q, k, v, query_segments_BT=segments, **options)
    np.testing.assert_array_equal(o, same)
    other = softmax_attention(q, k, v, query_segments_BT=segments[:, :1] + segments * 0, **options)
    assert np.abs(o - other).max() > 0.1


# -- several devices -------------------------------------------------------------------------------

# Axes; whether keys lie as the queries do; KV heads of 4 query heads; whether causal.
MESHES = [
    ("splash", dict(sequence=2, tensor=2, fsdp=2), True, 2, True),
    ("xla", dict(sequence=2, tensor=2, fsdp=2), False, 2, True),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
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
    arrays, segments = _arrays(4, 4, K, 16, 24, length=LENGTH), _segments(4, LENGTH)
    return arrays, segments, _exact(arrays, causal=causal, segments_BS=segments)


@pytest.mark.parametrize("implementation, sizes, both, K, causal", MESHES, ids=str)
def test_several_devices_equal_one(small_blocks, implementation, sizes, both, K, causal):
    """Zig-zag on a mesh, its devices' parts put back in order: output and gradients."""
    mesh = _mesh(**sizes)
    arrays, segments, expected = _expected_on_one_device(K, causal)
    order = zigzag(LENGTH, mesh.shape["sequence"])
    keys = order if both else np.arange(LENGTH)
    spec, whole = P(("data", "fsdp"), "sequence", "tensor"), P(("data", "fsdp"))
    placed = [
        jax.device_put(x[:, o], NamedSharding(mesh, s))
        for x, o, s in zip(
            arrays, (order, keys, keys, order), (spec, whole, whole, spec), strict=True
        )
    ]
    got = _run(
        placed,
        implementation=implementation,
        causal=causal,
        query_positions_T=order,
        key_positions_S=keys if both else None,
        query_segments_BT=segments[:, order],
        segments_BS=segments[:, keys],
        mesh=mesh,
    )
    back = [x[:, np.argsort(o)] for x, o in zip(got, (order, order, keys, keys), strict=True)]
    _assert_near(back, expected, 64 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("implementation", ["xla", "splash"])
@pytest.mark.parametrize("sequence", quick.only([2], [1, 2]))
def test_causality(small_blocks, implementation, sequence):
    """An output has a gradient by a value if and only if it stands no later in the row."""
    length = 512
    mesh = _mesh(sequence=sequence)
    order = zigzag(length, sequence)
    q, k, v, _ = _arrays(1, 2, 1, 8, 8, length=length)
    options = dict(causal=True, mesh=mesh, implementation=implementation)
    options |= dict(query_positions_T=order, key_positions_S=order)

    @jax.jit
    def reach(k, v, place):
        f = lambda k, v: softmax_attention(q, k, v, **options)[0, place].sum()
        return [jnp.abs(x).sum((0, 2, 3)) for x in jax.grad(f, argnums=(0, 1))(k, v)]

    for place in (0, 127, 128, 200, 383, 384, 511):
        dk, dv = reach(k, v, place)
        visible = order <= order[place]
        np.testing.assert_array_equal(np.asarray(dv) != 0, visible)
        assert np.all(np.asarray(dk)[~visible] == 0)
        if visible.sum() > 1:
            assert np.all(np.asarray(dk)[visible] != 0)


@pytest.mark.parametrize("implementation", ["xla", "splash"])
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_copy_of_the_keys_for_each_device(small_blocks, implementation, causal):
    """The same as one copy for all; each copy's gradients are by its device's queries alone."""
    mesh, order = _mesh(sequence=2, fsdp=2, tensor=2), zigzag(LENGTH, 2)
    arrays, segments, expected = _expected_on_one_device(2, causal)
    copied = P(("sequence", "data", "fsdp"))
    q, k, v, w = (x[:, order] for x in arrays)
    k, v = (jax.device_put(jnp.tile(x, (2, 1, 1, 1)), NamedSharding(mesh, copied)) for x in (k, v))
    options = dict(causal=causal, mesh=mesh, segments_BS=segments[:, order], query_chunk=100)
    options |= dict(query_positions_T=order, key_positions_S=order)
    got = _run((q, k, v, w), implementation=implementation, **options)
    got[2:] = [x.reshape(2, 4, *x.shape[1:]) for x in got[2:]]
    back = [*got[:2], *(x.sum(0) for x in got[2:])]
    back = [x[:, np.argsort(order)] for x in back]
    _assert_near(back, expected, 64 * np.finfo(np.float32).eps)
    first = _run((q, k, v, w.at[:, LENGTH // 2 :].set(0)), implementation=implementation, **options)
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
    for i, part in enumerate(positions.reshape(shards, 2, chunk)):
        first, second = i * chunk, (2 * shards - 1 - i) * chunk
        np.testing.assert_array_equal(part, [first + np.arange(chunk), second + np.arange(chunk)])


def test_zigzag_refuses_what_it_would_have_to_pad():
    with pytest.raises(UserError, match="sequence = 4 .* 8 chunks.* 1001 .* 1000 or 1008"):
        zigzag(1001, 4)
    with pytest.raises(UserError, match="nearest length is 8$"):
        zigzag(4, 4)


# -- which one -------------------------------------------------------------------------------------


def _shapes(B=2, length=256, N=4, K=2, H=128, Hv=128, dtype=BFLOAT16):
    shapes = (length, N, H), (length, K, H), (length, K, Hv)
    return [jax.ShapeDtypeStruct((B, *shape), dtype) for shape in shapes]


def _trace(arrays, **options):
    return jax.eval_shape(
        functools.partial(softmax_attention, **dict(causal=True) | options), *arrays
    )


def test_what_is_not_taken_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(api, "platform", lambda mesh: "tpu")
    logs.log_once.cache_clear()
    for _ in range(3):
        _trace(_shapes(length=200))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "200 queries" in record.getMessage()


@pytest.fixture
def cudnn(monkeypatch):
    """A GPU with cuDNN that is XLA and notes what it was given."""
    calls = []
    attend = jax.nn.dot_product_attention

    def fake(q, k, v, *, implementation=None, **options):
        if implementation == "cudnn":
            manual = jax.sharding.get_abstract_mesh().are_all_axes_manual
            shapes = q.shape, k.shape, v.shape
            calls.append(types.SimpleNamespace(shapes=shapes, manual=manual, **options))
        return attend(q, k, v, **options)

    gpu = types.SimpleNamespace(compute_capability="9.0", device_kind="a GPU", platform="gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    monkeypatch.setattr(api, "platform", lambda mesh: "gpu")
    monkeypatch.setattr(cudnn_lib, "_gpu", lambda: gpu)
    return types.SimpleNamespace(calls=calls, gpu=gpu)


@pytest.mark.parametrize(
    "H, Hv, dim, causal",
    quick.only(
        [(64, 128, 128, True), (20, 12, 24, False)],
        [
            (*dims, causal)
            for dims in ((64, 128, 128), (128, 128, 128), (20, 12, 24))
            for causal in (True, False)
        ],
    ),
)
def test_gpus_use_cudnn(cudnn, H, Hv, dim, causal):
    arrays = _arrays(1, 4, 2, H, Hv, length=32, dtype=BFLOAT16)[:3]
    o = softmax_attention(*arrays, causal=causal)
    (call,) = cudnn.calls
    assert [shape[-1] for shape in call.shapes] == [dim] * 3
    assert (call.is_causal, call.scale) == (causal, H**-0.5)
    sees = np.tril(np.ones((1, 32, 32), bool)) | (not causal)
    assert o.shape == (1, 32, 4, Hv)
    np.testing.assert_allclose(np.asarray(o, np.float64), _numpy(*arrays, sees), atol=0.03)


CUDNN_REFUSES = [
    (dict(dtype=FLOAT32), {}, "float32: must be bfloat16 or float16"),
    (dict(H=320), {}, "head dim of 320 is over 256"),
    ({}, dict(query_positions_T=zigzag(256, 2)), "zig-zag"),
    ({}, dict(key_positions_S=zigzag(256, 2)), "zig-zag"),
    ({}, dict(segments_BS=jnp.zeros((2, 256), jnp.int32)), "segments are not taken"),
    ({}, dict(mesh=dict(sequence=2)), "sequence = 2 devices"),
    (dict(B=6), dict(mesh=dict(data=2, fsdp=2)), "batch of 6 is not .* data x fsdp = 4"),
    (dict(N=6, K=6), dict(mesh=dict(tensor=4)), "6 query heads on 6 KV .* tensor = 4"),
    (dict(N=6, K=2), dict(mesh=dict(tensor=4)), "6 query heads on 2 KV .* tensor = 4"),
    (dict(N=12, K=3), dict(mesh=dict(tensor=4)), "12 query heads on 3 KV .* tensor = 4"),
]


@pytest.mark.parametrize("shape, options, message", CUDNN_REFUSES, ids=lambda x: str(x)[:20])
def test_cudnn_says_what_it_does_not_take(cudnn, shape, options, message):
    if "mesh" in options:
        options = dict(mesh=_mesh(**options["mesh"]))
    arrays = _shapes(**shape)
    with pytest.raises(NotImplementedError, match=f"^cudnn.*{message}.*'xla' takes this"):
        _trace(arrays, implementation="cudnn", **options)
    _trace(arrays, **options)
    assert not cudnn.calls


# Axes; KV heads of 4 query heads.
CUDNN_MESHES = [
    (dict(data=2, fsdp=2, tensor=2), 4),
    (dict(fsdp=2, tensor=4), 2),  # fewer KV heads than devices
    (dict(data=4, tensor=2), 1),
]


@pytest.mark.parametrize("sizes, K", quick.only(CUDNN_MESHES[1:2], CUDNN_MESHES), ids=str)
def test_cudnn_on_several_devices(cudnn, sizes, K):
    """Each calls it with its own rows and heads, and all are what XLA is on one, in float64.

    Outputs, probabilities and gradients are rounded to 8 bits: a few times 2^-9.
    """
    mesh, length = _mesh(**sizes), 16
    arrays = _arrays(4, 4, K, 16, 24, length=length, dtype=BFLOAT16)
    rows, tensor = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
    split = NamedSharding(mesh, P(("data", "fsdp")))
    placed = [jax.device_put(x, split) for x in arrays]
    got = _run(placed, causal=True, mesh=mesh)
    q, k, v = cudnn.calls[0].shapes
    assert q == (4 // rows, length, 4 // tensor, 24)
    assert k == v == (4 // rows, length, max(K // tensor, 1), 24)
    assert all(call.manual for call in cudnn.calls)
    _assert_near(got, _exact(arrays, causal=True), 8 * 2.0**-9)


def test_older_gpus_have_narrower_heads(cudnn):
    _trace(_shapes(H=192))
    assert len(cudnn.calls) == 1
    cudnn.gpu.compute_capability = "8.0"
    with pytest.raises(NotImplementedError, match="192 is over 128, its limit on a GPU"):
        _trace(_shapes(H=192), implementation="cudnn")


def test_a_gpu_that_is_not_there_gets_xla(cudnn, monkeypatch):
    """cuDNN's plans are made by cuDNN: compiling ahead of time has none."""
    monkeypatch.setattr(cudnn_lib, "_gpu", lambda: None)
    _trace(_shapes())
    assert not cudnn.calls
    with pytest.raises(NotImplementedError, match="on a machine with an NVIDIA GPU"):
        _trace(_shapes(), implementation="cudnn")


def test_cpus_get_xla(monkeypatch):
    seen = []
    monkeypatch.setitem(api._IMPLEMENTATIONS, "xla", lambda *args: seen.append(1) or args[0])
    _trace(_shapes())
    _trace(_shapes(), mesh=_mesh(data=2))
    assert seen == [1, 1]


BAD = [
    (dict(implementation="flash"), "'flash': must be one of xla, splash, cudnn"),
    (dict(query_positions_T=np.arange(255)), r"must be int \[256\]"),
    (dict(key_positions_S=np.arange(256.0)), r"must be int \[256\]"),
    (dict(query_segments_BT=np.zeros((2, 256), int)), "segments_BS are needed"),
]


@pytest.mark.parametrize("options, message", BAD, ids=lambda x: str(x)[:20])
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        _trace(_shapes(), **options)


def test_shapes_that_do_not_fit():
    q, k, v = _shapes()
    wrong = (_shapes(N=3)[0], k, v), (q, k, _shapes(K=4)[2]), (_shapes(H=64)[0], k, v)
    for arrays in (*wrong, (q, *_shapes(B=4)[1:]), (_shapes(B=4)[0], k, v)):
        with pytest.raises(ValueError, match="do not fit"):
            _trace(arrays)
