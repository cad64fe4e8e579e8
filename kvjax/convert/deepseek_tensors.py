"""Tensors of a model in DeepSeek-V3's layout, see `deepseek`.

The maps of `latent_maps` have this form exactly, except for a latent without a norm, for which
DeepSeek's norm is cancelled. In norm(y) = y / sqrt(mean(y^2) + eps), small projections y make the
root almost constant, and the norm's gain g undoes it: with mean(y^2) <= 2 DELTA eps the latent is
x W times 1 - d, 0 <= d <= DELTA. A factor on W makes y that small for every text, because the
layer's input is normalised.

DeepSeek's queries have biases only in their latent, so biased queries get the latent (x, 1) of
D + 1 channels.
"""

from collections.abc import Callable
import dataclasses
import functools
import math

import numpy as np

from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert import latent_maps, model as model_lib
from kvjax.convert.into_folder import LazyTensor
from kvjax.convert.latent_maps import LatentMaps
from kvjax.convert.model import LazyModel
from kvjax.model.config import TransformerConfig

DELTA = 2.0**-20  # largest relative error of a latent whose norm is cancelled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the exported attention, equal in all layers, and the epsilon of latents' norms."""

    latent: int  # C
    rope: int  # P
    content: int  # H
    value: int  # Hv
    epsilon: float
    biases: bool  # of the projections to latents and of the output
    query_rank: int  # 0: queries have no latent


_MLP = dict(gate_proj="gate", up_proj="up", down_proj="down")


def of_model(model: LazyModel, layout: Layout) -> dict[str, LazyTensor]:
    """Returns the tensors by published name, layer after layer."""
    config = model.transformer
    block, vocabulary = config.block, config.vocab_size
    width, mlp = block.d_model, block.mlp_dim
    tensors = {
        "model.embed_tokens.weight": LazyTensor((vocabulary, width), lambda: _embedding(model)),
        "model.norm.weight": LazyTensor((width,), lambda: _gain(model, "final_norm")),
        "lm_head.weight": LazyTensor((vocabulary, width), lambda: _head(model)),
    }

    @functools.lru_cache(maxsize=1)
    def attention(layer: int) -> dict[str, np.ndarray]:
        return _attention(model, layer, layout)

    def add(name: str, shape: tuple[int, ...], read: Callable, *arguments) -> None:
        tensors[name] = LazyTensor(shape, functools.partial(read, *arguments))

    for layer in range(block.num_layers):
        front = f"model.layers.{layer}."
        add(f"{front}input_layernorm.weight", (width,), _gain, model, "attention_norm", layer)
        norm = f"{front}post_attention_layernorm.weight"
        add(norm, (width,), _gain, model, "mlp_norm", layer)
        for name, shape in _attention_shapes(config, layout).items():
            add(f"{front}self_attn.{name}", shape, lambda i, name: attention(i)[name], layer, name)
        for name, own in _MLP.items():
            shape = (width, mlp) if own == "down" else (mlp, width)
            add(f"{front}mlp.{name}.weight", shape, _transposed, model, layer, own)
    return tensors


def _transposed(model: LazyModel, layer: int, name: str) -> np.ndarray:
    return model_lib.read_parameter(model, layer, "mlp", name).T


def _gain(model: LazyModel, norm: str, layer: int | None = None) -> np.ndarray:
    """Returns the gain of a norm; ones in a model without gains."""
    block = model.transformer.block
    if not block.norm_gain:
        return np.ones(block.d_model)
    if layer is None:
        return model.read((norm, "gain"))
    return model_lib.read_parameter(model, layer, norm, "gain")


def _embedding(model: LazyModel) -> np.ndarray:
    """Returns the embedding, with the norm that follows it applied to each row."""
    block, table_VD = model.transformer.block, model.read(("embedding",))
    if not block.embedding_norm:
        return table_VD
    table_VD = table_VD.astype(np.float64)
    square = np.mean(table_VD**2, axis=1, keepdims=True)
    return table_VD / np.sqrt(square + block.norm_epsilon) * _gain(model, "embedding_norm")


def _head(model: LazyModel) -> np.ndarray:
    if model.transformer.block.tied_head:
        return model.read(("embedding",))
    return model.read(("head",)).T


