"""GQA to MLA: its error as explicit sums, exactness where MLA holds the source, the command."""

import dataclasses
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention, GroupedConfig
from kvjax.convert import calibration, latent_fit, layer as layer_lib, model as model_lib
from kvjax.convert.latent_fit import AttentionStatistics
from kvjax.convert.latent_method import LatentAttention
from kvjax.convert.layerwise import LayerwisePass
from kvjax.layers import rope
from kvjax.workdir import trained
from tests.convert import comparison, workdirs

N, K, H, V, E, T = 4, 2, 6, 5, 18, 9
FREQUENCIES = rope.frequencies(H, 50.0)


def _random_layer():
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((40, E)) @ rng.standard_normal((E, E)) + 0.7
    layer = layer_lib.Layer(
        query_ENH=rng.standard_normal((E, N, H)),
        key_EKH=rng.standard_normal((E, K, H)),
        value_EKH=rng.standard_normal((E, K, V)),
        out_NHD=rng.standard_normal((N, V, E)),
        out_bias_D=None,
        gains={},
        qk_norm="none",
        rope=50.0,
    )
    statistics = AttentionStatistics(
        distance_NT=rng.random((N, T)) * np.exp(-np.arange(T) / 4),
        key_weight_N=rng.random(N),
        value_weight_N=rng.random(N),
        mean_D=inputs.mean(axis=0),
    )
    return inputs, layer, statistics


def _moment(inputs):
    return inputs.T @ inputs / len(inputs)


def _rotated(x_F, angles):
    """Rotates pairs (i, i + F/2) by minus the angles."""
    pairs = np.split(x_F, 2)
    turned = (pairs[0] + 1j * pairs[1]) * np.exp(-1j * angles)
    return np.concatenate([turned.real, turned.imag])


def _explicit_error(inputs, layer, statistics, fitted, rope_frequencies, constant_NH=None):
    """Sums squared errors of logits, up to the best constant per head, and of outputs."""
    total = 0.0
    for n in range(N):
        k, p_T = n // (N // K), statistics.distance_NT[n] / statistics.distance_NT[n].sum()
        errors, weights = [], []
        for d, p in enumerate(p_T):
            for x in inputs:
                key = _rotated(x @ layer.key_EKH[:, k], FREQUENCIES * d)
                shared = _rotated(x @ fitted.rope_key_EP, rope_frequencies * d)
                latent = x @ fitted.latent_EC
                near = fitted.rope_query_NHP[n] @ shared + latent @ fitted.up_key_CNH[:, n]
                errors.append(key - near)
                weights.append(p / len(inputs))
        errors, weights = np.stack(errors), np.array(weights)
        errors = errors - (weights @ errors if constant_NH is None else constant_NH[n])
        queries = inputs @ layer.query_ENH[:, n]
        logits = queries @ errors.T
        total += statistics.key_weight_N[n] * np.mean(logits**2 @ weights)
        values = inputs @ layer.value_EKH[:, k]
        values = values - inputs @ fitted.latent_EC @ fitted.up_value_CKV[:, k]
        outputs = values @ layer.out_NHD[n]
        total += statistics.value_weight_N[n] * np.mean(np.sum(outputs**2, axis=1))
    return total


@pytest.mark.parametrize("pairs", [3, 2, 1])
def test_error_is_the_mean_square_of_logits_and_outputs(pairs):
    """The fit's own figure, from expected rotations, equals sums over inputs and distances."""
    inputs, layer, statistics = _random_layer()
    frequencies = FREQUENCIES, rope.frequencies(2 * pairs, 50.0)
    errors = []
    for sweeps in (1, 3, 30):
        fitted = latent_fit.fit(layer, _moment(inputs), statistics, frequencies, 8, sweeps=sweeps)
        expected = _explicit_error(inputs, layer, statistics, fitted, frequencies[1])
        assert fitted.error == pytest.approx(expected, rel=1e-6)
        errors.append(fitted.error)
    assert errors == sorted(errors, reverse=True)


def test_updates_are_least_squares():
    """No small change of the inputs' maps lowers the error for the queries' and outputs' maps."""
    inputs, layer, statistics = _random_layer()
    frequencies = FREQUENCIES, rope.frequencies(4, 50.0)
    problem = latent_fit._Problem(layer, _moment(inputs), statistics, frequencies, 8)
    problem.update_queries_and_outputs()
    problem.update_inputs()
    fitted, rest = problem.result(), (frequencies[1], problem.constant_NH)
    best = _explicit_error(inputs, layer, statistics, fitted, *rest)
    for name in ("rope_key_EP", "latent_EC"):
        change = 1e-3 * np.random.default_rng(1).standard_normal(getattr(fitted, name).shape)
        for sign in (1, -1):
            moved = fitted._replace(**{name: getattr(fitted, name) + sign * change})
            assert _explicit_error(inputs, layer, statistics, moved, *rest) > best


