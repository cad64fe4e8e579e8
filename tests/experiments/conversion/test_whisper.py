"""Whisper's decoder, read from a file of random weights, against NumPy."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import special

from experiments.conversion import ctranslate2, whisper
from kvjax import cache as cache_lib
from kvjax.attention import Attention
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.errors import UserError
from tests.experiments.conversion import whisper_stand_in as stand_in
from tests.experiments.conversion.whisper_stand_in import LAYERS, TYPES, D, F, H, M, N, S, T, V

# -- the definition --------------------------------------------------------------------------------


def _norm(v, scope, x):
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
    return centred / deviation * v[f"{scope}/gamma"] + v[f"{scope}/beta"]


def _linear(v, scope, x):
    return x @ v[f"{scope}/weight"].T + v[f"{scope}/bias"]


def _gelu(x):
    return x * (1 + special.erf(x / math.sqrt(2))) / 2


def _attention(q, k, v, *, causal=False):
    """Attention of one row, head by head: [T, D] queries, [S, D] keys and values."""
    out = []
    for head in range(N):
        part = np.s_[:, head * H : head * H + H]
        z = q[part] @ k[part].T / math.sqrt(H)
        if causal:
            z = np.where(np.tri(len(q), dtype=bool), z, -np.inf)
        out.append(special.softmax(z, axis=-1) @ v[part])
    return np.concatenate(out, axis=-1)


def _self_attention(v, scope, x, *, causal):
    heads = np.split(_linear(v, f"{scope}/linear_0", x), 3, axis=-1)
    return _linear(v, f"{scope}/linear_1", _attention(*heads, causal=causal))


def _feed_forward(v, scope, x):
    h = _gelu(_linear(v, f"{scope}/linear_0", _norm(v, f"{scope}/layer_norm", x)))
    return _linear(v, f"{scope}/linear_1", h)


def _convolution(v, scope, x, stride):
    padded = np.pad(x, ((1, 1), (0, 0)))
    windows = [padded[i : i + 3] for i in range(0, len(x), stride)]
    return _gelu(np.einsum("swi,oiw->so", windows, v[f"{scope}/weight"]) + v[f"{scope}/bias"])


def _encoded(v):
    x = _convolution(v, "encoder/conv1", np.full((2 * S, F), -1.5), 1)
    x = _convolution(v, "encoder/conv2", x, 2) + v["encoder/position_encodings/encodings"]
    for layer in (f"encoder/layer_{i}" for i in range(LAYERS["encoder"])):
        h = _norm(v, f"{layer}/self_attention/layer_norm", x)
        x = x + _self_attention(v, f"{layer}/self_attention", h, causal=False)
        x = x + _feed_forward(v, f"{layer}/ffn", x)
    return _norm(v, "encoder/layer_norm", x)


def _decoded(v, tokens):
    """Returns logits [T, V] of one row, and each layer's self-attention input."""
    v = {name: np.asarray(x, np.float64) for name, x in v.items()}
    frames, inputs = _encoded(v), []
    embedding = v["decoder/embeddings/weight"]
    x = embedding[tokens] + v["decoder/position_encodings/encodings"][: len(tokens)]
    for layer in (f"decoder/layer_{i}" for i in range(LAYERS["decoder"])):
        inputs.append(_norm(v, f"{layer}/self_attention/layer_norm", x))
        x = x + _self_attention(v, f"{layer}/self_attention", inputs[-1], causal=True)
        cross = f"{layer}/attention"
        q = _linear(v, f"{cross}/linear_0", _norm(v, f"{cross}/layer_norm", x))
        keys_values = np.split(_linear(v, f"{cross}/linear_1", frames), 2, axis=-1)
        x = x + _linear(v, f"{cross}/linear_2", _attention(q, *keys_values))
        x = x + _feed_forward(v, f"{layer}/ffn", x)
    return _norm(v, "decoder/layer_norm", x) @ embedding.T, inputs


# -- the model -------------------------------------------------------------------------------------


FORWARD = jax.jit(whisper.forward, static_argnums=1)
INPUTS = jax.jit(whisper.attention_inputs, static_argnums=1)
STEP = jax.jit(whisper.decode, static_argnums=1)


