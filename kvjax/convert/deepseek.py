"""Writes a model whose attention is mathematically MLA as DeepSeek-V3, so its cache stays small.

    c = g * norm(x W^DKV)    r = Rot(x W^KR)    k_n = [c W_n^UK, r]    v_n = c W_n^UV

(DeepSeek-V2, arXiv 2405.04434, section 2.1). Engines cache c and r, C + P elements per token and
layer. `deepseek_tensors` brings the maps of `latent_maps` into this form.

Only transformers supports biases (`attention_bias`): of the projections to latents, of the
projection to r, and of the output.
"""

from collections.abc import Iterator
import dataclasses

from kvjax.attention import (
    GLAConfig,
    GroupedConfig,
    GTAConfig,
    MLAConfig,
    PaperMLAConfig,
    SharedKVConfig,
    kind_of,
)
from kvjax.attention.mechanism import MechanismConfig
from kvjax.convert import deepseek_tensors, huggingface, latent_maps
from kvjax.convert.deepseek_tensors import Layout
from kvjax.convert.families import LATENT_EPSILON
from kvjax.convert.into_folder import ExportPlan
from kvjax.convert.latent_maps import LatentSizes
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig

CLASS = "DeepseekV3ForCausalLM"
ENGINES = ("vllm", "vllm-cpu", "transformers")
# C and P that kernels support: vLLM's and SGLang's on GPUs, vLLM's on CPUs; transformers any.
_LATENTS, _ROPE = {"vllm": (256, 512), "vllm-cpu": (512,)}, 64
_LARGEST_BASE = 1e38  # largest base of RoPE in float32


def plan(model: LazyModel, dtype: str, engine: str = ENGINES[0]) -> ExportPlan:
    """Returns the contents of a folder in DeepSeek-V3's layout.

    Args:
      dtype: safetensors' name of the tensors' dtype.
      engine: "vllm" pads C and P to the sizes of vLLM's and SGLang's GPU kernels, "vllm-cpu" to
        those of vLLM's CPU kernels; "transformers" pads nothing, and allows for transformers' own
        epsilon in norms of latents.

    Raises:
      UserError: the layout cannot express the model; names all keys that prevent it.
    """
    config = model.transformer
    if reasons := list(_reasons(config, engine)):
        raise UserError(
            f"{'; '.join(reasons)}: DeepSeek-V3 supports nothing else; recipes.servable() has the "
            "keys to train with"
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
        tensors=deepseek_tensors.of_model(model, layout),
        files=huggingface.files(model, _config_json(model, layout), CLASS, dtype),
        notes=_notes(config, layout, engine),
    )


# -- what the layout cannot express ----------------------------------------------------------------

_BLOCK = dict(
    norm="rms",
    norm_bias=False,
    norm_after=False,
    norm_outputs=False,
    norm_both=False,
    norm_offset=False,
    embedding_scale=1.0,
    residual_scale=1.0,
    logit_divisor=1.0,
    activation="swiglu",
    bias=False,
    logit_softcap=0.0,
    window=0,
    attention_softcap=0.0,
    causal=True,
)
_ROPE_KEYS = dict(rope_factor=1.0, rope_fraction=1.0, rope_attention_factor=1.0, rope_layers=())
_ATTENTION = dict(qk_norm="none", output_gate=False, position_channels=0, alibi=False)
_BIASES = ("bias", "qk_bias")
_KINDS = ("gla", "mla", "shared_kv", "gta", "grouped", "factored", "mla_paper", "mfa_kr")
_ONE_NORM = "1, since DeepSeek has one norm over the whole latent"


def _reasons(config: TransformerConfig, engine: str) -> Iterator[str]:
    """Yields each key that DeepSeek's layout cannot express, with its value and the allowed one."""
    block, rope = config.block, config.block.positions == "rope"
    for key, allowed in (_BLOCK | (_ROPE_KEYS if rope else {})).items():
        if getattr(block, key) != allowed:
            yield f"config.model.{key} = {getattr(block, key)!r}: must be {allowed!r}"
    if block.positions not in ("rope", "none"):
        yield f"config.model.positions = {block.positions!r}: must be 'rope' or 'none'"
    if not block.norm_epsilon:
        yield "config.model.norm_epsilon = 0.0: must be more than 0"
    for mechanism, _ in config.layer_groups:
        for key, value, allowed in _attention_reasons(mechanism, rope, engine):
            yield f"config.attention.{key} = {value!r}: must be {allowed}"


