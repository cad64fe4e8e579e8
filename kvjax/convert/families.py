"""Families of published models: classes that translate config.json to kvjax's config and back."""

from collections.abc import Mapping
import dataclasses
import math

from kvjax.attention import GroupedConfig, MLAConfig
from kvjax.convert import config_keys, rope_keys, rules as rules_lib, windows
from kvjax.convert.published_config import ConfigSections, make_sections
from kvjax.convert.rope_keys import RopeKeys
from kvjax.convert.rules import Rule
from kvjax.convert.windows import WindowKeys
from kvjax.foundation.errors import UserError, warn
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.published.config import PublishedConfig

# Epsilon of latents' norms in transformers' DeepSeek, which ignores rms_norm_eps; vLLM reads it.
LATENT_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one `model_type`.

    Attributes:
      class_name: name of the models' class in transformers.
      activations: kvjax's activations by their names in config.json; the family's default first.
      rules: map tensors to weights.
      prefix: start of all tensor names but the head's; models saved without a head omit it.
      buffers: regular expression of tensors that are not weights.
      is_dense: each head's keys and values are projections of the input, so that `huggingface` can
        write the family.
    """

    class_name: str
    activations: Mapping[str, str]
    rules: tuple[Rule, ...]
    prefix: str
    buffers: str
    is_dense: bool = True

    @property
    def keys(self) -> frozenset[str]:
        """The keys of config.json that `sections` reads."""
        raise NotImplementedError

    def sections(self, c: PublishedConfig) -> ConfigSections:
        """Returns config.json as sections of kvjax's config; raises a UserError for bad values."""
        raise NotImplementedError

    def config_json(self, model: TransformerConfig, context: int) -> dict:
        """Returns the config.json closest to a model; the family may not express all keys."""
        raise NotImplementedError

    def _activation(self, c: PublishedConfig, key: str) -> str:
        return c.one_of(key, self.activations, next(iter(self.activations)))

    def _name_of(self, activation: str) -> str:
        """Returns an activation's name in config.json, or that of the default if it has none."""
        names = [name for name, own in self.activations.items() if own == activation]
        return names[0] if names else next(iter(self.activations))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Family(Family):
    """GPT-2: LayerNorm, learned positions, biases everywhere."""

    keys = frozenset(
        "vocab_size n_positions n_embd n_layer n_head n_inner activation_function "
        "layer_norm_epsilon tie_word_embeddings attention_multiplier".split()
    )

    def sections(self, c: PublishedConfig) -> ConfigSections:
        width, heads, context = c.integer("n_embd"), c.integer("n_head"), c.integer("n_positions")
        head_dim = _head_dim(c, width, heads, "n_embd", "n_head")
        _check_scale(c, head_dim)
        block = BlockConfig(
            num_layers=c.integer("n_layer"),
            d_model=width,
            mlp_dim=c.integer("n_inner", 4 * width),
            norm="layer",
            norm_gain=True,
            norm_bias=True,
            norm_epsilon=c.number("layer_norm_epsilon", 1e-5),
            positions="learned",
            max_positions=context,
            activation=self._activation(c, "activation_function"),
            bias=True,
            tied_head=c.flag("tie_word_embeddings", True),
            embedding_norm=False,
            logit_softcap=0.0,
        )
        mechanism = GroupedConfig(
            num_heads=heads,
            num_kv_heads=heads,
            num_bases=heads,
            rank=0,
            key_dim=head_dim,
            value_dim=head_dim,
            qk_norm="none",
            bias=True,
        )
        return make_sections(block, mechanism, vocab_size=c.integer("vocab_size"), context=context)

    def config_json(self, model: TransformerConfig, context: int) -> dict:
        del context  # equals max_positions, the rows of the position table
        return dict(
            n_layer=model.block.num_layers,
            n_embd=model.block.d_model,
            n_head=model.mechanisms[0].num_heads,
            n_inner=model.block.mlp_dim,
            n_positions=model.block.max_positions,
            layer_norm_epsilon=model.block.norm_epsilon,
            activation_function=self._name_of(model.block.activation),
            tie_word_embeddings=model.block.tied_head,
            vocab_size=model.vocab_size,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaFamily(Family):
    """Models with RMSNorm and RoPE; the defaults are Llama's.

    Attributes:
      activation_key: key of config.json with the activation.
      qk_norm, norm_gain, norm_outputs, embedding_norm, out_bias: as in kvjax's config.
      epsilon: default of the key rms_norm_eps.
      bias: queries, keys and values have biases; None: the key attention_bias decides.
      head_dim: default of the key head_dim; None: width / heads.
      tied: default of the key tie_word_embeddings.
      softcap: default of the key final_logit_softcapping; None: the family has no such key.
      ignored: further keys, which change nothing.
      multipliers: config.json has Granite's factors.
    """

    activations: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("silu", "swish"), "swiglu")
    )
    rules: tuple[Rule, ...] = rules_lib.llama_rules()
    prefix: str = "model."
    buffers: str = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    activation_key: str = "hidden_act"
    qk_norm: str = "none"
    norm_gain: bool = True
    norm_outputs: bool = False
    epsilon: float = 1e-6
    embedding_norm: bool = False
    bias: bool | None = None
    out_bias: bool = True
    head_dim: int | None = None
    softcap: float | None = None
    tied: bool = False
    window: WindowKeys = windows.NONE
    rope: RopeKeys = rope_keys.FLAT
    ignored: frozenset[str] = frozenset()
    multipliers: bool = False

    @property
    def keys(self) -> frozenset[str]:
        optional = dict(
            attention_bias=self.bias is None, final_logit_softcapping=self.softcap is not None
        )
        optional |= dict.fromkeys(_MULTIPLIERS, self.multipliers)
        read = {key for key, is_read in optional.items() if is_read}
        return _LLAMA_KEYS | self.rope.keys | self.window.keys | self.ignored | read

    def sections(self, c: PublishedConfig) -> ConfigSections:
        width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
        head_dim = c.integer("head_dim") if "head_dim" in c.values else self.head_dim
        head_dim = head_dim or _head_dim(c, width, heads, "hidden_size", "num_attention_heads")
        context = c.integer("max_position_embeddings")
        epsilon = c.number("rms_norm_eps", self.epsilon)
        if not self.multipliers:
            _check_scale(c, head_dim)
        _check_dual_chunks(c, context)
        window = self.window.read(c)
        block = BlockConfig(
            num_layers=c.integer("num_hidden_layers"),
            d_model=width,
            mlp_dim=c.integer("intermediate_size"),
            norm_gain=self.norm_gain,
            norm_outputs=self.norm_outputs,
            norm_epsilon=epsilon,
            embedding_norm=self.embedding_norm,
            activation=self._activation(c, self.activation_key),
            tied_head=c.flag("tie_word_embeddings", self.tied),
            logit_softcap=self._softcap(c),
            **window,
            **self.rope.read(c, bool(window)),
            **self._more(c),
        )
        kv_heads = c.integer("num_key_value_heads", heads)
        norm = {} if self.qk_norm == "none" else dict(norm_epsilon=epsilon)
        mechanism = GroupedConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            num_bases=kv_heads,
            rank=0,
            key_dim=head_dim,
            value_dim=head_dim,
            qk_norm=self.qk_norm,
            bias=c.flag("attention_bias", False) if self.bias is None else self.bias,
            out_bias=self.out_bias,
            logit_scale=self._logit_scale(c, head_dim),
            **norm,
        )
        return make_sections(block, mechanism, vocab_size=c.integer("vocab_size"), context=context)

    def _more(self, c: PublishedConfig) -> dict:
        """Returns further keys of BlockConfig: Granite's factors."""
        named = _MULTIPLIERS.items() if self.multipliers else ()
        return {own: c.number(key, 1.0) for key, own in named}

    def _logit_scale(self, c: PublishedConfig, head_dim: int) -> float:
        """Returns Granite's factor on logits; 0 if it is the usual 1 / sqrt(head_dim)."""
        usual = head_dim**-0.5
        scale = c.number("attention_multiplier", 1.0) if self.multipliers else usual
        return 0.0 if is_close(scale, usual) else scale

    def _softcap(self, c: PublishedConfig) -> float:
        key = "final_logit_softcapping"
        return 0.0 if self.softcap is None or key in c.nulls else c.number(key, self.softcap)

    def config_json(self, model: TransformerConfig, context: int) -> dict:
        block, mechanism = model.block, model.mechanisms[0]
        config = dict(
            hidden_size=block.d_model,
            intermediate_size=block.mlp_dim,
            num_hidden_layers=block.num_layers,
            num_attention_heads=mechanism.num_heads,
            num_key_value_heads=mechanism.num_kv_heads,
            head_dim=mechanism.key_dim,
            max_position_embeddings=context,
            rms_norm_eps=block.norm_epsilon,
            tie_word_embeddings=block.tied_head,
            vocab_size=model.vocab_size,
            **self.rope.write(block),
        )
        config[self.activation_key] = self._name_of(block.activation)
        if self.softcap is not None:
            config["final_logit_softcapping"] = block.logit_softcap or None
        if self.bias is None:
            config["attention_bias"] = mechanism.bias
        if self.multipliers:
            config |= {key: getattr(block, own) for key, own in _MULTIPLIERS.items()}
            config["attention_multiplier"] = mechanism.scale
        return config | self.window.write(block)


