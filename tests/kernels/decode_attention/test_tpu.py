"""The TPU kernels, interpreted with races detected and memory poisoned, and compiled for TPUs."""

import dataclasses
import functools
import itertools

from flax import nnx
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention, attention as attention_lib, named
from kvjax.cache import cache as cache_lib
from kvjax.hardware import topology
from kvjax.kernels.decode_attention import cache_layouts, shapes
from kvjax.kernels.decode_attention.api import decode_attention
from kvjax.kernels.decode_attention.cache_layouts.factored import FactoredSizes
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentSizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes
from kvjax.kernels.decode_attention.gpu import attention as gpu
from kvjax.kernels.decode_attention.shapes import OURS, RIVALS, SHAPES, Quantized
from kvjax.kernels.decode_attention.tpu import attention as tpu, operators
from kvjax.kernels.decode_attention.tpu.interfaces import Cached, Component
from kvjax.kernels.decode_attention.tpu.pipeline import attend
from kvjax.kernels.profile import tpu_static
from kvjax.layers import rope
from tests.kernels.decode_attention import agreement, components as plain

INTERPRET = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    num_cores_or_threads=2,
)
interpreted = functools.partial(tpu.decode_attention, interpret=INTERPRET)
FLOAT32, BFLOAT16 = jnp.float32, jnp.bfloat16
DIAGONAL, TRANSPOSED = tpu.Variant(diagonal=True), tpu.Variant(transposed=True)
slow = pytest.mark.slow
OF_RIVALS = [(name, FLOAT32 if name == "gta" else BFLOAT16) for name in RIVALS]
QUANTIZED = [
    (f"{name}_int{bits}", BFLOAT16)
    for name in ("mha", "gqa", "lrkv", "lrkv_no_rope", "mla")
    for bits in (8, 4)
]


@functools.cache
def _jitted(**options):
    return jax.jit(functools.partial(interpreted, **options))


# -- components ------------------------------------------------------------------------------------

B, N, S, TILE_KV = 2, 6, 768, 256


_random = np.random.default_rng(0)


def _draw(*shape, sequences=(B,)):
    return jnp.asarray(_random.standard_normal((*sequences, *shape)), FLOAT32)


