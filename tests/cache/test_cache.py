"""The cache against a NumPy model: what is written where, in which memory."""

from hypothesis import given, settings, strategies as st
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as cache_lib, config as config_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from tests import quick
from tests.kernels.decode_attention import agreement

FILES = {command_line.config_label(path): path for path in command_line.config_files()}
B, S = 3, 16
FIELDS = dict(base=(2, 3), scale=(4,), plain=())  # per token


def _resolve(name):
    return config_lib.resolve(command_line.load_config(FILES[name]))


@pytest.mark.parametrize("capacity, slots", [(1, 128), (128, 128), (129, 256), (1000, 1024)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_arrays_are_the_entry_with_tokens_last(make_mechanism, capacity, slots, dtype):
    mechanisms = [make_mechanism("lrkv"), make_mechanism("mla"), make_mechanism("kv_tied_gqa")]
    keys = dict(batch=B, capacity=capacity, dtype=jnp.dtype(dtype))
    cache = cache_lib.allocate(mechanisms, **keys)
    assert cache.capacity == slots
    shapes = [{name: (a.shape, a.dtype) for name, a in layer.items()} for layer in cache.layers]
    assert shapes == [
        dict(
            base_key=((B, 1, 8, slots), dtype),
            base_value=((B, 1, 8, slots), dtype),
            residual_key=((B, 4, 3, slots), dtype),
            residual_value=((B, 4, 3, slots), dtype),
            key_scale=((B, 4, 1, slots), jnp.float32),
        ),
        dict(latent=((B, 10, slots), dtype), rope_key=((B, 4, slots), dtype)),
        dict(base_key=((B, 2, 8, slots), dtype)),
    ]
    assert all(not np.any(np.asarray(a)) for a in jax.tree.leaves(cache))
    np.testing.assert_array_equal(cache.lengths, np.zeros(B, np.int32))
    abstract = cache_lib.abstract(mechanisms, **keys)

    def same(a, x):
        return (a.shape, a.dtype) == (x.shape, x.dtype)

    assert all(jax.tree.leaves(jax.tree.map(same, cache, abstract)))


def _model(layer, entry, first, counts):
    """The layer after an append, token by token."""
    layer = {name: array.copy() for name, array in layer.items()}
    for name, array in layer.items():
        for b in range(B):
            for t in range(counts[b]):
                if first[b] + t < array.shape[-1]:
                    array[b, ..., first[b] + t] = entry[name][b, t]
    return layer


_append = jax.jit(cache_lib.append)


SIZES = [(S, 5), (S, 1), (384, 5), (384, 1), (384, 130), (S, S)]


def _check_writes(append, S, T, draw, max_examples):
    """Compares appends to `_model`; `draw` makes arrays of a shape."""
    layer = {name: draw(B, *shape, S) for name, shape in FIELDS.items()}
    entry = {name: draw(B, T, *shape) for name, shape in FIELDS.items()}
    # Blocks of 128 slots are written at once: their ends, and the cache's, are where it may go
    # wrong.
    ends = [end + i for end in (0, 128, 256, S - T, S) for i in (-1, 0, 1) if 0 <= end + i <= S + 1]
    starts = st.integers(0, S + 2) | st.sampled_from(ends)

    @settings(max_examples=max_examples, deadline=None)
    @given(first=st.tuples(*[starts] * B), counts=st.tuples(*[st.integers(0, T)] * B))
    def check(first, counts):
        after = append(layer, entry, *(np.asarray(x, np.int32) for x in (first, counts)))
        for name, expected in _model(layer, entry, first, counts).items():
            np.testing.assert_array_equal(after[name], expected)

    check()


@pytest.mark.parametrize("S, T", quick.every(2, SIZES))
def test_append_writes_the_slots_it_says(S, T):
    """At the cache's end nothing wraps, and nothing that is held is overwritten."""
    rng = np.random.default_rng(0)
    _check_writes(_append, S, T, lambda *shape: rng.standard_normal(shape).astype(np.float32), 60)


@pytest.mark.parametrize("S, T", quick.every(2, SIZES))
def test_append_writes_bytes_on_a_tpu(S, T, monkeypatch):
    """Interprets the kernel."""

    def for_a_tpu(*arguments, tpu, default):
        return tpu(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", for_a_tpu)
    rng = np.random.default_rng(0)
    parameters = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(parameters):
        append = jax.jit(lambda *arguments: cache_lib.append(*arguments))
        _check_writes(append, S, T, lambda *shape: rng.integers(-128, 128, shape, np.int8), 20)
    assert not agreement.races()


def test_padding_is_never_held():
    """Not even where it is NaN."""
    layer = {"x": np.zeros((B, 2, S), np.float32)}
    entry = {"x": np.full((B, 4, 2), np.nan, np.float32)}
    counts = np.array([0, 2, 4], np.int32)
    for b, count in enumerate(counts):
        entry["x"][b, :count] = 1
    after = _append(layer, entry, np.array([0, 5, 12], np.int32), counts)
    assert np.asarray(after["x"]).sum(axis=(1, 2)).tolist() == [0, 4, 8]


def test_append_rounds_to_the_dtype_of_the_cache():
    layer = {"x": jnp.zeros((1, 2, S), jnp.bfloat16)}
    entry = {"x": jnp.full((1, 1, 2), 1 + 2**-9, jnp.float32)}
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    after = _append(layer, entry, zero, one)["x"]
    assert after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(after[0, :, 0], np.float32), 1)


def test_append_wants_the_same_names_and_enough_slots():
    layer, entry = {"x": jnp.zeros((1, S))}, {"y": jnp.zeros((1, 1))}
    zero = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=r"the cache has \['x'\], the entry \['y'\]"):
        cache_lib.append(layer, entry, zero, zero)
    with pytest.raises(ValueError, match="17 tokens at once exceed the capacity of 16"):
        cache_lib.append(layer, {"x": jnp.zeros((1, 17))}, zero, zero)


@pytest.mark.parametrize("T", [1, 5])
def test_append_is_in_place(T):
    """A donated cache is written where it lies: a step allocates nothing that grows with S."""

    def memory(slots, donate):
        layer = {
            name: jax.ShapeDtypeStruct((B, *shape, slots), jnp.float32)
            for name, shape in FIELDS.items()
        }
        entry = {
            name: jax.ShapeDtypeStruct((B, T, *shape), jnp.float32)
            for name, shape in FIELDS.items()
        }
        step = jax.jit(cache_lib.append, donate_argnums=0 if donate else ())
        int_B = jax.ShapeDtypeStruct((B,), jnp.int32)
        held = sum(4 * x.size for x in jax.tree.leaves(layer))
        return step.lower(layer, entry, int_B, int_B).compile().memory_analysis(), held

    (small, _), (large, held) = memory(256, True), memory(65_536, True)
    assert large.alias_size_in_bytes == held
    assert large.temp_size_in_bytes == small.temp_size_in_bytes < 0.01 * held
    assert memory(65_536, False)[0].alias_size_in_bytes == 0  # so the number means something


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_for_a_tpu_the_loop_is_unrolled_when_lowered(T, dtype):
    """The traced program has one write on any device; see `cache._write`."""
    batch = 32
    layer = {"x": jax.ShapeDtypeStruct((batch, 2, S), dtype)}
    entry = {"x": jax.ShapeDtypeStruct((batch, T, 2), dtype)}
    int_B = jax.ShapeDtypeStruct((batch,), jnp.int32)
    traced = jax.jit(cache_lib.append).trace(layer, entry, int_B, int_B)
    assert str(traced.jaxpr).count("dynamic_update_slice") <= 2
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    of_bytes = dtype == jnp.int8
    assert text.count("stablehlo.dynamic_update_slice") == (0 if of_bytes else batch)
    assert text.count("@tpu_custom_call") == of_bytes
    assert "stablehlo.while" not in text and "stablehlo.scatter" not in text


def test_capacity_is_checked_before_anything_is_lost():
    lengths, capacity = np.array([5, 100, 120]), 128
    cache_lib.check_capacity(lengths, np.array([100, 28, 8]), capacity)
    cache_lib.check_capacity(np.zeros(0, int), np.zeros(0, int), capacity)
    message = "sequence 3 holds 120 tokens and 9 more follow: 129 exceed.*capacity of 128"
    with pytest.raises(UserError, match=message):
        cache_lib.check_capacity(lengths, np.array([100, 28, 9]), capacity)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_bytes_are_those_of_the_cost_model(dtype):
    dtype = jnp.dtype(dtype)
    for name in FILES:
        config = _resolve(name).model
        cache = cache_lib.abstract(config.mechanisms, batch=B, capacity=200, dtype=dtype)
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
        assert held == formulas.cache_bytes_per_token(config, dtype) * B * 256, name
        assert len(cache.layers) == config.block.num_layers, name
        if name.endswith("_tiny"):
            real = cache_lib.allocate(config.mechanisms, batch=B, capacity=200, dtype=dtype)
            assert cache_lib.live_bytes(real) == held, name
