"""The GPU kernel, interpreted on a model of shared memory (`hopper`), and compiled for an H200."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.decode_attention import cache_layouts, shapes
from kvjax.kernels.decode_attention.cache_layouts.factored import FactoredSizes
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentSizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes
from kvjax.kernels.decode_attention.gpu import adapters, attention as gpu, combine, plans
from kvjax.kernels.decode_attention.shapes import Quantized
from kvjax.kernels.profile import gpu_static
from tests import quick
from tests.kernels.decode_attention import agreement, hopper, ptx

INTERPRET = hopper.InterpretGPUParams(detect_races=True)
slow = pytest.mark.slow
D12 = {name: shapes.SHAPES["d12"][name] for name in shapes.OURS}


def _run(inputs, cache, first_B, **parameters):
    return gpu.decode_attention(inputs, cache, first_B, interpret=INTERPRET, **parameters)


@functools.cache
def _jitted(**parameters):
    return jax.jit(functools.partial(_run, **parameters))


NO_ROPE = ResidualSizes(N=8, K=4, J=2, H=64, Hv=192, rope_base=None)
# The edges of splits of 128 tokens and tiles of 64; 256: the cache of 256 tokens is full.
EDGES = (0, 63, 64, 127, 128, 200, 256)


@pytest.mark.parametrize(
    "shape, firsts, parameters",
    [
        (GroupedSizes(N=6, K=2, H=64, Hv=192), (63, 128, 255), dict(tile_kv=64, split=128)),
        (LatentSizes(N=3, C=128), (256,), dict(split=128, slots=3)),
        (LatentSizes(N=4, C=128, J=2, key_channels=64, Hv=0), (200,), dict()),  # GTA
        (ResidualSizes(N=8, K=4, J=1, Hv=64), (200,), dict(split=128, wgmma_in_flight=2)),
        (NO_ROPE, (200,), dict(split=128)),
        (FactoredSizes(N=4, K=2, J=2, Hv=64), (200,), dict(split=128)),  # GQA, keys of rank 64
        (Quantized(GroupedSizes(N=6, K=2, H=64, Hv=192)), (200,), dict(tile_kv=64, split=128)),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                (GroupedSizes(N=1, K=1), EDGES, dict(tile_kv=64, split=128)),
                (ResidualSizes(N=1, K=1, Hv=64), (0, 127, 128, 255), dict(split=128)),
                (GroupedSizes(N=10, K=1, H=64, Hv=64), (150,), dict()),  # more queries than eight
                (LatentSizes(N=3, C=128), (0, 64, 255), dict(split=128, slots=3)),
                (LatentSizes(N=4, C=128, J=2, P=0, Hv=0), (255,), dict(slots=3)),  # held whole
                (GroupedSizes(N=4, K=2), (255, 130), dict()),  # the defaults: one split
                (
                    GroupedSizes(N=4, K=4, H=32),
                    (190,),
                    dict(tile_kv=64, split=128, slots=3),
                ),  # thin keys
                (ResidualSizes(N=4, K=2, Hv=64, scaled=False), (190,), dict(split=256, slots=3)),
                (ResidualSizes(N=2, K=2, J=2, R=128, H=64, Hv=64), (255,), dict(split=128)),
                (
                    ResidualSizes(N=10, K=2, H=64, Hv=64, rope_base=None, scaled=False),
                    (70,),
                    dict(tile_kv=64),
                ),
                (LatentSizes(N=9, C=64), (130,), dict(tile_kv=128)),
                # Two latents share a slab; two KV heads share a latent; without RoPE.
                (FactoredSizes(N=4, K=4, J=4, R=32, Rv=32, Hv=64), (200,), dict(split=128)),
                (FactoredSizes(N=4, K=4, J=2, R=128, H=64, Hv=64), (100, 255), dict(split=128)),
                (
                    FactoredSizes(N=8, K=4, J=2, R=32, Hv=64, rope_base=None),
                    (200,),
                    dict(tile_kv=64, split=128),
                ),
                (FactoredSizes(N=4, K=2, J=2, R=0, Rv=64), (130,), dict()),
                (LatentSizes(N=6, C=128, J=2), (130,), dict(split=128)),  # GLA
                (ResidualSizes(N=12, K=4, J=1, Hv=64), (200,), dict(split=128, wgmma_in_flight=3)),
                (Quantized(ResidualSizes(N=8, K=4, J=1, Hv=64)), (255, 130), dict(split=128)),
                (Quantized(GroupedSizes(N=4, K=4, H=32)), (190,), dict()),
                (Quantized(NO_ROPE), (200,), dict(split=128)),
                (
                    Quantized(FactoredSizes(N=4, K=4, J=4, R=32, Rv=32, Hv=64)),
                    (200,),
                    dict(split=128),
                ),
                (Quantized(LatentSizes(N=3, C=128)), (256,), dict(split=128)),
            )
        ),
    ],
)
def test_equals_the_definition(shape, firsts, parameters):
    run = _jitted(**parameters)
    agreement.check(run, shape, firsts=firsts, length=256, dtype=jnp.bfloat16, behind=np.nan)


@slow
def test_the_longest_split():
    """The table of 1,024 tokens is cut at its 64th singular value."""
    run = functools.partial(_run, split=1024)
    shape = ResidualSizes(N=1, K=1, Hv=64)
    agreement.check(run, shape, firsts=(1100,), length=1152, dtype=jnp.bfloat16)


def test_many_splits_are_combined_by_their_softmax_sums():
    """70 splits, of which sequences reach 70 and 3; the others hold NaN."""
    B, splits, split, g, k, r, V, R = 2, 70, 64, 1, 2, 2, 64, 64
    plan = plans.Plan(keys=(), values=(), columns=8, heads=k, group_size=r, scale=1.0)
    rng = np.random.default_rng(0)
    o = rng.normal(size=(B, splits, g, 8, V + k * R))
    maximum, total = (rng.normal(size=(B, 128, g, 8), scale=4) for _ in range(2))
    total, expand_KRV = np.abs(total) + 1, rng.normal(size=(g * k, R, V))
    first_B = np.array([splits * split, 3 * split - 1])
    weights = np.zeros((B, splits, g, 8))
    for b, reached in enumerate((splits, 3)):
        seen = maximum[b, :reached]
        weights[b, :reached] = np.exp2(seen - seen.max(axis=0))
        for x in (o, maximum, total):
            x[b, reached:] = np.nan
    shares = weights / np.nansum(weights * total[:, :splits], axis=1, keepdims=True)
    o_BgnC = np.nansum(shares[..., None] * o, axis=1)
    expected = o_BgnC[:, 0, : k * r, :V]
    for n in range(k * r):
        latent_BR = o_BgnC[:, 0, n, V + n // r * R :][:, :R]
        expected[:, n] += latent_BR @ expand_KRV[n // r]
    arrays = [jnp.asarray(x, jnp.float32) for x in (o, maximum, total)]
    found = combine.combine(
        plan,
        *arrays,
        jnp.asarray(first_B, jnp.int32),
        jnp.asarray(expand_KRV, jnp.bfloat16),
        split=split,
        dtype=jnp.dtype(jnp.float32),
        interpret=INTERPRET,
    )
    np.testing.assert_allclose(found, expected, atol=4e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    "shape, dtype",
    [
        (GroupedSizes(N=2, K=2), jnp.bfloat16),
        (LatentSizes(N=2, C=64), jnp.float32),
        (LatentSizes(N=2, C=64, Hv=0), jnp.bfloat16),
        (FactoredSizes(N=2, K=2, J=2, Rv=64), jnp.float32),
    ],
)
def test_what_a_matrix_still_expands_is_not_rounded(monkeypatch, shape, dtype):
    problem = shapes.abstract(shape, batch=1, length=128, dtype=jnp.bfloat16)
    dtypes, merge = [], combine.combine

    def noted(*arguments, dtype, **options):
        dtypes.append(dtype)
        return merge(*arguments, dtype=dtype, **options)

    monkeypatch.setattr(combine, "combine", noted)
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    o = jax.eval_shape(_run, *problem, first_B)
    assert dtypes == [dtype] and o.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", D12)
def test_equals_the_definition_at_d12(name):
    agreement.check(_run, D12[name], firsts=(1151, 0, 1024), length=1152, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "N, K, R, H",
    quick.only(
        [(16, 8, 64, 192), (24, 24, 192, 192)],
        [
            (*heads, *dims)
            for heads in ((8, 8), (16, 8), (24, 24))
            for dims in ((64, 192), (64, 256), (128, 256), (192, 192), (64, 512))
        ],
    ),
)
def test_shapes_that_check_takes_can_be_traced(N, K, R, H):
    """By default XLA takes only shapes that `check` refuses."""
    shape = ResidualSizes(N=N, K=K, R=R, H=H)
    inputs, cache = shapes.abstract(shape, batch=1, length=4096, dtype=jnp.bfloat16)
    try:
        gpu.check(inputs, cache)
    except NotImplementedError:
        return
    o = jax.eval_shape(_run, inputs, cache, jax.ShapeDtypeStruct((1,), jnp.int32))
    assert o.shape == (1, 1, N, 128)
    plan = adapters.ResidualAdapter(inputs, cache).plan
    basis = -(-H // 128) * 128 // 64  # ring slots of the basis; at least one more is needed to load
    assert plans.slots(plan, 64) > basis


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [GroupedSizes(N=2, K=2, H=64), ResidualSizes(N=1, K=1), LatentSizes(N=2, C=64)],
)
def test_queries_in_float32_are_taken(shape):
    """Queries of absorbed MLA are float32."""

    @jax.jit
    def run(inputs, cache, first_B):
        wide = dataclasses.replace(inputs, query=inputs.query.astype(jnp.float32))
        return _run(wide, cache, first_B)

    agreement.check(run, shape, firsts=(100,), length=128, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "shape, parameters, message",
    [
        (ResidualSizes(N=1, K=1), dict(split=2048), "split = 2048: at most 1024 with RoPE base"),
        (ResidualSizes(N=1, K=1), dict(tile_kv=128), r"tile_kv = 128: must be 64 .*ROTATED_TILE"),
        (ResidualSizes(N=1, K=1, H=256), dict(slots=4), "slots at least 5"),
        (LatentSizes(N=2, C=256), dict(slots=4), "slots at least 5"),
        (GroupedSizes(N=1, K=1), dict(split=192), "split must be a multiple of tile_kv"),
        (GroupedSizes(N=1, K=1), dict(slots=3, wgmma_in_flight=4), "wgmma_in_flight = 4: split"),
        (GroupedSizes(N=1, K=1), dict(wgmma_in_flight=-1), "wgmma_in_flight = -1: split must be"),
    ],
)
def test_sizes_that_do_not_fit_each_other(shape, parameters, message):
    inputs, cache = shapes.abstract(shape, batch=1, length=2048, dtype=jnp.bfloat16)
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(_run, **parameters), inputs, cache, first_B)


def test_slots_and_registers_of_real_models():
    """Ring slots that fit half a multiprocessor, and registers of a thread, at d36."""
    sizes = {}
    for name in ("mha", "gqa", "thin_keys", "lrkv", "lrkv_no_rope", "mla"):
        shape = shapes.SHAPES["d36"][name]
        problem = shapes.abstract(shape, batch=1, length=128, dtype=jnp.bfloat16)
        adapter = adapters.ADAPTERS[type(problem[0])](*problem)
        sizes[name] = (
            plans.slots(adapter.plan, adapter.tile_kv),
            adapter.plan.registers(adapter.tile_kv),
        )
    assert sizes == dict(
        mha=(6, 24),
        gqa=(6, 24),
        thin_keys=(6, 32),
        lrkv=(7, 104),
        lrkv_no_rope=(5, 48),
        mla=(22, 168),
    )


@pytest.mark.parametrize("batch", [1, 4, 32, 500])
@pytest.mark.parametrize("length", [128, 4224, 32_768])
def test_splits_fill_the_multiprocessors_if_there_are_enough_tokens(batch, length):
    split = plans.default_split(batch, length, 128, 132)
    count = batch * -(-length // split)
    assert split % 128 == 0 and (split >= 256 or length < 256)
    assert count >= 132 or split <= 384
    assert count <= 2 * 8 * 132 or split >= length  # few enough to merge


def test_layers_share_one_kernel():
    """Lowering a kernel for a GPU takes seconds."""
    shape = GroupedSizes(N=1, K=1, H=64, Hv=64)
    inputs, cache = shapes.abstract(shape, batch=1, length=128, dtype=jnp.bfloat16)

    @jax.jit
    def layers(inputs, caches, first_B):
        return [_run(inputs, cache, first_B) for cache in caches]

    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    text = layers.lower(inputs, [cache] * 3, first_B).as_text()
    assert text.count("func.func private @attend") == 1 and text.count("call @attend") == 3


def _replaced(field, change):
    return lambda o, c: (dataclasses.replace(o, **{field: change(getattr(o, field))}), c)


def _cast(o, c):
    return o, {name: x.astype(jnp.float32) for name, x in c.items()}


def _tied(o, c):
    inputs = dict(query=o.query, scale=1.0, rope_base=None, norm_epsilon=None)
    return cache_layouts.TiedInputs(**inputs), c


PLAIN = GroupedSizes(N=2, K=2)
BIAS = cache_layouts.PositionBias(weights=np.ones(4))


@pytest.mark.parametrize(
    "shape, change, message",
    [
        (PLAIN, lambda o, c: (o, {k: v[..., :100] for k, v in c.items()}), "S = 100"),
        (PLAIN, _cast, "base_key in bfloat16: here float32"),
        (PLAIN, _replaced("query", lambda q: jnp.repeat(q, 2, 1)), "here T = 2"),
        (PLAIN, _replaced("bias", lambda _: BIAS), "no bias"),
        (PLAIN, _tied, "a cache of kind 'tied'"),
        (GroupedSizes(N=3, K=3, H=32), None, "2 heads of H = 32, Hv = 128.*K = 3"),
        (GroupedSizes(N=80, K=1, H=1024), None, "memory for 80 queries on 16 slabs"),
        (LatentSizes(N=64, C=512), None, "registers for 64 queries on 8 slabs"),
        (ResidualSizes(N=2, K=2, R=32), None, "R = 32"),
        (LatentSizes(N=2, C=96), None, "C = 96, P = 64"),
    ],
)
def test_refusals_name_the_reason_and_the_fallback(shape, change, message):
    arrays = shapes.abstract(shape, batch=1, length=128, dtype=jnp.bfloat16)
    if change is not None:
        arrays = jax.eval_shape(change, *arrays)
    with pytest.raises(NotImplementedError, match=f"{message}.*'xla'"):
        gpu.check(*arrays)


@pytest.mark.aot
@pytest.mark.parametrize(
    "model, name, length",
    [
        *(("d12", name, 4224) for name in D12),
        *(("d36", name, 32_768) for name in D12),
        *(("d36", name, 4224) for name in ("mha", "lrkv", "lrkv_no_rope", "mla")),
        *(("d36", name, 32_768) for name in ("mha_int8", "lrkv_int8", "mla_int8")),
    ],
)
def test_compiles_without_spills_or_a_copy_of_the_cache(model, name, length):
    pytest.importorskip("jax_cuda13_plugin")
    shape = shapes.SHAPES[model][name]
    kernels, program = gpu_static.compiled(shape, batch=4, length=length)
    for resources, _ in kernels.values():
        assert resources["spill_bytes"] == 0 and resources["registers"] <= 255
        assert resources["shared_bytes"] <= 227 * 1024
    (_, attention_ptx), (_, combine_ptx) = kernels["decode_attention"], kernels["combine_splits"]
    assert not ptx.hazards(attention_ptx)
    # The second kernel may start early, so it waits before its first load.
    assert "griddepcontrol.launch_dependents" in attention_ptx
    assert "griddepcontrol.wait" not in attention_ptx
    before, waits, _ = combine_ptx.partition("griddepcontrol.wait")
    loads = re.findall(r"\bld\.(?!param|shared)", before)
    assert waits and not loads
    results = re.findall(r"= (\w+)\[([\d,]+)\]\S* (\w[\w-]*)\(", program.as_text())
    results = [(dtype, [int(dim) for dim in dims.split(",")], op) for dtype, dims, op in results]
    dtypes = {"float32": "f32", "bfloat16": "bf16", "int8": "s8"}
    _, cached = shapes.abstract(shape, batch=4, length=length, dtype=jnp.bfloat16)
    for field, dims in shape.fields().items():
        whole = dtypes[cached[field].dtype.name], 4 * math.prod(dims) * length
        of_slots = [(dtype, math.prod(dims), op) for dtype, dims, op in results if length in dims]
        operations = {op for *array, op in of_slots if tuple(array) == whole}
        assert "parameter" in operations and operations <= {"parameter", "bitcast"}, field
    temporary = program.memory_analysis().temp_size_in_bytes
    cache = 4 * length * shapes.bytes_per_token(shape, jnp.bfloat16)
    assert temporary < 0.2 * cache  # the splits' sums
