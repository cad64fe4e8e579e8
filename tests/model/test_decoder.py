"""A Transformer over a cache against the same Transformer over whole rows."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.model import decoder
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute, Transformer, compute_dtypes
from tests import quick
from tests.compiled import compiled

B, T, D, M, V = 3, 24, 16, 24, 32
CHUNK = 4
F64 = Compute(dtype=jnp.dtype(jnp.float64))
LAYER_NORM = dict(norm="layer", norm_gain=True, norm_bias=True, embedding_norm=False, bias=True)

# Mechanisms by layer, as (name, options), and the block's options.
MODELS = {
    "rank_per_layer": (  # segments of 1 and 2
        [("lrkv", dict(rank=2)), ("lrkv", {}), ("lrkv", {})],
        dict(rope_base=100.0),
    ),
    "gpt2": (
        [("mha", dict(qk_norm="none", bias=True))] * 2,
        LAYER_NORM
        | dict(positions="learned", activation="gelu", tied_head=True, logit_softcap=0.0),
    ),
    "qwen3": (
        [("gqa", dict(qk_norm="rms_gain"))] * 2,
        dict(norm_gain=True, embedding_norm=False, activation="swiglu", rope_base=1e6),
    ),
    "llama3": (
        [("gqa", dict(qk_norm="none", bias=True, out_bias=False)), ("lrkv", {}), ("factored", {})],
        dict(rope_base=50.0, rope_factor=8.0, rope_original=24, window=7, activation="gelu_exact"),
    ),
    "granite": (
        [("gqa", dict(logit_scale=0.6)), ("lrkv", dict(logit_scale=0.6))],
        dict(embedding_scale=3.0, residual_scale=0.3, logit_divisor=2.5),
    ),
    "olmo2": (
        [("gqa", dict(qk_norm="rms_whole")), ("lrkv", {})],
        dict(norm_gain=True, norm_outputs=True, rope_base=100.0),
    ),
    "gemma": (
        [("gqa", dict(qk_norm="rms_offset")), ("lrkv", {}), ("factored", {}), ("mla", {})],
        dict(
            norm_gain=True,
            norm_offset=True,
            norm_both=True,
            activation="geglu",
            attention_softcap=0.8,
            window=5,
            window_layers=(1, 0, 1, 0),
        ),
    ),
    "layers_of_several_kinds": (
        [("gqa", {}), ("lrkv", {}), ("mla", {}), ("lrkv", {})],
        dict(
            window=6,
            window_layers=(1, 0, 1, 1),
            window_rope_base=20.0,
            rope_layers=(1, 1, 0, 1),
            rope_base=50.0,
            rope_factor=4.0,
            rope_scaling="yarn",
            rope_original=16,
            rope_attention_factor=1.4,
        ),
    ),
    "every_way_of_caching": (
        [
            ("mla", {}),
            ("mla_paper", dict(qk_norm="rms_gain")),
            ("lrkv_shared_rope", {}),
            ("qkv_tied_plus", dict(bias=True)),
            ("lrkv_kv_tied", {}),
        ],
        dict(rope_base=100.0, window=9),
    ),
    "partial_rope": (
        [("lrkv", {}), ("mla_paper", {}), ("lrkv_kv_tied", {}), ("mla", {})],
        dict(rope_base=50.0, rope_fraction=0.5),
    ),
    "norm_after": (
        [("gqa", {}), ("lrkv", {})],
        LAYER_NORM | dict(norm_after=True, positions="sinusoidal", activation="relu"),
    ),
    "alibi": (
        [("gqa", dict(alibi=True)), ("lrkv", dict(alibi=True)), ("lrkv_kv_tied", dict(alibi=True))],
        dict(positions="none", window=5),
    ),
    "no_positions": (
        [("lrkv_gqa", dict(bias=True)), ("qk_tied_plus", {})],
        LAYER_NORM | dict(positions="none", tied_head=True),
    ),
}
# Every sequence is prefilled to another length, has count 0 at least once, and is stepped.
SPLITS = (
    *[(CHUNK, (4, 4, 2)), (CHUNK, (4, 0, 0)), (CHUNK, (3, 4, 1))],
    *[(1, (1, 1, 1)), (1, (0, 1, 1)), (1, (1, 0, 1)), (1, (1, 1, 0))],
    (CHUNK, (0, 4, 3)),
)
LENGTHS = np.sum([counts for _, counts in SPLITS], axis=0)


def _config(make_mechanism, name):
    layers, block = MODELS[name]
    mechanisms = tuple(make_mechanism(kind, **keys) for kind, keys in layers)
    shape = dict(num_layers=len(mechanisms), d_model=D, mlp_dim=M, max_positions=T + CHUNK)
    return TransformerConfig(
        block=BlockConfig(**shape | block), mechanisms=mechanisms, vocab_size=V
    )


def _model(randomise, config, dtype=np.float64):
    return randomise(lambda: Transformer(config, jax.random.key(0)), dtype=dtype)[0]


def _stepper(model, compute, packed=False):
    """Returns a jitted step of the model's decoder, which donates its cache, and its traces."""
    model_graph, state = nnx.split(model)

    def make(state):
        return decoder.Decoder(nnx.merge(model_graph, state), compute, packed=packed)

    graph, _ = nnx.split(nnx.eval_shape(make, state))
    weights = jax.jit(lambda state: nnx.state(make(state)))(state)
    traces = []

    @functools.partial(jax.jit, donate_argnums=2)
    def step(weights, tokens_BT, cache, counts_B):
        traces.append(tokens_BT.shape)
        model_decoder = nnx.merge(graph, weights)
        x_BTD, cache = model_decoder(tokens_BT, cache, counts_B)
        return model_decoder.logits(x_BTD), cache

    return functools.partial(step, weights), traces