def _cached(K, rows, S, *, bits: int | None) -> Cached:
    if bits is None:
        return Cached(_draw(K, rows, S), FLOAT32)
    if bits == 8:
        array = jnp.asarray(_random.integers(-127, 128, (B, K, rows, S)), jnp.int8)
    else:
        low, high = _random.integers(1, 16, (2, B, K, rows // 2, S))
        array = jnp.asarray(low | (high << 4), jnp.uint8)
    return Cached(array, FLOAT32, scale=jnp.exp(_draw(K, 1, S)) / 2 ** (bits - 2))


def _components(of_rotated, bits: int | None):
    """Returns kinds of keys and values, in different sizes, and a key scale."""
    cached = functools.partial(_cached, bits=bits)
    own = operators.VectorKeys(_draw(N, 32), cached(3, 32, S))
    keys = cached(2, 16, S)
    shared = operators.MatrixKeys(_draw(2, 3, 16), keys)
    if of_rotated is None:
        are_keys = operators.MatrixValues(keys, group=3, transposed=True, are_keys=True)
        return [
            Component(own, operators.DiagonalValues(cached(N, 16, S))),
            Component(shared, are_keys),
            Component(operators.MatrixKeys(_draw(1, N, 48), cached(1, 48, S))),
        ], None
    expand_key, latents = _draw(3, 16, 32, sequences=()) / 4, cached(3, 16, S)
    rotating = of_rotated(
        _draw(N, 32), expand_key, latents, base=100.0, tile_kv=TILE_KV, origins=None
    )
    values = operators.MatrixValues(cached(2, 48, S), group=3, transposed=False)
    return [
        Component(shared, values),
        Component(rotating, operators.VectorValues(cached(3, 32, S), N=N)),
    ], 1 + 0.5 * jnp.tanh(_draw(3, 1, S))


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("of_rotated", [None, operators.RotatingKeys, operators.BasisKeys])
def test_the_pipeline_is_a_softmax_over_the_sum_of_its_components_logits(of_rotated, bits):
    """Two splits, one of them empty for a short sequence; two score tiles per tile."""
    components, key_scale = _components(of_rotated, bits)
    options = dict(
        heads=N, capacity=S, scale=0.25, key_scale=key_scale, tile_kv=TILE_KV, score_tile=128
    )
    options |= dict(splits=2, delay_values=of_rotated is not None, vmem_bytes=2**26)
    first_B = jnp.asarray([600, 100], jnp.int32)
    run = jax.jit(functools.partial(attend, components, interpret=INTERPRET, **options))
    got, expected = run(first_B), plain.attend(components, first_B, **options)
    assert not agreement.races()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, rtol=1e-5, atol=1e-5)


CASES = [
    (GroupedSizes(N=3, K=3, H=16, Hv=32), {}),
    (GroupedSizes(N=3, K=3, H=16, Hv=32), dict(variant=DIAGONAL)),
    (GroupedSizes(N=6, K=2, H=16, Hv=32), dict(tile_kv=128)),
    (ResidualSizes(N=6, K=3, R=16, H=128, Hv=32), dict(tile_kv=128, score_tile=128)),
    (ResidualSizes(N=3, K=3, R=16, H=128, Hv=32), {}),
    (ResidualSizes(N=3, K=3, R=16, H=128, Hv=32), dict(variant=tpu.Variant())),
    (ResidualSizes(N=12, K=6, J=2, R=16, H=32, Hv=48, rope_base=None, scaled=False), {}),
    (FactoredSizes(N=6, K=6, J=3, R=16, Rv=32, Hv=48), dict(tile_kv=128)),  # two heads, one latent
    (FactoredSizes(N=6, K=6, J=1, R=32, Rv=16, H=32, Hv=48, rope_base=None, scaled=False), {}),
    (FactoredSizes(N=4, K=4, J=4, R=16, Hv=48, rope_base=None), {}),
    (FactoredSizes(N=6, K=3, J=3, R=0, Rv=16, H=32, Hv=48), {}),
    (LatentSizes(N=6, C=32, P=16, Hv=48, J=2, key_channels=16), {}),
    (LatentSizes(N=3, C=48, P=0, Hv=0), dict(splits=2)),
    (Quantized(GroupedSizes(N=3, K=3, H=32, Hv=64)), {}),
    (Quantized(GroupedSizes(N=6, K=2, H=32, Hv=32)), {}),
    (Quantized(ResidualSizes(N=6, K=3, R=32, H=128, Hv=32)), {}),
    (Quantized(LatentSizes(N=6, C=32, P=16, Hv=48, J=2, key_channels=16)), {}),
    (Quantized(LatentSizes(N=3, C=64, P=0, Hv=0)), {}),
    (Quantized(GroupedSizes(N=3, K=3, H=64, Hv=128), 4), {}),
    (Quantized(ResidualSizes(N=6, K=3, R=64, H=128, Hv=64), 4), {}),
    (Quantized(LatentSizes(N=6, C=64, P=16, Hv=48, J=2, key_channels=16), 4), {}),
]


def test_components_of_cache_layouts_are_the_definition(monkeypatch):
    """On a full cache, and on two chips' stripes; plain JAX replaces the pipeline."""
    calls = []

    def attend(components, first_B, **options):
        names = ("tile_kv", "score_tile", "splits", "delay_values")
        calls.append([options[name] for name in names])
        return plain.attend(components, first_B, **options)

    monkeypatch.setattr(tpu, "attend", attend)
    tpu._run.clear_cache()
    for shape, options in CASES:
        run = functools.partial(tpu.decode_attention, **options)
        agreement.check(run, shape, firsts=(256, 63), length=256, dtype=FLOAT32)
        with_lse = functools.partial(tpu.attend_with_lse, **options)
        over_chips = agreement.over_chips(with_lse, chips=2, size=128, slots=384)
        firsts = (700, 384, 100)  # the second chip holds no token of the last sequence
        agreement.check(over_chips, shape, firsts=firsts, length=768, dtype=FLOAT32)
    tpu._run.clear_cache()
    sizes = [getattr(shape, "sizes", shape) for shape, _ in CASES]
    delayed = [bool(getattr(x, "R", 0)) and x.rope_base is not None for x in sizes]
    own = [(options.get("tile_kv", 256), options.get("splits", 1)) for _, options in CASES]
    assert calls[::2] == [
        [b, b, s, delay_values] for (b, s), delay_values in zip(own, delayed, strict=True)
    ]
    assert calls[1::2] == [
        [128, 128, s, delay_values] for (_, s), delay_values in zip(own, delayed, strict=True)
    ]


@slow
@pytest.mark.parametrize(
    "mechanism, dtype", [*itertools.product(OURS, (FLOAT32, BFLOAT16)), *OF_RIVALS, *QUANTIZED]
)
def test_equals_the_definition_at_d12(mechanism, dtype):
    """Sequences end in a tile's last slot, in the next tile's first, and in the first of all."""
    run = _jitted(tile_kv=128, score_tile=128)
    agreement.check(run, SHAPES["d12"][mechanism], firsts=(127, 128, 0), length=256, dtype=dtype)


@slow
@pytest.mark.parametrize(
    "mechanism, options",
    [
        ("mha", dict(splits=2)),
        ("mha", dict(variant=DIAGONAL)),
        ("gqa", dict(splits=3)),
        ("gqa", dict(variant=TRANSPOSED)),
        ("mla", dict(splits=2, variant=TRANSPOSED)),
        ("lrkv", dict(splits=2)),
        ("lrkv", dict(variant=DIAGONAL)),
        ("lrkv", dict(variant=dataclasses.replace(TRANSPOSED, basis=True))),
        ("lrkv", dict(tile_kv=256, score_tile=256)),
        ("lrkv_gqa", dict(tile_kv=256, score_tile=128)),
        ("lrkv_no_rope", dict(variant=DIAGONAL, splits=2)),
    ],
)
def test_splits_tiles_and_operators_of_values_change_nothing(mechanism, options):
    """The second split of a short sequence has no token."""
    run = _jitted(**(dict(tile_kv=128, score_tile=128) | options))
    shape = SHAPES["d12"][mechanism]
    agreement.check(run, shape, firsts=(450, 100), length=512, dtype=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["mha", "mla", "lrkv"])
def test_tiles_behind_a_sequence_are_not_read(mechanism):
    """Sequences of one tile read one tile; the others hold NaN."""
    shape = SHAPES["d12"][mechanism]
    inputs, cache = agreement.problem(shape, batch=2, length=384, dtype=BFLOAT16)
    first_B = jnp.asarray([100, 127], jnp.int32)
    poisoned = jax.tree.map(np.array, cache)
    for array in poisoned.values():
        array[..., 128:] = np.nan

    def run(cache):
        return _jitted(tile_kv=128, splits=2)(inputs, cache, first_B)

    np.testing.assert_array_equal(run(poisoned), run(cache))


def _several_queries(o, c):
    return dataclasses.replace(o, query=jnp.repeat(o.query, 3, axis=1)), c


def _tied(o, c):
    return cache_layouts.TiedInputs(query=o.query, scale=1.0, rope_base=None, norm_epsilon=None), c


def test_programs_in_64_bits_are_left_to_xla(x64):
    inputs, cache = shapes.abstract(SHAPES["d12"]["mha"], batch=1, length=128, dtype=BFLOAT16)
    with pytest.raises(NotImplementedError, match="32-bit programs, not .*x64: use 'xla'"):
        tpu.check(inputs, cache)
    with pytest.raises(NotImplementedError, match="in 32 bits: .*x64.*use 'xla'"):
        gpu.check(inputs, cache)


def _narrow_rows(o, c):
    """A tile of int8 has 32 rows where one of bfloat16 has 16."""
    return o, c | dict(residual_key=c["residual_key"][:, :, :16].astype(jnp.int8))


def _with_bias(o, c):
    return dataclasses.replace(o, bias=cache_layouts.PositionBias(weights=jnp.ones(4))), c


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o, c: (o, {k: v[..., :100] for k, v in c.items()}), "S = 100"),
        (lambda o, c: (o, c | dict(residual_key=c["residual_key"][:, :, :3])), "3 of residual_key"),
        (lambda o, c: (o, {k: v.astype(jnp.float16) for k, v in c.items()}), "in float16"),
        (lambda o, c: (o, c | dict(residual_key=c["residual_key"].astype(jnp.int4))), "in int4"),
        (_narrow_rows, "in multiples of 32, not 16 of residual_key"),
        (_tied, "not tied"),
        (_several_queries, "T = 3"),
        (_with_bias, "bias"),
        (lambda o, c: (dataclasses.replace(o, query=o.query[..., :64]), c), "H = 64"),
    ],
)
def test_tpu_refusals_name_the_reason_and_the_fallback(change, message):
    problem = shapes.abstract(SHAPES["d12"]["lrkv"], batch=1, length=128, dtype=BFLOAT16)
    arrays = *jax.eval_shape(change, *problem), jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match=f"{message}.*: use 'xla'"):
        jax.eval_shape(functools.partial(decode_attention, implementation="tpu"), *arrays)


