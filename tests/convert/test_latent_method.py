"""GQA to MLA: its error as explicit sums, exactness where MLA holds the source, the command."""

import dataclasses
import itertools
import json
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention, GroupedConfig
from kvjax.attention.named import mha
from kvjax.convert import (
    __main__ as command,
    calibration,
    choice,
    latent_fit,
    layer as layer_lib,
    model as model_lib,
    options as options_lib,
    perplexity,
)
from kvjax.convert.latent_fit import AttentionStatistics
from kvjax.convert.latent_method import LatentAttention
from kvjax.convert.layerwise import LayerwisePass
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.workdir import trained
from tests import quick
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
        mean_E=inputs.mean(axis=0),
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
        assert sum(fitted.squared_errors) == pytest.approx(expected, rel=1e-6)
        errors.append(sum(fitted.squared_errors))
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


def _config(K, **keys):
    sizes = dict(num_heads=N, num_kv_heads=K, num_bases=K, rank=0, key_dim=H, value_dim=4)
    return GroupedConfig(**sizes, qk_norm="none", **keys)


def _with_ones(x_TD):
    return np.concatenate([x_TD, np.ones((len(x_TD), 1))], axis=1)


def _attention(config, weights, x_TD):
    """Runs causal attention [T, D] in float64."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Attention(config, x_TD.shape[1], rngs=nnx.Rngs(0))))
    index = np.arange(len(x_TD), dtype=np.int32)[None]
    positions = rope.positions(index, config.rope_dim, 50.0)
    with jax.enable_x64(True):
        weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), weights)
        module = nnx.merge(graph, weights)
        return np.asarray(module(x_TD[None], positions, causal=True))[0]


@pytest.mark.parametrize("biases", [{}, dict(bias=True), dict(bias=True, out_bias=False)])
def test_mqa_is_exact(randomise, biases):
    """A key that all heads share is a RoPE key, and its value a latent."""
    config = _config(1, **biases)
    _, weights = randomise(lambda: Attention(config, E, rngs=nnx.Rngs(0)))
    inputs, _, statistics = _random_layer()
    x = _with_ones(inputs) if biases else inputs
    statistics = statistics._replace(mean_E=x.mean(axis=0))
    method = LatentAttention(rank=4, statistics=statistics, sweeps=60)
    layer = layer_lib.read(weights, config, rope=50.0)
    converted = method.convert(layer, _moment(x)).weights
    before = _attention(config, weights, inputs[:T])
    after = _attention(method.mechanism(config, rope=50.0), converted, inputs[:T])
    assert np.abs(after - before).max() < 1e-7 * np.abs(before).max()


def test_a_bias_is_an_input_of_1(randomise):
    """A layer with biases loses as much as one without that has a further input of 1."""
    config, plain = _config(2, bias=True, out_bias=False), _config(2)
    _, weights = randomise(lambda: Attention(config, E, rngs=nnx.Rngs(0)))
    weights["mechanism"]["base_value_bias"] *= 0  # moves to the output's bias, with the latent's
    inputs, _, statistics = _random_layer()
    x = _with_ones(inputs)
    statistics = statistics._replace(mean_E=x.mean(axis=0))
    method = LatentAttention(rank=6, rope_dim=4, statistics=statistics, sweeps=3)
    layer = layer_lib.read(weights, config, rope=50.0)
    out_NHE = np.pad(layer.out_NHD, [(0, 0), (0, 0), (0, 1)])
    found, expected = (
        _attention(method.mechanism(c, rope=50.0), method.convert(of, _moment(x)).weights, rows)
        for c, of, rows in (
            (config, layer, inputs[:T]),
            (plain, dataclasses.replace(layer, out_NHD=out_NHE), x[:T]),
        )
    )
    np.testing.assert_allclose(found, expected[:, :-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("limit, queries", [(512, range(11)), (4, (1, 4, 7, 10))])
def test_attention_statistics(monkeypatch, limit, queries):
    """Shares of attention by distance, from probabilities computed token by token.

    Of long rows some queries count, the last among them.
    """
    monkeypatch.setattr(calibration, "_SENSITIVE_TOKENS", limit)
    source = model_lib.open(str(comparison.PUBLISHED / "llama_tied_bias"))
    config = source.transformer.mechanisms[0]
    assert config.num_heads > config.num_kv_heads
    rows = np.random.default_rng(0).integers(0, 38, (3, 11))
    moments = calibration.moments(source, rows)
    (first, *_), per_row = calibration.attention_statistics(source, rows, moments), []
    assert first.distance_NT.sum() == pytest.approx(config.num_heads * len(rows) * len(queries))
    np.testing.assert_allclose(first.mean_E, moments[0][-1])

    def observe(attention, h_BTD, positions, mask):
        q_BTNH, raw = attention.mechanism.project(h_BTD, positions)
        k_BTKH, _ = attention.mechanism.keys_values(raw, positions)
        per_row.append((np.asarray(q_BTNH), np.asarray(k_BTKH)))
        return ()

    with jax.disable_jit():
        next(iter(LayerwisePass(source, rows).layers(observe)))
    expected = np.zeros_like(first.distance_NT)
    for q_BTNH, k_BTKH in per_row:
        B, _, N, _ = q_BTNH.shape
        for b, t, n in itertools.product(range(B), queries, range(N)):
            k = n * config.num_kv_heads // config.num_heads
            z = k_BTKH[b, : t + 1, k] @ q_BTNH[b, t, n] * config.scale
            p = np.exp(z - z.max())
            expected[n, : t + 1] += (p / p.sum())[::-1]
    np.testing.assert_allclose(first.distance_NT, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "most, asked, length, warned",
    [(99, 20, 20, ""), (99, 2, 4, ""), (99, 10**6, 24, ""), (13, 10**6, 12, "rows of 12, and")],
)
def test_attention_is_measured_on_long_rows(
    run, imported, text, tmp_path, monkeypatch, most, asked, length, warned
):
    """Rows have --attention_length tokens, but no more than the model's context or the text."""
    read = perplexity.rows

    def rows(*arguments, length, **options):
        if length > most:
            raise perplexity.TooShortError("has no row of this length")
        return read(*arguments, length=length, **options)

    def statistics(model, rows_BT, moments):
        raise UserError(f"measured on rows of {rows_BT.shape[1]}")

    monkeypatch.setattr(perplexity, "rows", rows)
    monkeypatch.setattr(calibration, "attention_statistics", statistics)
    options = [f"--source={imported('llama')}", f"--out={tmp_path / 'out'}", f"--calibrate={text}"]
    options += ["--calibrate_tokens=64", "--method=mla", "--cache=0.75", "--row_length=4"]
    status, _, errors = run(*options, "--evaluate_tokens=0", f"--attention_length={asked}")
    assert status == 2 and errors.endswith(f"measured on rows of {length}\n"), errors
    assert ("is measured on " in errors) == bool(warned) and warned in errors


