"""Families of published models: their configs as kvjax's, and their tensors as weights.

A family is a function from its config to kvjax's, and a table of rules (`rules`).
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
import re

from kvjax.attention import GroupedConfig
from kvjax.convert import config_keys, rules as rules_lib
from kvjax.convert.rules import Rule
from kvjax.foundation.configuration import checked
from kvjax.foundation.errors import UserError, warn
from kvjax.model.config import BlockConfig, TransformerConfig

# -- configs ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConfigSections:
    """A published config as sections of kvjax's config."""

    model: dict  # every key of BlockConfig
    attention: dict  # every key of GroupedConfig, kind and layer_ranks
    vocab_size: int  # rows of the embedding, at least the tokenizer's tokens
    context: int  # training context length in tokens

    @property
    def transformer(self) -> TransformerConfig:
        keys = {k: v for k, v in self.attention.items() if k not in ("kind", "layer_ranks")}
        block = BlockConfig(**self.model)
        mechanisms = (GroupedConfig(**keys),) * block.num_layers
        return TransformerConfig(block=block, mechanisms=mechanisms, vocab_size=self.vocab_size)


def _sections(block: dict, attention: dict, *, vocab_size: int, context: int) -> ConfigSections:
    block = dict(embedding_norm=False, logit_softcap=0.0) | block
    model = dataclasses.asdict(BlockConfig(**block))
    kv_heads = attention["num_kv_heads"]
    mechanism = dataclasses.asdict(GroupedConfig(num_bases=kv_heads, rank=0, **attention))
    kind = dict(kind="grouped", layer_ranks=())
    return ConfigSections(model, kind | mechanism, vocab_size=vocab_size, context=context)


# -- published configs -----------------------------------------------------------------------------