_MULTIPLIERS = dict(  # kvjax's keys by Granite's
    embedding_multiplier="embedding_scale",
    residual_multiplier="residual_scale",
    logits_scaling="logit_divisor",
)
_LLAMA_KEYS = windows.KEYS | frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings "
    "hidden_act rope_theta rope_scaling rope_parameters attention_multiplier "
    "dual_chunk_attention_config".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekFamily(Family):
    """DeepSeek-V2 and V3 with MLA and dense MLPs; `deepseek` writes it."""

    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(silu="swiglu"))
    rules: tuple[Rule, ...] = rules_lib.deepseek_rules()
    prefix: str = "model."
    buffers: str = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    is_dense: bool = False

    keys = frozenset(
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim head_dim "
        "v_head_dim max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act rope_theta "
        "rope_scaling rope_parameters rope_interleave first_k_dense_replace n_routed_experts "
        # Keys of experts, which are refused.
        "moe_layer_freq moe_intermediate_size n_shared_experts num_experts_per_tok n_group "
        "topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor aux_loss_alpha "
        "seq_aux ep_size num_nextn_predict_layers output_router_logits".split()
    )

    def sections(self, c: PublishedConfig) -> ConfigSections:
        heads, layers = c.integer("num_attention_heads"), c.integer("num_hidden_layers")
        dense = c.get("first_k_dense_replace", int, 0)
        if dense < layers and "n_routed_experts" not in c.nulls:
            raise c.error(
                "first_k_dense_replace",
                f"must be num_hidden_layers = {layers}: the layers from this one on are mixtures "
                "of experts (MoE), which are not supported",
            )
        if c.integer("num_key_value_heads", heads) != heads:
            raise c.error("num_key_value_heads", f"must be num_attention_heads = {heads}")
        if not c.flag("rope_interleave", True):
            raise c.error("rope_interleave", "must be true: RoPE rotates pairs (2i, 2i + 1)")
        epsilon = c.number("rms_norm_eps", LATENT_EPSILON)
        if epsilon != LATENT_EPSILON:
            raise c.error(
                "rms_norm_eps",
                f"must be {LATENT_EPSILON}: with another value, norms of latents differ between "
                "transformers and vLLM",
            )
        block = BlockConfig(
            num_layers=layers,
            d_model=c.integer("hidden_size"),
            mlp_dim=c.integer("intermediate_size"),
            norm_gain=True,
            norm_epsilon=epsilon,
            embedding_norm=False,
            activation=self._activation(c, "hidden_act"),
            tied_head=c.flag("tie_word_embeddings", False),
            logit_softcap=0.0,
            **rope_keys.read(c, yarn=False),
        )
        mechanism = MLAConfig(
            num_heads=heads,
            latent_dim=c.integer("kv_lora_rank"),
            rope_key_dim=c.integer("qk_rope_head_dim"),
            key_dim=c.integer("qk_nope_head_dim"),
            value_dim=c.integer("v_head_dim"),
            query_rank=c.integer("q_lora_rank") if "q_lora_rank" in c.values else 0,
            qk_norm="none",
            norm_epsilon=epsilon,
        )
        context = c.integer("max_position_embeddings")
        return make_sections(block, mechanism, vocab_size=c.integer("vocab_size"), context=context)