def test_long_rows_and_those_compared_are_of_all_texts(imported, monkeypatch):
    """A budget of whole rows is not one row less; a text that is too short is left out."""
    model, lengths = model_lib.open(str(imported("llama"))), {"a": 9999, "b": 9999, "c": 100}

    def rows(_, source, *, length, tokens, **options):
        if length > lengths[source]:
            raise perplexity.TooShortError(f"{source}: has no row of {length} tokens")
        return np.full((-(-tokens // length), length + 1), ord(source))

    monkeypatch.setattr(perplexity, "model_rows", rows)
    monkeypatch.setattr(model, "context", 8192)
    for texts, length, found in (
        ("a,b", 4096, "abab"),
        ("a,b", 8192, "ab"),
        ("a,b,c", 4096, "abab"),
        ("c", 256, None),
    ):
        given = [f"--calibrate={texts}", f"--attention_length={length}", "--row_length=128"]
        options = command.make_parser().parse([*given, "--method=mla", "--cache=0.5"])
        short = np.zeros((7, 129), np.int32)
        rows_BT = command.long_rows(options, model, short)
        if found is None:
            assert rows_BT is not short and rows_BT.shape == (7, 129)
        else:
            assert "".join(map(chr, rows_BT[:, 0])) == found and rows_BT.shape[1] == length + 1


def test_a_short_text_beside_a_long_one_does_not_shorten_rows(tmp_path, capsys):
    """Nor does it end the command, unless it has no row of --row_length."""
    model = workdirs.Made(workdirs.config("llama", workdirs.mla()))
    (tmp_path / "long.txt").write_text("abc\n" * 3000)
    (tmp_path / "short.txt").write_text("a\n" * 250)
    texts = f"{tmp_path}/long.txt,{tmp_path}/short.txt"
    options = command.make_parser().parse([f"--calibrate={texts}", "--row_length=8"])
    model.context = 1024
    rows_BT = command.long_rows(options, model, np.zeros((4, 9), np.int32))
    assert rows_BT.shape[1] == 1025
    assert "short.txt: " in (said := capsys.readouterr().err) and "measured without it" in said
    options.row_length = 1024
    with pytest.raises(UserError, match="short.txt: .*--row_length = 1024"):
        command._rows(options, model, key="calibrate")


def test_auto_compares_methods_on_all_texts(monkeypatch):
    """8,192 tokens are two rows of 4,096, one of each text."""
    compared = []
    monkeypatch.setattr(choice, "_refusals", lambda *_: {})
    monkeypatch.setattr(choice, "_by_layer", lambda *_: [types.SimpleNamespace(title="any")])
    monkeypatch.setattr(choice.refit, "converted_model", lambda *_: None)
    monkeypatch.setattr(
        choice.perplexity, "perplexity", lambda _, rows_BT: compared.append(rows_BT) or 2.0
    )
    parser = command.make_parser()
    options = parser.parse(["--method=auto", "--cache=0.5"])
    options_lib.fill_defaults(options, parser.get_default)
    rows_BT = np.tile(np.arange(4)[:, None], (1, 4097))
    choice._best(options, None, None, rows_BT, rows_BT)
    assert [each[:, 0].tolist() for each in compared] == [[0, 1]] * len(options_lib.FITTED)


def test_sizes_of_mla_are_possible(imported):
    """No latent is wider than the model, or than the 512 channels that exports pad to."""
    model = model_lib.open(str(imported("llama")))
    wide = dataclasses.replace(model.transformer.block, d_model=600)
    parser = command.make_parser()
    for block, most in ((model.transformer.block, 512), (wide, 600)):
        mechanism = mha(64, head_dim=16)
        mechanisms = (mechanism,) * block.num_layers
        transformer = dataclasses.replace(model.transformer, block=block, mechanisms=mechanisms)
        source = types.SimpleNamespace(transformer=transformer)
        options = parser.parse(["--method=mla", "--cache=0.9"])
        method = LatentAttention(rank=2)
        ranks = {size.rank for size in choice._latent_sizes(options, source, method)}
        assert ranks == {most}
    options = parser.parse(["--method=mla", "--rank=602"])
    options_lib.fill_defaults(options, parser.get_default)
    with pytest.raises(
        UserError, match="--rank=602: must be at most 600: the model's width, or 512"
    ):
        choice.check(options, source)
    with pytest.raises(UserError, match="--rope_dim=3: must be even"):
        next(choice._latent_sizes(options, source, LatentAttention(rank=2, rope_dim=3)))


def test_command(run, imported, text, tmp_path):
    out, source = tmp_path / "out", imported("llama3_rope")
    options = [f"--source={source}", f"--out={out}", "--row_length=16", "--json", "--method=mla"]
    options += [f"--calibrate={text}", "--calibrate_tokens=256", f"--evaluate={text}"]
    status, printed, errors = run(
        *options, "--evaluate_tokens=64", "--cache=0.75", "--multiple=2", "--refit"
    )
    assert status == 0, errors
    result = json.loads(printed)
    assert result["options"]["refit"] is True
    for before, after in result["outputs_lost"].values():
        assert 0 < after <= before
    assert (
        result["cache_bytes_per_token"]["after"] <= 0.75 * result["cache_bytes_per_token"]["before"]
    )
    config = trained.load(out).model.config
    assert config.mechanisms[0].rope_key_dim == result["rope_dim"]
    tokens = np.random.default_rng(1).integers(0, 38, (2, 12)).astype(np.int32)
    before = workdirs.logits(model_lib.transformer(model_lib.open(str(source))), tokens)
    after = workdirs.logits(trained.load(out).model, tokens)
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.9


def test_one_row_is_too_few_to_refit(run, imported, text, tmp_path):
    options = [f"--source={imported('llama')}", f"--out={tmp_path / 'out'}", f"--calibrate={text}"]
    options += ["--row_length=16", "--calibrate_tokens=16", "--method=mla", "--cache=0.75"]
    status, _, errors = run(*options, "--refit")
    assert status == 2 and "--refit: needs two rows of calibration text" in errors


AUTO = [("llama", "0.5"), ("qwen2", "0.75"), ("gpt2", "0.5")]


@pytest.mark.parametrize("source, cache", quick.only(AUTO[:1], AUTO))
def test_auto_takes_the_least_perplexity(run, imported, text, tmp_path, source, cache):
    """Methods that apply are tried within the budget; the workdir has the best one's cache."""
    out = tmp_path / "out"
    options = [f"--source={imported(source)}", f"--out={out}", "--row_length=16", "--json"]
    options += [f"--calibrate={text}", "--calibrate_tokens=256", f"--evaluate={text}"]
    options += ["--evaluate_tokens=64", "--method=auto", f"--cache={cache}", "--multiple=1"]
    status, printed, errors = run(*options)
    assert status == 0, errors
    result = json.loads(printed)
    compared = result["compared"]
    tried = {name.partition(":")[0] for name in compared}
    if source == "gpt2":
        assert tried == {"thin_keys", "lrkv", "gqa"}
        assert "--method=mla is left out: " in errors and "RoPE" in errors
    else:
        assert tried == {"thin_keys", "lrkv", "mla", "gqa"}
    sizes = result["cache_bytes_per_token"]
    assert sizes["after"] <= float(cache) * sizes["before"]
    best = min(compared, key=compared.get).partition(":")[0]
    kinds = {"thin_keys": "factored", "lrkv": "grouped", "mla": "mla", "gqa": "grouped"}
    section = model_lib.attention_section(trained.load(out).model.config)
    assert section["kind"] == kinds[best]


@pytest.mark.parametrize(
    "source, cache, reasons",
    [
        ("llama", "0.001", ["mla: --cache=0.001: leaves 0 elements", "gqa: --cache=0.001: one KV"]),
        ("olmo2", "0.5", ["thin_keys: ", "lrkv: ", "mla: ", "gqa: "]),
    ],
)
def test_auto_refuses_at_once_what_no_method_reaches(
    run, imported, tmp_path, source, cache, reasons
):
    options = [f"--source={imported(source)}", f"--out={tmp_path / 'out'}", "--method=auto"]
    status, _, errors = run(*options, f"--cache={cache}")
    assert status == 2 and "--method=auto: no method applies" in errors
    assert all(reason in errors for reason in reasons) and "calibrating" not in errors


def test_a_latent_is_even_with_any_multiple(imported):
    model = model_lib.open(str(imported("llama")))
    for multiple, cache in itertools.product((1, 3, 5), (0.4, 0.47, 0.55, 0.66, 0.75, 0.9)):
        parser = command.make_parser()
        options = parser.parse(["--method=mla", f"--cache={cache}", f"--multiple={multiple}"])
        options_lib.fill_defaults(options, parser.get_default)
        choice.check(options, model)