def _tokens(seed=0):
    """[B, T] in [0, V)."""
    return np.random.default_rng(seed).integers(0, V, (B, T), np.int32)


def _decode(step, cache, tokens_BT, padding):
    """Returns logits [B, T, V] of the tokens that SPLITS reach (NaN for others), and the cache."""
    logits = np.full((*tokens_BT.shape, V), np.nan)
    lengths = np.zeros(B, int)
    for width, counts in SPLITS:
        new = np.full((B, width), padding, np.int32)
        for b, count in enumerate(counts):
            new[b, :count] = tokens_BT[b, lengths[b] : lengths[b] + count]
        z, cache = step(new, cache, np.asarray(counts, np.int32))
        z = np.asarray(z)
        for b, count in enumerate(counts):
            logits[b, lengths[b] : lengths[b] + count] = z[b, :count]
        lengths += counts
    np.testing.assert_array_equal(cache.lengths, lengths)
    return logits, cache


@pytest.mark.parametrize("name", quick.only(["rank_per_layer", "gemma"], MODELS))
def test_the_basis_for_a_quantised_cache_changes_no_logit(x64, make_mechanism, randomise, name):
    """Over a cache that is not quantised: of every layer of every group, windows included."""
    config, tokens_BT = _config(make_mechanism, name), _tokens()
    model = _model(randomise, config)
    other = decoder.Decoder(model, dataclasses.replace(F64, cache_bits=8))
    assert all(block.attention.spreads_keys for block in other.layers)
    graph, weights = nnx.split(other)

    @jax.jit
    def logits(weights, cache):
        counts_B = np.full(B, tokens_BT.shape[1], np.int32)
        module = nnx.merge(graph, weights)
        return module.logits(module(tokens_BT, cache, counts_B)[0])

    cache = decoder.allocate(config, F64, batch=B, capacity=T)
    expected = model.logits(model(tokens_BT, compute=F64))
    np.testing.assert_allclose(logits(weights, cache), expected, rtol=1e-10, atol=1e-10)
    plain = jax.tree.leaves(nnx.state(decoder.Decoder(model, F64)))
    changed = [
        not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(weights), plain, strict=True)
    ]
    assert any(changed) and not all(changed)


@pytest.mark.parametrize(
    "name, packed",
    quick.only(
        [("every_way_of_caching", True)],
        [(name, packed) for name in MODELS for packed in (False, True)],
    ),
)
def test_equals_the_whole_row(x64, make_mechanism, randomise, name, packed):
    config = _config(make_mechanism, name)
    model = _model(randomise, config)
    graph, weights = nnx.split(model)

    @jax.jit
    def whole(weights, tokens):
        model = nnx.merge(graph, weights)
        return model.logits(model(tokens, compute=F64))

    tokens = _tokens()
    expected = np.array(whole(weights, tokens))
    assert np.ptp(expected) > 1
    step, _ = _stepper(model, F64, packed)
    logits, _ = _decode(step, decoder.allocate(config, F64, batch=B, capacity=T), tokens, 0)
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[b, :length], expected[b, :length], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank_per_layer", "every_way_of_caching"])
def test_sequences_do_not_see_padding_or_each_other(make_mechanism, randomise, name):
    """The bits of a sequence depend on its own tokens only."""
    config = _config(make_mechanism, name)
    step, traces = _stepper(_model(randomise, config, np.float32), Compute())

    def empty():
        return decoder.allocate(config, Compute(), batch=B, capacity=T)

    first, cache = _decode(step, empty(), _tokens(), padding=0)
    other = _tokens(seed=1)
    other[1] = _tokens()[1]
    again, same = _decode(step, empty(), other, padding=V - 1)
    np.testing.assert_array_equal(again[1], first[1])
    assert not np.array_equal(again[0], first[0], equal_nan=True)

    def row(x):
        return np.asarray(x[1])

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(row(a), row(b)), same, cache)
    for array in jax.tree.leaves(cache.layers):  # and padding is not held either
        for b, length in enumerate(LENGTHS):
            assert np.all(np.asarray(array[b])[..., length:] == 0)
            assert np.any(np.asarray(array[b])[..., length - 1] != 0)
    assert len(traces) == 2  # one compilation per width, whatever the lengths and counts


