"""The Transformer against one written layer by layer in NumPy, and ways of computing it."""

import dataclasses
import functools
import math
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.layers import rope
from kvjax.model import parameters
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.loss import mean_loss, token_losses
from kvjax.model.transformer import REMAT_POLICIES, Compute, Transformer, apply_blocks
from tests import quick, reference
from tests.mechanisms import FAMILIES

B, T, D, M, V, L = 2, 12, 16, 24, 32, 3
F64 = jnp.dtype(jnp.float64)

LAYER_NORM = dict(norm="layer", norm_gain=True, norm_bias=True, embedding_norm=False)
# Options other than the recipe's, arranged so that pairs of them occur together.
OPTIONS = {
    "nanochat": ("lrkv", {}, {}),
    "gpt2": (
        "mha",
        dict(qk_norm="none", bias=True),
        LAYER_NORM
        | dict(
            positions="learned", activation="gelu", bias=True, tied_head=True, logit_softcap=0.0
        ),
    ),
    "qwen3": (
        "gqa",
        dict(qk_norm="rms_gain"),
        dict(
            norm_gain=True,
            embedding_norm=False,
            activation="swiglu",
            logit_softcap=0.0,
            rope_base=1e6,
        ),
    ),
    "llama3": (
        "gqa",
        dict(qk_norm="none", bias=True, out_bias=False),
        dict(
            norm_gain=True,
            activation="gelu_exact",
            rope_base=50.0,
            rope_factor=8.0,
            rope_original=24,  # of four channel pairs one is unchanged, two mixed, one 8 x slower
            window=5,
        ),
    ),
    "granite": (
        "gqa",
        dict(qk_norm="none", logit_scale=0.6),
        dict(embedding_scale=3.0, residual_scale=0.3, logit_divisor=2.5, logit_softcap=1.0),
    ),
    "olmo2": (
        "gqa",
        dict(qk_norm="rms_whole"),
        dict(norm_gain=True, norm_outputs=True, activation="swiglu", residual_scale=0.5),
    ),
    "gemma": (
        "gqa",
        dict(qk_norm="rms_offset", logit_scale=0.9),
        dict(
            norm_gain=True,
            norm_offset=True,
            norm_both=True,
            embedding_norm=False,
            activation="geglu",
            attention_softcap=0.8,
            window=5,
        ),
    ),
    "alibi": ("lrkv", dict(alibi=True), dict(positions="none")),
    "partial_rope": ("lrkv", {}, dict(rope_base=50.0, rope_fraction=0.5)),
    "factored": ("factored", dict(bias=True), dict(window=3)),
    "bidirectional": (
        "mla",
        {},
        dict(norm="layer", positions="none", tied_head=True, causal=False, logit_softcap=2.0),
    ),
    "encoder": (  # as in the first Transformer paper
        "qkv_tied_plus",
        {},
        LAYER_NORM
        | dict(norm_after=True, positions="sinusoidal", activation="relu", causal=False, bias=True),
    ),
    "norm_bias": (
        "mla_paper",
        {},
        dict(
            norm_bias=True, positions="learned", activation="swiglu", bias=True, logit_softcap=2.0
        ),
    ),
    "bidirectional_rope": (
        "lrkv_gqa",
        dict(qk_norm="rms_gain", bias=True),
        dict(norm="layer", norm_gain=True, activation="gelu", causal=False, logit_softcap=0.0),
    ),
    "no_positions": (
        "mqa",
        dict(qk_norm="none"),
        dict(norm_gain=True, norm_bias=True, positions="none", embedding_norm=False, bias=True),
    ),
}


def _config(mechanism, num_layers=L, **block):
    mechanisms = mechanism if isinstance(mechanism, tuple) else (mechanism,) * num_layers
    shape = dict(num_layers=num_layers, d_model=D, mlp_dim=M, max_positions=T + 3)
    return TransformerConfig(
        block=BlockConfig(**shape | block), mechanisms=mechanisms, vocab_size=V
    )


