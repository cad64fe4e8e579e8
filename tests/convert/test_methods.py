"""Each method on a layer of random weights: exact at full rank, close elsewhere."""

import dataclasses
import itertools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention, FactoredConfig, GroupedConfig
from kvjax.convert import layer as layer_lib
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.convert.pooled_heads import PooledHeads
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from tests import quick

D, T, BASE = 24, 20, 100.0
SHAPE = dict(num_heads=4, key_dim=8, value_dim=8, norm_epsilon=1e-6)
SOURCES = {
    "llama": (dict(num_kv_heads=2, num_bases=2, qk_norm="none"), True),
    "granite": (dict(num_kv_heads=2, num_bases=2, qk_norm="none", logit_scale=0.6), True),
    "gpt2": (dict(num_kv_heads=4, num_bases=4, qk_norm="none", bias=True), False),
    "qwen2": (
        dict(num_kv_heads=2, num_bases=2, qk_norm="none", bias=True, out_bias=False),
        True,
    ),
    "qwen3": (dict(num_kv_heads=2, num_bases=2, qk_norm="rms_gain"), True),
    "gemma3": (
        dict(num_kv_heads=2, num_bases=2, qk_norm="rms_offset", logit_scale=0.6),
        True,
    ),
    "nanochat": (dict(num_kv_heads=4, num_bases=4, qk_norm="rms"), True),
    "normed": (dict(num_kv_heads=2, num_bases=2, qk_norm="rms", bias=True), False),
}
INPUTS = np.random.default_rng(5).standard_normal((3, T, D)) * np.linspace(0.2, 2, D)


def _source(randomise, name):
    keys, on = SOURCES[name]
    config = GroupedConfig(**SHAPE, rank=0, **keys)
    _, weights = randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)))
    return config, weights, on


