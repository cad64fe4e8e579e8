"""kvjax.Attention, as a user's model has it."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import named
from kvjax.costs.formulas import entry_bytes
from kvjax.library.attention import Attention
from tests import quick
from tests.mechanisms import MECHANISMS, random_values

B, T, D = 2, 7, 16


def layer_of(name, **options):
    """Returns a layer of a small mechanism in float64, with weights of which none is zero."""
    cls, keys = MECHANISMS[name]
    names = {field.name for field in dataclasses.fields(cls)}
    dims = dict.fromkeys({"key_dim", "value_dim"} & names, 8)
    config = cls(**dict(num_heads=4) | dims | keys)
    layer = Attention(config, D, rope_base=100.0, rngs=nnx.Rngs(0), **options)
    nnx.update(layer, random_values(nnx.state(layer, nnx.Param)))
    return layer


CHANGED = dict(window=3, softcap=0.4)
CASES = [(name, {}) for name in MECHANISMS] + [("lrkv", CHANGED)]


@pytest.mark.parametrize(
    ("name", "keys"), quick.only([("lrkv", CHANGED), ("mla", {}), ("tpa", {})], CASES)
)
def test_decoding_equals_attention_over_whole_sequences(name, keys):
    """Prompts of different lengths, then steps of which some sequences have fewer than others."""
    with jax.enable_x64(True):
        layer = layer_of(name, **keys)
        x_BTD = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, D)))
        whole_BTD = layer(x_BTD)
        for key in keys:  # each counts
            without = layer_of(name, **{k: v for k, v in keys.items() if k != key})
            assert np.abs(without(x_BTD) - whole_BTD).max() > 1e-3
        lengths = np.array([3, 5], np.int32)
        cache = layer.cache(B, 10, jnp.float64)
        assert cache.capacity == 128
        assert cache.nbytes == B * 128 * entry_bytes(layer.config.entry(), jnp.float64)
        y_BTD, cache = layer.prefill(x_BTD[:, :5], cache, lengths)
        for b, length in enumerate(lengths):
            np.testing.assert_allclose(y_BTD[b, :length], whole_BTD[b, :length], atol=1e-12)
        decode = nnx.jit(Attention.decode)
        for counts in ((2, 1), (1, 0), (1, 1)):
            at = np.minimum(cache.lengths[:, None] + np.arange(2)[None], T - 1)
            new_BTD = np.take_along_axis(x_BTD, at[..., None], axis=1)
            before = cache.lengths
            y_BTD, cache = decode(layer, new_BTD, cache, jnp.asarray(counts, jnp.int32))
            for b, count in enumerate(counts):
                first = int(before[b])
                expected = whole_BTD[b, first : first + count]
                np.testing.assert_allclose(y_BTD[b, :count], expected, atol=1e-10)
        assert cache.lengths.tolist() == [7, 7]


def test_layers_in_a_scan_and_an_ensemble():
    """Stacked by vmap, applied by scan; caches are scanned with their layers."""
    cls, keys = MECHANISMS["lrkv"]
    config = cls(num_heads=4, key_dim=8, value_dim=8, **keys)
    layers = nnx.vmap(lambda rngs: Attention(config, D, rngs=rngs), axis_size=3)(
        nnx.Rngs(0).fork(split=3)
    )
    x_BTD = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, D)), jnp.float32)
    graph, weights = nnx.split(layers)

    def each(i):
        return nnx.merge(graph, jax.tree.map(lambda w: w[i], weights))

    expected = x_BTD
    for i in range(3):
        expected = expected + each(i)(expected)

    def step(x, layer_and_cache):
        layer, cache = layer_and_cache
        y, cache = nnx.merge(graph, layer).decode(x, cache)
        return x + y, cache

    caches = [each(0).cache(B, 128, jnp.float32)] * 3
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    y_BTD = []
    for t in range(T):
        y, stacked = jax.jit(jax.lax.scan, static_argnums=0)(
            step, x_BTD[:, t : t + 1], (weights, stacked)
        )
        y_BTD.append(y[:, 0])
    np.testing.assert_allclose(np.stack(y_BTD, axis=1), expected, atol=1e-5)


def test_soft_caps_that_are_refused():
    with pytest.raises(ValueError, match="softcap = -1.0: must be positive, or 0 for none"):
        layer_of("lrkv", softcap=-1.0)
    with pytest.raises(ValueError, match="window = -1: must be positive, or 0 for none"):
        layer_of("lrkv", window=-1)
    cls, keys = MECHANISMS["gqa"]
    config = cls(num_heads=4, key_dim=8, value_dim=8, **keys | dict(alibi=True))
    with pytest.raises(ValueError, match="softcap = 2.0: must be 0 with alibi"):
        Attention(config, D, rope_base=None, softcap=2.0, rngs=nnx.Rngs(0))


def test_positions_and_segments():
    """RoPE sees differences of positions alone; a segment's tokens see their own segment."""
    layer = layer_of("lrkv")
    x_BTD = jnp.asarray(np.random.default_rng(1).standard_normal((1, 6, D)), jnp.float32)
    shifted = layer(x_BTD, jnp.arange(6) + 40)
    np.testing.assert_allclose(shifted, layer(x_BTD), atol=1e-4)
    segments = jnp.array([[0, 0, 0, 1, 1, 1]])
    apart = layer(x_BTD, segment_ids=segments)
    np.testing.assert_allclose(apart[:, 3:], layer(x_BTD[:, 3:]), atol=1e-4)
    assert not np.allclose(apart[:, 3:], layer(x_BTD)[:, 3:], atol=1e-2)
    with pytest.raises(ValueError, match=r"positions \(1, 5\): must be \[T\] or \[B, T\], T = 6"):
        layer(x_BTD, jnp.arange(5))
    with pytest.raises(ValueError, match="x has 6 tokens, the cache 4"):
        layer.prefill(x_BTD, _smaller(layer.cache(1, 128), 4))


def _smaller(cache, capacity):
    return jax.tree.map(lambda x: x[..., :capacity] if x.ndim > 1 else x, cache)


@pytest.mark.parametrize("shape", [(2, 4, 32), (1, 4, 32), (3, 4, 16), (3, 32)])
def test_shapes_that_do_not_fit(shape):
    """Inputs must have the model's width, and with a cache one row per cached sequence."""
    attention = Attention(named.mqa(num_heads=2, head_dim=16), 32, rngs=nnx.Rngs(0))
    cache, x = attention.cache(3, 128), jnp.zeros(shape)
    for method in (attention.prefill, attention.decode):
        with pytest.raises(ValueError, match=r"expected \[B, T, D\] = \[3, T, 32\]"):
            method(x, cache)
    if shape[1:] != (4, 32):
        with pytest.raises(ValueError, match=r"expected \[B, T, D\] = \[B, T, 32\]"):
            attention(x)


@pytest.mark.parametrize("tie, residual", [("kv", 0), ("kv", 8)])
def test_gpu_kernels_refuse_tied_values(tie, residual):
    """Named as the implementation, where there is no kernel that prepares them."""
    config = named.lrkv(4, rank=residual, head_dim=64) if residual else named.mha(2, head_dim=128)
    config = dataclasses.replace(config, tie=tie)
    layer = Attention(config, 256, rngs=nnx.Rngs(0))
    x_BTD = jnp.zeros((1, 1, 256), jnp.bfloat16)
    cache = layer.cache(1, 128)
    with pytest.raises(NotImplementedError, match="'xla'"):
        jax.eval_shape(lambda x, c: layer.decode(x, c, implementation="gpu"), x_BTD, cache)
