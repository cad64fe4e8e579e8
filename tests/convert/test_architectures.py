"""Configs of published models as kvjax's, and the errors for unsupported ones."""

import numpy as np
import pytest

from kvjax.convert import architectures, layer as layer_lib
from kvjax.foundation.errors import UserError
from kvjax.published.config import PublishedConfig

GPT2 = dict(model_type="gpt2", vocab_size=9, n_positions=7, n_embd=8, n_layer=2, n_head=2)
LLAMA = dict(
    model_type="llama",
    vocab_size=9,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
MISTRAL, QWEN2, QWEN3 = (LLAMA | dict(model_type=name) for name in ("mistral", "qwen2", "qwen3"))
NANOCHAT = LLAMA | dict(model_type="nanochat")
PHI3 = LLAMA | dict(model_type="phi3")
OLMO2 = LLAMA | dict(model_type="olmo2")
OLMO3, SMOLLM3 = LLAMA | dict(model_type="olmo3"), LLAMA | dict(model_type="smollm3")
GRANITE = LLAMA | dict(model_type="granite")
GEMMA2, GEMMA3 = LLAMA | dict(model_type="gemma2"), LLAMA | dict(model_type="gemma3_text")
ROPE = dict(rope_type="default", rope_theta=9.0)
LINEAR = dict(rope_type="linear", factor=8.0)
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWED = dict(sliding_window=5, use_sliding_window=True)
SCALED = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4,
    original_max_position_embeddings=128,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)


def sections(config):
    options = PublishedConfig(config, "config.json")
    found = architectures.family_of(options).sections(options)
    assert found.transformer.block.num_layers == 2  # valid as kvjax's config
    return found


def test_gpt2_by_its_defaults():
    found = sections(GPT2)
    model = dict(mlp_dim=32, norm="layer", norm_epsilon=1e-5, positions="learned")
    model |= dict(max_positions=7, activation="gelu", bias=True, tied_head=True, norm_bias=True)
    assert model.items() <= found.model.items()
    assert dict(num_heads=2, num_bases=2, key_dim=4, bias=True).items() <= found.attention.items()
    assert found.vocab_size == 9 and found.context == 7
    assert sections(GPT2 | dict(n_inner=5)).model["mlp_dim"] == 5
    assert sections(GPT2 | dict(activation_function="gelu")).model["activation"] == "gelu_exact"


def test_llama_by_its_defaults():
    found = sections(LLAMA)
    model = dict(mlp_dim=12, norm="rms", norm_gain=True, norm_epsilon=1e-5, rope_base=10_000.0)
    model |= dict(activation="swiglu", bias=False, tied_head=False, rope_factor=1.0, window=0)
    model |= dict(embedding_norm=False, logit_softcap=0.0, positions="rope")
    assert model.items() <= found.model.items()
    attention = dict(kind="grouped", layer_ranks=(), num_heads=4, num_kv_heads=2, num_bases=2)
    attention |= dict(rank=0, key_dim=2, value_dim=2, qk_norm="none", bias=False)
    assert attention.items() <= found.attention.items()
    assert found.context == 64
    assert sections({**LLAMA, "num_key_value_heads": None}).attention["num_kv_heads"] == 4


@pytest.mark.parametrize(
    "config, bias, out_bias",
    [
        (LLAMA | dict(attention_bias=True), True, True),
        (QWEN2, True, False),
        (QWEN3, False, True),
        (QWEN3 | dict(attention_bias=True), True, True),
    ],
)
def test_biases(config, bias, out_bias):
    attention = sections(config).attention
    assert (attention["bias"], attention["out_bias"]) == (bias, out_bias)


def test_qwen3_norms_queries_and_keys_with_gains():
    attention = sections(QWEN3).attention
    assert attention["qk_norm"] == "rms_gain" and attention["norm_epsilon"] == 1e-5
    assert attention["key_dim"] == 128  # its own default
    assert sections(QWEN3 | dict(head_dim=6)).attention["key_dim"] == 6