def _attention_shapes(config: TransformerConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's attention tensors, by name."""
    width, heads, rank = config.block.d_model, config.mechanisms[0].num_heads, layout.query_rank
    query, down = heads * (layout.content + layout.rope), layout.latent + layout.rope
    shapes = {"q_proj.weight": (query, width)}
    if rank:
        shapes = {
            "q_a_proj.weight": (rank, width),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (query, rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa.weight": (down, width),
        "kv_a_layernorm.weight": (layout.latent,),
        "kv_b_proj.weight": (heads * (layout.content + layout.value), layout.latent),
        "o_proj.weight": (width, heads * layout.value),
    }
    if layout.biases:
        shapes |= {"kv_a_proj_with_mqa.bias": (down,), "o_proj.bias": (width,)}
        shapes |= {"q_a_proj.bias": (rank,)} if rank else {}
    return shapes


def _attention(model: LazyModel, layer: int, layout: Layout) -> dict[str, np.ndarray]:
    """Returns a layer's attention tensors, by name, in float64."""
    config = model.transformer
    block, mechanism = config.block, config.mechanisms[layer]
    weights = model_lib.read_layer(model, layer, "attention")
    rope = block.positions == "rope"
    maps = latent_maps.of_layer(mechanism, weights["mechanism"], block.d_model, rope=rope)
    gain_D = np.asarray(_gain(model, "attention_norm", layer), np.float64)
    down_DC, gain = _latent(mechanism, maps.down_DC, gain_D, layout)
    down_DX = np.concatenate([down_DC, _pairs(maps.rope_key_DP, layout.rope)], axis=1)
    up_key_CNH = _padded(maps.up_key_CNH, layout.content)
    up_CNX = np.concatenate([up_key_CNH, maps.up_value_CNV], axis=-1)
    up_CX = up_CNX.reshape(len(up_CNX), -1)
    out_NVD = np.asarray(weights["out"], np.float64)
    tensors = _queries(mechanism, maps, gain_D, layout) | {
        "kv_a_proj_with_mqa.weight": down_DX.T,
        "kv_a_layernorm.weight": np.full(layout.latent, gain),
        "kv_b_proj.weight": _padded(up_CX.T, layout.latent),
        "o_proj.weight": out_NVD.reshape(-1, block.d_model).T,
    }
    if layout.biases:
        no_latent_bias = np.zeros(layout.latent)
        bias_P = np.zeros(layout.rope)
        if maps.rope_key_bias_P is not None:
            bias_P = _pairs(maps.rope_key_bias_P, layout.rope)
        tensors["kv_a_proj_with_mqa.bias"] = np.concatenate([no_latent_bias, bias_P])
        tensors["o_proj.bias"] = np.asarray(weights.get("out_bias", np.zeros(block.d_model)))
    return tensors


def _queries(
    mechanism: MechanismConfig, maps: LatentMaps, gain_D: np.ndarray, layout: Layout
) -> dict[str, np.ndarray]:
    """Returns the queries' tensors, scaled for DeepSeek's 1/sqrt(H + P) on logits."""

    def joined(query_NH, rope_query_NP):
        parts = _padded(query_NH, layout.content), _pairs(rope_query_NP, layout.rope)
        query_NX = np.concatenate(parts, axis=-1)
        scale = mechanism.scale * math.sqrt(layout.content + layout.rope)
        return query_NX.reshape(*query_NX.shape[:-2], -1) * scale

    query_QX = joined(maps.query_QNH, maps.rope_query_QNP)
    if maps.query_bias_NH is not None:
        bias_X = joined(maps.query_bias_NH, maps.rope_query_bias_NP)
        return _biased_queries(query_QX, bias_X, gain_D, layout)
    if maps.query_down_DQ is None:
        return {"q_proj.weight": query_QX.T}
    width, rank = maps.query_down_DQ.shape
    gain = math.sqrt(width / rank) if mechanism.latent_scale else 1.0
    down_DQ = maps.query_down_DQ * math.sqrt(layout.epsilon / mechanism.norm_epsilon)
    tensors = {
        "q_a_proj.weight": down_DQ.T,
        "q_a_layernorm.weight": np.full(rank, gain),
        "q_b_proj.weight": query_QX.T,
    }
    return tensors | ({"q_a_proj.bias": np.zeros(rank)} if layout.biases else {})


def _biased_queries(
    query_DX: np.ndarray, bias_X: np.ndarray, gain_D: np.ndarray, layout: Layout
) -> dict[str, np.ndarray]:
    """Returns tensors of queries whose latent is (x, 1), with its norm cancelled."""
    width = len(query_DX)
    largest = np.linalg.norm([np.abs(gain_D).max() * math.sqrt(width), 1.0])
    gain, factor = _cancelled_norm(largest, width + 1, layout)
    # The latent's weights are 0 or this power of two, which no dtype rounds.
    exact = 2.0 ** math.floor(math.log2(factor))
    query_b = np.concatenate([query_DX, bias_X[None]]) * (factor / exact)
    return {
        "q_a_proj.weight": np.eye(width + 1, width) * exact,
        "q_a_proj.bias": np.eye(width + 1)[-1] * exact,
        "q_a_layernorm.weight": np.full(width + 1, gain),
        "q_b_proj.weight": query_b.T,
    }


def _latent(
    mechanism: MechanismConfig, down_DC: np.ndarray, gain_D: np.ndarray, layout: Layout
) -> tuple[np.ndarray, float]:
    """Returns the latent's projection [D, C], padded, and the gain of its norm.

    Args:
      gain_D: gain of the norm of the layer's input.
    """
    width, channels = down_DC.shape
    if latent_maps.has_normed_latent(mechanism):
        # The padded norm has more channels and perhaps another epsilon: factors undo both.
        grow = math.sqrt(layout.latent / channels)
        gain = math.sqrt(width / channels) if mechanism.latent_scale else 1.0
        factor = grow * math.sqrt(layout.epsilon / mechanism.norm_epsilon)
        return _padded(down_DC * factor, layout.latent), gain / grow
    largest = (np.linalg.norm(gain_D[:, None] * down_DC, 2) or 1.0) * math.sqrt(width)
    gain, factor = _cancelled_norm(largest, layout.latent, layout)
    return _padded(down_DC * factor, layout.latent), gain


def _cancelled_norm(largest: float, channels: int, layout: Layout) -> tuple[float, float]:
    """Returns a norm's gain, and the factor on the weights before it, that cancel the norm.

    Args:
      largest: bound on the length of the latent without the factor.
    """
    # A power of two, which no dtype rounds.
    gain = 2.0 ** math.ceil(math.log2(largest / math.sqrt(2 * DELTA * channels)))
    return gain, math.sqrt(layout.epsilon) / gain


def _padded(x: np.ndarray, channels: int) -> np.ndarray:
    """Pads the last axis with zeros."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, channels - x.shape[-1])])


def _pairs(x: np.ndarray, channels: int) -> np.ndarray:
    """Moves channels i and i + P/2 to 2i and 2i + 1, and pads the last axis with zeros."""
    halves = np.stack(np.split(x, 2, axis=-1), axis=-1)
    return _padded(halves.reshape(x.shape), channels)