def _attention_reasons(
    mechanism: MechanismConfig, rope: bool, engine: str
) -> Iterator[tuple[str, object, str]]:
    """Yields (key, value, allowed values) of each key of a mechanism that prevents an export."""
    kind = kind_of(mechanism)
    if kind not in _KINDS:
        yield "kind", kind, f"one of {', '.join(_KINDS)}"
        return
    for key, allowed in _ATTENTION.items():
        if getattr(mechanism, key, allowed) != allowed:
            yield key, getattr(mechanism, key), repr(allowed)
    biases = [key for key in _BIASES if getattr(mechanism, key, False)]
    if biases and type(mechanism) is not MLAConfig:
        yield biases[0], True, "False"
    elif biases and engine != "transformers":
        yield biases[0], True, f"False for --engine={engine}; --engine=transformers has biases"
    elif "qk_bias" in biases and mechanism.query_rank:
        yield "qk_bias", True, "False with query_rank"
    normed = latent_maps.has_normed_latent(mechanism)
    if (normed or mechanism.query_rank) and not mechanism.norm_epsilon:
        yield "norm_epsilon", mechanism.norm_epsilon, "more than 0"
    if isinstance(mechanism, GLAConfig) and mechanism.num_latents > 1:
        yield "num_latents", mechanism.num_latents, _ONE_NORM
    if isinstance(mechanism, SharedKVConfig) and mechanism.num_kv_heads > 1:
        yield "num_kv_heads", mechanism.num_kv_heads, _ONE_NORM
    if isinstance(mechanism, MLAConfig) and not rope:
        yield "rope_key_dim", mechanism.rope_key_dim, "rotated: config.model.positions = 'rope'"
    if rope and not isinstance(mechanism, (MLAConfig, GTAConfig)):
        yield from _rotated_reasons(mechanism)


def _rotated_reasons(mechanism: MechanismConfig) -> Iterator[tuple[str, object, str]]:
    """Yields the keys that give each head a rotated key of its own, or that rotate values."""
    heads = mechanism.key_heads
    without = "or config.model.positions = 'none', since DeepSeek rotates one key for all heads"
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
    """Returns the sizes of all layers: the largest C, padded to what the engine supports."""
    own = [_sizes(config, mechanism) for mechanism, _ in config.layer_groups]
    latent, first, mechanism = max(each.latent for each in own), own[0], config.mechanisms[0]
    rope, biased_queries = first.rope, getattr(mechanism, "qk_bias", False)
    sizes, epsilon = _LATENTS.get(engine), config.block.norm_epsilon
    if sizes and (latent > sizes[-1] or rope > _ROPE):
        raise UserError(
            f"--engine = {engine!r}: takes at most {sizes[-1]} channels of a latent and {_ROPE} of "
            f"a RoPE key, and config.attention has {latent} and {rope}: --engine=transformers "
            "takes any"
        )
    if sizes:
        latent, rope = next(size for size in sizes if latent <= size), _ROPE
    else:
        rope, epsilon = rope or 2, LATENT_EPSILON  # transformers does not support 0 channels
    layout = Layout(
        latent=latent,
        rope=rope,
        # At least as many channels as values have, since flash attention pads values to the width
        # of keys; never 0, which kernels do not support.
        content=max(first.content or _ROPE, first.value - rope),
        value=first.value,
        epsilon=epsilon,
        biases=any(getattr(mechanism, key, False) for key in _BIASES),
        query_rank=config.block.d_model + 1 if biased_queries else mechanism.query_rank,
    )
    if (base := _rope_base(config, layout)) > _LARGEST_BASE:
        raise UserError(
            f"--engine = {engine!r}: pads {first.rope} channels of a RoPE key to {_ROPE}, whose "
            f"base {base:.0e} is too large for float32: give more channels, or "
            "--engine=transformers"
        )
    return layout


def _notes(config: TransformerConfig, layout: Layout, engine: str) -> tuple[str, ...]:
    """Returns notes on what the engines cache, and on which of them compute the model exactly."""
    numbers = layout.latent + layout.rope
    size = f"{2 * numbers:,} bytes per token and layer in bfloat16"
    notes = [f"engines cache C = {layout.latent} and P = {layout.rope}, {size}"]
    own = [_sizes(config, mechanism) for mechanism, _ in config.layer_groups]
    latent, rope = max(each.latent for each in own), own[0].rope
    if (latent, rope) != (layout.latent, layout.rope):
        notes[0] += f", padded from C = {latent} and P = {rope}"
    if (epsilon := config.block.norm_epsilon) != LATENT_EPSILON:
        right, wrong = "vLLM and SGLang", "transformers"
        if engine == "transformers":
            right, wrong = wrong, right
        notes.append(
            f"rms_norm_eps = {epsilon}: right in {right}, wrong in {wrong}: transformers has "
            f"{LATENT_EPSILON} in norms of latents, whatever config.json says"
        )
    if layout.biases:
        notes.append("biases: transformers has them (attention_bias), vLLM and SGLang have not")
    return tuple(notes)


def _sizes(config: TransformerConfig, mechanism: MechanismConfig) -> LatentSizes:
    return latent_maps.sizes(mechanism, config.block.d_model, rope=config.block.positions == "rope")


def _rope_base(config: TransformerConfig, layout: Layout) -> float:
    """Returns the RoPE base with which the padded key's first pairs keep their frequencies."""
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
        q_lora_rank=layout.query_rank or None,
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
        attention_bias=layout.biases,
        tie_word_embeddings=False,
        # No layer has experts, but engines read these keys.
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