class PublishedConfig:
    """The keys of a published config; errors name the file, the key and the value.

    Args:
      values: by transformers' keys; null counts as absent, which is not always the default.
      source: the config's file, for messages.
      names: names of keys in the file where they differ, for messages.
    """

    def __init__(self, values: Mapping, source: str, names: Mapping[str, str] | None = None):
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = frozenset(values) - frozenset(self.values)
        self.source = source
        self._names = names or {}

    def error(self, key: str, allowed: str) -> UserError:
        """Returns the error for a key's value, with the allowed values."""
        return UserError(f"{self._name(key)} = {self.values.get(key)!r}: {allowed}")

    def _name(self, key: str) -> str:
        return f"{self.source}: {self._names.get(key, key)}"

    def get(self, key: str, hint: type, default=None):
        value = self.values.get(key, default)
        if value is None:
            raise UserError(f"{self._name(key)} is missing: this family's configs need it")
        return checked(value, hint, self._name(key))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if not 1 <= value < 1 << 31:
            raise self.error(key, "must be at least 1, and less than 2**31")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self.get(key, float, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.get(key, bool, default)

    def section(self, key: str) -> dict:
        return self.get(key, dict, {})

    def one_of(self, key: str, meanings: Mapping, default):
        """Maps a value by a table; raises a UserError for values that are not in it."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in meanings:
            known = ", ".join(map(repr, meanings))
            raise self.error(key, f"must be one of {known} in this family")
        return meanings[value]

    def require(self, key: str, allowed, why: str) -> None:
        """Raises a UserError if a key has another value than the one that kvjax supports."""
        if self.values.get(key, allowed) != allowed:
            raise self.error(key, f"{why}; kvjax supports only {key} = {allowed!r}")


_GELUS = {  # transformers' names: kvjax's ("gelu" is the tanh approximation)
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
}


def _gpt2(c: PublishedConfig) -> ConfigSections:
    c.require("scale_attn_weights", True, "logits of attention are not scaled")
    c.require("scale_attn_by_inverse_layer_idx", False, "every layer scales its logits differently")
    c.require("add_cross_attention", False, "layers attend to an encoder too")
    width, heads, context = c.integer("n_embd"), c.integer("n_head"), c.integer("n_positions")
    head_dim = _head_dim(c, width, heads, "n_embd", "n_head")
    _check_scale(c, head_dim)
    block = dict(
        num_layers=c.integer("n_layer"),
        d_model=width,
        mlp_dim=c.integer("n_inner", 4 * width),
        norm="layer",
        norm_gain=True,
        norm_bias=True,
        norm_epsilon=c.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        max_positions=context,
        activation=c.one_of("activation_function", _GELUS, "gelu_new"),
        bias=True,
        tied_head=c.flag("tie_word_embeddings", True),
    )
    attention = dict(
        num_heads=heads,
        num_kv_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        qk_norm="none",
        bias=True,
    )
    return _sections(block, attention, vocab_size=c.integer("vocab_size"), context=context)


def _llama(c: PublishedConfig) -> ConfigSections:
    bias = c.flag("attention_bias", False)
    _no_window(c)
    return _gated(c, attention=dict(qk_norm="none", bias=bias), window=0)


def _mistral(c: PublishedConfig) -> ConfigSections:
    return _gated(c, attention=dict(qk_norm="none"), window=_window_everywhere(c))


def _qwen2(c: PublishedConfig) -> ConfigSections:
    attention = dict(qk_norm="none", bias=True, out_bias=False)
    return _gated(c, attention=attention, window=_window_of_layers(c))


def _qwen3(c: PublishedConfig) -> ConfigSections:
    bias = c.flag("attention_bias", False)
    norm = dict(qk_norm="rms_gain", norm_epsilon=c.number("rms_norm_eps", 1e-6))
    window = _window_of_layers(c)
    return _gated(c, attention=dict(bias=bias, **norm), window=window, head_dim=128)


def _nanochat(c: PublishedConfig) -> ConfigSections:
    key = "final_logit_softcapping"
    block = dict(
        embedding_norm=True,
        activation=c.one_of("hidden_act", dict(relu2="relu2") | _GELUS, "relu2"),
        logit_softcap=0.0 if key in c.nulls else c.number(key, 15.0),
    )
    norm = dict(qk_norm="rms", norm_epsilon=c.number("rms_norm_eps", 1e-6))
    return _rotated(c, block, norm | dict(bias=c.flag("attention_bias", False)))


def _gated(
    c: PublishedConfig, *, attention: dict, window: int, head_dim: int | None = None
) -> ConfigSections:
    """Returns sections of Llama and its relatives: norm gains, SwiGLU.

    Arguments as in `_rotated`.
    """
    c.require("mlp_bias", False, "the MLP has biases, the gate's among them")
    c.require("partial_rotary_factor", 1.0, "RoPE rotates some channels only")
    c.one_of("hidden_act", dict.fromkeys(("silu", "swish")), "silu")
    block = dict(norm_gain=True, activation="swiglu", window=window)
    return _rotated(c, block, attention, head_dim=head_dim)


def _rotated(
    c: PublishedConfig, block: dict, attention: dict, *, head_dim: int | None = None
) -> ConfigSections:
    """Returns sections of models with RMSNorm and RoPE.

    Args:
      head_dim: default if the config has none; None: width / heads.
    """
    width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if "head_dim" in c.values:
        head_dim = c.integer("head_dim")
    head_dim = head_dim or _head_dim(c, width, heads, "hidden_size", "num_attention_heads")
    block |= dict(
        num_layers=c.integer("num_hidden_layers"),
        d_model=width,
        mlp_dim=c.integer("intermediate_size"),
        norm_epsilon=c.number("rms_norm_eps", 1e-6),
        tied_head=c.flag("tie_word_embeddings", False),
        **_rope(c),
    )
    kv_heads = c.integer("num_key_value_heads", heads)
    shape = dict(num_heads=heads, num_kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim)
    context = c.integer("max_position_embeddings")
    _check_scale(c, head_dim)
    _check_dual_chunks(c, context)
    return _sections(block, shape | attention, vocab_size=c.integer("vocab_size"), context=context)


def _check_scale(c: PublishedConfig, head_dim: int) -> None:
    """Raises a UserError if logits are scaled by another number than 1 / sqrt(head_dim)."""
    key, scale = "attention_multiplier", head_dim**-0.5
    if not math.isclose(c.number(key, scale), scale, rel_tol=1e-6):
        raise _unknown_key(c, key)


def _check_dual_chunks(c: PublishedConfig, context: int) -> None:
    """Raises a UserError for a context at which dual chunk attention changes positions."""
    key, name = "dual_chunk_attention_config", "original_max_position_embeddings"
    if key not in c.values:
        return
    original = c.section(key).get(name)
    if type(original) is not int:
        raise _unknown_key(c, key)
    if context > original:
        raise c.error(
            key,
            f"kvjax has no dual chunk attention, which changes texts longer than {name}: set "
            f"max_position_embeddings = {context} to at most {original}",
        )
    warn(f"{c.source}: {key} is ignored: it affects texts of more than {original:,} tokens")


def _head_dim(c: PublishedConfig, width: int, heads: int, width_key: str, heads_key: str) -> int:
    if width % heads:
        raise c.error(heads_key, f"must divide {width_key} = {width} where no head_dim is given")
    return width // heads


_ROPE_TYPE = ("rope_type", "type")  # the key's current and former name
_ROPE_SECTIONS = ("rope_scaling", "rope_parameters")  # transformers 4 and 5
_ROPE_KEYS = frozenset(
    "rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings "
    # Of unsupported scalings; transformers does not read them with the supported ones.
    "attention_factor beta_fast beta_slow short_factor long_factor mscale mscale_all_dim".split()
)


def _rope(c: PublishedConfig) -> dict:
    """Returns RoPE's keys, from one section or from both if they agree."""
    given = {}  # name: (full key, value)
    for section in _ROPE_SECTIONS:
        for name, (own, value) in _rope_section(c, section).items():
            key, there = given.setdefault(name, (own, value))
            if there != value:
                raise _disagree(c, own, value, key, there)
    if "rope_theta" in c.values:
        base = c.number("rope_theta")
        key, there = given.setdefault("rope_theta", ("rope_theta", base))
        if there != base:
            raise _disagree(c, key, there, "rope_theta", base)
    section = _ROPE_SECTIONS[0] if c.section(_ROPE_SECTIONS[0]) else _ROPE_SECTIONS[1]
    names = {name: f"{section}.{name}" for name in _ROPE_KEYS}
    names |= {name: key for name, (key, _) in given.items()}
    scaling = PublishedConfig({name: value for name, (_, value) in given.items()}, c.source, names)
    if scaling.values.get("rope_type") == "linear" and scaling.values.get("factor") == 1:
        scaled = False
    else:
        scaled = scaling.one_of("rope_type", dict(default=False, llama3=True), "default")
    scaling.require("partial_rotary_factor", 1.0, "RoPE rotates some channels only")
    keys = dict(rope_base=scaling.number("rope_theta", 10_000.0))
    if scaled:
        keys |= dict(
            rope_factor=scaling.number("factor"),
            rope_low=scaling.number("low_freq_factor"),
            rope_high=scaling.number("high_freq_factor"),
            rope_original=scaling.integer("original_max_position_embeddings"),
        )
    return keys


def _rope_section(c: PublishedConfig, section: str) -> dict[str, tuple[str, object]]:
    """Returns the non-null keys of a RoPE section: by name, the full key and the value."""
    found = {name: value for name, value in c.section(section).items() if value is not None}
    if any(isinstance(value, dict) for value in found.values()):
        raise c.error(section, "layers differ in their angles; kvjax needs equal layers")
    if unknown := set(found) - _ROPE_KEYS - {*_ROPE_TYPE}:
        raise c.error(section, f"{min(unknown)} is unknown, and may change the angles")
    types = {name: found.pop(name) for name in _ROPE_TYPE if name in found}
    if len({*map(repr, types.values())}) > 1:
        raise c.error(section, "rope_type and type are two names of one key: give one of them")
    if not types and (unclear := set(found) - {"rope_theta", "partial_rotary_factor"}):
        raise c.error(
            section,
            f"{section}.rope_type is missing, which defines {min(unclear)}: give 'default' (no "
            "scaling) or 'llama3', as the model was trained",
        )
    keys = {name: (f"{section}.{name}", value) for name, value in found.items()}
    for name, kind in types.items():
        keys.setdefault("rope_type", (f"{section}.{name}", kind))
    return keys


def _disagree(c: PublishedConfig, key: str, value, other: str, there) -> UserError:
    return UserError(
        f"{c.source}: {key} = {value!r} contradicts {other} = {there!r}: keep the one that the "
        "model was trained with"
    )


def _no_window(c: PublishedConfig) -> None:
    """Raises a UserError for a sliding window in a family that has none."""
    on = c.flag("use_sliding_window", "sliding_window" in c.values)
    if on and c.integer("sliding_window") < c.integer("max_position_embeddings"):
        raise c.error("sliding_window", "no model of this family has a window: is it a mistral?")
    _check_layers(c, "full_attention")


def _check_layers(c: PublishedConfig, *kinds: str) -> None:
    """Raises a UserError for a layer type that the family does not have."""
    if not all(kind in kinds for kind in c.get("layer_types", list, [])):
        raise c.error("layer_types", f"layers of this family are all {' or '.join(kinds)}")


def _window(c: PublishedConfig) -> int:
    """Returns the sliding window; if the key is absent, transformers' default."""
    return 0 if "sliding_window" in c.nulls else c.integer("sliding_window", 4096)


def _window_everywhere(c: PublishedConfig) -> int:
    """Returns Mistral's sliding window, shared by all layers."""
    window, full, sliding = _window(c), "full_attention", "sliding_attention"
    if not window:
        _check_layers(c, full)
    elif window >= c.integer("max_position_embeddings"):
        _check_layers(c, full, sliding)
    elif c.flag("use_sliding_window", True):
        _check_layers(c, sliding)
    else:
        raise c.error(
            "use_sliding_window",
            f"sliding_window = {window} applies to all layers of a mistral: set sliding_window to "
            "null if the model was trained without a window, else this key to true",
        )
    return window


def _window_of_layers(c: PublishedConfig) -> int:
    """Returns Qwen's sliding window, which kvjax supports in all layers or in none."""
    layers = c.integer("num_hidden_layers")
    window = _window(c) if c.flag("use_sliding_window", False) else 0
    if "layer_types" in c.values:
        key, kinds = "layer_types", c.get("layer_types", list)
        sliding = kinds.count("sliding_attention")
        if kinds.count("full_attention") + sliding != layers:
            raise c.error(key, f"must be full_attention or sliding_attention for {layers} layers")
    else:
        key, first = "max_window_layers", c.get("max_window_layers", int, 28)
        sliding = max(layers - first, 0) if window else 0
    if sliding and not window:
        raise c.error(key, "layers have a sliding window, and use_sliding_window is not set")
    if 0 < sliding < layers:
        raise c.error(
            key,
            f"{sliding} of {layers} layers have a sliding window; kvjax has it in all or in none",
        )
    return window if sliding else 0


# -- families --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
    """Models of one `model_type`."""

    sections: Callable[[PublishedConfig], ConfigSections]
    rules: tuple[Rule, ...]
    prefix: str  # of all tensors but the head's; absent in models saved without a head
    buffers: str  # regular expression of tensors that are not weights
    keys: frozenset[str]  # of the config that `sections` reads


_ROTARY = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
_MASKS = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
_GPT2_KEYS = frozenset(
    "vocab_size n_positions n_embd n_layer n_head n_inner activation_function layer_norm_epsilon "
    "tie_word_embeddings scale_attn_weights scale_attn_by_inverse_layer_idx "
    "add_cross_attention attention_multiplier".split()
)
_ROTATED_KEYS = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings "
    "hidden_act rope_theta rope_scaling rope_parameters attention_multiplier "
    "dual_chunk_attention_config".split()
)
_GATED_KEYS = _ROTATED_KEYS | {"mlp_bias", "partial_rotary_factor"}
_WINDOW_KEYS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
_LLAMA = Family(
    _llama,
    rules_lib.llama_rules(),
    prefix="model.",
    buffers=_ROTARY,
    keys=_GATED_KEYS | _WINDOW_KEYS | {"attention_bias"},
)
FAMILIES = {
    "gpt2": Family(
        _gpt2,
        rules_lib.gpt2_rules(),
        prefix="transformer.",
        buffers=_MASKS,
        keys=_GPT2_KEYS,
    ),
    "llama": _LLAMA,
    "mistral": dataclasses.replace(
        _LLAMA,
        sections=_mistral,
        keys=_GATED_KEYS | {"sliding_window", "use_sliding_window", "layer_types"},
    ),
    "qwen2": dataclasses.replace(_LLAMA, sections=_qwen2, keys=_GATED_KEYS | _WINDOW_KEYS),
    "qwen3": dataclasses.replace(_LLAMA, sections=_qwen3),
    "nanochat": Family(
        _nanochat,
        rules_lib.nanochat_rules(),
        prefix="model.",
        buffers=_ROTARY,
        keys=_ROTATED_KEYS | {"attention_bias", "final_logit_softcapping"},
    ),
}


