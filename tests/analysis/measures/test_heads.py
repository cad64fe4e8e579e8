"""The matrices of heads, against the mechanism."""

import dataclasses
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.analysis.measures import heads as heads_lib
from kvjax.attention import Attention
from kvjax.attention.mechanism import Mechanism
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from tests import quick
from tests.compiled import compiled
from tests.convert import workdirs
from tests.mechanisms import MECHANISMS, random_values

D, BASE = 24, 100.0
LINEAR = [name for name in MECHANISMS if name != "tpa"]  # with linear queries and keys
WITH_GAINS = [name for name in LINEAR if name != "lrkv_shared_rope"]  # linear with rms_gain, too


def _weights(config, seed=0):
    """Returns random weights of an `Attention`, and the module with them in float64."""
    module = nnx.eval_shape(lambda: Attention(config, D, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    weights = random_values(state, seed)
    return weights, nnx.merge(graph, jax.tree.map(jnp.asarray, weights)).mechanism


def _projected(mechanism, x_TD, position, base=BASE):
    index = np.full((1, len(x_TD)), position, np.int32)
    positions = rope.positions(index, mechanism.config.rope_dim, base)

    def projected(x_BTD):
        q_BTNH, raw = mechanism.project(x_BTD, positions)
        return q_BTNH, *mechanism.keys_values(raw, positions)

    return [np.asarray(x[0]) for x in compiled(projected, x_TD[None])]


@pytest.mark.parametrize("mechanism_name", quick.only(("mla",), MECHANISMS))
def test_products_of_queries_and_keys(make_mechanism, mechanism_name, x64):
    """Compares logits at a distance with the mechanism's, without norms and biases."""
    config = make_mechanism(mechanism_name, qk_norm="none")
    weights, module = _weights(config)
    for name in ("latent_norm", "query_latent_norm"):  # norms that qk_norm does not remove
        if hasattr(module, name):
            gain = weights["mechanism"].get(name, {}).get("gain", 1.0)
            setattr(module, name, lambda latent, gain=gain: latent * gain)
    if mechanism_name == "tpa":
        with pytest.raises(UserError, match="are not linear in the layer's input"):
            heads_lib.read(weights, config, D, BASE)
        return
    found = heads_lib.read(weights, config, D, BASE)
    x_TD = np.random.default_rng(1).normal(size=(5, D))
    at_3, at_0 = (_projected(module, x_TD, position) for position in (3, 0))
    bias_at_3, bias_at_0 = (_projected(module, 0 * x_TD, position) for position in (3, 0))
    q_TNH, k_TKH = at_3[0] - bias_at_3[0], at_0[1] - bias_at_0[1]
    k_TNH = np.repeat(k_TKH, q_TNH.shape[1] // k_TKH.shape[1], axis=1)
    expected_NTS = np.einsum("TNH,SNH->NTS", q_TNH, k_TNH)

    rotated_TNH = np.tensordot(x_TD, found.query_DNH, 1)
    for _ in range(3):
        rotated_TNH = heads_lib.rotate_one_token(rotated_TNH, found.rotated, found.frequencies_F)
    key_TNH = np.tensordot(
        x_TD, np.repeat(found.key_DKH, k_TNH.shape[1] // found.key_DKH.shape[1], axis=1), 1
    )
    got_NTS = np.einsum("TNH,SNH->NTS", rotated_TNH, key_TNH)
    np.testing.assert_allclose(got_NTS, expected_NTS, atol=1e-9 * np.abs(expected_NTS).max())
    value_TKH = np.tensordot(x_TD, found.value_DKH, 1)
    np.testing.assert_allclose(value_TKH, at_0[2] - bias_at_0[2], atol=1e-9)


@pytest.mark.parametrize("mechanism_name", quick.only(("lrkv_gqa",), WITH_GAINS))
def test_norms_are_reduced_to_their_gains(make_mechanism, mechanism_name, x64):
    """Compares with the mechanism without norms, channels multiplied by the gains."""
    config = make_mechanism(mechanism_name, qk_norm="rms_gain")
    weights, _ = _weights(config)
    found = heads_lib.read(weights, config, D, BASE)
    plain = dataclasses.replace(config, qk_norm="none")
    inner = {k: w for k, w in weights["mechanism"].items() if not k.endswith("_norm")}
    if config.query_rank:
        gain_C = weights["mechanism"]["query_latent_norm"]["gain"]
        for name in {"query", "rope_query"} & inner.keys():
            inner[name] = inner[name] * gain_C[:, None, None]
    expected = heads_lib.read(weights | dict(mechanism=inner), plain, D, None)

    def gain(*names):
        return np.concatenate(
            [np.ones(0)]
            + [weights["mechanism"][name]["gain"] for name in names if name in weights["mechanism"]]
        )

    queries, keys = gain("query_norm", "rope_query_norm"), gain("key_norm", "rope_key_norm")
    more = found.query_DNH.shape[-1] - len(queries)  # the "+" of projection sharing
    queries = np.concatenate([queries, np.ones(more)])
    np.testing.assert_allclose(found.query_DNH, expected.query_DNH * queries, atol=1e-12)
    if len(keys) == found.key_DKH.shape[-1]:
        np.testing.assert_allclose(found.key_DKH, expected.key_DKH * keys, atol=1e-12)


def test_gains_of_gemma_are_one_plus_their_weights(make_mechanism, x64):
    config = make_mechanism("gqa", qk_norm="rms_offset")
    weights, _ = _weights(config)
    found = heads_lib.read(weights, config, D, BASE)
    plain = dataclasses.replace(config, qk_norm="none")
    inner = {k: w for k, w in weights["mechanism"].items() if not k.endswith("_norm")}
    expected = heads_lib.read(weights | dict(mechanism=inner), plain, D, None)
    gain = 1 + weights["mechanism"]["key_norm"]["gain"]
    np.testing.assert_allclose(found.key_DKH, expected.key_DKH * gain, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism_name", LINEAR)
def test_norms_without_a_gain_change_nothing(make_mechanism, mechanism_name, x64):
    config = make_mechanism(mechanism_name, qk_norm="rms")
    weights, _ = _weights(config)
    found = heads_lib.read(weights, config, D, BASE)
    plain = dataclasses.replace(config, qk_norm="none")
    expected = heads_lib.read(weights, plain, D, BASE)
    for name in ("query_DNH", "key_DKH", "value_DKH", "out_NHD"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.rotated == expected.rotated


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlra", "mfa_kr", "shared_kv"])
def test_outputs_include_combine(make_mechanism, name, x64):
    """A single token's output is its value times the output projection."""
    config = make_mechanism(name, qk_norm="none")
    weights, module = _weights(config)
    module.latent_norm = lambda latent: latent
    found = heads_lib.read(weights, config, D, BASE)
    x_1D = np.random.default_rng(1).normal(size=(1, D))
    graph, _ = nnx.split(nnx.eval_shape(lambda: Attention(config, D, rngs=nnx.Rngs(0))))
    attention = nnx.merge(graph, jax.tree.map(jnp.asarray, weights))
    attention.mechanism = module
    positions = rope.positions(np.zeros((1, 1), np.int32), config.rope_dim, BASE)
    expected = attention(jnp.asarray(x_1D)[None], positions, causal=True)[0]
    value_DNH = np.repeat(found.value_DKH, found.num_heads // found.value_DKH.shape[1], axis=1)
    got = np.einsum("TD,DNH,NHE->TE", x_1D, value_DNH, found.out_NHD)
    np.testing.assert_allclose(got, expected, atol=1e-9)


def test_outputs_include_a_synthetic_combine():
    """Mixes channels of three heads into two of another width."""
    rng = np.random.default_rng(0)
    mix_NHMG, out_MGD = rng.normal(size=(3, 4, 2, 5)), rng.normal(size=(2, 5, 7))

    class Mixes(Mechanism):
        def __init__(self):
            self.config = types.SimpleNamespace(query_heads=3, value_dim=4)

        def combine(self, o_BTNH, positions):
            assert positions == rope.Positions(None, None)
            return np.einsum("BTNH,NHMG->BTMG", o_BTNH, mix_NHMG)

    found = heads_lib._outputs(Mixes(), out_MGD)
    np.testing.assert_allclose(found, np.einsum("NHMG,MGD->NHD", mix_NHMG, out_MGD), rtol=1e-6)


def test_rotated_channels_are_checked_on_queries():
    """Accepts pairs 3 and 5, and 4 and 6, of eight channels; refuses adjacent pairs."""
    x_TNH = np.random.default_rng(0).normal(size=(3, 2, 8))
    first, second = rope.frequencies(4, BASE)

    def detect(pairs, x_TNH=x_TNH):
        rotated_TNH = x_TNH.copy()
        for (a, b), angle in zip(pairs, (first, second), strict=True):
            rotated_TNH[..., a] = np.cos(angle) * x_TNH[..., a] - np.sin(angle) * x_TNH[..., b]
            rotated_TNH[..., b] = np.sin(angle) * x_TNH[..., a] + np.cos(angle) * x_TNH[..., b]
        projected = {None: x_TNH, 1: rotated_TNH}
        config = types.SimpleNamespace(rope_dim=4, rotated_channels=slice(3, 7))
        return heads_lib._rotation(lambda x, at=None: [projected[at], "keys"], None, config, BASE)

    last_are_zero_TNH = x_TNH * (np.arange(8) % 2)  # as exports pad queries
    for given_TNH in (x_TNH, 0 * x_TNH, last_are_zero_TNH):
        rotated, frequencies_F = detect([(3, 5), (4, 6)], given_TNH)
        assert rotated == slice(3, 7) and frequencies_F.tolist() == [first, second]
    rotated, frequencies_F = heads_lib._rotation(None, x_TNH, None, None)
    assert rotated == slice(0, 0) and frequencies_F.shape == (0,)
    with pytest.raises(UserError, match="channels of RoPE's pairs are not half of the rotated"):
        detect([(3, 4), (5, 6)])


@pytest.mark.slow
def test_rotated_channels(make_mechanism):
    def of(name, base=BASE):
        return heads_lib.read(_weights(make_mechanism(name))[0], make_mechanism(name), D, base)

    assert of("mha").rotated == slice(0, 8) and len(of("mha").frequencies_F) == 4
    assert of("mha", None).rotated == slice(0, 0)
    assert of("mha", rope.Partial(BASE, 0.5)).rotated == slice(0, 8)
    c = make_mechanism("mla")
    assert of("mla").rotated == slice(c.key_dim, c.key_dim + c.rope_key_dim)
    # Of 16: RoPE rotates no channels of the residual.
    assert of("lrkv_shared_rope").rotated == slice(0, 8)


def test_weights_that_are_not_finite_are_named(make_mechanism):
    config = make_mechanism("mha")
    weights, _ = _weights(config)
    weights["mechanism"]["base_key"][3, 2, 1] = np.nan
    with pytest.raises(UserError, match=r"weights of keys are not finite, of heads \[2\]"):
        heads_lib.read(weights, config, D, BASE)


def _model(config):
    return workdirs.Made(workdirs.config("nanochat", config))


def test_only_attention_is_read(make_mechanism, monkeypatch):
    model = _model(make_mechanism("mha"))
    read, paths = model.read, []
    monkeypatch.setattr(
        model, "read", lambda path, *layer: (paths.append(path), read(path, *layer))[1]
    )
    heads_lib.of_layer(model, 1)
    assert paths and all(path[2] == "attention" for path in paths)


@pytest.mark.slow
def test_check_reads_no_weights(make_mechanism, mechanism_name, monkeypatch):
    """Raises the error of reading; layers that are not in `indices` may have any mechanism."""
    plain = make_mechanism("mha")
    for norm in ("none", "rms", "rms_gain"):
        config = make_mechanism(mechanism_name, qk_norm=norm)
        model = _model([plain, config, config])
        try:
            heads_lib.of_layer(model, 1)
            message = None
        except UserError as error:
            message = str(error)
        monkeypatch.setattr(model, "read", None)
        if message is None:
            heads_lib.check(model)
            continue
        with pytest.raises(UserError) as refused:
            heads_lib.check(model)
        assert str(refused.value) == message and message.startswith("layer 1 of made: ")
        heads_lib.check(model, [0])