def _tokens(rows, length):
    return np.random.default_rng(1).integers(0, V, (rows, length)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    """Params and config, in float32."""
    return whisper.from_variables(stand_in.variables(np.float32))


@pytest.fixture
def folder(tmp_path):
    stand_in.write(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_folder_is_read_in_float32(folder):
    model = whisper.load(folder)
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.float32)}
    assert model.config == whisper.WhisperConfig(
        num_layers=2, num_heads=N, d_model=D, mlp_dim=M, vocab_size=V, max_positions=T
    )
    assert model.prefix == (1, 2)  # of SPECIALS, which have the first ids
    assert model.tokenizer.decode(model.encode("to be,\n  or\nnot")) == " to be, or not"
    tokens_BT = _tokens(2, T)
    x_BTD = FORWARD(model.params, model.config.mechanisms, tokens_BT)
    logits_BTV = whisper.logits(model.params, x_BTD)
    for tokens, logits in zip(tokens_BT, logits_BTV, strict=True):
        expected, _ = _decoded(stand_in.variables(np.float16), tokens)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_forward_is_the_definition(x64):
    variables = stand_in.variables(np.float64)
    params, config = whisper.from_variables(variables)
    tokens_BT = _tokens(2, T - 5)
    logits_BTV = whisper.logits(params, FORWARD(params, config.mechanisms, tokens_BT))
    inputs = INPUTS(params, config.mechanisms, tokens_BT)
    for b, tokens in enumerate(tokens_BT):
        expected, expected_inputs = _decoded(variables, tokens)
        np.testing.assert_allclose(logits_BTV[b], expected, rtol=1e-10, atol=1e-10)
        found_inputs = [x_BTD[b] for x_BTD in inputs]
        np.testing.assert_allclose(found_inputs, expected_inputs, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_decoding_equals_forward_whatever_the_mechanism(x64, make_mechanism, randomise):
    """The last layer has LRKV with biases in place of its MHA."""
    dtype = np.float64
    params, config = whisper.from_variables(stand_in.variables(dtype))
    sizes = dict(num_heads=N, num_kv_heads=N, key_dim=H, value_dim=H)
    lrkv = make_mechanism("lrkv", **sizes, rank=2, qk_norm="none", bias=True)
    _, weights = randomise(lambda: Attention(lrkv, D, rngs=nnx.Rngs(0)), dtype=dtype)
    params["layers"][-1]["attention"] = jax.tree.map(jnp.asarray, weights)
    mechanisms = (*config.mechanisms[:-1], lrkv)
    tokens_BT = _tokens(2, T)
    expected_BTD = FORWARD(params, mechanisms, tokens_BT)

    cache = cache_lib.allocate(mechanisms, batch=2, capacity=T + 1, dtype=jnp.dtype(dtype))
    found = []
    for cut in np.split(tokens_BT, [5, *range(6, T)], axis=1):
        x_BTD, cache = STEP(params, mechanisms, cut, cache)
        found.append(x_BTD)
    found_BTD = np.concatenate(found, axis=1)
    assert found_BTD.dtype == dtype
    np.testing.assert_allclose(found_BTD, expected_BTD, rtol=1e-10, atol=1e-10)
    beyond_BTD, _ = STEP(params, mechanisms, tokens_BT[:, :1], cache)  # there is no position T
    assert np.isnan(beyond_BTD).all()


@pytest.mark.slow
def test_perplexity_is_of_the_text_behind_the_prefix(model):
    params, config = model
    rows_RT = _tokens(3, 9)

    def ours(**keys):
        return whisper.perplexity(params, config.mechanisms, rows_RT, **keys)

    nats = []
    for row in rows_RT:
        z_TV = _decoded(stand_in.variables(np.float32), row)[0]
        nats.append(-special.log_softmax(z_TV, axis=-1)[np.arange(8), row[1:]])
    assert ours(batch=2) == pytest.approx(np.exp(np.mean(np.array(nats)[:, 1:])), rel=1e-4)
    assert ours(first=1) == pytest.approx(np.exp(np.mean(nats)), rel=1e-4)


def test_rows_longer_than_the_positions_are_refused(model):
    params, config = model
    with pytest.raises(UserError, match=f"rows of {T + 1} tokens: Whisper has {T} positions"):
        whisper.forward(params, config.mechanisms, _tokens(1, T + 1))


# -- its files -------------------------------------------------------------------------------------


def _read(path):
    return ctranslate2.read(path, specification="WhisperSpec", revision=3)


def test_a_file_is_read_back(tmp_path):
    values = np.arange(6).reshape(1, 2, 3) - 2.5
    variables = {f"a/{name}": values.astype(name) for name in TYPES[:-1]}
    variables["bfloat16"] = values.astype(ml_dtypes.bfloat16)
    variables |= {"number": np.int16(-3), "none": np.zeros((0, 4), np.float32)}
    path = tmp_path / "model.bin"
    path.write_bytes(stand_in.content(variables, [("again", "a/int8"), ("minus three", "number")]))
    found = _read(path)
    expected = variables | {"again": variables["a/int8"], "minus three": variables["number"]}
    assert list(found) == list(expected)
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)
        assert found[name].shape == x.shape


def test_a_truncated_file_is_named(tmp_path):
    content = stand_in.content({"x": np.ones(3, np.float16)}, [("y", "x")])
    path = tmp_path / "model.bin"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match="model.bin: must be a whole CTranslate2 file"):
            _read(path)


ONE = {"x": np.ones(3, np.float16)}
OTHERS = {
    "specification": (stand_in.content(ONE, specification="TransformerSpec"), "Transformer"),
    "revision": (stand_in.content(ONE, revision=2), "'WhisperSpec', 2"),
    "version": (stand_in.content(ONE, version=7), "begins with .7, "),
    "longer": (stand_in.content(ONE) + b"..", "2 bytes follow its end"),
    "alias": (stand_in.content(ONE, [("y", "z")]), "'z'"),
    "size": (stand_in.content(ONE).replace(b"\4\6\0\0\0", b"\4\7\0\0\0"), "in 7 bytes"),
    "type": (stand_in.content(ONE).replace(b"\4\6\0\0\0", b"\x09\6\0\0\0"), "out of range"),
    "variables": (stand_in.content(ONE), "is damaged: it has no decoder/num_heads"),
    "int8": (stand_in.content({"x/weight_scale": np.ones(3, np.float32)}), "is quantised"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_file_is_refused_by_name(folder, case):
    content, message = OTHERS[case]
    (folder / "model.bin").write_bytes(content)
    with pytest.raises(UserError, match=f"{folder / 'model.bin'}: .*{message}"):
        whisper.load(folder)


def test_a_missing_file_and_another_tokenizer_are_named(folder):
    (folder / "model.bin").unlink()
    with pytest.raises(UserError, match=r"model\.bin: cannot be read"):
        whisper.load(folder)
    other = tokenizer_lib.train(["some text"], 257, ("<|endoftext|>",))
    other.save(folder / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json: is no tokenizer of Whisper: .*script"):
        whisper.load(folder)
