"""Reads the attention of a published model, layer by layer, from the keys of its config.json.

It needs only keys that most families have, so it also reads families that kvjax cannot import. Keys
that a config leaves out have the defaults of transformers' configuration classes.
"""

from collections import Counter
from collections.abc import Mapping
import dataclasses

from kvjax.costs import layer_kinds
from kvjax.foundation.errors import UserError
from kvjax.published.config import PublishedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's attention.

    Attributes:
      num_heads, kv_heads: N query heads, which read K KV heads.
      key_dim, value_dim: channels of a head's key and value.
      window: number of latest tokens that the cache keeps; 0: all tokens.
      latent, rope_key: channels of the latent and of the shared RoPE key, for MLA; else 0.
      indexer: channels of the key of DeepSeek V3.2's indexer (sparse attention); 0: no indexer.
    """

    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    latent: int = 0
    rope_key: int = 0
    indexer: int = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that a model's KV cache depends on.

    Attributes:
      layers: the layers that cache keys and values.
      others: number of layers without a cache of their own, by kind.
      context: the model's context length; 0 if the config does not give it.
      normed_keys: True if keys are normed per head.
      parameters: number of parameters; 0 if the config does not determine it.
      weight_bytes: size of the weight files beside the config; 0: there are none.
      defaults: keys that the config leaves out, with the family's defaults.
    """

    name: str
    family: str
    layers: tuple[Layer, ...]
    others: dict[str, int]
    context: int
    normed_keys: bool
    parameters: int
    weight_bytes: int
    defaults: dict[str, int]


def of_config(values: Mapping, source: str, *, name: str = "", weight_bytes: int = 0) -> Shape:
    """Returns the shape that the keys of a config.json describe.

    Args:
      values: contents of config.json. Of a multimodal model, the section of its text model is read.
      source: the config's file, for messages.
    """
    for section in _SECTIONS:
        inner = values.get(section)
        if isinstance(inner, dict) and inner:
            family = values.get("model_type")
            inner = dict(model_type=f"{family}_text") | inner
            return of_config(inner, f"{source}: {section}", name=name, weight_bytes=weight_bytes)
    values = dict(values)
    for key, aliases in _ALIASES.items():
        present = [alias for alias in aliases if values.get(alias) is not None]
        if key not in values and present:
            values[key] = values[present[0]]
    family = values.get("model_type")
    family = family if isinstance(family, str) else ""
    defaults = {k: v for k, v in _DEFAULTS.get(family, {}).items() if k not in values}
    c = PublishedConfig(values | defaults, source)
    _check(c)
    kinds = layer_kinds.kinds(c, c.integer("num_hidden_layers"))
    layers, others = [], Counter()
    shared = c.get("num_kv_shared_layers", int, 0)
    for i, kind in enumerate(kinds):
        kv_heads = _kv_heads(c, i, kind)
        if kind not in layer_kinds.WINDOWS or not kv_heads:
            others[kind] += 1
        elif i >= len(kinds) - shared:
            others["shares another layer's cache"] += 1
        else:
            layers.append(_layer(c, i, kind, kv_heads))
    if not layers:
        raise UserError(f"{source}: no layer has keys and values: {', '.join(others)}")
    has_context = type(c.values.get("max_position_embeddings")) is int
    normed = any(c.values.get(key) is True for key in _NORM_KEYS)
    return Shape(
        name=name or source,
        family=family,
        layers=tuple(layers),
        others=others,
        context=c.integer("max_position_embeddings") if has_context else 0,
        normed_keys=normed or family.startswith(_NORMED),
        parameters=_parameters(c, layers, len(kinds)),
        weight_bytes=weight_bytes,
        defaults=defaults,
    )


