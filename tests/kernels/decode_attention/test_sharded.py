"""A cache whose tokens are split over chips gives the result of one device.

Shapes are small enough that a sequence goes round the chips several times: stripes of 8 tokens, 24
slots per chip.
"""

import functools
import re

from flax import nnx
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import d36
from kvjax import cache as cache_lib
from kvjax.aot import hlo
from kvjax.attention import Attention
from kvjax.cache.stripes import Stripes
from kvjax.decoding import program
from kvjax.hardware import topology
from kvjax.kernels.decode_attention import api, shapes, sharded, xla
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.tpu import attention as tpu
from kvjax.layers import rope
from tests import quick
from tests.kernels.decode_attention import agreement
from tests.mechanisms import ALL_KINDS, MECHANISMS

B, D, BASE = 3, 16, 100.0
STRIPE, SLOTS = 8, 24  # of each chip
CHUNK = 20  # tokens at once: over two stripes and more

# -- the law ---------------------------------------------------------------------------------------


def _mesh(chips):
    return program.make_mesh(chips, jax.devices())


def _split(layer, mesh):
    """Returns a layer's arrays, placed on the chips of a mesh."""
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = program.cache_shardings(cache_lib.Cache((layer,), None), whole)
    return jax.device_put(layer, shardings.layers[0])


def _by_position(array, chips, size=STRIPE):
    """Returns an array of a split cache in the order of positions."""
    slots = np.arange(array.shape[-1] // chips)
    chips = [Stripes(size, chips, chip) for chip in range(chips)]
    order = np.concatenate([np.asarray(stripes.position(slots)) for stripes in chips])
    out = np.empty(array.shape, array.dtype)
    out[..., order] = np.asarray(array)
    return out


def _decode(graph, config, mesh):
    """Returns a jitted step of an attention module over its cache, split over a mesh or not."""

    def step(weights, x_BTD, layer, first_B, counts_B):
        index = first_B[:, None] + jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
        positions = rope.positions(index, config.rope_dim, BASE)
        options = dict(rope_base=BASE, implementation="xla")
        return nnx.merge(graph, weights).decode(x_BTD, positions, layer, counts_B, **options)

    def in_mesh(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return step(*arguments)

    return jax.jit(in_mesh if mesh else step, donate_argnums=2)


def _splits(S, chips):
    """Yields (T, counts [B]) of calls: ragged prefill, ends of stripes and rounds, single tokens.

    A round is one stripe on each chip.
    """
    ends = [STRIPE * chips - 3, 3, 0]  # the second sequence never leaves the first chip for long
    remaining = np.array(ends)
    while remaining.any():
        counts = np.minimum(remaining, CHUNK)
        yield CHUNK, counts
        remaining = remaining - counts
    for _ in range(4):  # over the end of a round, and to a first token
        yield 1, np.array([1, 1, 1])
    yield 1, np.array([0, 1, 0])  # 8 tokens: exactly a stripe
    yield CHUNK, np.array([CHUNK, 0, 17])  # chunks over three stripes
    yield CHUNK, np.array([7, CHUNK, CHUNK])
    lengths = np.array([STRIPE * chips - 3 + 4 + 27, 8 + 20, 4 + 37])
    yield 1, np.array([1, 1, 1])
    lengths += 1
    while lengths[0] < S:  # to the last slot of all
        count = min(CHUNK, S - lengths[0])
        yield CHUNK, np.array([count, 0, 0])
        lengths[0] += count
    yield 1, np.array([0, 1, 1])


@pytest.fixture
def short_tiles(monkeypatch):
    """Sets tiles of 4: a stripe has two, and 24 slots are read tile by tile."""
    attend = functools.partial(xla.attend_with_lse, tile_kv=4)
    monkeypatch.setitem(sharded.IMPLEMENTATIONS, "xla", attend)


@pytest.mark.parametrize(
    "mechanism_name, chips",
    quick.only(
        [("lrkv_gqa", 2)],
        [(name, 2) for name in MECHANISMS] + [(name, 8) for name in ALL_KINDS],
    ),
)
def test_the_law(x64, short_tiles, make_mechanism, randomise, mechanism_name, chips):
    config, S = make_mechanism(mechanism_name), SLOTS * chips
    module, weights = randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)))
    graph, weights = nnx.split(module)
    shape = dict(batch=B, capacity=S, dtype=jnp.dtype(jnp.float64))
    (fields,) = cache_lib.abstract([config], **shape).layers

    def empty():
        return {n: jnp.zeros((*x.shape[:-1], S), x.dtype) for n, x in fields.items()}

    mesh = _mesh(chips)
    steps = _decode(graph, config, None), _decode(graph, config, mesh)
    layers = [empty(), _split(empty(), mesh)]
    x_BTD = np.random.default_rng(0).standard_normal((B, S + CHUNK, D))
    lengths, compared = np.zeros(B, np.int32), 0
    for T, counts in _splits(S, chips):
        new = np.full((B, T, D), np.nan)
        for b, count in enumerate(counts):
            new[b, :count] = x_BTD[b, lengths[b] : lengths[b] + count]
        outputs = []
        for i, step in enumerate(steps):
            y_BTD, layers[i] = step(weights, new, layers[i], lengths, np.asarray(counts, np.int32))
            outputs.append(np.asarray(y_BTD))
        for b, count in enumerate(counts):
            expected, split = (y[b, :count] for y in outputs)
            np.testing.assert_allclose(split, expected, rtol=1e-10, atol=1e-10)
            assert count == 0 or np.abs(expected).max() > 0.01
            compared += count
        lengths = lengths + np.asarray(counts, np.int32)
    assert lengths[0] == S and compared == lengths.sum()
    for name, array in layers[1].items():
        np.testing.assert_array_equal(_by_position(array, chips), layers[0][name])
        for shard in array.addressable_shards:
            assert shard.data.nbytes * chips == array.nbytes


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism",
    ["mha", "gqa", "lrkv", "lrkv_gqa", "lrkv_no_rope", "mla"],
)
def test_the_tpu_kernels_attend_over_a_part(mechanism):
    """Two chips with three stripes of 128 each; the second has no token of the short sequence."""
    interpret = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
    options = dict(splits=2 if mechanism == "gqa" else 1, interpret=interpret)

    @jax.jit
    def attend(inputs, chip_cache, first_B, chip):
        return tpu.attend_with_lse(inputs, chip_cache, first_B, Stripes(128, 2, chip), **options)

    def on_chip(o, chip_cache, first_B, stripes):
        return attend(o, chip_cache, first_B, jnp.int32(stripes.chip))

    run = agreement.over_chips(on_chip, chips=2, size=128, slots=384)
    shape = shapes.SHAPES["d12"][mechanism]
    agreement.check(run, shape, firsts=(700, 383, 100), length=768, dtype=jnp.float32)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_merging_parts_whose_logits_are_of_any_size(scale):
    """Log-sum-exps whose exponentials overflow float32; one chip has no token."""
    mesh, rng = _mesh(4), np.random.default_rng(0)
    o = rng.standard_normal((4, 2, 1, 3, 5)).astype(np.float32)  # [chip, B, T, N, V]
    log_sum_exp = (scale * rng.standard_normal((4, 2, 1, 3))).astype(np.float32)
    log_sum_exp[2, 0] = -np.inf
    spec = jax.sharding.PartitionSpec("cache")
    merge = jax.shard_map(
        lambda o, z: sharded.merge(o[0], z[0])[None],
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=spec,
    )
    share = np.exp(np.float64(log_sum_exp) - log_sum_exp.max(0))[..., None]
    expected = (o * share).sum(0) / share.sum(0)
    for merged in np.asarray(merge(o, log_sum_exp)):
        np.testing.assert_allclose(merged, expected, rtol=1e-4, atol=1e-6)


