"""Writes a model whose attention is MLA in substance as DeepSeek-V3, which keeps its cache small.

    c = g * norm(x W^DKV)    r = Rot(x W^KR)    k_n = [c W_n^UK, r]    v_n = c W_n^UV

(DeepSeek-V2, arXiv 2405.04434, section 2.1). Engines cache c and r, C + P elements per token and
layer. The maps of `latent_maps` take this form exactly, with one exception: a latent that kvjax
does not norm. Weights so small that the norm's epsilon rules make the norm a constant, which g
undoes: norm(y) = y / sqrt(mean(y^2) + eps), and with mean(y^2) <= 2 DELTA eps the latent is x W
times 1 - d, 0 <= d <= DELTA. The layer's input is normed, so that a factor on W bounds y for every
text.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import math

import numpy as np

from kvjax.attention import (
    MECHANISMS,
    FactoredConfig,
    GLAConfig,
    GroupedConfig,
    GTAConfig,
    MFAKRConfig,
    MLAConfig,
    PaperMLAConfig,
    SharedKVConfig,
)
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert import huggingface, latent_maps, model as model_lib
from kvjax.convert.architectures import LATENT_EPSILON
from kvjax.convert.into_folder import ExportPlan, LazyTensor
from kvjax.convert.latent_maps import LatentMaps, LatentSizes
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig

CLASS = "DeepseekV3ForCausalLM"
ENGINES = ("vllm", "transformers")
DELTA = 2.0**-20  # largest relative error of a latent whose norm is undone
_LATENTS, _ROPE = (256, 512), 64  # C and P of vLLM's and SGLang's kernels
_LARGEST_BASE = 1e38  # of RoPE, in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the exported attention, which all layers share, and epsilon of latents' norms."""

    latent: int  # C
    rope: int  # P
    content: int  # H
    value: int  # Hv
    epsilon: float


def plan(model: LazyModel, dtype: str, engine: str = ENGINES[0]) -> ExportPlan:
    """Returns the contents of a folder in DeepSeek-V3's layout.

    Args:
      dtype: safetensors' name of the tensors' dtype.
      engine: "vllm" pads C and P to the sizes of its kernels (and SGLang's); "transformers" pads
        nothing, and has an epsilon of its own in norms of latents.

    Raises:
      UserError: the layout cannot express the model; names all keys that differ.
    """
    config = model.transformer
    if reasons := list(_reasons(config)):
        raise UserError(
            f"{'; '.join(reasons)}: DeepSeek-V3 has nothing else; recipes.servable() has the keys "
            "to train with"
        )
    if dtype == "F16" and not all(map(latent_maps.has_normed_latent, config.mechanisms)):
        raise UserError(
            "--dtype is missing: weights are float16, which cannot hold the small weights of a "
            "latent without a norm: give --dtype=bfloat16 or float32"
        )
    layout = _layout(config, engine)
    return ExportPlan(
        title=CLASS,
        transformer=_transformer(config, layout),
        tensors=_tensors(model, layout),
        files=huggingface.files(model, _config_json(model, layout), CLASS, dtype),
        notes=_notes(config, layout, engine),
    )


# -- what the layout cannot express ----------------------------------------------------------------

_BLOCK = dict(
    norm="rms",
    norm_bias=False,
    norm_after=False,
    norm_outputs=False,
    embedding_scale=1.0,
    residual_scale=1.0,
    logit_divisor=1.0,
    activation="swiglu",
    bias=False,
    logit_softcap=0.0,
    window=0,
    causal=True,
)
_ROPE_KEYS = dict(rope_factor=1.0, rope_fraction=1.0)
_ATTENTION = dict(
    qk_norm="none", bias=False, qk_bias=False, output_gate=False, position_channels=0, alibi=False
)
_KINDS = dict(
    gla=GLAConfig,
    mla=MLAConfig,
    shared_kv=SharedKVConfig,
    gta=GTAConfig,
    grouped=GroupedConfig,
    factored=FactoredConfig,
    mla_paper=PaperMLAConfig,
    mfa_kr=MFAKRConfig,
)


def _reasons(config: TransformerConfig) -> Iterator[str]:
    """Yields each key that DeepSeek's layout cannot express, with its value and what must be."""
    block, rope = config.block, config.block.positions == "rope"
    for key, allowed in (_BLOCK | (_ROPE_KEYS if rope else {})).items():
        if getattr(block, key) != allowed:
            yield f"config.model.{key} = {getattr(block, key)!r}: must be {allowed!r}"
    if block.positions not in ("rope", "none"):
        yield f"config.model.positions = {block.positions!r}: must be 'rope' or 'none'"
    if not block.norm_epsilon:
        yield "config.model.norm_epsilon = 0.0: must be more than 0"
    for mechanism, _ in config.layer_groups:
        for key, value, allowed in _attention_reasons(mechanism, rope):
            yield f"config.attention.{key} = {value!r}: must be {allowed}"