def _tokens(seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (B, T), np.int32), rng.integers(0, V, (B, T), np.int32)


@functools.cache
def _init(config):
    return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(Transformer(config, key))))


def _initial(config, seed=0):
    return _init(config)(jax.random.key(seed))


@pytest.mark.parametrize(
    "name", quick.only(["gpt2", "llama3", "olmo2", "gemma", "encoder"], OPTIONS)
)
def test_equals_the_reference(x64, make_mechanism, randomise, name):
    mechanism, keys, block = OPTIONS[name]
    mechanism = make_mechanism(mechanism, **keys)
    if hasattr(mechanism, "rank") and mechanism.rank:  # rank per layer: segments of 1 and 2
        wider = dataclasses.replace(mechanism, rank=5)
        mechanism = (wider, mechanism, mechanism)
    config = _config(mechanism, norm_epsilon=1e-3, **block)
    _, weights = randomise(lambda: Transformer(config, jax.random.key(0)))
    tokens, targets = _tokens()
    graph, compute = parameters.graph(config), Compute(dtype=F64, loss_chunks=4)

    @jax.jit
    def run(weights, tokens, targets):
        model = nnx.merge(graph, weights)
        nats = token_losses(model, tokens, targets, compute=compute)
        mean = mean_loss(model, tokens, targets, compute=compute)
        return model.logits(model(tokens, compute=compute)), nats, mean

    logits, nats, mean = run(weights, tokens, targets)
    expected = reference.logits(config, weights, tokens)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-10)
    expected_nats = reference.nats(expected, targets)
    np.testing.assert_allclose(nats, expected_nats, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(mean, expected_nats.mean(), rtol=1e-10)


KINDS = {
    "local_and_global": dict(
        window=4,
        window_layers=(1, 1, 0, 1, 1, 0, 1),  # a pattern twice, and a layer of the next
        window_rope_base=9.0,
        rope_base=30.0,
        rope_factor=4.0,
        rope_scaling="yarn",
        rope_original=9,
        rope_high=3.0,
        rope_attention_factor=1.4,
    ),
    "without_rope": dict(rope_layers=(1, 1, 1, 0, 1, 1, 1), rope_base=30.0),
    "linear": dict(
        window=3, window_layers=(0, 0, 0, 0, 1, 1, 1), rope_factor=3.0, rope_scaling="linear"
    ),
}


@pytest.mark.parametrize("name", quick.only(["local_and_global"], KINDS))
def test_layers_of_several_kinds_equal_the_reference(x64, make_mechanism, randomise, name):
    config = _config(make_mechanism("gqa"), 7, **KINDS[name])
    assert config.layer_groups == ((config.mechanisms[0], 7),)
    _, weights = randomise(lambda: Transformer(config, jax.random.key(0)))
    tokens, _ = _tokens()
    for remat in ("none", "full"):
        compute = Compute(dtype=F64, remat=remat)
        run = jax.jit(lambda weights, compute=compute: _logits(config, weights, tokens, compute))
        expected = reference.logits(config, weights, tokens)
        np.testing.assert_allclose(run(weights), expected, rtol=1e-10, atol=1e-10)


def _logits(config, weights, tokens, compute):
    model = nnx.merge(parameters.graph(config), weights)
    return model.logits(model(tokens, compute=compute))


@pytest.fixture
def plain(x64, make_mechanism, randomise):
    """A model of two layer groups; its loss and gradients with Compute's simplest options."""
    lrkv = make_mechanism("lrkv")
    config = _config((lrkv, lrkv, make_mechanism("mla")), 3)
    _, weights = randomise(lambda: Transformer(config, jax.random.key(0)))
    graph, batch = parameters.graph(config), _tokens()

    def loss(weights):
        model = nnx.merge(graph, weights)
        return jnp.mean(token_losses(model, *batch, compute=Compute(dtype=F64, loss_chunks=1)))

    weights = jax.tree.map(jnp.asarray, weights)
    return graph, weights, batch, jax.jit(jax.value_and_grad(loss))(weights)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(loss_chunks=1), marks=pytest.mark.slow),
        pytest.param(dict(loss_chunks=5, remat="dots"), marks=pytest.mark.slow),
        pytest.param(dict(loss_chunks=12, query_chunk=5), marks=pytest.mark.slow),
        dict(loss_chunks=5, remat="full", unroll=True, query_chunk=8),  # 12 in 4 chunks
        pytest.param(dict(loss_chunks=100, remat="dots", unroll=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compute_options_do_not_change_the_loss(plain, options):
    """`mean_loss` and its gradients equal mean(token_losses)'s for all options of Compute."""
    graph, weights, batch, (expected, expected_grads) = plain

    def loss(weights):
        model = nnx.merge(graph, weights)
        return mean_loss(model, *batch, compute=Compute(dtype=F64, **options))

    value, grads = jax.jit(jax.value_and_grad(loss))(weights)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert all(np.abs(leaf).max() > 1e-8 for leaf in jax.tree.leaves(expected_grads))

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)

    jax.tree.map(close, grads, expected_grads)


def _saved_bytes(config, remat):
    """Returns bytes that the forward pass saves for the backward pass, with weights and tokens."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, jax.random.key(0))))
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def pullback(weights, tokens):
        def loss(weights):
            return mean_loss(
                nnx.merge(graph, weights), tokens, tokens, compute=Compute(remat=remat)
            )

        return jax.vjp(loss, weights)[1]

    saved = jax.eval_shape(pullback, nnx.to_pure_dict(state), tokens)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(saved))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_remat_policies_differ(make_mechanism, family):
    """ "full" saves layer inputs, "dots" also products with weights, "none" everything."""
    config = _config(make_mechanism(family))
    full, dots, none = (_saved_bytes(config, remat) for remat in ("full", "dots", "none"))
    # A layer's products with weights include queries (N·H) and the MLP's hidden layer (M), which
    # the backward pass needs, and the outputs of both halves (D), which it does not.
    assert dots - full >= L * B * T * (4 * 8 + M) * 4
    assert none - dots >= L * B * T * (4 * 8 + M) * 4


@pytest.mark.slow
def test_layers_do_not_depend_on_their_grouping(make_mechanism):
    a, b = make_mechanism("lrkv"), make_mechanism("lrkv", rank=6)
    together, apart = _config((a, a, a, a), 4), _config((a, b, a, a), 4)
    assert [n for _, n in together.layer_groups] == [4]
    assert [n for _, n in apart.layer_groups] == [1, 1, 2]
    whole, parts = _initial(together), _initial(apart)

    def layer(segment, i):
        return jax.tree.map(lambda x: np.asarray(x)[i], segment)

    def same(x, y):
        return jax.tree.map(np.testing.assert_array_equal, x, y)

    for index, (segment, i) in {0: (0, 0), 2: (2, 0), 3: (2, 1)}.items():
        same(layer(whole["segments"][0], index), layer(parts["segments"][segment], i))
    same(whole["embedding"], parts["embedding"])
    queries = np.asarray(whole["segments"][0]["attention"]["mechanism"]["query"])
    assert len(np.unique(queries.reshape(4, -1), axis=0)) == 4  # layers differ from each other
    other = parts["segments"][1]["attention"]["mechanism"]
    assert other["expand_key"].shape == (1, 4, 6, 8)
    np.testing.assert_array_equal(queries[1], other["query"][0])


@pytest.mark.slow
def test_initialisation(make_mechanism):
    """Output projections are zero, embeddings N(0, 1), and the loss is exactly ln V."""
    config = _config(make_mechanism("lrkv"), positions="learned", norm_gain=True, bias=True)
    weights = _initial(config)
    segment = weights["segments"][0]
    for zeros in (weights["head"], segment["attention"]["out"], segment["mlp"]["down"]):
        assert np.all(np.asarray(zeros) == 0)
    assert np.all(np.asarray(segment["mlp"]["up_bias"]) == 0)
    assert np.all(np.asarray(segment["mlp_norm"]["gain"]) == 1)
    for table in (weights["embedding"], weights["positions"]):
        assert abs(np.std(table) - 1) < 6 / math.sqrt(2 * table.size)
    up = np.asarray(segment["mlp"]["up"])
    assert abs(up.std() * math.sqrt(D) - 1) < 6 / math.sqrt(2 * up.size)
    model = nnx.merge(parameters.graph(config), weights)
    nats, mean = jax.jit(lambda *rows: (token_losses(model, *rows), mean_loss(model, *rows)))(
        *_tokens()
    )
    np.testing.assert_array_equal(nats, np.full((B, T), np.float32(math.log(V))))
    np.testing.assert_allclose(mean, math.log(V), rtol=2e-7)


def test_equal_configs_share_one_graph(make_mechanism):
    """The cached graph equals the module's own."""
    config, equal = (_config(make_mechanism("lrkv")) for _ in range(2))
    module = nnx.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    assert config is not equal and parameters.graph(config) is parameters.graph(equal)
    assert parameters.graph(config) == nnx.graphdef(module)
    assert parameters.graph(_config(make_mechanism("mla"))) != nnx.graphdef(module)


def test_dropout(make_mechanism, randomise):
    """Dropout zeroes a share of each half-block's output and scales the rest, if given a key."""
    plain, config = (_config(make_mechanism("mha"), 2, dropout=share) for share in (0.0, 0.25))
    model, weights = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
    without = nnx.merge(parameters.graph(plain), jax.tree.map(jnp.asarray, weights))

    def program(model, key):
        def run(x_BTD):
            return apply_blocks(
                model.config, model.segments, x_BTD, np.arange(T)[None], dropout=key
            )

        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(np.ones((B, T, D), np.float32))))

    key, expected = jax.random.key(0), program(without, None)
    assert program(without, key) == expected == program(model, None) != program(model, key)

    graph, layers = nnx.split(model.segments[0])

    def block():
        return nnx.merge(graph, jax.tree.map(lambda w: w[0], layers))

    y_BTD = np.ones((8, T, 64), np.float32)
    dropped = np.asarray(jax.jit(lambda key: block()._apply_dropout(y_BTD, key))(key))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(np.mean(dropped == 0) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / dropped.size)

    def keys(key):
        used, module, x_BTD = [], block(), np.ones((B, T, D), np.float32)
        module._apply_dropout = lambda y_BTD, key: used.append(key) or y_BTD
        places = rope.positions(np.arange(T)[None], 8, 10_000.0)
        module(x_BTD, places, compute=Compute(), dropout=key, causal=True)
        return used

    assert jax.jit(keys)(key) == list(jax.random.split(key))


