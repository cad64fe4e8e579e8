"""Export in DeepSeek-V3's layout: its formulas over exported tensors give the model's outputs."""

import dataclasses
import itertools
import json
import math

from flax import traverse_util
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax import config as config_lib
from kvjax.attention import (
    GLAConfig,
    GTAConfig,
    MFAKRConfig,
    MLALRKVConfig,
    MLRAConfig,
    PaperMLAConfig,
    SharedKVConfig,
    TPAConfig,
)
from kvjax.convert import deepseek, export, model as model_lib, published
from kvjax.costs import formulas
from kvjax.foundation import command_line, runtime
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import config_label, configs_of, load_config
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from tests import quick, reference
from tests.convert import comparison, deepseek_v3, workdirs
from tests.convert.workdirs import PLAIN, factored, grouped

DELTA = 2.0**-20
WIDTH, EPSILON = 24, 1e-2
BLOCK = BlockConfig(
    num_layers=2,
    d_model=WIDTH,
    mlp_dim=20,
    norm_gain=True,
    norm_epsilon=EPSILON,
    activation="swiglu",
    logit_softcap=0.0,
    rope_base=100.0,
)
NO_ROPE = dataclasses.replace(BLOCK, positions="none")
DIMS = dict(num_heads=4, key_dim=8, norm_epsilon=3e-2)
NORMED = {"mla", "mla_query_rank", "gla_1", "shared_kv", "shared_kv_no_rope"}
# By name: a block, a mechanism, and the exported C and P.
CASES = {
    "mla": (BLOCK, workdirs.mla(qk_norm="none"), 10, 4),
    "mla_linear_latent": (BLOCK, workdirs.mla(**PLAIN, norm_latent=False), 10, 4),
    "mla_query_rank": (
        BLOCK,
        workdirs.mla(**PLAIN, norm_epsilon=0.5, query_rank=6, latent_scale=True, value_dim=6),
        10,
        4,
    ),
    "gla_1": (
        BLOCK,
        GLAConfig(**DIMS, **PLAIN, num_latents=1, latent_dim=6, rope_key_dim=4, value_dim=8),
        6,
        4,
    ),
    "shared_kv": (BLOCK, SharedKVConfig(**DIMS, **PLAIN, num_kv_heads=1, rope_key_dim=0), 8, 0),
    "shared_kv_no_rope": (
        NO_ROPE,
        SharedKVConfig(**DIMS, **PLAIN, num_kv_heads=1, rope_key_dim=4, latent_scale=True),
        8,
        0,
    ),
    "gta": (BLOCK, GTAConfig(**DIMS, **PLAIN, num_kv_heads=2, rope_key_dim=4), 16, 4),
    "gta_query_rank": (
        BLOCK,
        GTAConfig(**DIMS, **PLAIN, num_kv_heads=2, rope_key_dim=4, query_rank=5, latent_scale=True),
        16,
        4,
    ),
    "gta_no_rope_key": (BLOCK, GTAConfig(**DIMS, **PLAIN, num_kv_heads=2, rope_key_dim=0), 16, 0),
    "lrkv_shared_rope": (
        BLOCK,
        grouped(4, 1, 2, **PLAIN, rope="shared", value_dim=6),
        6 + 2 * 4 * 2,
        8,
    ),
    "lrkv_shared_rope_gqa": (BLOCK, grouped(2, 1, 3, **PLAIN, rope="shared"), 8 + 2 * 2 * 3, 8),
    "mqa": (BLOCK, grouped(1, 1, **PLAIN, value_dim=6), 6, 8),
    "q_mqa": (BLOCK, grouped(1, 1, **PLAIN, tie="kv"), 8, 8),
    "mfa": (BLOCK, grouped(1, 1, **PLAIN, query_rank=5), 8, 8),
    "lrkv_one_head": (BLOCK, grouped(1, 1, 3, **PLAIN), 8, 8),
    "factored_one_head": (BLOCK, factored(1, 1, 3, 4, **PLAIN), 4, 8),
    "mfa_kr": (BLOCK, MFAKRConfig(**DIMS, **PLAIN, num_kv_heads=1), 8, 8),
    "mla_paper_one_head": (
        BLOCK,
        PaperMLAConfig(**DIMS | dict(num_heads=1), **PLAIN, latent_dim=6, value_dim=8),
        6,
        8,
    ),
    "qkv_tied_one_head": (BLOCK, grouped(1, 1, **PLAIN, tie="qkv", num_heads=1), 8, 8),
    "mha_no_rope": (NO_ROPE, grouped(4, 4, **PLAIN), WIDTH, 0),
    "gqa_no_rope": (NO_ROPE, grouped(2, 2, **PLAIN, value_dim=3), 2 * (8 + 3), 0),
    "lrkv_no_rope": (NO_ROPE, grouped(4, 1, 1, **PLAIN), 2 * (8 + 4), 0),
    "lrkv_split_no_rope": (NO_ROPE, grouped(4, 1, 1, **PLAIN, rope="shared"), 2 * (8 + 4), 0),
    "thin_keys_no_rope": (NO_ROPE, grouped(2, 2, **PLAIN, key_dim=2), 2 * (2 + 8), 0),
    "q_k_v_tied_no_rope": (NO_ROPE, grouped(2, 2, **PLAIN, tie="kv"), 2 * 8, 0),
    "qk_tied_no_rope": (NO_ROPE, grouped(4, 4, **PLAIN, tie="qk", key_dim=2, value_dim=3), 20, 0),
    "factored_no_rope": (NO_ROPE, factored(4, 2, 3, 4, **PLAIN), 2 * (3 + 4), 0),
    "mla_paper_no_rope": (
        NO_ROPE,
        PaperMLAConfig(**DIMS, **PLAIN, latent_dim=6, value_dim=8),
        6,
        0,
    ),
    "mfa_kr_no_rope": (NO_ROPE, MFAKRConfig(**DIMS, **PLAIN, num_kv_heads=2), 16, 0),
}


