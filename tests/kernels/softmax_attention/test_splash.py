"""Splash attention, interpreted against float64 and compiled for absent TPUs."""

import functools

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
    splash_attention_mask_info as mask_info,
)
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from kvjax.foundation import logs
from kvjax.hardware import topology
from kvjax.kernels.softmax_attention import api, splash
from kvjax.kernels.softmax_attention.api import softmax_attention, zigzag
from tests import quick
from tests.kernels.softmax_attention import cases
from tests.kernels.softmax_attention.cases import AXES, BFLOAT16, FLOAT32

# -- interpreted -----------------------------------------------------------------------------------

# N, K, H, Hv, causal, segments.
SPLASH = [
    (4, 2, 64, 128, True, True),
    pytest.param((2, 2, 24, 40, False, False), marks=pytest.mark.slow),
    pytest.param((4, 1, 192, 128, True, False), marks=pytest.mark.slow),
    pytest.param((4, 1, 192, 128, False, True), marks=pytest.mark.slow),
    pytest.param((3, 1, 40, 24, True, True), marks=pytest.mark.slow),
]


def _case(B, N, K, H, Hv, causal, segmented, dtype=FLOAT32):
    options = dict(causal=causal, segment_ids_BS=cases.segments(B) if segmented else None)
    return cases.arrays(B, N, K, H, Hv, dtype=dtype), options


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLASH, ids=str)
def test_splash_equals_xla_in_float64(small_blocks, case):
    """Tolerance: sums over up to 384 keys and 192 channels, with independent rounding errors."""
    arrays, options = _case(2, *case)
    got = cases.run(arrays, implementation="splash", **options)
    cases.assert_near(got, cases.exact(arrays, **options), 64 * np.finfo(np.float32).eps)


@pytest.mark.slow
@pytest.mark.parametrize("case", [SPLASH[0], (2, 2, 128, 128, True, False)], ids=str)
def test_splash_in_bfloat16(small_blocks, case):
    """Scaled queries, probabilities and outputs are rounded to 8 bits: a few times 2^-9."""
    arrays, options = _case(1, *case, dtype=BFLOAT16)
    got = cases.run(arrays, implementation="splash", **options)
    cases.assert_near(got, cases.exact(arrays, **options), 8 * 2.0**-9)


@pytest.mark.slow
def test_splash_scale(small_blocks):
    arrays = cases.arrays(1, 2, 2, 16, 16)
    got = cases.run(arrays, implementation="splash", causal=True, scale=0.7)
    cases.assert_near(
        got, cases.exact(arrays, causal=True, scale=0.7), 64 * np.finfo(np.float32).eps
    )
    default_scale = cases.exact(arrays, causal=True)
    assert np.abs(got[0] - default_scale[0]).max() > 0.1


@pytest.mark.slow
def test_splash_softcap(small_blocks):
    arrays, options = cases.arrays(1, 2, 2, 16, 16), dict(causal=True, softcap=0.8)
    got = cases.run(arrays, implementation="splash", **options)
    cases.assert_near(got, cases.exact(arrays, **options), 64 * np.finfo(np.float32).eps)
    uncapped = cases.exact(arrays, causal=True)
    assert np.abs(got[0] - uncapped[0]).max() > 0.05


@pytest.mark.parametrize("window", quick.only([200], [2, 100, 128, 200]))
def test_splash_window(small_blocks, window):
    """Windows within a block of 128, of a whole block, and with blocks that no query sees."""
    arrays, options = cases.arrays(1, 2, 2, 16, 16), dict(causal=True, window=window)
    got = cases.run(arrays, implementation="splash", **options)
    cases.assert_near(got, cases.exact(arrays, **options), 64 * np.finfo(np.float32).eps)


@pytest.mark.slow
def test_inside_a_shard_map(small_blocks):
    """Without a mesh, arrays belong to one device."""
    arrays, mesh = cases.arrays(2, 2, 2, 16, 16), cases.mesh(data=2)
    run = functools.partial(softmax_attention, causal=True, implementation="splash")
    split = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    np.testing.assert_allclose(jax.jit(split)(*arrays[:3]), run(*arrays[:3]), rtol=1e-6, atol=1e-6)


# -- masks -----------------------------------------------------------------------------------------

