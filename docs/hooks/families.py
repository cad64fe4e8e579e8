"""The support matrix's table of published families, by the checks of conversions and exports."""

import dataclasses

from docs.hooks.support import table
from kvjax.attention import MLAConfig
from kvjax.convert import architectures, deepseek, huggingface, layer as layer_lib
from kvjax.convert.latent_method import LatentAttention
from kvjax.convert.methods import LowRankKV, Method, ThinKeys
from kvjax.convert.pooled_heads import PooledHeads
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig
from kvjax.published.config import PublishedConfig

_LAYERS, _WIDTH, _CONTEXT = 4, 2048, 32_768
_SIZES = dict(
    vocab_size=512,
    hidden_size=_WIDTH,
    intermediate_size=4 * _WIDTH,
    num_hidden_layers=_LAYERS,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=_CONTEXT,
)
_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA3 |= dict(original_max_position_embeddings=8192)
_YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192)
_EXPERTS = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_EXPERTS |= dict(first_k_dense_replace=_LAYERS, num_key_value_heads=16)
# The keys of a published config beside its sizes, by the name of the model.
ROWS: dict[str, dict] = {
    "GPT-2": dict(
        model_type="gpt2",
        vocab_size=512,
        n_embd=_WIDTH,
        n_head=16,
        n_layer=_LAYERS,
        n_positions=_CONTEXT,
    ),
    "Llama 2, SmolLM2": dict(model_type="llama"),
    "Llama 3.1": dict(model_type="llama", rope_scaling=_LLAMA3, rope_theta=5e5),
    "Mistral, later ones": dict(model_type="mistral", sliding_window=None),
    "Mistral 7B v0.1": dict(model_type="mistral", sliding_window=4096),
    "Phi-4": dict(model_type="phi3"),
    "Phi-3 mini 4k": dict(model_type="phi3", sliding_window=2047),
    "Qwen 2": dict(model_type="qwen2"),
    "Qwen 3": dict(model_type="qwen3"),
    "SmolLM3": dict(model_type="smollm3"),
    "Granite 3": dict(model_type="granite", embedding_multiplier=12, attention_multiplier=0.01),
    "OLMo 2": dict(model_type="olmo2"),
    "OLMo 3": dict(model_type="olmo3", rope_theta=5e5, rope_scaling=_YARN),
    "Gemma 2": dict(model_type="gemma2"),
    "Gemma 3": dict(model_type="gemma3_text"),
    "NanoChat": dict(model_type="nanochat"),
    "DeepSeek-V2, dense": dict(model_type="deepseek_v2", **_EXPERTS),
    "DeepSeek-V3, dense": dict(model_type="deepseek_v3", q_lora_rank=512, **_EXPERTS),
}
METHODS: dict[str, Method] = {
    "thin_keys": ThinKeys(rank=32),
    "lrkv": LowRankKV(rank=32),
    "gqa": PooledHeads(rank=2),
    "mla": LatentAttention(rank=512, rope_dim=64),
}


def matrix() -> str:
    """Returns the table of conversions and exports of all families."""

    def cells(keys: dict) -> list[str]:
        model = transformer(keys)
        smaller = (method_cell(model, method) for method in METHODS.values())
        served = (served_cell(model, engine) for engine in ("vllm", "transformers"))
        return [f"`{keys['model_type']}`", class_of(model), *smaller, *served]

    methods = [f"`{name}`" for name in METHODS]
    engines = ["DeepSeek's layout for vLLM", "for transformers"]
    return table(["model", "`model_type`", "transformers", *methods, *engines], ROWS, cells)


def transformer(keys: dict) -> TransformerConfig:
    """Returns the model that a published config describes, at this page's sizes."""
    sizes = {} if keys["model_type"] == "gpt2" else _SIZES
    options = PublishedConfig(sizes | keys, "config.json")
    return architectures.family_of(options).sections(options).transformer


def class_of(model: TransformerConfig) -> str:
    """Returns transformers' class that `export --format=huggingface` writes for the model."""
    if _is_mla(model):
        return "no: it has MLA, which `--format=deepseek` writes"
    kind, _ = huggingface._family(model, context=_CONTEXT)
    return (
        architectures.FAMILIES[kind]
        .class_name.removesuffix("ForCausalLM")
        .removesuffix("LMHeadModel")
    )


def converted(model: TransformerConfig, method: Method) -> TransformerConfig:
    """Returns the model with a method's mechanism in every layer."""
    layer_lib.check(model.mechanisms)
    mechanisms = tuple(
        method.mechanism(mechanism, rope=kind.rope_base) for mechanism, kind in model.layers
    )
    return dataclasses.replace(model, mechanisms=mechanisms)


def method_cell(model: TransformerConfig, method: Method) -> str:
    """Says if `kvjax convert` applies a method."""
    try:
        converted(model, method)
    except UserError as error:
        return f"no: {str(error).removeprefix('--method=mla: ')}"
    return "yes"


def served_cell(model: TransformerConfig, engine: str) -> str:
    """Says if `export --format=deepseek` writes the model: after `--method=mla`, or as it is."""
    try:
        model = model if _is_mla(model) else converted(model, METHODS["mla"])
    except UserError:
        return "no: `--method=mla` does not apply"
    reason = next(deepseek._reasons(model, engine), None)
    return "yes" if reason is None else f"no: {reason}"


def _is_mla(model: TransformerConfig) -> bool:
    return isinstance(model.mechanisms[0], MLAConfig)