@pytest.mark.parametrize(
    "mechanism",
    [
        named.mha(4, head_dim=128),
        named.gqa(4, kv_heads=2, head_dim=128),
        named.lrkv(4, rank=32, head_dim=128),
        named.factored(4, kv_heads=2, latents=2, key_rank=32, head_dim=128),
        named.mla(4, latent=64, rope_dim=32, head_dim=128),
        named.mla_paper(4, latent=64, head_dim=128),
    ],
    ids=lambda mechanism: mechanism.title,
)
def test_a_bfloat16_model_multiplies_an_int8_cache_in_bfloat16(mechanism, monkeypatch):
    """In float32 the matrix unit takes several times as long."""
    attention = nnx.eval_shape(lambda: Attention(mechanism, 64, rngs=nnx.Rngs(0)))
    attention.spreads_keys = True
    graph, weights = nnx.split(attention)
    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, BFLOAT16), weights)
    sizes = dict(batch=1, capacity=128, dtype=jnp.dtype(BFLOAT16), bits=8)
    layer = cache_lib.abstract([mechanism], **sizes).layers[0]
    dtypes = {}

    def decode_attention(inputs, cache, first_B, **_):
        names = [name for name in cache if f"{name}.scale" in cache]
        dtypes.update({name: tpu._cached(inputs, cache, name).dtype for name in names})
        return jnp.zeros((*inputs.query.shape[:3], mechanism.value_dim), FLOAT32)

    monkeypatch.setattr(attention_lib, "decode_attention", decode_attention)

    def decode(weights, x_BTD, layer):
        positions = rope.positions(jnp.zeros((1, 1), jnp.int32), mechanism.rope_dim, 100.0)
        module = nnx.merge(graph, weights)
        return module.decode(x_BTD, positions, layer, jnp.ones(1, jnp.int32), rope_base=100.0)

    jax.eval_shape(decode, weights, jax.ShapeDtypeStruct((1, 1, 64), BFLOAT16), layer)
    assert {str(dtype) for dtype in dtypes.values()} == {"bfloat16"}