def test_each_layer_has_its_own_dropout_key(make_mechanism, randomise):
    """Layers of different groups drop with different keys: a step equals blocks one by one."""
    config = _config((make_mechanism("mha"), make_mechanism("mqa")), 2, dropout=0.5)
    model, _ = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
    key, x_BTD = jax.random.key(1), jax.random.normal(jax.random.key(2), (B, T, D))
    positions_BT = np.arange(T)[None]
    y_BTD = x_BTD
    for group, layer_key in zip(model.segments, jax.random.split(key), strict=True):
        graph, weights = nnx.split(group)
        block = nnx.merge(graph, jax.tree.map(lambda weight: weight[0], weights))
        places = rope.positions(positions_BT, 8, 10_000.0)
        y_BTD = block(y_BTD, places, compute=Compute(), dropout=layer_key, causal=True)
    applied_BTD = apply_blocks(config, model.segments, x_BTD, positions_BT, dropout=key)
    np.testing.assert_allclose(applied_BTD, y_BTD, rtol=1e-5, atol=1e-5)


def test_compute_options_change_the_program(make_mechanism):
    """Every option of Compute makes another program; remat in a scan needs no `prevent_cse`."""
    graph, shapes = {}, {}
    for layers in (1, 2):
        config = _config(make_mechanism("mha"), layers)
        graph[layers], shapes[layers] = parameters.graph(config), parameters.abstract(config).shapes

    def program(layers=2, **options):
        def loss(weights):
            compute = Compute(**options)
            return mean_loss(nnx.merge(graph[layers], weights), *_tokens(), compute=compute)

        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(loss)(shapes[layers])))

    options_of_programs = [{}, dict(unroll=True), dict(query_chunk=5), dict(loss_chunks=3)]
    options_of_programs += [dict(remat=policy) for policy in REMAT_POLICIES if policy != "none"]
    texts = [program(**options) for options in options_of_programs]
    assert len(set(texts)) == len(options_of_programs) and texts[0] == program(loss_chunks=8)

    def merging(**options):
        return set(re.findall(r"prevent_cse=(\w+)", program(**options)))

    assert merging(remat="full") == {"False"}
    assert merging(remat="full", unroll=True) == merging(remat="full", layers=1) == {"True"}
    with pytest.raises(ValueError, match="implementation = 'other'"):
        program(attention="other")