# Those with biases, which vLLM has not.
BIASED = {
    "mla_biases": (BLOCK, workdirs.mla(**PLAIN, bias=True, qk_bias=True), 10, 4),
    "mla_linear_biases": (
        BLOCK,
        workdirs.mla(**PLAIN, norm_latent=False, bias=True, qk_bias=True),
        10,
        4,
    ),
    "mla_query_biases": (BLOCK, workdirs.mla(**PLAIN, qk_bias=True, value_dim=6), 10, 4),
    "mla_output_bias": (BLOCK, workdirs.mla(**PLAIN, bias=True, query_rank=6), 10, 4),
}


def _relative(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


def _exported(made, engine):
    """config.json and all tensors before rounding, whose shapes are the announced ones."""
    plan = deepseek.plan(made, "F32", engine)
    tensors = {}
    for name, lazy in plan.tensors.items():
        tensors[name] = np.asarray(lazy.read(), np.float64)
        assert tensors[name].shape == lazy.shape, name
    return json.loads(plan.files["config.json"]), tensors


@pytest.mark.parametrize(
    "name, engine",
    [*itertools.product(CASES, deepseek.ENGINES), *((name, "transformers") for name in BIASED)],
)
def test_attention_is_deepseeks(name, engine):
    block, mechanism, latent, rope = (CASES | BIASED)[name]
    made = workdirs.Made(workdirs.config(block, mechanism))
    config, tensors = _exported(made, engine)
    padded = engine != "transformers"
    sizes = {"vllm": 256, "vllm-cpu": 512, "transformers": latent}
    assert config["kv_lora_rank"] == sizes[engine]
    assert config["qk_rope_head_dim"] == (64 if padded else rope or 2)
    assert config["v_head_dim"] <= config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    layer = 1
    weights = model_lib.read_layer(made, layer)
    rows = np.random.default_rng(0).standard_normal((2, 9, WIDTH))
    gain = np.float64(weights["attention_norm"]["gain"])
    x_BTD = deepseek_v3.norm(rows, gain, EPSILON)
    expected = reference.attention(
        mechanism, weights["attention"], x_BTD, base=block.angles_base, causal=True
    )
    found = deepseek_v3.attention(
        config,
        deepseek_v3.of_layer(tensors, layer),
        x_BTD,
        latent_epsilon=None if padded else 1e-6,
    )
    assert _relative(found, expected) < (1e-12 if name in NORMED else 16 * DELTA)


def _llama(mechanisms, **keys):
    return workdirs.config(dataclasses.replace(BLOCK, **keys), mechanisms)


MODELS = {
    "mla": _llama(workdirs.mla(**PLAIN)),
    "gains_of_1_tied_head": _llama(workdirs.mla(**PLAIN), norm_gain=False, tied_head=True),
    "no_embedding_norm": _llama(CASES["gta"][1], embedding_norm=False, tied_head=True),
    "ranks_by_layer": _llama(
        [grouped(4, 1, 1, **PLAIN), grouped(4, 1, 0, **PLAIN)], positions="none"
    ),
    "lrkv_shared_rope": _llama(CASES["lrkv_shared_rope"][1]),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_deepseeks(name):
    made = workdirs.Made(MODELS[name])
    config, tensors = _exported(made, "vllm")
    tokens_BT = np.random.default_rng(0).integers(0, workdirs.VOCABULARY, (2, 12))
    weights = traverse_util.unflatten_dict(
        {path: w.astype(np.float64) for path, w in made.weights.items()}
    )
    expected_BTV = reference.logits(made.transformer, weights, tokens_BT)
    found_BTV = deepseek_v3.logits(config, tensors, tokens_BT)
    assert np.abs(found_BTV - expected_BTV).max() < 1e-5 * expected_BTV.std()


@pytest.mark.parametrize("largest", [1e-3, 1.0, 1e3])
def test_an_undone_norm_is_bounded_for_every_input(largest):
    """Also for the input along which the projection is largest, and in bfloat16's range."""
    _, mechanism, _, _ = CASES["gta"]
    made = workdirs.Made(workdirs.config(BLOCK, mechanism))
    path = ("segments", 0, "attention", "mechanism", "latent")
    made.weights[path] = made.weights[path] * largest
    made.weights["segments", 0, "attention_norm", "gain"] *= 8
    config, tensors = _exported(made, "vllm")
    w = deepseek_v3.of_layer(tensors, 0)
    C = config["kv_lora_rank"]
    down_DC = w["kv_a_proj_with_mqa"][:C].T
    gain_D = np.float64(made.weights["segments", 0, "attention_norm", "gain"][0])
    worst_D = np.linalg.svd(gain_D[:, None] * down_DC)[0][:, 0] * math.sqrt(WIDTH)
    y_C = worst_D * gain_D @ down_DC
    latent_C = deepseek_v3.norm(y_C, w["kv_a_layernorm"], EPSILON)
    plain_C = worst_D * gain_D @ np.float64(made.weights[path][0]).reshape(WIDTH, -1)
    difference = np.abs(latent_C[: len(plain_C)] - plain_C).max() / np.abs(plain_C).max()
    assert DELTA / 8 < difference <= DELTA
    gain = w["kv_a_layernorm"][0]
    assert gain == ml_dtypes.bfloat16(gain) == 2.0 ** round(math.log2(gain))


# Why each of these is no DeepSeek-V3: a change of MLA's block, or a mechanism, and the message.
FULL = grouped(4, 1, 2, **PLAIN)
REFUSED = {
    "relu2": (dict(activation="relu2"), "config.model.activation = 'relu2': must be 'swiglu'"),
    "softcap": (dict(logit_softcap=15.0), "config.model.logit_softcap = 15.0: must be 0.0"),
    "layer_norm": (dict(norm="layer"), "config.model.norm = 'layer': must be 'rms'"),
    "norm_bias": (dict(norm_bias=True), "config.model.norm_bias = True: must be False"),
    "norm_after": (dict(norm_after=True), "config.model.norm_after = True: must be False"),
    "norm_outputs": (dict(norm_outputs=True), "config.model.norm_outputs = True: must be False"),
    "embedding_scale": (dict(embedding_scale=2.0), "embedding_scale = 2.0: must be 1.0"),
    "residual_scale": (dict(residual_scale=2.0), "config.model.residual_scale = 2.0: must be 1.0"),
    "logit_divisor": (dict(logit_divisor=2.0), "config.model.logit_divisor = 2.0: must be 1.0"),
    "norm_epsilon": (dict(norm_epsilon=0.0), "config.model.norm_epsilon = 0.0: must be more"),
    "mlp_bias": (dict(bias=True), "config.model.bias = True: must be False"),
    "window": (dict(window=6), "config.model.window = 6: must be 0"),
    "not_causal": (dict(causal=False), "config.model.causal = False: must be True"),
    "scaled_rope": (dict(rope_factor=8.0), "config.model.rope_factor = 8.0: must be 1.0"),
    "partial_rope": (dict(rope_fraction=0.5), "config.model.rope_fraction = 0.5: must be 1.0"),
    "learned": (dict(positions="learned"), "config.model.positions = 'learned': must be 'rope' or"),
    "mla_no_rope": (dict(positions="none"), "config.attention.rope_key_dim = 4: must be rotated"),
    "qk_norm": (workdirs.mla(), "config.attention.qk_norm = 'rms': must be 'none'"),
    "latent_epsilon": (
        workdirs.mla(**PLAIN, norm_epsilon=0.0),
        "config.attention.norm_epsilon = 0.0: must be more than 0",
    ),
    "output_gate": (
        workdirs.mla(**PLAIN, output_gate=True),
        "config.attention.output_gate = True: must be False",
    ),
    "bias": (grouped(1, 1, **PLAIN, bias=True), "config.attention.bias = True: must be False"),
    "qk_bias": (
        workdirs.mla(**PLAIN, qk_bias=True),
        "config.attention.qk_bias = True: must be False for --engine=vllm; --engine=transformers",
    ),
    "plus": (
        grouped(1, 1, **PLAIN, position_channels=4),
        "config.attention.position_channels = 4: must be 0",
    ),
    "alibi": (
        (grouped(1, 1, **PLAIN, alibi=True), dict(positions="none")),
        "config.attention.alibi = True: must be False",
    ),
    "lrkv": (FULL, "config.attention.rope = 'full': must be 'shared', or config.model.positions"),
    "bases": (
        grouped(4, 2, 2, **PLAIN, rope="shared"),
        "config.attention.num_bases = 2: must be 1, or config.model.positions = 'none'",
    ),
    "gqa": (grouped(2, 2, **PLAIN), "config.attention.num_kv_heads = 2: must be 1, or config.mo"),
    "kv_tied": (
        grouped(2, 2, **PLAIN, tie="kv"),
        "config.attention.num_kv_heads = 2: must be 1, or config.model.positions = 'none'",
    ),
    "factored": (factored(2, 1, 3, **PLAIN), "config.attention.num_kv_heads = 2: must be 1, or"),
    "mfa_kr": (
        MFAKRConfig(**DIMS, **PLAIN, num_kv_heads=2),
        "config.attention.num_kv_heads = 2: must be 1, or config.model.positions = 'none'",
    ),
    "mla_paper": (
        PaperMLAConfig(**DIMS, **PLAIN, latent_dim=6, value_dim=8),
        "config.attention.num_heads = 4: must be 1, or config.model.positions = 'none'",
    ),
    "shared_kv": (
        SharedKVConfig(**DIMS, **PLAIN, num_kv_heads=1, rope_key_dim=4),
        "config.attention.rope_key_dim = 4: must be 0, since values",
    ),
    "shared_kv_heads": (
        SharedKVConfig(**DIMS, **PLAIN, num_kv_heads=2, rope_key_dim=0),
        "config.attention.num_kv_heads = 2: must be 1, since DeepSeek",
    ),
    "gla": (
        GLAConfig(**DIMS, **PLAIN, num_latents=2, latent_dim=6, rope_key_dim=4, value_dim=8),
        "config.attention.num_latents = 2: must be 1, since DeepSeek",
    ),
    "mlra": (
        MLRAConfig(
            **DIMS,
            **PLAIN,
            num_branches=2,
            num_latents=2,
            latent_dim=6,
            rope_key_dim=4,
            value_dim=8,
        ),
        "config.attention.kind = 'mlra': must be one of gla, mla, shared_kv",
    ),
    "mla_lrkv": (
        MLALRKVConfig(**DIMS, **PLAIN, latent_dim=6, rope_key_dim=4, rank=2, value_dim=8),
        "config.attention.kind = 'mla_lrkv': must be one of gla, mla, shared_kv",
    ),
    "tpa": (
        TPAConfig(**DIMS, **PLAIN, query_factors=2, key_rank=2, value_rank=2, value_dim=8),
        "config.attention.kind = 'tpa': must be one of gla, mla, shared_kv",
    ),
    "wide_rope_key": (
        grouped(1, 1, **PLAIN, key_dim=66),
        "--engine = 'vllm': takes at most 512 channels of a latent and 64 of a RoPE key, and "
        "config.attention has 8 and 66",
    ),
    "wide_latent": (
        (grouped(72, 72, **PLAIN, num_heads=72), dict(positions="none", d_model=520)),
        "--engine = 'vllm': takes at most 512 channels of a latent and 64 of a RoPE key, and "
        "config.attention has 520 and 0",
    ),
    "short_rope_key": (
        (workdirs.mla(**PLAIN), dict(rope_base=10_000.0)),
        "--engine = 'vllm': pads 4 channels of a RoPE key to 64, whose base 1e+64 is too large",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepseek_has_not_is_refused_by_key(name, tmp_path, monkeypatch, capsys):
    given, said = REFUSED[name]
    mechanism, keys = given if isinstance(given, tuple) else (given, {})
    if isinstance(mechanism, dict):
        mechanism, keys = workdirs.mla(**PLAIN), mechanism
    made = workdirs.Made(_llama(mechanism, **keys))
    monkeypatch.setattr(runtime, "workdir", lambda path: path)
    monkeypatch.setattr(model_lib, "TrainedModel", lambda path: made)
    options = [f"--workdir={tmp_path}", f"--out={tmp_path / 'out'}", "--format=deepseek"]
    assert command_line.status(export.main, options) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_every_key_that_differs_is_named_and_nothing_is_written(small, tmp_path, capsys):
    """Exports LRKV of the default recipe."""
    options = [f"--workdir={small}", f"--out={tmp_path / 'out'}", "--format=deepseek"]
    assert command_line.status(export.main, options) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    for part in (
        "config.model.activation = 'relu2'",
        "config.model.logit_softcap = 2.0",
        "config.attention.qk_norm = 'rms'",
        "config.attention.rope = 'full'",
        "recipes.servable()",
    ):
        assert part in said
    assert "Traceback" not in said and not (tmp_path / "out").exists()


def test_float16_holds_no_undone_norm():
    halves = workdirs.Made(workdirs.config(BLOCK, CASES["gta"][1]))
    with pytest.raises(UserError, match="--dtype is missing: weights are float16"):
        deepseek.plan(halves, "F16")
    deepseek.plan(workdirs.Made(MODELS["mla"]), "F16")


def test_the_command(tmp_path, capsys):
    """Tensors as planned, rounded once; the cache in numbers; which engines are right."""
    workdir = workdirs.write(tmp_path / "workdir", MODELS["lrkv_shared_rope"])
    workdirs.export(workdir, tmp_path / "out", "--format=deepseek", "--json")
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["format"], result["model"]) == ("deepseek", "DeepseekV3ForCausalLM")
    numbers = 8 + 6 + 2 * 4 * 2
    assert result["cache_bytes_per_token"] == dict(workdir=2 * 2 * numbers, out=2 * 2 * (256 + 64))
    said = " ".join(printed.err.split())
    assert "C = 256 and P = 64, 640 bytes per token and layer in bfloat16" in said
    assert "padded from C = 22 and P = 8" in said
    assert "rms_norm_eps = 0.01: right in vLLM and SGLang" in said
    _, tensors = _exported(model_lib.open(str(workdir)), "vllm")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, tensors[name].astype(np.float32), err_msg=name)


@pytest.mark.parametrize(
    "options, said",
    [
        (
            ["--engine=sglang"],
            "--engine = 'sglang': must be one of 'vllm', 'vllm-cpu', 'transformers'",
        ),
        (["--engine=vllm", "--format=factored"], "--engine = 'vllm': needs --format=deepseek"),
    ],
)
def test_options(tmp_path, capsys, options, said):
    options = [f"--workdir={tmp_path}", f"--out={tmp_path / 'o'}", "--format=deepseek", *options]
    assert command_line.status(export.main, options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "variant, latent, rope",
    [("mla_served_tiny", 48, 16), ("gta_served_tiny", 64, 16), ("lrkv_served_tiny", 96, 32)],
)
def test_shipped_configs_are_servable(variant, latent, rope):
    """All configs of configs/serving.py, with MHA's parameters to 0.1 %."""
    files = {config_label(path): path for path in configs_of(CONFIGS / "serving.py")}
    assert len(files) == 3
    made = workdirs.Made(config_lib.resolve(load_config(files[variant])).model)
    mha = config_lib.resolve(load_config(CONFIGS / "mha_tiny.py")).model
    counts = [formulas.parameters(model)["total"] for model in (made.transformer, mha)]
    assert abs(counts[0] / counts[1] - 1) < 0.001
    config = json.loads(deepseek.plan(made, "F32", "transformers").files["config.json"])
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (latent, rope)
    plan = deepseek.plan(made, "F32")
    assert f"padded from C = {latent} and P = {rope}" in plan.notes[0]
    assert len(plan.notes) == 1  # rms_norm_eps is transformers' own


# -- read back -------------------------------------------------------------------------------------

EXACT_EPSILON = dict(norm_epsilon=1e-6)
SOURCES = {
    "mla": _llama(workdirs.mla(**PLAIN), **EXACT_EPSILON),
    "mla_query_rank": _llama(CASES["mla_query_rank"][1], **EXACT_EPSILON),
    "gta": _llama(CASES["gta"][1], **EXACT_EPSILON),
    "lrkv_shared_rope": _llama(CASES["lrkv_shared_rope"][1], **EXACT_EPSILON, tied_head=True),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", quick.only(["mla_query_rank", "gta"], SOURCES))
def test_exports_come_back_as_mla(tmp_path, name, dtype):
    """Logits are those of the exported tensors, with gains that no dtype rounds again."""
    workdir = workdirs.write(tmp_path / "workdir", SOURCES[name])
    workdirs.export(workdir, tmp_path / "out", "--format=deepseek", f"--dtype={dtype}")
    back = published.open(tmp_path / "out")
    (mechanism, _) = back.transformer.layer_groups[0]
    assert mechanism == dataclasses.replace(
        MODELS["mla"].mechanisms[0],
        latent_dim=256,
        rope_key_dim=64,
        key_dim=mechanism.key_dim,
        value_dim=mechanism.value_dim,
        query_rank=mechanism.query_rank,
        norm_epsilon=1e-6,
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    tensors = load_file(tmp_path / "out/model.safetensors")
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    tokens_BT = np.random.default_rng(0).integers(0, workdirs.VOCABULARY, (2, 12))
    expected_BTV = deepseek_v3.logits(config, tensors, tokens_BT)
    found_BTV = comparison.logits(back, tokens_BT)
    assert np.abs(found_BTV - expected_BTV).max() < comparison.TOLERANCE * expected_BTV.std()


@pytest.mark.parametrize(
    "keys, said",
    [
        (
            dict(first_k_dense_replace=1),
            "first_k_dense_replace = 1: must be num_hidden_layers = 2: the layers from this one "
            "on are mixtures of experts (MoE)",
        ),
        (dict(num_key_value_heads=2), "num_key_value_heads = 2: must be num_attention_heads = 4"),
        (dict(rope_interleave=False), "rope_interleave = False: must be true"),
        (dict(rms_norm_eps=1e-5), "rms_norm_eps = 1e-05: must be 1e-06"),
        (dict(attention_bias=True), "attention_bias = True: changes the model"),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu': must be one of 'silu' in this family"),
        (dict(kv_lora_rank=None), "kv_lora_rank is missing: this family's configs need it"),
    ],
)
def test_other_models_by_the_name_of_deepseek_are_refused(tmp_path, run, keys, said):
    workdir = workdirs.write(tmp_path / "workdir", SOURCES["mla"])
    workdirs.export(workdir, tmp_path / "out", "--format=deepseek")
    file = tmp_path / "out/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    status, _, found = run(f"--source={tmp_path / 'out'}", f"--out={tmp_path / 'back'}")
    assert status == 2 and said in " ".join(found.split())


def test_missing_and_misshapen_gains_are_named(tmp_path, run):
    workdir = workdirs.write(tmp_path / "workdir", SOURCES["mla"])
    workdirs.export(workdir, tmp_path / "out", "--format=deepseek")
    file, name = (
        tmp_path / "out/model.safetensors",
        "model.layers.1.self_attn.kv_a_layernorm.weight",
    )
    tensors = load_file(file)
    for gain in (None, np.ones(3, np.float32)):
        changed = {key: tensor for key, tensor in tensors.items() if key != name}
        if gain is not None:
            changed[name] = gain
        save_file(changed, file)
        status, _, said = run(f"--source={tmp_path / 'out'}", f"--out={tmp_path / 'back'}")
        assert status == 2 and name in said.replace("\n", "")