# Orders of 2048 tokens over devices; in some, blocks of queries end where blocks of keys do.
ORDERS = {
    "in order": (np.arange(2048), 1),
    "2 devices": (zigzag(2048, 2), 2),
    "4 devices": (zigzag(2048, 4), 4),
    "a token early": (np.roll(np.arange(2048), -1), 1),
    "a token late": (np.roll(np.arange(2048), 1), 1),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("process", [mask_info.process_mask, mask_info.process_mask_dkv])
@pytest.mark.parametrize("window", [0, 700])
def test_blocks_of_the_mask_are_those_of_its_elements(order, process, window):
    """Two elements per block give the same result as all [128, 256] elements."""
    (positions, shards), length = ORDERS[order], 2048
    far = positions[:, None] - np.arange(length)[None]
    dense = (far >= 0) & (far < (window or length))
    infos = []
    for mask in (splash._Causal(positions, length, window), splash_mask.NumpyMask(dense)):
        heads = splash_mask.MultiHeadMask([mask] * 2)
        infos.append(process(heads, (128, 256), q_seq_shards=shards)[0])
    assert infos[0].partial_mask_blocks is None
    np.testing.assert_array_equal(infos[0].q_sequence, positions)
    assert set(np.unique(infos[0].block_mask)) == {0, 1, 2}
    np.testing.assert_array_equal(infos[0].block_mask, infos[1].block_mask)
    np.testing.assert_array_equal(infos[0].data_next, infos[1].data_next)


def test_masks_of_equal_positions_are_equal():
    """The library caches tables by mask, so masks need equality and hashes."""
    mask = splash._Causal(zigzag(512, 2), 512)
    assert mask == splash._Causal(zigzag(512, 2), 512)
    assert hash(mask) == hash(splash._Causal(zigzag(512, 2), 512))
    assert mask != splash._Causal(zigzag(512, 4), 512)
    assert mask != splash._Causal(zigzag(512, 2), 1024)
    assert mask != splash._Causal(zigzag(512, 2), 512, window=3)


# -- refusals --------------------------------------------------------------------------------------

SPLASH_REFUSES = [
    (dict(dtype=jnp.float16), {}, "float16: must be bfloat16 or float32"),
    (dict(length=200), {}, "200 queries are not a multiple of 128"),
    (dict(length=256), dict(sequence=4), "256 queries are not .* 128 x sequence = 4 devices"),
    (dict(B=3), dict(fsdp=2), "batch of 3 is not divided by data x fsdp = 2"),
    (dict(N=6, K=6), dict(tensor=4), "6 query heads on 6 KV heads .* tensor = 4"),
    (dict(N=12, K=3), dict(tensor=4), "12 query heads on 3 KV heads .* tensor = 4"),
    (dict(N=12, K=6), dict(tensor=4), "12 query heads on 6 KV heads .* tensor = 4"),
    (dict(H=576, Hv=576), {}, "2304 bytes exceed 2176"),
]


@pytest.mark.parametrize("shape, sizes, message", SPLASH_REFUSES, ids=lambda x: str(x)[:40])
def test_splash_refusals(monkeypatch, caplog, shape, sizes, message):
    """A refused kernel hints at XLA if it was named; else XLA replaces it, with one warning."""
    arrays, options = cases.shapes(**shape), dict(mesh=cases.mesh(**sizes) if sizes else None)
    with pytest.raises(NotImplementedError, match=f"^splash.*{message}.*'xla' supports them"):
        cases.trace(arrays, implementation="splash", **options)
    monkeypatch.setattr(api, "platform", lambda mesh: "tpu")
    logs.log_once.cache_clear()
    for _ in range(2):
        assert cases.trace(arrays, **options).shape == arrays[0].shape[:3] + arrays[2].shape[3:]
    (record,) = caplog.records
    assert message.split(" ")[0] in record.getMessage()


def test_keys_of_another_length_and_blocks_for_them():
    q, k, v = (*cases.shapes(length=256)[:1], *cases.shapes(length=640)[1:])
    run = functools.partial(cases.trace, implementation="splash")
    assert run((q, k, v), causal=False).shape == q.shape
    with pytest.raises(NotImplementedError, match="200 keys are not a multiple of 128"):
        run((q, *cases.shapes(length=200)[1:]))
    order = np.arange(640)[::-1]
    assert run((q, k, v), key_positions_S=order).shape == q.shape
    assert run((q, k, v), key_positions_S=order + 1, causal=False).shape == q.shape
    with pytest.raises(NotImplementedError, match="must be 0 .. S - 1 in some order"):
        run((q, k, v), key_positions_S=order + 1)
    blocks = {
        (384, 640, 512): (384, 640, 128),
        (2048, 4096, 1024): (1024, 1024, 512),
        (2048, 4096, 1025): (512, 512, 512),
        (128, 1152, 512): (128, 384, 384),
    }
    for sizes, (queries, keys, compute) in blocks.items():
        b = splash._block_sizes(*sizes)
        assert (b.block_q, b.block_q_dkv, b.block_q_dq) == (queries,) * 3
        assert (b.block_kv, b.block_kv_dkv, b.block_kv_dq) == (keys,) * 3
        assert (b.block_kv_compute, b.block_kv_dkv_compute) == (compute,) * 2


# -- compiled for TPUs -----------------------------------------------------------------------------


def _compiled(mesh, *, length, N, K, H, Hv, dtype=BFLOAT16, policy=None, segmented=False):
    """Compiles forward and backward pass over a batch of 4 with the device's default."""

    def place(x, *axes):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P(("data", "fsdp"), *axes))
        )

    q, k, v = cases.shapes(B=4, length=length, N=N, K=K, H=H, Hv=Hv, dtype=dtype)
    order = zigzag(length, mesh.shape["sequence"])
    segments = jnp.zeros((4, length), jnp.int32) if segmented else None

    def f(q, k, v):
        o = softmax_attention(
            q, k, v, causal=True, mesh=mesh, query_positions_T=order, segment_ids_BS=segments
        )
        return jnp.square(o.astype(jnp.float32)).sum()

    if policy is not None:
        f = jax.checkpoint(f, policy=policy)
    arrays = place(q, "sequence", "tensor"), place(k), place(v)
    return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2))).lower(*arrays).compile()