GELUS = {  # "gelu" is the tanh approximation in kvjax
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
}


def _check_scale(c: PublishedConfig, head_dim: int) -> None:
    """Raises a UserError if logits are scaled by anything but 1 / sqrt(head_dim)."""
    key, scale = "attention_multiplier", head_dim**-0.5
    if not is_close(c.number(key, scale), scale):
        raise unsupported_key(c, key)


def is_close(scale: float, other: float) -> bool:
    return math.isclose(scale, other, rel_tol=1e-6)


def _check_dual_chunks(c: PublishedConfig, context: int) -> None:
    """Raises a UserError for a context at which dual chunk attention changes positions."""
    key, name = "dual_chunk_attention_config", "original_max_position_embeddings"
    if key not in c.values:
        return
    original = c.section(key).get(name)
    if type(original) is not int:
        raise unsupported_key(c, key)
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


def unsupported_key(c: PublishedConfig, key: str) -> UserError:
    """Returns the error for a key that kvjax does not read and that may change the model."""
    kind = c.values["model_type"]
    if key in config_keys.NEUTRAL:
        values = " or ".join(map(repr, config_keys.NEUTRAL[key]))
        return c.error(key, f"changes the model; kvjax supports only {values} in a {kind}")
    return c.error(
        key,
        f"is not a key of {kind}, and may change the model (another family under the name {kind}?)"
        ". If it changes nothing, remove it",
    )