def _attention_reasons(mechanism: MechanismConfig, rope: bool) -> Iterator[tuple[str, object, str]]:
    """Yields key, value and what must be."""
    kind = next(name for name, cls in MECHANISMS.items() if cls is type(mechanism))
    if kind not in _KINDS:
        yield "kind", kind, f"one of {', '.join(_KINDS)}, with one latent that is normed as a whole"
        return
    for key, allowed in _ATTENTION.items():
        if getattr(mechanism, key, allowed) != allowed:
            yield key, getattr(mechanism, key), repr(allowed)
    normed = latent_maps.has_normed_latent(mechanism)
    if (normed or mechanism.query_rank) and not mechanism.norm_epsilon:
        yield "norm_epsilon", mechanism.norm_epsilon, "more than 0"
    if isinstance(mechanism, GLAConfig) and mechanism.num_latents > 1:
        yield "num_latents", mechanism.num_latents, "1, since a latent is normed as a whole"
    if isinstance(mechanism, SharedKVConfig) and mechanism.num_kv_heads > 1:
        yield "num_kv_heads", mechanism.num_kv_heads, "1, since a latent is normed as a whole"
    if isinstance(mechanism, MLAConfig) and not rope:
        yield "rope_key_dim", mechanism.rope_key_dim, "rotated: config.model.positions = 'rope'"
    if rope and not isinstance(mechanism, (MLAConfig, GTAConfig)):
        yield from _rotated_reasons(mechanism)


def _rotated_reasons(mechanism: MechanismConfig) -> Iterator[tuple[str, object, str]]:
    """Yields the keys with which each head has a rotated key of its own, or rotated values."""
    heads = mechanism.key_heads
    without = "or config.model.positions = 'none', since one rotated key serves all heads"
    if isinstance(mechanism, SharedKVConfig):
        if mechanism.rope_key_dim:
            yield "rope_key_dim", mechanism.rope_key_dim, "0, since values are not rotated"
    elif isinstance(mechanism, GroupedConfig) and mechanism.splits_rope:
        if mechanism.num_bases > 1:
            yield "num_bases", mechanism.num_bases, f"1, {without}"
    elif heads > 1:
        if isinstance(mechanism, GroupedConfig) and mechanism.rank and mechanism.tie == "none":
            yield "rope", mechanism.rope, f"'shared', {without}"
        elif isinstance(mechanism, PaperMLAConfig):
            yield "num_heads", heads, f"1, {without}"
        else:
            yield "num_kv_heads", heads, f"1, {without}"


# -- sizes and config.json -------------------------------------------------------------------------


def _layout(config: TransformerConfig, engine: str) -> Layout:
    """Returns the sizes of all layers: the largest C, zeros where a kernel needs more."""
    found = [_sizes(config, mechanism) for mechanism, _ in config.layer_groups]
    latent, first = max(each.latent for each in found), found[0]
    rope = first.rope
    pads, epsilon = engine == "vllm", config.block.norm_epsilon
    if pads and (latent > _LATENTS[-1] or rope > _ROPE):
        raise UserError(
            f"--engine = 'vllm': takes at most {_LATENTS[-1]} channels of a latent and {_ROPE} of "
            f"a RoPE key, and config.attention has {latent} and {rope}: --engine=transformers "
            "takes any"
        )
    if pads:
        latent, rope = next(size for size in _LATENTS if latent <= size), _ROPE
    else:
        rope, epsilon = rope or 2, LATENT_EPSILON  # transformers takes no 0 channels
    layout = Layout(
        latent=latent,
        rope=rope,
        # Flash attention pads values to the width of keys; kernels take no 0 channels.
        content=max(first.content or _ROPE, first.value - rope),
        value=first.value,
        epsilon=epsilon,
    )
    if (base := _rope_base(config, layout)) > _LARGEST_BASE:
        raise UserError(
            f"--engine = 'vllm': pads {first.rope} channels of a RoPE key to {_ROPE}, and float32 "
            f"has no number for their base {base:.0e}: give more channels, or --engine=transformers"
        )
    return layout