def test_nanochat_by_its_defaults():
    found = sections(NANOCHAT)
    model = dict(norm_gain=False, norm_epsilon=1e-5, embedding_norm=True, activation="relu2")
    model |= dict(logit_softcap=15.0, tied_head=False, rope_base=10_000.0, window=0, bias=False)
    assert model.items() <= found.model.items()
    attention = dict(qk_norm="rms", norm_epsilon=1e-5, bias=False, key_dim=2, num_bases=2)
    assert attention.items() <= found.attention.items()
    changed = sections({**NANOCHAT, "final_logit_softcapping": None, "head_dim": 6})
    assert changed.model["logit_softcap"] == 0.0 and changed.attention["value_dim"] == 6
    changed = sections(NANOCHAT | dict(attention_bias=True, hidden_act="gelu"))
    assert changed.attention["bias"] and changed.model["activation"] == "gelu_exact"


def test_norms_of_olmo2():
    found = sections(OLMO2 | dict(rms_norm_eps=None))
    assert dict(norm_outputs=True, norm_epsilon=1e-5).items() <= found.model.items()
    assert dict(qk_norm="rms_whole", norm_epsilon=1e-5).items() <= found.attention.items()
    assert sections(PHI3 | dict(rms_norm_eps=None)).model["norm_epsilon"] == 1e-5
    with pytest.raises(UserError, match="qk_norm = 'rms_whole': must be 'rms', 'rms_gain' or"):
        layer_lib.check(found.transformer.mechanisms)


def test_granite_multiplies():
    found = sections(GRANITE)  # transformers' default of every factor is 1
    ones = dict(embedding_scale=1.0, residual_scale=1.0, logit_divisor=1.0)
    assert ones.items() <= found.model.items() and found.attention["logit_scale"] == 1.0
    keys = dict(embedding_multiplier=12, residual_multiplier=0.22, logits_scaling=8)
    found = sections(GRANITE | keys | dict(attention_multiplier=0.5))
    others = dict(embedding_scale=12.0, residual_scale=0.22, logit_divisor=8.0)
    assert others.items() <= found.model.items() and found.attention["logit_scale"] == 0.5
    usual = sections(GRANITE | dict(attention_multiplier=2**-0.5))
    assert usual.attention == sections(LLAMA).attention