# Upper bounds of scheduled bundles over the cycles in which HBM delivers the cache's bytes.
MOST = dict(
    lrkv=dict(v5e=0.275, v5p=0.395, v4=0.543, v6e=0.442),
    lrkv_gqa=dict(v5e=0.63, v5p=0.91, v4=0.976, v6e=0.878),
    lrkv_no_rope=dict(v5e=0.60, v5p=0.60, v4=0.60),
    mha=dict(v5e=0.60, v5p=0.60, v4=0.60),
    gqa=dict(v5e=0.60, v5p=0.60, v4=0.60, v6e=0.285),
    mla=dict(v6e=0.545),
)
MOST |= dict(lrkv_int8=dict(v5e=0.79), gqa_int8=dict(v5e=0.54))
MOST |= dict(gqa_int4=dict(v5e=1.16))  # the schedule is the bound, at 0.6 of int8's


@pytest.mark.aot
@pytest.mark.parametrize(
    ("mechanism", "name"), [(mechanism, name) for mechanism in MOST for name in MOST[mechanism]]
)
def test_schedules_leave_the_time_to_memory(name, mechanism):
    chip = tpu_static.CHIPS[name]
    bytes_of_token = shapes.bytes_per_token(SHAPES["d36"][mechanism], jnp.dtype(BFLOAT16))
    bundles = tpu_static.per_token(chip, "d36", mechanism).bundles
    assert 0 < bundles < MOST[mechanism][name] * chip.hbm_cycles(bytes_of_token)