_SECTIONS = ("text_config", "llm_config", "language_config")
# The common key: other names for it in transformers.
_ALIASES = dict(
    num_hidden_layers=("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    num_attention_heads=("n_head", "n_heads", "num_query_heads"),
    num_key_value_heads=("num_kv_heads", "n_head_kv"),
    head_dim=("kv_channels", "attention_head_dim"),
    hidden_size=("n_embd", "d_model", "model_dim"),
    max_position_embeddings=("n_positions", "n_ctx", "seq_length", "max_seq_len", "seq_len"),
    layer_types=("layers_block_type",),
    sliding_window_pattern=("_sliding_window_pattern",),
)
# Defaults of transformers' classes where they differ from those of most families (most have, for
# example, as many KV heads as query heads).
_GEMMA3 = dict(
    hidden_size=2304,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    sliding_window=4096,
    sliding_window_pattern=6,
)
_DEFAULTS: dict[str, dict] = dict(
    cohere2=dict(sliding_window=4096, sliding_window_pattern=4),
    gemma=dict(head_dim=256),
    gemma2=dict(head_dim=256, sliding_window=4096, sliding_window_pattern=2),
    gemma3_text=_GEMMA3,
    gemma3n_text=_GEMMA3
    | dict(
        hidden_size=2048,
        num_hidden_layers=35,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        sliding_window=512,
        sliding_window_pattern=5,
        num_kv_shared_layers=15,
    ),
    gpt_oss=dict(sliding_window=128, sliding_window_pattern=2),
    llama4_text=dict(num_key_value_heads=8, head_dim=128, attention_chunk_size=8192),
    mistral=dict(sliding_window=4096),
    qwen2=dict(use_sliding_window=False),
    qwen2_moe=dict(use_sliding_window=False),
    qwen3=dict(head_dim=128, use_sliding_window=False),
    qwen3_moe=dict(use_sliding_window=False),
)
_NORMED = ("exaone4", "gemma3", "qwen3", "nanochat")
_NORM_KEYS = ("qk_norm", "qk_layernorm", "use_qk_norm")


def _check(c: PublishedConfig) -> None:
    """Raises a UserError for configs whose cache depends on keys that are not read here."""
    if c.flag("is_encoder_decoder", False):
        raise c.error("is_encoder_decoder", "must be false: only decoders are supported")
    if c.values.get("model_type") == "longcat_flash":
        raise c.error("model_type", "is not supported: its layers have two attentions each")
    known = {"num_key_value_heads", "num_kv_shared_layers", *_ALIASES["num_key_value_heads"]}
    for key in c.values:
        if "kv" in key and "head" in key and key not in known:
            raise c.error(key, "is unknown; kvjax reads num_key_value_heads")


def _per_layer(c: PublishedConfig, key: str, i: int, default: int | None = None) -> int:
    """Returns a key's number for layer i. Its value is one number, or a list that may contain 0."""
    value = c.values.get(key)
    if isinstance(value, list):
        if i >= len(value) or type(value[i]) is not int or value[i] < 0:
            raise c.error(key, f"must be a number, or one for each layer (layer {i} has none)")
        return value[i]
    return c.integer(key, default)


def _kv_heads(c: PublishedConfig, i: int, kind: str) -> int:
    """Returns the KV heads of a layer; 0: it has no attention."""
    if "kv_lora_rank" in c.values:
        return _per_layer(c, "num_attention_heads", i)
    if c.flag("multi_query", False) and not c.flag("new_decoder_architecture", False):
        return 1
    if c.flag("multi_query_attention", False):
        return c.integer("multi_query_group_num")
    section = c.section("attn_config")
    if "kv_n_heads" in section:  # MPT, DBRX
        return PublishedConfig(section, c.source).integer("kv_n_heads")
    if kind in layer_kinds.FULL and "num_global_key_value_heads" in c.values:
        return c.integer("num_global_key_value_heads")
    return _per_layer(c, "num_key_value_heads", i, _per_layer(c, "num_attention_heads", i))


def _layer(c: PublishedConfig, i: int, kind: str, kv_heads: int) -> Layer:
    heads = _per_layer(c, "num_attention_heads", i)
    if heads % kv_heads:
        raise c.error("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    key = layer_kinds.WINDOWS[kind]
    window = c.integer(key) if key else 0
    shape = dict(num_heads=heads, kv_heads=kv_heads, window=window)
    if "kv_lora_rank" in c.values:
        rope = c.integer("qk_rope_head_dim")
        return Layer(
            **shape,
            key_dim=c.integer("qk_nope_head_dim") + rope,
            value_dim=c.integer("v_head_dim"),
            latent=c.integer("kv_lora_rank"),
            rope_key=rope,
            indexer=c.integer("index_head_dim") if "index_head_dim" in c.values else 0,
        )
    if kind in layer_kinds.FULL and "global_head_dim" in c.values:
        head_dim = c.integer("global_head_dim")
    elif "head_dim" in c.values:
        head_dim = c.integer("head_dim")
    else:
        width = c.integer("hidden_size")
        if width % heads:
            raise c.error("hidden_size", f"without head_dim, must be divisible by {heads} heads")
        head_dim = width // heads
    value_dim = c.integer("v_head_dim") if "v_head_dim" in c.values else head_dim
    return Layer(**shape, key_dim=head_dim, value_dim=value_dim)


_GATED = ("silu", "swish")


def _parameters(c: PublishedConfig, layers: list[Layer], count: int) -> int:
    """Returns the number of parameters of a dense model with gated MLPs; 0 for other models."""
    sizes = [c.values.get(key) for key in ("hidden_size", "intermediate_size", "vocab_size")]
    is_gated = c.values.get("hidden_act") in _GATED and len(layers) == count
    if not is_gated or any("expert" in key for key in c.values) or layers[0].latent:
        return 0
    if not all(type(size) is int and size > 0 for size in sizes):
        return 0
    width, mlp, vocabulary = sizes
    attention = sum(
        width * (x.num_heads * (x.key_dim + x.value_dim) + x.kv_heads * (x.key_dim + x.value_dim))
        for x in layers
    )
    tables = 1 if c.values.get("tie_word_embeddings") is True else 2
    return tables * vocabulary * width + attention + count * 3 * width * mlp
