"""A layer whose tokens the GPU's `prepare` appends decodes as one that XLA computes."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import d36
from kvjax import cache
from kvjax.attention import Attention
from kvjax.attention.grouped import GroupedConfig
from kvjax.kernels.decode_attention import api
from kvjax.kernels.decode_attention.gpu import attention as gpu, prepare
from kvjax.kernels.profile import gpu_static
from kvjax.layers import rope
from tests import quick
from tests.compiled import compiled
from tests.kernels.decode_attention import agreement, hopper

INTERPRET = hopper.InterpretGPUParams(detect_races=True)
D, S = 32, 128
FIRSTS = np.array([5, 127, 128, 9], np.int32)  # the third cache is full: nothing is appended
COUNTS = np.array([1, 1, 1, 0], np.int32)


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets the kernels, and returns the calls of `prepare`."""
    calls, interpret = [], functools.partial(prepare.prepare, interpret=INTERPRET)

    def noted(*args, **options):
        calls.append(options)
        return interpret(*args, **options)

    attend = functools.partial(gpu.decode_attention, interpret=INTERPRET)
    monkeypatch.setattr(prepare, "prepare", noted)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "gpu", attend)
    return calls


@pytest.mark.parametrize(
    "heads, rank, qk_norm, base",
    quick.only(
        [((4, 2, 1, 128, 64), 64, "rms", 100.0)],
        [
            ((4, 2, 2, 128, 64), 0, "rms", 100.0),
            ((4, 2, 1, 128, 64), 64, "rms", 100.0),
            ((10, 1, 1, 128, 128), 0, "rms", None),
            ((1, 1, 1, 256, 128), 0, "none", 100.0),
            ((4, 4, 2, 128, 128), 128, "none", 100.0),
        ],
    ),
)
def test_a_prepared_token_equals_the_models(interpreted, randomise, heads, rank, qk_norm, base):
    """Sequences that append, one whose cache is full, and one that appends nothing."""
    N, K, J, H, Hv = heads
    config = GroupedConfig(
        **dict(num_heads=N, num_kv_heads=K, num_bases=J, rank=rank, key_dim=H, value_dim=Hv),
        qk_norm=qk_norm,
    )
    attention = randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)), dtype=np.float32)[0]
    graph, weights = nnx.split(attention)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    rng = np.random.default_rng(0)
    B = len(FIRSTS)
    layer = {
        name: jnp.asarray(rng.normal(size=(B, *field.shape, S)), field.dtype_in(jnp.bfloat16))
        for name, field in config.entry().items()
    }
    x_B1D = jnp.asarray(rng.normal(size=(B, 1, D)), jnp.bfloat16)

    def decode(packed, implementation):
        module = nnx.merge(graph, weights)
        if packed:
            module.mechanism.pack()

        def run(x_B1D, layer, firsts, counts):
            positions = rope.positions(firsts[:, None], config.rope_dim, base)
            options = dict(rope_base=base, implementation=implementation)
            return module.decode(x_B1D, positions, layer, counts, **options)

        return compiled(run, x_B1D, layer, FIRSTS, COUNTS)

    expected, expected_layer = decode(False, "xla")
    assert not interpreted
    y_B1D, found_layer = decode(True, "gpu")
    assert len(interpreted) == 1 and not agreement.races()
    for name, array in found_layer.items():
        before, after = np.asarray(layer[name], float), np.asarray(array, float)
        exact = np.asarray(expected_layer[name], float)
        if array.dtype == np.float32:  # 1/rms: a sum whose order differs between CPUs
            np.testing.assert_allclose(after, exact, rtol=2.0**-21, atol=0)
        else:  # equal bits, but for single roundings that fall to the other side
            np.testing.assert_allclose(after, exact, rtol=2.0**-7, atol=2.0**-9)
            assert np.mean(after != exact, where=before != exact) < 0.01
        changed = np.any(before != after, axis=(1, 2))  # [B, S]
        assert [list(np.flatnonzero(slots)) for slots in changed] == [[5], [127], [], []]
    difference = np.asarray(y_B1D, float) - np.asarray(expected, float)
    assert np.abs(difference).max() < 2.0**-7 * np.abs(np.asarray(expected, float)).max()


@pytest.mark.aot
@pytest.mark.parametrize("name", ["MHA", "LRKV"])
def test_compiles_in_place_without_spills(name):
    """One layer of d36; a copy of any field would be temporary memory."""
    pytest.importorskip("jax_cuda13_plugin")
    config = d36.model(name, layers=1)
    (mechanism,), base, width = config.mechanisms, config.block.angles_base, config.block.d_model

    def make():
        attention = Attention(mechanism, width, rngs=nnx.Rngs(0))
        attention.mechanism.pack()
        return attention

    graph, weights = nnx.split(nnx.eval_shape(make))
    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), weights)
    (layer,) = cache.abstract([mechanism], batch=4, capacity=4096, dtype=jnp.bfloat16).layers

    def decode(weights, x_B1D, layer, firsts, counts):
        positions = rope.positions(firsts[:, None], mechanism.rope_dim, base)
        module = nnx.merge(graph, weights)
        return module.decode(x_B1D, positions, layer, counts, rope_base=base)

    integers = jax.ShapeDtypeStruct((4,), jnp.int32)
    x_B1D = jax.ShapeDtypeStruct((4, 1, width), jnp.bfloat16)
    arguments = (nnx.to_pure_dict(weights), x_B1D, layer, integers, integers)
    kernels, program = gpu_static.compiled_kernels(decode, *arguments, donate_argnums=2)
    assert set(kernels) == {"prepare", "decode_attention", "combine_splits"}
    assert all(figures["spill_bytes"] == 0 for figures, _ in kernels.values())
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in layer.values())
    assert memory.temp_size_in_bytes < 0.2 * memory.alias_size_in_bytes  # the splits' sums