@pytest.mark.slow
def test_a_sequence_with_count_0_does_not_change(make_mechanism, randomise):
    config = _config(make_mechanism, "rank_per_layer")
    step, _ = _stepper(_model(randomise, config, np.float32), Compute())
    _, cache = _decode(step, decoder.allocate(config, Compute(), batch=B, capacity=T), _tokens(), 0)
    before = jax.tree.map(np.array, cache)
    _, after = step(np.zeros((B, CHUNK), np.int32), cache, np.array([0, 2, 0], np.int32))
    np.testing.assert_array_equal(after.lengths, before.lengths + np.array([0, 2, 0]))
    for a, b in zip(jax.tree.leaves(after.layers), jax.tree.leaves(before.layers), strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])
        assert not np.array_equal(a[1], b[1])


def test_gains_outside_blocks_have_the_dtype_of_training(make_mechanism, randomise):
    """Gains stay float32; rounding them to bfloat16 would change most channels."""
    mechanisms = (make_mechanism("gqa"),) * 2
    block = BlockConfig(num_layers=2, d_model=D, mlp_dim=M, norm_gain=True, norm_bias=True)
    model = _model(
        randomise, TransformerConfig(block=block, mechanisms=mechanisms, vocab_size=V), np.float32
    )
    compute = Compute(dtype=jnp.dtype(jnp.bfloat16))
    model_decoder = decoder.Decoder(model, compute)
    tokens_BT, positions_BT = _tokens(), np.arange(T)[None]

    def embed(module):
        return compiled(
            lambda t, positions: module.embed(t, positions, compute), tokens_BT, positions_BT
        )

    x_BTD = embed(model)
    np.testing.assert_array_equal(embed(model_decoder), x_BTD)
    of_both = (compiled(of.final_norm, x_BTD) for of in (model_decoder, model))
    np.testing.assert_array_equal(*of_both)
    weights = {
        name: nnx.to_pure_dict(nnx.state(m)) for name, m in (("own", model_decoder), ("of", model))
    }
    used = compute_dtypes(weights["of"], compute.dtype)
    for name in ("embedding", "head", "embedding_norm", "final_norm"):
        assert jax.tree.map(lambda w: w.dtype, weights["own"][name]) == used[name]
    assert used["final_norm"] == dict(gain=jnp.float32, bias=jnp.float32)
    assert {w.dtype for w in jax.tree.leaves(weights["own"]["layers"])} == {compute.dtype}


def test_weights_of_a_decoder_are_by_layer_in_the_compute_dtype(make_mechanism, randomise):
    config, compute = _config(make_mechanism, "rank_per_layer"), Compute(dtype=jnp.bfloat16)
    model = _model(randomise, config, np.float32)
    model_decoder = nnx.eval_shape(lambda: decoder.Decoder(model, compute))
    weights = [jax.tree.leaves(nnx.state(m)) for m in (model_decoder, model)]
    assert {w.dtype for w in weights[0]} == {jnp.dtype(jnp.bfloat16)}
    assert sum(w.size for w in weights[0]) == sum(w.size for w in weights[1])
    assert len(model_decoder.layers) == config.block.num_layers
    cache = jax.eval_shape(lambda: decoder.allocate(config, compute, batch=B, capacity=T))
    assert cache.layers[0]["base_key"].dtype == jnp.bfloat16


def test_layers_of_a_stack_are_views_on_a_cpu(make_mechanism):
    """A decoder made of arrays has the weights of one made in a program, without a copy of them."""
    config = _config(make_mechanism, "qwen3")
    graph, state = nnx.split(Transformer(config, jax.random.key(0)))

    def weights(state):
        return nnx.state(decoder.Decoder(nnx.merge(graph, state), Compute()))

    views, copies = weights(state), jax.jit(weights)(state)
    jax.tree.map(np.testing.assert_array_equal, views, copies)
    up = nnx.to_pure_dict(state)["segments"][0]["mlp"]["up"]
    first, second = (nnx.to_pure_dict(views)["layers"][i]["mlp"]["up"] for i in range(2))
    assert first.unsafe_buffer_pointer() == up.unsafe_buffer_pointer()
    assert second.unsafe_buffer_pointer() == up.unsafe_buffer_pointer() + first.nbytes