def _notes(config: TransformerConfig, layout: Layout, engine: str) -> tuple[str, ...]:
    """Returns what the engines cache, and which of them compute the model."""
    numbers = layout.latent + layout.rope
    size = f"{2 * numbers:,} bytes per token and layer in bfloat16"
    found = [f"engines cache C = {layout.latent} and P = {layout.rope}, {size}"]
    own = [_sizes(config, mechanism) for mechanism, _ in config.layer_groups]
    latent, rope = max(each.latent for each in own), own[0].rope
    if (latent, rope) != (layout.latent, layout.rope):
        found[0] += f", padded from C = {latent} and P = {rope}"
    if (epsilon := config.block.norm_epsilon) != LATENT_EPSILON:
        right = "vLLM and SGLang" if engine == "vllm" else "transformers"
        wrong = "transformers" if engine == "vllm" else "vLLM and SGLang"
        found.append(
            f"rms_norm_eps = {epsilon}: right in {right}, wrong in {wrong}: transformers has "
            f"{LATENT_EPSILON} in norms of latents, whatever config.json says"
        )
    return tuple(found)


def _sizes(config: TransformerConfig, mechanism: MechanismConfig) -> LatentSizes:
    return latent_maps.sizes(mechanism, config.block.d_model, rope=config.block.positions == "rope")


def _rope_base(config: TransformerConfig, layout: Layout) -> float:
    """Returns the base with which the first pairs of the padded key rotate as before."""
    rope = _sizes(config, config.mechanisms[0]).rope or layout.rope
    return config.block.rope_base ** (layout.rope / rope)


def _config_json(model: LazyModel, layout: Layout) -> dict:
    config = model.transformer
    block, mechanism = config.block, config.mechanisms[0]
    base = _rope_base(config, layout)
    return dict(
        model_type="deepseek_v3",
        vocab_size=config.vocab_size,
        hidden_size=block.d_model,
        intermediate_size=block.mlp_dim,
        num_hidden_layers=block.num_layers,
        num_attention_heads=mechanism.num_heads,
        num_key_value_heads=mechanism.num_heads,
        q_lora_rank=mechanism.query_rank or None,
        kv_lora_rank=layout.latent,
        qk_nope_head_dim=layout.content,
        qk_rope_head_dim=layout.rope,
        v_head_dim=layout.value,
        hidden_act="silu",
        max_position_embeddings=model.context,
        rms_norm_eps=block.norm_epsilon,
        rope_theta=base,
        rope_scaling=None,
        rope_parameters=dict(rope_type="default", rope_theta=base),  # transformers 5
        rope_interleave=True,
        attention_bias=False,
        tie_word_embeddings=False,
        # No layer has experts, but engines compute with their numbers.
        first_k_dense_replace=block.num_layers,
        moe_layer_freq=1,
        moe_intermediate_size=block.mlp_dim,
        n_routed_experts=1,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        num_nextn_predict_layers=0,
    )


def _transformer(config: TransformerConfig, layout: Layout) -> TransformerConfig:
    """Returns the exported model's config."""
    mechanism = MLAConfig(
        num_heads=config.mechanisms[0].num_heads,
        latent_dim=layout.latent,
        rope_key_dim=layout.rope,
        key_dim=layout.content,
        value_dim=layout.value,
        query_rank=config.mechanisms[0].query_rank,
        qk_norm="none",
        norm_epsilon=layout.epsilon,
    )
    return dataclasses.replace(config, mechanisms=(mechanism,) * config.block.num_layers)


# -- tensors ---------------------------------------------------------------------------------------

_MLP = dict(gate_proj="gate", up_proj="up", down_proj="down")


def _tensors(model: LazyModel, layout: Layout) -> dict[str, LazyTensor]:
    """Returns the tensors by published name, layer after layer."""
    config = model.transformer
    block, vocabulary = config.block, config.vocab_size
    width, mlp = block.d_model, block.mlp_dim
    found = {
        "model.embed_tokens.weight": LazyTensor((vocabulary, width), lambda: _embedding(model)),
        "model.norm.weight": LazyTensor((width,), lambda: _gain(model, "final_norm")),
        "lm_head.weight": LazyTensor((vocabulary, width), lambda: _head(model)),
    }

    @functools.lru_cache(maxsize=1)
    def attention(layer: int) -> dict[str, np.ndarray]:
        return _attention(model, layer, layout)

    def add(name: str, shape: tuple[int, ...], read: Callable, *arguments) -> None:
        found[f"{name}.weight"] = LazyTensor(shape, functools.partial(read, *arguments))

    for layer in range(block.num_layers):
        front = f"model.layers.{layer}."
        add(f"{front}input_layernorm", (width,), _gain, model, "attention_norm", layer)
        add(f"{front}post_attention_layernorm", (width,), _gain, model, "mlp_norm", layer)
        for name, shape in _attention_shapes(config, layout).items():
            add(f"{front}self_attn.{name}", shape, lambda i, name: attention(i)[name], layer, name)
        for name, own in _MLP.items():
            shape = (width, mlp) if own == "down" else (mlp, width)
            add(f"{front}mlp.{name}", shape, _transposed, model, layer, own)
    return found