def family_of(c: PublishedConfig) -> Family:
    """Returns the family of a config; raises a UserError for unknown families and unsupported
    options.
    """
    kind = c.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise c.error("model_type", f"must be one of {', '.join(FAMILIES)}")
    quantised = "weights are quantised: load the model with transformers, dequantise it and save it"
    for key in ("quantization_config", "quantization"):  # transformers' name, MLX's name
        if key in c.values:
            raise c.error(key, f"{quantised} in bfloat16 first")
    if "AutoModelForCausalLM" in c.section("auto_map"):
        raise c.error("auto_map", f"the model needs its own code: it is not a {kind}")
    c.require("is_causal", True, "tokens attend to later ones")
    _check_keys(c, FAMILIES[kind])
    return FAMILIES[kind]


def _check_keys(c: PublishedConfig, family: Family) -> None:
    """Raises a UserError for a key that may change the model and that its family does not have."""
    for key in c.values:
        if key not in family.keys and not config_keys.changes_nothing(key, c.values):
            raise _unknown_key(c, key)


def _unknown_key(c: PublishedConfig, key: str) -> UserError:
    """Returns the error for a key that may belong to another family."""
    kind = c.values["model_type"]
    return c.error(
        key,
        f"is not a key of {kind}, and may change the model (another family under the name {kind}?)"
        ". If it changes nothing, remove it",
    )


def is_buffer(family: Family, name: str) -> bool:
    """Returns True for published tensors that are not weights."""
    return re.fullmatch(family.buffers, name) is not None