def test_a_race_would_be_seen():
    """Both cores write one output."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    whole = pl.BlockSpec((8, 128), lambda i: (0, 0))
    racy = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        grid=(2,),
        in_specs=[whole],
        out_specs=whole,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=INTERPRET,
    )
    jax.block_until_ready(racy(jnp.ones((8, 128))))
    assert agreement.races()
    pltpu.reset_tpu_interpret_mode_state()
    assert not agreement.races()


WIDE = GroupedSizes(N=128, K=128)
SIZES = [  # kind, shape, batch, length: tile_kv, score_tile, splits, bytes
    ("TPU v4", SHAPES["d36"]["mha"], 1, 4096, (512, 512, 2, 11_403_264)),
    ("TPU v4", SHAPES["d36"]["lrkv"], 2, 32_768, (1024, 256, 1, 14_589_952)),
    ("TPU v4", WIDE, 1, 4096, (128, 128, 2, 34_275_328)),
    ("TPU v4", ResidualSizes(N=64, K=64, R=128), 1, 4096, (128, 128, 2, 26_222_592)),
    ("TPU v5", WIDE, 1, 4096, (256, 128, 2, 51_183_616)),
    ("TPU v5p", SHAPES["d36"]["gqa"], 1, 8192, (1024, 512, 2, 6_922_240)),
    ("TPU v5 lite", SHAPES["d36"]["mla"], 1, 32_768, (2048, 512, 1, 7_905_280)),
    ("TPU v5e", SHAPES["d36"]["lrkv_gqa"], 3, 1152, (384, 512, 1, 4_995_072)),
    ("TPU v6 lite", SHAPES["d36"]["thin_keys"], 1, 65_536, (4096, 512, 1, 49_815_552)),
    ("TPU v6e", SHAPES["d12"]["gta"], 1, 128, (128, 512, 1, 647_168)),
    (
        "TPU v99",
        SHAPES["d36"]["lrkv"],
        1,
        4096,
        (512, 512, 1, 10_620_928),
    ),  # an unknown chip: v4's memory
]


def test_sizes_fit_the_chip_or_are_left_to_xla(monkeypatch):
    for kind, shape, batch, length, expected in SIZES:
        monkeypatch.setattr(tpu.tuning, "current_device_kind", lambda kind=kind: kind)
        problem = shapes.abstract(shape, batch=batch, length=length, dtype=BFLOAT16)
        sizes = tpu._default_sizes(*problem)
        need = tpu._vmem_bytes(*problem, sizes["tile_kv"], sizes["score_tile"])
        assert (*sizes.values(), need) == expected, (kind, shape)
        if need <= tpu._chip().vmem_bytes:
            tpu.check(*problem)
            continue
        with pytest.raises(NotImplementedError, match="MiB of VMEM, not .* MiB: use 'xla'"):
            tpu.check(*problem)


# Shapes that do not fit v4's VMEM with large tiles.
TIGHT = [
    (ResidualSizes(N=32, K=8), BFLOAT16),
    (ResidualSizes(N=18, K=18, R=128), FLOAT32),
    (GroupedSizes(N=64, K=8), FLOAT32),
    (LatentSizes(N=128, C=512), BFLOAT16),
]


@pytest.mark.aot
@pytest.mark.parametrize("shape, dtype", TIGHT)
def test_tiles_shrink_until_they_fit_v4(shape, dtype):
    device = topology.tpu_devices("v4:2x2x1")[0]
    inputs, cache = shapes.abstract(shape, batch=2, length=16_384, dtype=dtype)
    first_B = jax.ShapeDtypeStruct((2,), jnp.int32)
    compiled = topology.compile_for(device, jax.jit(tpu.decode_attention), inputs, cache, first_B)
    assert "tpu_custom_call" in compiled.as_text()


CHIPS = [(m, n) for m in OURS for n in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")]
CHIPS += [(mechanism, "v5e:2x2") for mechanism in RIVALS]


@pytest.mark.aot
@pytest.mark.parametrize(("mechanism", "name"), CHIPS)
def test_compiles_without_a_copy_of_the_cache(name, mechanism):
    device = topology.tpu_devices(name)[0]
    for B, S in ((1, 4224), (2, 32_768)):
        problem = shapes.abstract(SHAPES["d36"][mechanism], batch=B, length=S, dtype=BFLOAT16)
        first_B = jax.ShapeDtypeStruct((B,), jnp.int32)
        compiled = topology.compile_for(device, jax.jit(tpu.decode_attention), *problem, first_B)
        lines = compiled.as_text().splitlines()
        assert [line for line in lines if "custom-call" in line and f",{S}]" in line]
        copies = [line for line in lines if " copy(" in line or "copy-start(" in line]
        assert not [line for line in copies if f",{S}]" in line]
        assert compiled.memory_analysis().temp_size_in_bytes < 1e6  # of 2 to 600 MB of cache


@pytest.mark.parametrize("dtype, most", [("bfloat16", 1.6e-2), ("float32", 1e-6)])
@pytest.mark.parametrize(
    "base",
    [100.0, 1e4, 1e6, rope.Llama3(5e5, 8.0, 1.0, 4.0, 8192), rope.Yarn(1e6, 4.0, 1.0, 32.0, 4096)],
)
def test_a_basis_of_128_slots_gives_the_table_of_every_run(base, dtype, most):
    """left · right is the table of cosines and sines of rope.rotary, run by run."""
    left_EH, right_El = operators._basis(128, base, 3, jnp.dtype(dtype))
    E = len(right_El)
    table = np.concatenate([left_EH[i * E : (i + 1) * E].T @ right_El for i in range(3)], axis=1)
    with jax.enable_x64(True):
        angles = rope.rotary(jnp.arange(384)[None], 128, base)
        exact = np.concatenate([np.asarray(a[0], np.float64).T for a in angles])
    assert np.abs(table - exact).max() <= most