def _read(model: LazyModel, layer: int, *path: str) -> np.ndarray:
    segment, index = model_lib.layer_of(model, layer)
    return model.read(("segments", segment, *path), index)


def _transposed(model: LazyModel, layer: int, name: str) -> np.ndarray:
    return _read(model, layer, "mlp", name).T


def _gain(model: LazyModel, norm: str, layer: int | None = None) -> np.ndarray:
    """Returns the gain of a norm; ones in a model without gains."""
    block = model.transformer.block
    if not block.norm_gain:
        return np.ones(block.d_model)
    return model.read((norm, "gain")) if layer is None else _read(model, layer, norm, "gain")


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
    width, mechanism = config.block.d_model, config.mechanisms[0]
    heads, rank = mechanism.num_heads, mechanism.query_rank
    query = heads * (layout.content + layout.rope)
    queries = dict(q_proj=(query, width))
    if rank:
        queries = dict(q_a_proj=(rank, width), q_a_layernorm=(rank,), q_b_proj=(query, rank))
    return queries | dict(
        kv_a_proj_with_mqa=(layout.latent + layout.rope, width),
        kv_a_layernorm=(layout.latent,),
        kv_b_proj=(heads * (layout.content + layout.value), layout.latent),
        o_proj=(width, heads * layout.value),
    )


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
    return _queries(mechanism, maps, layout) | dict(
        kv_a_proj_with_mqa=down_DX.T,
        kv_a_layernorm=np.full(layout.latent, gain),
        kv_b_proj=_padded(up_CX.T, layout.latent),
        o_proj=out_NVD.reshape(-1, block.d_model).T,
    )


def _queries(mechanism: MechanismConfig, maps: LatentMaps, layout: Layout) -> dict[str, np.ndarray]:
    """Returns the queries' tensors, scaled for DeepSeek's 1/sqrt(H + P) on logits."""
    parts = (
        _padded(maps.query_QNH, layout.content),
        _pairs(maps.rope_query_QNP, layout.rope),
    )
    query_QNX = np.concatenate(parts, axis=-1)
    query_QNX = query_QNX * (mechanism.scale * math.sqrt(layout.content + layout.rope))
    matrix = query_QNX.reshape(len(query_QNX), -1).T
    if maps.query_down_DQ is None:
        return dict(q_proj=matrix)
    width, rank = maps.query_down_DQ.shape
    gain = math.sqrt(width / rank) if mechanism.latent_scale else 1.0
    down_DQ = maps.query_down_DQ * math.sqrt(layout.epsilon / mechanism.norm_epsilon)
    return dict(q_a_proj=down_DQ.T, q_a_layernorm=np.full(rank, gain), q_b_proj=matrix)


def _latent(
    mechanism: MechanismConfig, down_DC: np.ndarray, gain_D: np.ndarray, layout: Layout
) -> tuple[np.ndarray, float]:
    """Returns the latent's projection [D, C], padded, and the gain of its norm.

    Args:
      gain_D: of the norm of the layer's input.
    """
    width, channels = down_DC.shape
    if latent_maps.has_normed_latent(mechanism):
        # The mean is over more channels, and may have another epsilon: factors on W undo both.
        grow = math.sqrt(layout.latent / channels)
        gain = math.sqrt(width / channels) if mechanism.latent_scale else 1.0
        factor = grow * math.sqrt(layout.epsilon / mechanism.norm_epsilon)
        return _padded(down_DC * factor, layout.latent), gain / grow
    largest = np.linalg.norm(gain_D[:, None] * down_DC, 2) or 1.0
    # A power of two, which no dtype rounds.
    gain = 2.0 ** math.ceil(math.log2(largest * math.sqrt(width / (2 * DELTA * layout.latent))))
    return _padded(down_DC * (math.sqrt(layout.epsilon) / gain), layout.latent), gain


def _padded(x: np.ndarray, channels: int) -> np.ndarray:
    """Pads the last axis with zeros."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, channels - x.shape[-1])])


def _pairs(x: np.ndarray, channels: int) -> np.ndarray:
    """Moves channels i and i + P/2 to 2i and 2i + 1, and pads the last axis with zeros."""
    halves = np.stack(np.split(x, 2, axis=-1), axis=-1)
    return _padded(halves.reshape(x.shape), channels)