def test_the_default_is_a_kernel_that_takes_a_chips_part(monkeypatch):
    shape = GroupedSizes(N=4, K=2, H=8, Hv=8)
    inputs, cache = shapes.problem(shape, batch=1, length=SLOTS, dtype=jnp.float32)
    seen = []
    for name in ("tpu", "gpu"):

        def check(inputs, cache):
            seen.append(cache["base_key"].shape)

        monkeypatch.setitem(api._CHECKS, name, check)

    def default(kernels, axis):
        monkeypatch.setattr(api, "kernels_of", lambda device: kernels)
        mesh = jax.make_mesh((2,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return api.default(inputs, cache)

    assert default("tpu", "cache") == "tpu" and seen == [(1, 2, 8, SLOTS // 2)]
    assert default("gpu", "cache") == "xla"  # its kernel does not give log-sum-exps
    assert default("tpu", "data") == "xla" == default(None, "cache")
    assert len(seen) == 1


# -- compiled for TPUs -----------------------------------------------------------------------------


@pytest.mark.aot
@pytest.mark.parametrize("name, batch, kernel_calls", [("LRKV", 2, 2), ("Q-K=V", 1, 0)])
def test_a_step_on_four_tpus_moves_and_copies_no_cache(
    no_compilation_cache, name, batch, kernel_calls
):
    config, memory = d36.model(name, layers=2), []
    mesh = program.make_mesh(4, topology.tpu_devices("v5e:2x2"))
    for length in (8192, 131_072):
        lowered = program.lowered_step(config, mesh, batch=batch, length=length)
        compiled = lowered.compile()
        text = compiled.as_text()
        assert len(re.findall('custom_call_target="tpu_custom_call', text)) == kernel_calls
        collectives = hlo.collectives(text)
        assert {c.kind for c in collectives} == {"all-reduce"}
        assert max(c.bytes for c in collectives) <= 4 * batch * d36.HEADS * (128 + 1)
        cache = cache_lib.abstract(
            config.mechanisms, batch=batch, capacity=length, dtype=jnp.dtype(jnp.bfloat16)
        )
        analysis = compiled.memory_analysis()
        cache_bytes = cache_lib.live_bytes(cache) // 4
        assert cache_bytes <= analysis.alias_size_in_bytes < 1.001 * cache_bytes + 4096
        memory.append((analysis.temp_size_in_bytes, cache_bytes))
    (short, small), (long, large) = memory
    assert long - short < 0.05 * (large - small)