@pytest.mark.slow
def test_positions_may_be_given(x64, make_mechanism, randomise):
    """Traced positions equal the default ones, and a shift of RoPE's positions changes nothing."""
    config = _config(make_mechanism("lrkv"), 2)
    model, _ = randomise(lambda: Transformer(config, jax.random.key(0)))
    graph, weights = nnx.split(model)
    tokens, compute = _tokens()[0], Compute(dtype=F64)
    run = jax.jit(
        lambda weights, positions: nnx.merge(graph, weights)(
            tokens, compute=compute, positions_BT=positions
        )
    )
    default = model(tokens, compute=compute)
    positions = np.arange(T, dtype=np.int32)[None]
    np.testing.assert_allclose(run(weights, positions), default, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(run(weights, positions + 500), default, rtol=1e-9, atol=1e-9)
    assert np.abs(run(weights, positions * 2) - default).max() > 1e-3


@pytest.mark.parametrize("family", quick.only(["lrkv"], FAMILIES))
def test_bfloat16(make_mechanism, randomise, family):
    """Matrices and activations are bfloat16, logits float32; the error is rounding alone."""
    config = _config(make_mechanism(family))
    model, weights = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
    tokens, targets = _tokens()
    compute = Compute(dtype=jnp.dtype(jnp.bfloat16))

    @jax.jit
    def run(tokens, targets):
        x = model(tokens, compute=compute)
        return x, model.logits(x), token_losses(model, tokens, targets, compute=compute)

    x, logits, losses = run(tokens, targets)
    assert x.dtype == jnp.bfloat16
    assert logits.dtype == losses.dtype == jnp.float32
    expected = reference.logits(config, jax.tree.map(np.float64, weights), tokens)
    error = np.linalg.norm(np.asarray(logits) - expected) / np.linalg.norm(expected)

    # Logits are one float32 product of the last activations and the bfloat16 head.
    def wide(w):
        return np.asarray(w.astype(jnp.bfloat16), np.float64)

    z, cap = wide(x) @ wide(model.head[...]), config.block.logit_softcap
    np.testing.assert_allclose(logits, cap * np.tanh(z / cap), rtol=0, atol=1e-5)
    # About 10 independent roundings of 2**-9 per layer: sqrt(30)·2**-9 = 1 %. The bound of 4 % is
    # near their worst case, 30·2**-9 = 6 %.
    assert 1e-4 < error < 0.04
