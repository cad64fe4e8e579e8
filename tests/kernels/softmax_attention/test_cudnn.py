"""Arguments and refusals of cuDNN attention, with XLA in its place."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from kvjax.kernels.softmax_attention import api, cudnn as cudnn_lib
from kvjax.kernels.softmax_attention.api import softmax_attention, zigzag
from tests import quick
from tests.kernels.softmax_attention import cases
from tests.kernels.softmax_attention.cases import BFLOAT16, FLOAT32


@pytest.fixture
def cudnn(monkeypatch):
    """A fake GPU; its cuDNN attention is XLA's and records the arguments."""
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
    arrays = cases.arrays(1, 4, 2, H, Hv, length=32, dtype=BFLOAT16)[:3]
    o = softmax_attention(*arrays, causal=causal)
    (call,) = cudnn.calls
    assert [shape[-1] for shape in call.shapes] == [dim] * 3
    assert (call.is_causal, call.scale) == (causal, H**-0.5)
    sees = np.tril(np.ones((1, 32, 32), bool)) | (not causal)
    assert o.shape == (1, 32, 4, Hv)
    np.testing.assert_allclose(np.asarray(o, np.float64), cases.numpy(*arrays, sees), atol=0.03)


CUDNN_REFUSES = [
    (dict(dtype=FLOAT32), {}, "float32: must be bfloat16 or float16"),
    (dict(H=320), {}, "head dim of 320 is over 256"),
    ({}, dict(query_positions_T=zigzag(256, 2)), "zig-zag"),
    ({}, dict(segment_ids_BS=jnp.zeros((2, 256), jnp.int32)), "segment ids are not supported"),
    ({}, dict(window=100), "window .100 tokens. is not supported"),
    ({}, dict(softcap=50.0), "soft cap of logits .50. is not supported"),
    ({}, dict(mesh=dict(sequence=2)), "sequence = 2 devices"),
    (dict(B=6), dict(mesh=dict(data=2, fsdp=2)), "batch of 6 is not .* data x fsdp = 4"),
]


@pytest.mark.parametrize("shape, options, message", CUDNN_REFUSES, ids=lambda x: str(x)[:20])
def test_cudnn_refusals(cudnn, shape, options, message):
    if "mesh" in options:
        options = dict(mesh=cases.mesh(**options["mesh"]))
    arrays = cases.shapes(**shape)
    with pytest.raises(NotImplementedError, match=f"^cudnn.*{message}.*'xla' supports them"):
        cases.trace(arrays, implementation="cudnn", **options)
    cases.trace(arrays, **options)
    assert not cudnn.calls


# Axes; KV heads of 4 query heads.
CUDNN_MESHES = [
    (dict(data=2, fsdp=2, tensor=2), 4),
    (dict(fsdp=2, tensor=4), 2),  # fewer KV heads than devices
    (dict(data=4, tensor=2), 1),
]


@pytest.mark.parametrize("sizes, K", quick.only(CUDNN_MESHES[1:2], CUDNN_MESHES), ids=str)
def test_cudnn_on_several_devices(cudnn, sizes, K):
    """Each device calls it with its own rows and heads; the result is XLA's on one, in float64.

    Outputs, probabilities and gradients are rounded to 8 bits: a few times 2^-9.
    """
    mesh, length = cases.mesh(**sizes), 16
    arrays = cases.arrays(4, 4, K, 16, 24, length=length, dtype=BFLOAT16)
    rows, tensor = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
    split = NamedSharding(mesh, P(("data", "fsdp")))
    placed = [jax.device_put(x, split) for x in arrays]
    got = cases.run(placed, causal=True, mesh=mesh)
    q, k, v = cudnn.calls[0].shapes
    assert q == (4 // rows, length, 4 // tensor, 24)
    assert k == v == (4 // rows, length, max(K // tensor, 1), 24)
    assert all(call.manual for call in cudnn.calls)
    cases.assert_near(got, cases.exact(arrays, causal=True), 8 * 2.0**-9)


def test_older_gpus_have_narrower_heads(cudnn):
    cases.trace(cases.shapes(H=192))
    assert len(cudnn.calls) == 1
    shorter = cases.shapes(length=128)[:1] + cases.shapes(length=256)[1:]
    with pytest.raises(
        NotImplementedError, match="128 queries over 256 keys: must be equal numbers"
    ):
        cases.trace(shorter, implementation="cudnn")
    assert cases.trace(shorter, implementation="cudnn", causal=False).shape == shorter[0].shape
    cudnn.gpu.compute_capability = "8.0"
    with pytest.raises(NotImplementedError, match="192 is over 128, its limit on a GPU"):
        cases.trace(cases.shapes(H=192), implementation="cudnn")
    cases.trace(cases.shapes(H=128), implementation="cudnn")
    calls = len(cudnn.calls)
    for older in ("7.5", "gfx942"):  # a T4; AMD
        cudnn.gpu.compute_capability = older
        with pytest.raises(NotImplementedError, match="needs compute capability 8"):
            cases.trace(cases.shapes(H=64), implementation="cudnn")
        cases.trace(cases.shapes(H=64))
    assert len(cudnn.calls) == calls


_FIRST_GPU = cudnn_lib._gpu


def test_without_a_gpu_xla_is_used(cudnn, monkeypatch):
    """Compiling cuDNN attention ahead of time would need cuDNN."""
    monkeypatch.setattr(cudnn_lib, "_gpu", _FIRST_GPU)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: [cudnn.gpu, None])
        assert cudnn_lib._gpu() is cudnn.gpu
    cases.trace(cases.shapes())
    assert not cudnn.calls
    with pytest.raises(NotImplementedError, match="needs cuDNN and an NVIDIA GPU"):
        cases.trace(cases.shapes(), implementation="cudnn")
