"""The table of supported families of published models, by model_type.

A family with RMSNorm, RoPE and SwiGLU is one entry of `FAMILIES` that lists its differences from
Llama. `families` has the classes, `rules` the names of tensors.
"""

from kvjax.convert import config_keys, rope_keys, rules as rules_lib, windows
from kvjax.convert.families import (
    GELUS,
    DeepseekFamily,
    Family,
    GPT2Family,
    LlamaFamily,
    unsupported_key,
)
from kvjax.convert.gemma import GemmaFamily
from kvjax.published.config import PublishedConfig

FAMILIES: dict[str, Family] = dict(
    gpt2=GPT2Family(
        class_name="GPT2LMHeadModel",
        activations=GELUS,
        rules=rules_lib.gpt2_rules(),
        prefix="transformer.",
        buffers=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    ),
    llama=LlamaFamily(class_name="LlamaForCausalLM"),
    mistral=LlamaFamily(class_name="MistralForCausalLM", bias=False, window=windows.MISTRAL),
    qwen2=LlamaFamily(
        class_name="Qwen2ForCausalLM", bias=True, out_bias=False, window=windows.QWEN
    ),
    qwen3=LlamaFamily(
        class_name="Qwen3ForCausalLM", qk_norm="rms_gain", head_dim=128, window=windows.QWEN
    ),
    olmo2=LlamaFamily(
        class_name="Olmo2ForCausalLM",
        rules=rules_lib.olmo2_rules(),
        qk_norm="rms_whole",
        norm_outputs=True,
        epsilon=1e-5,
    ),
    olmo3=LlamaFamily(
        class_name="Olmo3ForCausalLM",
        rules=rules_lib.olmo2_rules(),
        qk_norm="rms_whole",
        norm_outputs=True,
        epsilon=1e-5,
        window=windows.every(4),
        rope=rope_keys.OLMO3,
    ),
    smollm3=LlamaFamily(
        class_name="SmolLM3ForCausalLM",
        tied=True,
        window=windows.SMOLLM3,
        rope=rope_keys.SMOLLM3,
    ),
    granite=LlamaFamily(class_name="GraniteForCausalLM", multipliers=True),
    phi3=LlamaFamily(
        class_name="Phi3ForCausalLM",
        bias=False,
        epsilon=1e-5,
        rules=rules_lib.phi3_rules(),
        window=windows.PHI,
        rope=rope_keys.PHI3,
        ignored=frozenset({"original_max_position_embeddings"}),  # for LongRoPE, which is refused
    ),
    gemma2=GemmaFamily(
        class_name="Gemma2ForCausalLM",
        softcap=30.0,
        attention_softcap=50.0,
        window=windows.every(2),
    ),
    gemma3_text=GemmaFamily(
        class_name="Gemma3ForCausalLM",
        qk_norm="rms_offset",
        softcap=0.0,
        window=windows.every(6, key="sliding_window_pattern"),
        rope=rope_keys.GEMMA3,
        ignored=frozenset({"_sliding_window_pattern"}),  # written by transformers 5 only
    ),
    deepseek_v2=DeepseekFamily(class_name="DeepseekV2ForCausalLM"),
    deepseek_v3=DeepseekFamily(class_name="DeepseekV3ForCausalLM"),
    nanochat=LlamaFamily(
        class_name="NanoChatForCausalLM",
        activations=dict(relu2="relu2") | GELUS,
        rules=rules_lib.nanochat_rules(),
        qk_norm="rms",
        norm_gain=False,
        embedding_norm=True,
        softcap=15.0,
    ),
)


# Families whose published models all have experts.
_EXPERTS = frozenset(
    "gpt_oss granitemoe llama4 llama4_text mixtral olmoe phimoe qwen2_moe qwen3_moe".split()
)


def family_of(c: PublishedConfig) -> Family:
    """Returns the family of a config; raises a UserError if it or one of its keys is unknown."""
    kind = c.values.get("model_type")
    if isinstance(kind, str) and kind in _EXPERTS:
        raise c.error("model_type", "mixtures of experts (MoE) are not supported")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise c.error("model_type", f"must be one of {', '.join(FAMILIES)}")
    quantised = "weights are quantised: load the model with transformers, dequantise it and save it"
    for key in ("quantization_config", "quantization"):  # transformers' name, MLX's name
        if key in c.values:
            raise c.error(key, f"{quantised} in bfloat16 first")
    # Phi-3 names a copy of transformers' own class.
    own_class = c.section("auto_map").get("AutoModelForCausalLM")
    if own_class is not None and str(own_class).rpartition(".")[2] != FAMILIES[kind].class_name:
        raise c.error("auto_map", f"the model needs its own code: it is not a {kind}")
    family = FAMILIES[kind]
    for key in c.values:
        if key not in family.keys and not config_keys.changes_nothing(key, c.values):
            raise unsupported_key(c, key)
    return family
