"""A layer whose tokens the GPU's `prepare` appends decodes as one that XLA computes."""

import functools
import re

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
    """Interprets the kernels, and returns the names of those called, but for attention's."""
    calls = []

    def noted(name, kernel, *args, **options):
        calls.append(name)
        return kernel(*args, **options, interpret=INTERPRET)

    kernels = (prepare, "prepare"), (prepare_latent, "prepare"), (partial_products, "add_norm")
    for module, name in kernels:
        monkeypatch.setattr(module, name, functools.partial(noted, name, getattr(module, name)))
    attend = functools.partial(gpu.decode_attention, interpret=INTERPRET)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "gpu", attend)
    return calls


def _grouped(N, K, J, H, Hv, **options):
    heads = dict(num_heads=N, num_kv_heads=K, num_bases=J)
    return GroupedConfig(**heads, key_dim=H, value_dim=Hv, **options)


def _mla(**options):
    dims = dict(latent_dim=384, rope_key_dim=64, key_dim=128, value_dim=64)
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
    assert interpreted == ["prepare"] and not agreement.races()
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


def _model_config(mechanism, **options):
    block = BlockConfig(**dict(num_layers=2, d_model=D, mlp_dim=512) | options)
    return TransformerConfig(block=block, mechanisms=(mechanism,) * 2, vocab_size=64)


BLOCKS = {
    "as it is": {},
    "LayerNorm": dict(norm="layer"),
    "gains": dict(norm_gain=True),
    "norm after": dict(norm_after=True),
    "norm of outputs": dict(norm_outputs=True),
    "both norms": dict(norm_both=True),
    "scaled": dict(residual_scale=0.5),
    "biases": dict(bias=True),
    "width": dict(d_model=192),
    "attention's bias": {},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_that_the_kernels_add_up(monkeypatch, name):
    """Only plain blocks; in bfloat16, one token per sequence, on Hopper or by name."""
    mechanism = _grouped(2, 1, 1, 128, 64, rank=0, bias=name == "attention's bias")
    config = _model_config(mechanism, **BLOCKS[name])

    def takes(capability, implementation, *, dtype=jnp.bfloat16, T=1, packed=True):
        compute = Compute(dtype=jnp.dtype(dtype))
        monkeypatch.setattr(gpu, "capability", lambda: capability)

        def make():
            return Decoder(Transformer(config, jax.random.key(0)), compute, packed=packed)

        x_BTD = jax.ShapeDtypeStruct((2, T, config.block.d_model), dtype)
        return fused_step.takes(nnx.eval_shape(make).layers, x_BTD, implementation)

    plain = name == "as it is"
    assert takes(9, None) == takes(9, "gpu") == takes(None, "gpu") == plain
    if plain:
        assert not any(takes(*of) for of in [(8, "gpu"), (8, None), (None, None), (9, "reference")])
        assert not takes(9, None, dtype=jnp.float32) and not takes(9, None, T=2)
        assert not takes(9, None, packed=False)


def test_a_step_whose_kernels_add_partial_sums_equals_the_models(interpreted, randomise):
    """Two blocks: `add_norm` after attention, and between the blocks."""
    mechanism = _grouped(2, 1, 1, 128, 64, rank=0)
    config = _model_config(mechanism, norm_epsilon=0.1)
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
    step = ["prepare", "add_norm", "add_norm", "prepare", "add_norm"]
    assert interpreted == 2 * step and not agreement.races()
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


@pytest.mark.aot
@pytest.mark.parametrize("D, K", [(768, 3072), (2304, 9216), (8192, 8192)])
def test_add_norm_waits_before_it_loads(D, K):
    pytest.importorskip("jax_cuda13_plugin")

    def run(x_BD, h_BK, w_KD):
        partials_PBD = partial_products.partial_products(h_BK, w_KD)
        return partial_products.add_norm(x_BD, partials_PBD, epsilon=1e-6)

    shapes = (4, D), (4, K), (K, D)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    kernels, _ = gpu_static.compiled_kernels(run, *arguments)
    figures, ptx = kernels["add_norm"]
    assert figures["spill_bytes"] == 0
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    assert waits and not re.findall(r"\bld\.(?!param|shared)", before)