def test_gemma_by_its_defaults():
    shared = dict(norm_both=True, norm_offset=True, activation="geglu", tied_head=True)
    shared |= dict(embedding_scale=8**0.5, window=4096, rope_factor=1.0)
    found = sections(GEMMA2)
    same = dict(sliding_window=8, sliding_window_size=8)  # as in Gemma 2 9B
    assert sections(GEMMA2 | same) == sections(GEMMA2 | dict(sliding_window=8))
    model = shared | dict(logit_softcap=30.0, attention_softcap=50.0, window_layers=(1, 0))
    assert (model | dict(rope_base=1e4, window_rope_base=0.0)).items() <= found.model.items()
    attention = dict(qk_norm="none", key_dim=256, logit_scale=0.0)  # 1/sqrt(256)
    assert attention.items() <= found.attention.items()
    found = sections(GEMMA3)
    model = shared | dict(logit_softcap=0.0, attention_softcap=0.0, window_layers=())
    assert (model | dict(rope_base=1e6, window_rope_base=1e4)).items() <= found.model.items()
    assert found.attention["qk_norm"] == "rms_offset" and found.attention["norm_epsilon"] == 1e-5
    keys = dict(head_dim=6, query_pre_attn_scalar=25, final_logit_softcapping=7.0)
    for family in (GEMMA2, GEMMA3):
        found = sections(family | keys)
        assert found.attention["logit_scale"] == 0.2 and found.model["logit_softcap"] == 7.0
    uncapped = sections(GEMMA2 | dict(attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (uncapped.model["attention_softcap"], uncapped.model["logit_softcap"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "keys, base, local, factor",
    [
        (dict(rope_theta=7.0, rope_local_base_freq=3.0), 7.0, 3.0, 1.0),
        (dict(rope_scaling=LINEAR), 1e6, 1e4, 8.0),
        (dict(rope_parameters={FULL: LINEAR | dict(rope_theta=5.0), SLIDING: ROPE}), 5.0, 9.0, 8.0),
    ],
)
def test_two_bases_of_gemma3(keys, base, local, factor):
    model = sections(GEMMA3 | dict(sliding_window_pattern=2) | keys).model
    assert (model["rope_base"], model["window_rope_base"]) == (base, local)
    assert (model["rope_factor"], model["window_layers"]) == (factor, (1, 0))


@pytest.mark.parametrize("family", [GEMMA3, OLMO3])
@pytest.mark.parametrize(
    "keys, factor",
    [
        (dict(rope_theta=7.0, rope_scaling=LINEAR), 8.0),
        (dict(rope_parameters={FULL: ROPE | dict(rope_theta=7.0), SLIDING: ROPE}), 1.0),
    ],
)
def test_no_layer_has_a_window(family, keys, factor):
    """The base of layers with a window counts for none, in a config that has it."""
    found = sections(family | dict(layer_types=[FULL, FULL]) | keys)
    model = found.model
    assert (model["rope_base"], model["rope_factor"]) == (7.0, factor)
    assert not model["window"] and not model["window_rope_base"]
    written = architectures.FAMILIES[family["model_type"]].config_json(found.transformer, 64)
    assert "sliding_window" not in written  # transformers refuses null
    assert sections(family | written) == found


@pytest.mark.parametrize(
    "keys",
    [
        dict(rope_theta=500.0, rope_scaling=SCALED),
        dict(rope_theta=500, rope_scaling={**SCALED, "rope_type": None, "type": "llama3"}),
        dict(rope_parameters=SCALED | dict(rope_theta=500.0)),
        dict(rope_scaling=SCALED | dict(rope_theta=500.0)),
    ],
)
def test_scaled_rope_as_transformers_4_and_5_write_it(keys):
    model = sections(LLAMA | keys).model
    rope = dict(rope_base=500.0, rope_factor=8.0, rope_low=1.0, rope_high=4.0, rope_original=128)
    assert rope.items() <= model.items()


@pytest.mark.parametrize(
    "keys",
    [
        dict(rope_theta=500.0),
        dict(rope_scaling=None),
        dict(rope_theta=500.0, rope_scaling=dict(factor=None)),
        dict(rope_theta=500.0, rope_scaling=dict(type="default", factor=8.0)),
        dict(rope_scaling=dict(type="linear", factor=1.0)),
        dict(rope_theta=5.0, rope_parameters=dict(rope_type="linear", factor=1, rope_theta=5.0)),
    ],
)
def test_unscaled_rope(keys):
    model = sections(LLAMA | keys).model
    assert (model["rope_base"], model["rope_factor"]) == (keys.get("rope_theta", 10_000.0), 1.0)
    default = dict(rope_parameters=dict(rope_type="default", rope_theta=3.0))
    assert sections(LLAMA | default).model["rope_base"] == 3.0


@pytest.mark.parametrize(
    "config, keys, window",
    [
        (MISTRAL, {}, 4096),
        (MISTRAL, dict(sliding_window=None), 0),
        (MISTRAL, dict(sliding_window=5), 5),
        (MISTRAL, dict(sliding_window=5, layer_types=["sliding_attention"] * 2), 5),
        (MISTRAL, dict(use_sliding_window=False, layer_types=["full_attention"] * 2), 4096),
        (MISTRAL, dict(sliding_window=None, layer_types=["full_attention"] * 2), 0),
        (LLAMA, dict(sliding_window=64), 0),  # as long as the context
        (PHI3, {}, 0),
        (PHI3, dict(sliding_window=None, layer_types=["full_attention"] * 2), 0),
        (PHI3, dict(sliding_window=5), 5),
        (LLAMA, dict(sliding_window=5, use_sliding_window=False, max_window_layers=1), 0),
        (QWEN2, dict(sliding_window=5), 0),
        (QWEN2, dict(sliding_window=5, use_sliding_window=True), 0),  # from layer 28 on
        (QWEN3, dict(sliding_window=5, use_sliding_window=True, max_window_layers=0), 5),
        (QWEN2, WINDOWED | dict(layer_types=["sliding_attention"] * 2), 5),
        (QWEN2, WINDOWED | dict(layer_types=["full_attention"] * 2), 0),
        (SMOLLM3, dict(sliding_window=5), 0),
        (SMOLLM3, WINDOWED | dict(no_rope_layers=[0, 0]), 5),
        (OLMO3, {}, 4096),
        (OLMO3, dict(layer_types=["full_attention"] * 2), 0),
    ],
)
def test_windows(config, keys, window):
    model = sections(config | keys).model
    assert (model["window"], model["window_layers"]) == (window, ())


@pytest.mark.parametrize(
    "config, keys, expected",
    [
        (QWEN2, WINDOWED | dict(max_window_layers=1), (0, 1)),
        (QWEN3, WINDOWED | dict(max_window_layers=0, layer_types=[SLIDING, FULL]), (1, 0)),
        (SMOLLM3, WINDOWED | dict(no_rope_layer_interval=2), (0, 1)),
        (SMOLLM3, WINDOWED | dict(layer_types=[SLIDING, FULL]), (1, 0)),
        (OLMO3, dict(sliding_window=5, layer_types=[FULL, SLIDING]), (0, 1)),
    ],
)
def test_windows_of_some_layers(config, keys, expected):
    model = sections(config | keys).model
    assert (model["window"], model["window_layers"]) == (5, expected)


def test_layers_without_rope():
    found = sections(SMOLLM3).model
    assert dict(rope_layers=(), rope_base=2e6, tied_head=True).items() <= found.items()
    assert sections(SMOLLM3 | dict(no_rope_layer_interval=2)).model["rope_layers"] == (1, 0)
    given = dict(no_rope_layers=[0, 1, 1], no_rope_layer_interval=2)
    assert sections(SMOLLM3 | given).model["rope_layers"] == (0, 1)


def test_yarn():
    found = sections(QWEN3 | dict(rope_scaling=YARN, rope_theta=1e6)).model
    keys = dict(rope_scaling="yarn", rope_factor=4.0, rope_low=1.0, rope_high=32.0)
    keys |= dict(rope_original=128, rope_attention_factor=0.1 * np.log(4) + 1)
    assert keys.items() <= found.items()
    given = dict(attention_factor=1.5, beta_fast=3, beta_slow=2)
    found = sections(LLAMA | dict(rope_scaling=YARN | given)).model
    keys |= dict(rope_attention_factor=1.5, rope_high=3.0, rope_low=2.0)
    assert keys.items() <= found.items()


@pytest.mark.parametrize(
    "keys, base, local",
    [
        (dict(), 5e5, 0.0),
        (dict(rope_theta=5e5, rope_scaling=YARN), 5e5, 5e5),
        (dict(rope_parameters={FULL: YARN | dict(rope_theta=7.0), SLIDING: ROPE}), 7.0, 9.0),
        (dict(rope_parameters={FULL: ROPE, SLIDING: ROPE}), 9.0, 0.0),
        (dict(rope_parameters={FULL: YARN}), 5e5, 5e5),
    ],
)
def test_layers_with_a_window_have_a_base_of_their_own(keys, base, local):
    model = sections(OLMO3 | keys).model
    assert (model["rope_base"], model["window_rope_base"]) == (base, local)


# By base config: keys, and the key and the problem that the error names.
REFUSED = [
    (LLAMA, dict(model_type="gemma"), "model_type = 'gemma': must be one of gpt2, llama, mistral"),
    (LLAMA, dict(model_type=[]), "model_type = []: must be one of"),
    (LLAMA, dict(quantization_config=dict(bits=4)), "weights are quantised"),
    (LLAMA, dict(quantization=dict(bits=4)), "weights are quantised"),
    (LLAMA, dict(auto_map=dict(AutoModelForCausalLM="x.Y")), "the model needs its own code"),
    (LLAMA, dict(auto_map=dict(AutoModelForCausalLM="m.LlamaX")), "the model needs its own code"),
    (LLAMA, dict(hidden_size=None), "hidden_size is missing"),
    (LLAMA, dict(hidden_size="8"), "hidden_size = '8' is a str; it must be <class 'int'>"),
    (LLAMA, dict(hidden_size=0), "hidden_size = 0: must be at least 1"),
    (LLAMA, dict(num_attention_heads=3), "num_attention_heads = 3: must divide hidden_size"),
    (LLAMA, dict(hidden_act="gelu"), "hidden_act = 'gelu': must be one of 'silu'"),
    (LLAMA, dict(mlp_bias=True), "mlp_bias = True: changes the model; kvjax supports only False"),
    (MISTRAL, dict(attention_bias=True), "attention_bias = True: changes the model"),
    (LLAMA, dict(rope_scaling=3), "rope_scaling = 3 is a int"),
    (LLAMA, dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_scaling.type = 'dynamic': "),
    (LLAMA, dict(rope_scaling=dict(type="linear")), "rope_scaling.factor is missing"),
    (LLAMA, dict(rope_scaling=YARN | dict(mscale=1.0)), "rope_scaling.mscale = 1.0: is not read"),
    (
        GEMMA3 | dict(sliding_window_pattern=2),
        dict(rope_parameters={FULL: ROPE, SLIDING: ROPE}, rope_local_base_freq=5.0),
        "rope_local_base_freq = 5.0: contradicts rope_parameters.sliding_attention.rope_theta = 9",
    ),
    (LLAMA, dict(rope_scaling=LINEAR | dict(mscale_all_dim=1.0)), "multiplies the logits: not sup"),
    (LLAMA, dict(rope_scaling=YARN | dict(truncate=False)), "truncate is unknown, and may change"),
    (LLAMA, dict(rope_scaling=dict(factor=8.0)), "rope_scaling.rope_type is missing, which defin"),
    (LLAMA, dict(rope_parameters=dict(rope_theta=1.0, factor=8.0)), "rope_parameters.rope_type is"),
    (
        LLAMA,
        dict(rope_parameters=dict(rope_type="default"), rope_scaling=dict(factor=8.0)),
        "rope_scaling.rope_type is missing, which defines factor: give 'default'",
    ),
    (LLAMA, dict(rope_parameters=dict(partial_rotary_factor=0.25)), "must be 1: RoPE rotates all"),
    (LLAMA, dict(rope_parameters=dict(full_attention={})), "do not differ in their angles"),
    (
        LLAMA,
        dict(rope_theta=5.0, rope_parameters=dict(rope_theta=6.0)),
        "contradicts rope_theta = ",
    ),
    (
        LLAMA,
        dict(rope_scaling=SCALED, rope_parameters=SCALED | dict(factor=4.0)),
        "rope_parameters.factor = 4.0 contradicts rope_scaling.factor = 8.0",
    ),
    (LLAMA, dict(rope_scaling=SCALED | dict(type="linear")), "two names of one key: give one"),
    (LLAMA, dict(rope_scaling=dict(type="default", mrope_section=[1])), "mrope_section is unknown"),
    (LLAMA, dict(rope_scaling=SCALED | dict(low_freq_factor=None)), "low_freq_factor is missing"),
    (LLAMA, dict(sliding_window=5), "no model of this family has a window"),
    (LLAMA, dict(layer_types=[FULL, SLIDING]), "layers of this family are all full_attention"),
    (MISTRAL, WINDOWED | dict(use_sliding_window=False), "applies to all layers of this family"),
    (MISTRAL, dict(sliding_window=5, layer_types=[FULL] * 2), "are all sliding_attention"),
    (MISTRAL, dict(sliding_window=None, layer_types=[SLIDING] * 2), "are all full_attention"),
    (QWEN3, WINDOWED | dict(layer_types=[FULL]), "must be full_attention or sliding_attention for"),
    (SMOLLM3, dict(no_rope_layers=[]), "no_rope_layers = []: must have a 0 or a 1 for each of 2"),
    (SMOLLM3, dict(no_rope_layers=[1, 2]), "no_rope_layers = [1, 2]: must have a 0 or a 1"),
    (SMOLLM3, dict(mlp_bias=True), "mlp_bias = True: changes the model"),
    (SMOLLM3, dict(layer_types=[FULL, SLIDING]), "and use_sliding_window is not set"),
    (GEMMA2, dict(use_bidirectional_attention=True), "must be false: tokens see earlier tokens"),
    (
        GEMMA2,
        dict(sliding_window=8, sliding_window_size=9),
        "sliding_window_size = 9: is not a key",
    ),
    (GEMMA2, dict(hidden_activation="silu"), "hidden_activation = 'silu': must be one of 'gelu_py"),
    (GEMMA3, dict(attn_logit_softcapping=50.0), "must be null: attention of this family has no"),
    (GEMMA3, dict(sliding_window_pattern="LG"), "sliding_window_pattern = 'LG' is a str"),
    (LLAMA, dict(model_type="gemma3"), "model_type = 'gemma3': must be one of gpt2, llama"),
    (GEMMA2, dict(query_pre_attn_scalar=0), "query_pre_attn_scalar = 0: must be more than 0"),
    (GEMMA2, dict(query_pre_attn_scalar=-4), "query_pre_attn_scalar = -4: must be more than 0"),
    (OLMO3, dict(sliding_window=None), "must be a number: layers have a sliding window"),
    (OLMO3, dict(rope_parameters=YARN), "must have full_attention and sliding_attention"),
    (OLMO3, dict(rope_theta=1e4), "rope_theta = 10000.0: transformers 4 and 5 differ in the"),
    (
        OLMO3,
        dict(rope_parameters={FULL: YARN, SLIDING: YARN}),
        "rope_parameters.sliding_attention.factor = 4.0: layers with a window have no scaling",
    ),
    (QWEN3, dict(layer_types=[SLIDING] * 2), "and use_sliding_window is not set"),
    (
        QWEN3,
        dict(layer_types=[FULL, "chunked_attention"]),
        "sliding_attention for each of 2 layers",
    ),
    (
        QWEN2,
        dict(dual_chunk_attention_config=dict(original_max_position_embeddings=63)),
        "kvjax has no dual chunk attention",
    ),
    (GPT2, dict(activation_function="relu"), "activation_function = 'relu': must be one of"),
    (GPT2, dict(n_head=3), "n_head = 3: must divide n_embd = 8"),
    (GPT2, dict(tie_word_embeddings=1), "tie_word_embeddings = 1 is a int"),
    (PHI3, dict(layer_types=[FULL, SLIDING]), "layers of this family are all full_attention"),
    (PHI3, dict(sliding_window=5, layer_types=[FULL] * 2), "are all sliding_attention"),
    (
        PHI3,
        dict(rope_scaling=dict(type="longrope", short_factor=[1.0], long_factor=[1.0])),
        "rope_scaling.type = 'longrope': is not supported: past original_max_position_embeddings",
    ),
    (PHI3, dict(rope_scaling=dict(rope_type="su")), "rope_scaling.rope_type = 'su': is not supp"),
    (PHI3, dict(rope_scaling=YARN), "'yarn': is not supported: this family's YaRN is LongRoPE"),
    (LLAMA, dict(model_type="llama4_text"), "'llama4_text': mixtures of experts (MoE) are not"),
    (LLAMA, dict(model_type="gpt_oss"), "model_type = 'gpt_oss': mixtures of experts"),
    (PHI3, dict(partial_rotary_factor=0.75), "partial_rotary_factor = 0.75: changes the model"),
    (NANOCHAT, dict(hidden_act="silu"), "hidden_act = 'silu': must be one of 'relu2'"),
]


def test_unsupported_values_are_named():
    for config, keys, said in REFUSED:
        with pytest.raises(UserError) as error:
            sections(config | keys)
        assert str(error.value).startswith("config.json: ") and said in str(error.value)


# More keys of published configs, with nulls and those of older versions.
OF_V4 = dict(architectures=["X"], bos_token_id=1, eos_token_id=[2, 3], initializer_range=0.02)
OF_V4 |= dict(torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True)
GATED = OF_V4 | dict(hidden_act="silu", attention_dropout=0.0, rope_theta=5e5, rope_scaling=None)
OF_QWEN = GATED | dict(max_window_layers=28, sliding_window=9, use_sliding_window=False)
SAMPLED = dict(n_ctx=7, task_specific_params={"text-generation": dict(do_sample=True)})
REAL = {
    "Llama 1, Vicuna": LLAMA | OF_V4 | dict(max_sequence_length=2048, pad_token_id=0),
    "Llama 2, CodeLlama, TinyLlama": LLAMA
    | GATED
    | dict(_name_or_path="x", pretraining_tp=1, tie_word_embeddings=False),
    "Llama 3.2": LLAMA
    | GATED
    | dict(rope_scaling=SCALED, head_dim=2, mlp_bias=False, attention_bias=False),
    "SmolLM 2": LLAMA
    | GATED
    | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}},
    "Falcon 3": LLAMA | GATED | dict(activation="swiglu"),
    "fine-tuned": LLAMA | GATED | dict(unsloth_version="2025.1", pad_token_id=0),
    "Mistral": MISTRAL | GATED | dict(sliding_window=4096, head_dim=128),
    "Qwen 2": QWEN2 | OF_QWEN,
    "Qwen 2.5, DeepSeek-R1-Distill-Qwen": QWEN2 | OF_QWEN | dict(use_mrope=False),
    "Qwen 3": QWEN3 | OF_QWEN | dict(attention_bias=False, head_dim=128),
    "Phi 3, Phi 4": PHI3
    | GATED
    | dict(original_max_position_embeddings=4096, sliding_window=2047, resid_pdrop=0.0)
    | dict(auto_map=dict(AutoConfig="c.Phi3Config", AutoModelForCausalLM="m.Phi3ForCausalLM"))
    | dict(attention_bias=False),
    "SmolLM 3": SMOLLM3
    | GATED
    | dict(layer_types=[FULL] * 2, no_rope_layer_interval=4, no_rope_layers=[1, 0])
    | dict(max_window_layers=28, mlp_bias=False, sliding_window=None, use_sliding_window=False),
    "OLMo 3": OLMO3
    | GATED
    | dict(rope_scaling=YARN | dict(attention_factor=1.2, beta_fast=32.0, beta_slow=1.0))
    | dict(sliding_window=4096, layer_types=[SLIDING, FULL], attention_bias=False),
    "Gemma 2": GEMMA2
    | GATED
    | dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", head_dim=2)
    | dict(cache_implementation="hybrid", attn_logit_softcapping=50.0, query_pre_attn_scalar=2)
    | dict(final_logit_softcapping=30.0, sliding_window=4096, attention_bias=False),
    "Gemma 3": GEMMA3
    | OF_V4
    | dict(hidden_activation="gelu_pytorch_tanh", head_dim=2, query_pre_attn_scalar=2)
    | dict(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None, sliding_window=512)
    | dict(sliding_window_pattern=6, final_logit_softcapping=None, attn_logit_softcapping=None)
    | dict(cache_implementation="hybrid", attention_bias=False, attention_dropout=0.0),
    "OLMo 2": OLMO2 | GATED | dict(attention_bias=False),
    "Granite 3": GRANITE
    | GATED
    | dict(attention_bias=False, embedding_multiplier=1, mlp_bias=False, residual_multiplier=1)
    | dict(attention_multiplier=2**-0.5),
    "GPT-2": GPT2
    | SAMPLED
    | dict(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, summary_type="cls_index")
    | dict(summary_first_dropout=0.1, summary_proj_to_labels=True, summary_use_proj=True)
    | dict(layer_norm_epsilon=1e-05, output_past=True, summary_activation=None),
    "DistilGPT2": GPT2 | SAMPLED | dict(_num_labels=1, id2label={"0": "x"}, label2id={"x": 0}),
    "of transformers 4.2": GPT2 | dict(n_special=0, predict_special_tokens=True, pruned_heads={}),
}
# Keys that change nothing with these values, in a model of any family.
NEUTRAL = dict(
    **dict(attention_bias=False, attn_output_gate=False, bias=False, qk_norm=False),
    **dict(embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1),
    **dict(hidden_dropout_prob=0.0, no_rope_layers=[1, 1], no_rope_layer_interval=4),
    **dict(author="x", created_date="x", license="mit", use_flash_attention=True),
    **dict(full_attn_mod=1, interpolate_factor=1, lm_head_bias=False),
    **dict(mlp_bias=False, partial_rotary_factor=1.0, is_causal=True, scale_attn_weights=True),
    **dict(eos_token_ids=[1], loss_type="ForCausalLM", neftune_noise_alpha=5.0),
)
# By family, keys that change its models.
FOREIGN = dict(
    of_gpt2=dict(
        scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, add_cross_attention=True
    ),
    of_rotary=dict(partial_rotary_factor=0.5, is_causal=False),
    granite=dict(
        attention_multiplier=0.1, embedding_multiplier=12, logits_scaling=8, residual_multiplier=0.2
    ),
    smollm3=dict(no_rope_layers=[1, 0], no_rope_layer_interval=4),
    of_no_layer=dict(no_rope_layers=[]),
    nanogpt=dict(bias=True, qk_norm=True, attn_output_gate=True),
    gemma=dict(query_pre_attn_scalar=256, attn_logit_softcapping=50.0, hidden_activation="gelu"),
    gemma2_cap=dict(final_logit_softcapping=30.0),
    gemma3=dict(sliding_window_pattern=6, rope_local_base_freq=1e4),
    cohere=dict(logit_scale=0.06, use_qk_norm=True, layer_norm_eps=1e-5),
    olmo=dict(clip_qkv=8.0),
    phi3=dict(original_max_position_embeddings=4096),
    neox=dict(rotary_pct=0.25, use_parallel_residual=True, rotary_emb_base=10_000),
    mixtral=dict(num_local_experts=8),
    minicpm=dict(scale_emb=12, scale_depth=1.4, dim_model_base=256),
    qwen_1m=dict(dual_chunk_attention_config=dict(chunk_size=9)),
    vision=dict(vision_config={}, use_mrope=True),
    nanotron=dict(rope_interleaved=True),
    encoder=dict(is_encoder_decoder=True, pruned_heads={"0": [1]}),
)


OWN = {
    "Phi 3, Phi 4": ("phi3",),
    "Granite 3": ("granite",),
    "SmolLM 3": ("smollm3", "of_no_layer"),
    "Gemma 2": ("gemma", "gemma2_cap"),
    "Gemma 3": ("gemma", "gemma2_cap", "gemma3"),
}  # by name in REAL, what is not foreign to it


def test_keys_of_published_configs_and_of_other_families(capsys):
    for name, config in REAL.items():
        attention = sections(config).attention
        scale = 1 / np.sqrt(attention["key_dim"])
        changed = NEUTRAL | config | dict(attention_multiplier=float(scale))
        assert sections(changed) == sections(config)
        foreign = {
            family: keys for family, keys in FOREIGN.items() if family not in OWN.get(name, ())
        }
        for key, value in (pair for keys in foreign.values() for pair in keys.items()):
            sections(config | {key: None})
            said = f"^config.json: {key} = .*: (is not a key of|changes the model)"
            with pytest.raises(UserError, match=said):
                sections(config | {key: value})
    original = dict(chunk_size=8, original_max_position_embeddings=64)
    sections(QWEN2 | OF_QWEN | dict(dual_chunk_attention_config=original))
    assert "dual_chunk_attention_config is ignored" in capsys.readouterr().err