def test_mqa_is_exact(randomise):
    """A key that all heads share is a RoPE key, and its value a latent."""
    config = GroupedConfig(
        num_heads=N, num_kv_heads=1, num_bases=1, rank=0, key_dim=H, value_dim=4, qk_norm="none"
    )
    _, weights = randomise(lambda: Attention(config, E, rngs=nnx.Rngs(0)))
    inputs, _, statistics = _random_layer()
    layer = layer_lib.read(weights, config, rope=50.0)
    method = LatentAttention(rank=4, statistics=statistics, sweeps=60)
    converted = method.convert(layer, _moment(inputs)).weights
    positions = np.arange(T, dtype=np.int32)[None]
    found = {}
    with jax.enable_x64(True):
        for name, of, w in (
            ("before", config, weights),
            ("after", method.mechanism(config, rope=50.0), converted),
        ):
            graph = nnx.split(nnx.eval_shape(lambda of=of: Attention(of, E, rngs=nnx.Rngs(0))))[0]
            module = nnx.merge(graph, jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), w))
            angles = rope.positions(positions, H, 50.0)
            found[name] = np.asarray(module(inputs[None, :T], angles, causal=True))
    assert np.abs(found["after"] - found["before"]).max() < 1e-7 * np.abs(found["before"]).max()


def test_attention_statistics():
    """Shares of attention by distance, from probabilities computed token by token."""
    source = model_lib.open(str(comparison.PUBLISHED / "llama_tied_bias"))
    config = dataclasses.replace(source.transformer.mechanisms[0], bias=False)
    assert config.num_heads > config.num_kv_heads
    rows = np.random.default_rng(0).integers(0, 38, (3, 11))
    moments = calibration.moments(source, rows)
    (first, *_), per_row = calibration.attention_statistics(source, rows, moments), []
    assert first.distance_NT.sum() == pytest.approx(config.num_heads * rows.size)
    np.testing.assert_allclose(first.mean_D, moments[0][-1, :-1])

    def observe(attention, h_BTD, positions, mask):
        q_BTNH, raw = attention.mechanism.project(h_BTD, positions)
        k_BTKH, _ = attention.mechanism.keys_values(raw, positions)
        per_row.append((np.asarray(q_BTNH), np.asarray(k_BTKH)))
        return ()

    with jax.disable_jit():
        next(iter(LayerwisePass(source, rows).layers(observe)))
    expected = np.zeros_like(first.distance_NT)
    for q_BTNH, k_BTKH in per_row:
        for b, t, n in np.ndindex(*q_BTNH.shape[:3]):
            k = n * config.num_kv_heads // config.num_heads
            z = k_BTKH[b, : t + 1, k] @ q_BTNH[b, t, n] * config.scale
            p = np.exp(z - z.max())
            expected[n, : t + 1] += (p / p.sum())[::-1]
    np.testing.assert_allclose(first.distance_NT, expected, rtol=1e-4, atol=1e-5)


def test_command(run, imported, text, tmp_path):
    out, source = tmp_path / "out", imported("llama3_rope")
    options = [f"--source={source}", f"--out={out}", "--row_length=16", "--json", "--method=mla"]
    options += [f"--calibrate={text}", "--calibrate_tokens=256", f"--evaluate={text}"]
    status, printed, errors = run(*options, "--evaluate_tokens=64", "--cache=0.75", "--multiple=2")
    assert status == 0, errors
    result = json.loads(printed)
    assert (
        result["cache_bytes_per_token"]["after"] <= 0.75 * result["cache_bytes_per_token"]["before"]
    )
    config = trained.load(out).model.config
    assert config.mechanisms[0].rope_key_dim == result["rope_dim"]
    tokens = np.random.default_rng(1).integers(0, 38, (2, 12)).astype(np.int32)
    before = workdirs.logits(model_lib.transformer(model_lib.open(str(source))), tokens)
    after = workdirs.logits(trained.load(out).model, tokens)
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.9


def test_auto_takes_the_least_perplexity(run, imported, text, tmp_path):
    """Every method is tried within the budget; the workdir has the best one's cache."""
    out = tmp_path / "out"
    options = [f"--source={imported('llama')}", f"--out={out}", "--row_length=16", "--json"]
    options += [f"--calibrate={text}", "--calibrate_tokens=256", f"--evaluate={text}"]
    options += ["--evaluate_tokens=64", "--method=auto", "--cache=0.5", "--multiple=1"]
    status, printed, errors = run(*options)
    assert status == 0, errors
    result = json.loads(printed)
    compared = result["compared"]
    assert {name.partition(":")[0] for name in compared} == {"thin_keys", "lrkv", "mla", "gqa"}
    assert result["cache_bytes_per_token"]["after"] <= result["cache_bytes_per_token"]["before"] / 2
    best = min(compared, key=compared.get).partition(":")[0]
    kinds = {"thin_keys": "factored", "lrkv": "grouped", "mla": "mla", "gqa": "grouped"}
    section = model_lib.attention_section(trained.load(out).model.config)
    assert section["kind"] == kinds[best]