def _tpus(name, **sizes):
    devices = topology.tpu_devices(name)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = np.array(devices[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)


@pytest.mark.aot
@pytest.mark.parametrize("H", [128, 192])
@pytest.mark.parametrize("sizes", [dict(sequence=2, fsdp=2), dict(fsdp=4)], ids=str)
def test_logits_are_never_held(sizes, H):
    """Three kernels, and no array [.., T, S]: temporaries are under a quarter of one."""
    mesh, N, length = _tpus("v5e:2x2", **sizes), 8, 8192
    compiled = _compiled(mesh, length=length, N=N, K=N, H=H, Hv=128)
    text, queries = compiled.as_text(), length // mesh.shape["sequence"]
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert f",{queries},128]" in text
    assert f"{queries},{length}]" not in text
    logits = 4 // mesh.shape["fsdp"] * N * queries * length * 2  # bfloat16, of a device
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 4


@pytest.mark.aot
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("H, Hv, dtype", [(256, 256, BFLOAT16), (192, 128, FLOAT32)])
def test_blocks_fit_every_tpu(name, H, Hv, dtype):
    """The widest heads with blocks of full size, and wider ones, with segments."""
    mesh = _tpus(name, fsdp=4)
    compiled = _compiled(mesh, length=4096, N=2, K=1, H=H, Hv=Hv, dtype=dtype, segmented=True)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.aot
def test_rows_of_128k_tokens():
    """Neither building nor compiling the kernel makes an array [T, S]."""
    mesh = _tpus("v5e:4x4", sequence=16)
    compiled = _compiled(mesh, length=131_072, N=2, K=2, H=128, Hv=128)
    keys = 4 * 131_072 * 2 * 256 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * keys
    assert len(compiled.as_text()) < 1e6


@pytest.mark.aot
def test_named_residuals_spare_the_forward_pass():
    mesh, policies = _tpus("v5e:2x2", fsdp=4), jax.checkpoint_policies

    def kernels(policy):
        return (
            _compiled(mesh, length=256, N=2, K=2, H=128, Hv=128, policy=policy)
            .as_text()
            .count('custom_call_target="tpu_custom_call"')
        )

    assert kernels(policies.nothing_saveable) == 4
    assert kernels(policies.dots_with_no_batch_dims_saveable) == 4
    assert kernels(policies.save_only_these_names(splash.RESIDUALS)) == 3
