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
from kvjax.attention.mla import MLAConfig
from kvjax.kernels import partial_products
from kvjax.kernels.decode_attention import api
from kvjax.kernels.decode_attention.gpu import attention as gpu, prepare, prepare_latent
from kvjax.kernels.profile import gpu_static
from kvjax.layers import rope
from kvjax.model import decoder as decoder_lib, fused_step
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute, Transformer
from tests import quick
from tests.compiled import compiled
from tests.kernels.decode_attention import agreement, hopper

INTERPRET = hopper.InterpretGPUParams(detect_races=True)
D, S = 256, 128  # a product over D has four partial sums
FIRSTS = np.array([5, 127, 128, 9], np.int32)  # the third cache is full: nothing is appended
COUNTS = np.array([1, 1, 1, 0], np.int32)


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets the kernels, and returns the calls of `prepare`."""
    calls, add_norm = [], functools.partial(partial_products.add_norm, interpret=INTERPRET)

    def noted(prepare, *args, **options):
        calls.append(options)
        return prepare(*args, **options, interpret=INTERPRET)

    for module in (prepare, prepare_latent):
        monkeypatch.setattr(module, "prepare", functools.partial(noted, module.prepare))
    attend = functools.partial(gpu.decode_attention, interpret=INTERPRET)
    monkeypatch.setattr(partial_products, "add_norm", add_norm)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "gpu", attend)
    return calls


def _grouped(N, K, J, H, Hv, **options):
    heads = dict(num_heads=N, num_kv_heads=K, num_bases=J)
    return GroupedConfig(**heads, key_dim=H, value_dim=Hv, **options)


def _mla(**options):
    dims = dict(latent_dim=384, rope_key_dim=64, key_dim=64, value_dim=64)
    return MLAConfig(num_heads=3, **dims, **options)


@pytest.mark.parametrize(
    "config, base",
    quick.only(
        [(_grouped(4, 2, 1, 128, 64, rank=64), 100.0), (_mla(), 100.0)],
        [
            (_grouped(4, 2, 2, 128, 64, rank=0), 100.0),
            (_grouped(4, 2, 1, 128, 64, rank=64), 100.0),
            (_grouped(10, 1, 1, 128, 128, rank=0), None),
            (_grouped(1, 1, 1, 256, 128, rank=0, qk_norm="none"), 100.0),
            (_grouped(4, 4, 2, 128, 128, rank=128, qk_norm="none"), 100.0),
            (_mla(), 100.0),
            (_mla(qk_norm="none", norm_latent=False), 100.0),
            (_mla(), None),
        ],
    ),
)
def test_a_prepared_token_equals_the_models(interpreted, randomise, config, base):
    """Sequences that append, one whose cache is full, and one that appends nothing."""
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
        changed = np.any(before != after, axis=tuple(range(1, before.ndim - 1)))  # [B, S]
        assert [list(np.flatnonzero(slots)) for slots in changed] == [[5], [127], [], []]
    difference = np.asarray(y_B1D, float) - np.asarray(expected, float)
    assert np.abs(difference).max() < 2.0**-7 * np.abs(np.asarray(expected, float)).max()


def test_a_step_whose_kernels_add_partial_sums_equals_the_models(interpreted, randomise):
    """Two blocks: `add_norm` after attention, between the blocks, and before the final norm."""
    mechanism = _grouped(2, 1, 1, 128, 64, rank=0)
    block = BlockConfig(num_layers=2, d_model=D, mlp_dim=512)
    config = TransformerConfig(block=block, mechanisms=(mechanism,) * 2, vocab_size=64)
    model = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)[0]
    graph, weights = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda w: jax.lax.reduce_precision(w, 8, 7), weights))
    tokens_B1 = np.array([[3], [5]], np.int32)

    def activations(dtype, *, packed=False, implementation="xla"):
        compute = Compute(dtype=jnp.dtype(dtype))
        decoder = Decoder(model, compute, packed=packed)
        x_B1D = jax.ShapeDtypeStruct((2, 1, D), dtype)
        assert fused_step.takes(decoder.layers, x_B1D, implementation) == packed
        cache = decoder_lib.allocate(config, compute, batch=2, capacity=S)
        x_BD = []
        for tokens in (tokens_B1, tokens_B1 + 7):
            step = functools.partial(decoder, implementation=implementation)
            x_B1D, cache = compiled(step, tokens, cache, np.ones(2, np.int32))
            x_BD.append(np.asarray(x_B1D[:, 0], float))
        return np.stack(x_BD)

    exact, rounded = activations(jnp.float32), activations(jnp.bfloat16)
    found = activations(jnp.bfloat16, packed=True, implementation="gpu")
    assert len(interpreted) == 2 * 2 and not agreement.races()
    assert np.std(found - exact) < 1.2 * np.std(rounded - exact)
    assert np.abs(found - exact).max() < 1.5 * np.abs(rounded - exact).max()


@pytest.mark.aot
@pytest.mark.parametrize("name", ["MHA", "LRKV", "MLA"])
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