def _attend(config, weights, on, x_BTD=INPUTS):
    module = nnx.eval_shape(lambda: Attention(config, D, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    shapes = jax.tree.map(lambda x: x.shape, nnx.to_pure_dict(state))
    assert shapes == jax.tree.map(np.shape, weights)  # the weights of that config and no others
    positions = rope.positions(np.arange(T, dtype=np.int32)[None], 8, BASE if on else None)
    positions = positions if config.key_dim == 8 else rope.Positions(positions.index, None)
    weights = jax.tree.map(jnp.asarray, weights)
    attend = jax.jit(lambda w, x: nnx.merge(graph, w)(x, positions, causal=True))
    return np.asarray(attend(weights, x_BTD))


def _moment(config):
    x = INPUTS.reshape(-1, D)
    if config.bias:
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return x.T @ x / len(x)


def _converted(method, source, moment=None):
    """Returns the new config, its weights, and the output's relative error."""
    config, weights, on = source
    layer = layer_lib.read(weights, config, rope=on)
    moment = layer.identity_moment() if moment is None else moment
    new, converted = method.mechanism(config, rope=on), method.convert(layer, moment)
    before, after = _attend(config, weights, on), _attend(new, converted.weights, on)
    return new, converted, np.linalg.norm(after - before) / np.linalg.norm(before)


FULL = [
    ThinKeys(rank=8),
    ThinKeys(rank=8, objective="weights"),
    ThinKeys(rank=8, part="value"),
    ThinKeys(rank=8, part="query", objective="weights"),
    ThinKeys(rank=8, part="both"),
    ThinKeys(rank=8, part="key_value"),
    ThinKeys(rank=8, part="key_value", absorb=False),
    LowRankKV(rank=8),
    LowRankKV(rank=8, objective="weights", align=False),
    LowRankKV(rank=0, bases=2),
]


@pytest.mark.parametrize(
    "method, source", quick.every(42, itertools.product(FULL, SOURCES), first=3), ids=str
)
def test_full_rank_loses_nothing(x64, randomise, source, method):
    """Scaling, rotating and dropping biases change no output."""
    source = _source(randomise, source)
    if method.__class__ is LowRankKV and method.rank == 0:
        method = dataclasses.replace(method, bases=source[0].num_kv_heads)
    _, converted, error = _converted(method, source, _moment(source[0]))
    assert error < 1e-9
    assert all(lost < 1e-9 for lost in converted.errors.values())


@pytest.mark.parametrize("source", quick.every(3, SOURCES))
def test_joint_latents_of_all_heads(x64, randomise, source):
    source = _source(randomise, source)
    rank = 8 * source[0].num_kv_heads
    new, _, error = _converted(ThinKeys(rank=rank, mode="joint"), source, _moment(source[0]))
    assert error < 1e-9
    assert isinstance(new, FactoredConfig) and new.num_latents == 1 and new.key_rank == rank


@pytest.mark.parametrize("source", SOURCES)
def test_cached_elements(x64, randomise, source):
    config, _, on = _source(randomise, source)

    def elements(new):
        return sum(int(np.prod(field.shape)) for field in new.entry().values() if not field.wide)

    K = config.num_kv_heads
    assert elements(ThinKeys(rank=3).mechanism(config, rope=on)) == K * (3 + 8)
    assert elements(ThinKeys(rank=3, mode="joint").mechanism(config, rope=on)) == 3 + K * 8
    assert elements(ThinKeys(rank=3, part="value").mechanism(config, rope=on)) == K * (3 + 8)
    assert elements(ThinKeys(rank=3, part="query").mechanism(config, rope=on)) == K * 16
    both = ThinKeys(rank=3, part="key_value", value_rank=2)
    assert elements(both.mechanism(config, rope=on)) == K * (3 + 2)
    both = dataclasses.replace(both, mode="joint", rank=9)
    assert elements(both.mechanism(config, rope=on)) == 9 + 2
    assert elements(LowRankKV(rank=3).mechanism(config, rope=on)) == 2 * (8 + K * 3)


@pytest.mark.parametrize("source", SOURCES)
def test_pooled_heads(x64, randomise, source):
    """Equal heads lose nothing; the mean of unequal heads is nearest to both."""
    config, weights, on = _source(randomise, source)
    layer = layer_lib.read(weights, config, rope=on)
    unequal = PooledHeads(1).convert(layer, layer.identity_moment())
    keys = layer.weights_of(layer.key_EKH)
    np.testing.assert_allclose(unequal.weights["mechanism"]["base_key"][:, 0], keys.mean(axis=1))
    assert 0.2 < min(unequal.errors.values()) <= max(unequal.errors.values()) < 1
    inner = weights["mechanism"]
    for name in [name for name in inner if name.startswith("base_")]:
        inner[name] = np.repeat(inner[name][..., :1, :], config.num_kv_heads, axis=-2)
    new, converted, error = _converted(PooledHeads(1), (config, weights, on))
    assert error < 1e-12 and max(converted.errors.values()) < 1e-12 and new.num_kv_heads == 1


def test_up_projections_are_absorbed_into_queries(x64, randomise):
    """The result is a model with thin keys, whose logits are still divided by sqrt(8)."""
    for name, absorbed in (("gpt2", True), ("llama", False), ("qwen3", False)):
        config, _, on = _source(randomise, name)
        new = ThinKeys(rank=3).mechanism(config, rope=on)
        assert isinstance(new, GroupedConfig) == absorbed
        assert new.key_dim == (3 if absorbed else 8)


def test_zero_outputs_keep_values(x64, randomise):
    """Grown blocks start with a zero output projection and learn from their values."""
    config, weights, on = _source(randomise, "llama")
    weights = weights | dict(out=np.zeros_like(weights["out"]))
    layer = layer_lib.read(weights, config, rope=on)
    for method in (LowRankKV(rank=2), ThinKeys(rank=4, part="value", absorb=False)):
        inner = method.convert(layer, _moment(config)).weights["mechanism"]
        values = inner["base_value" if isinstance(method, LowRankKV) else "value"]
        assert np.abs(values).max() > 0.01 and np.isfinite(values).all()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["key", "value", "key_value"])
def test_absorbing_changes_no_output(x64, randomise, part):
    config, weights, on = _source(randomise, "gpt2")
    layer, moment_EE = layer_lib.read(weights, config, rope=on), _moment(config)

    def outputs(absorb):
        method = ThinKeys(rank=3, part=part, absorb=absorb)
        new = method.mechanism(config, rope=on)
        assert isinstance(new, GroupedConfig if absorb else FactoredConfig)
        return _attend(new, method.convert(layer, moment_EE).weights, on)

    np.testing.assert_allclose(outputs(True), outputs(False), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("method", [ThinKeys(rank=5), LowRankKV(rank=3)], ids=str)
def test_objectives(x64, randomise, source, method):
    """On the calibration text, inputs and outputs lose less than weights."""
    source = _source(randomise, source)
    error = {}
    for objective in ("weights", "inputs", "outputs"):
        moment = None if objective == "weights" else _moment(source[0])
        error[objective] = _converted(
            dataclasses.replace(method, objective=objective), source, moment
        )[2]
    assert error["outputs"] < error["weights"]
    assert error["inputs"] < error["weights"]
    assert 0.001 < error["outputs"] < 1


@pytest.mark.parametrize("source", ["gpt2", "llama"])
def test_whitening(x64, randomise, source):
    """Queries and outputs get unit moments; under RoPE the mean of a pair does."""
    config, weights, on = _source(randomise, source)
    moment_EE = _moment(config)
    layer = layer_lib.read(weights, config, rope=on)
    layer = layer_lib.change_basis(layer, *layer_lib.whitening(layer, moment_EE))
    K = config.num_kv_heads
    query_KXH = layer.query_ENH.reshape(-1, K, 4 // K, 8).transpose(1, 2, 0, 3)
    found_KHH = np.einsum("KGEH,EF,KGFI->KHI", query_KXH, moment_EE, query_KXH)
    if on:
        of_pairs = np.einsum("KHH->KH", found_KHH).reshape(K, 2, 4).mean(axis=1)
        np.testing.assert_allclose(of_pairs, 1, rtol=1e-9)
    else:
        np.testing.assert_allclose(found_KHH, np.broadcast_to(np.eye(8), (K, 8, 8)), atol=1e-9)
    out_KXH = layer.out_NHD.reshape(K, 4 // K, 8, D)
    found_KHH = np.einsum("KGHD,KGID->KHI", out_KXH, out_KXH)
    np.testing.assert_allclose(found_KHH, np.broadcast_to(np.eye(8), (K, 8, 8)), atol=1e-9)


@pytest.mark.parametrize("method", [ThinKeys(rank=5, part="value"), LowRankKV(rank=3)], ids=str)
def test_objective_outputs_weighs_channels(x64, randomise, method):
    """Half of a value's channels hardly reach the output; the objective outputs drops them."""
    config, weights, on = _source(randomise, "llama")
    scale_H1 = np.where(np.arange(8) < 4, 1.0, 0.01)[:, None]
    source = config, weights | dict(out=np.asarray(weights["out"]) * scale_H1), on

    def of(objective):
        return dataclasses.replace(method, objective=objective)

    error = {
        name: _converted(of(name), source, _moment(config))[2] for name in ("inputs", "outputs")
    }
    assert error["outputs"] < 0.8 * error["inputs"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "method",
    [
        ThinKeys(rank=9, mode="joint", part="key_value"),
        ThinKeys(rank=5, part="key_value"),
        LowRankKV(rank=3),
    ],
    ids=str,
)
def test_factors_have_balanced_scales(x64, randomise, source, method):
    """Factors of a product have equal root mean squares; bases about the projections'."""
    config, weights, on = _source(randomise, source)
    layer = layer_lib.read(weights, config, rope=on)
    inner = method.convert(layer, _moment(config)).weights["mechanism"]

    def size(x, over=None):
        return np.sqrt(np.mean(np.asarray(x) ** 2, axis=over))

    lrkv = isinstance(method, LowRankKV)
    for part in ("key", "value"):
        if lrkv:
            before = size(weights["mechanism"][f"base_{part}"])
            assert 0.4 * before < size(inner[f"base_{part}"]) < 1.5 * before
        if f"expand_{part}" in inner:
            latent = inner[f"latent_{part}" if lrkv else part]
            expand = inner[f"expand_{part}"]
            J = latent.shape[1]
            expand = expand.reshape(J, -1, *expand.shape[1:])
            np.testing.assert_allclose(size(latent, 0), size(expand, (1, 3)), rtol=1e-9)
    if not lrkv and "expand_key" in inner:
        np.testing.assert_array_equal(inner["query"], layer.weights_of(layer.query_ENH))
    elif not lrkv:  # absorbed
        G = config.num_heads // config.num_kv_heads
        query = inner["query"].reshape(D, -1, G, method.rank)
        np.testing.assert_allclose(size(inner["base_key"], 0), size(query, (0, 2)), rtol=1e-9)


def test_aligned_heads_lose_less(x64, randomise):
    source = _source(randomise, "llama")
    aligned, plain = (
        _converted(LowRankKV(rank=3, align=align), source, _moment(source[0]))[1].errors
        for align in (True, False)
    )
    assert aligned["key"] < plain["key"] and aligned["value"] < plain["value"]


BAD = [
    (ThinKeys(rank=9), "llama", r"rank = 9: must lie in \[1, 8\], the 8 channels of a head"),
    (
        ThinKeys(rank=3, part="key_value", value_rank=9),
        "llama",
        r"value_rank = 9: must lie in \[1, 8\]",
    ),
    (ThinKeys(rank=0), "llama", r"rank = 0: must lie in \[1, 8\]"),
    (
        ThinKeys(rank=17, mode="joint"),
        "llama",
        r"rank = 17: must lie in \[1, 16\], the channels of all heads",
    ),
    (LowRankKV(rank=9), "gpt2", r"rank = 9: must lie in \[0, 8\]"),
    (LowRankKV(rank=3, bases=3), "gpt2", "bases = 3: must divide the 4 KV heads"),
    (LowRankKV(rank=3, bases=0), "gpt2", "bases = 0: must divide the 4 KV heads"),
]


@pytest.mark.parametrize("method, source, message", BAD, ids=str)
def test_impossible_ranks(randomise, method, source, message):
    config, _, on = _source(randomise, source)
    with pytest.raises(UserError, match=message):
        method.mechanism(config, rope=on)


@pytest.mark.parametrize("key", ["mode", "part", "objective"])
def test_unknown_options(key):
    with pytest.raises(UserError, match=f"{key} = 'x': must be one of '"):
        ThinKeys(rank=3, **{key: "x"})


def test_only_plain_attention_is_converted(make_mechanism):
    layer_lib.check([make_mechanism("gqa"), make_mechanism("mha")])
    for name in ("lrkv", "mla", "kv_tied", "qk_tied_plus", "factored"):
        with pytest.raises(UserError, match="only MHA, GQA and MQA are converted"):
            layer_lib.check([make_mechanism("gqa"), make_mechanism(name)])
