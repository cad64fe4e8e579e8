"""The cache of published models by config.json: hand numbers, kvjax's formulas, odd families."""

import json
import shutil

from huggingface_hub import constants
import jax.numpy as jnp
import pytest

from kvjax.convert import published as published_models
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.costs import __main__ as command, formulas, methods, published
from kvjax.costs.shape import of_config
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets
from tests.convert import comparison, gguf_files

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
LLAMA = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    hidden_act="silu",
    vocab_size=128256,
    tie_word_embeddings=False,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
SMOLLM2 = dict(
    model_type="llama", num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
) | dict(hidden_size=576, max_position_embeddings=8192)
QWEN3 = dict(
    model_type="qwen3", num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8
) | dict(hidden_size=4096, head_dim=128, use_sliding_window=False, max_window_layers=36)
GEMMA3 = dict(  # 1B: 4 layers of 26 attend to everything, the others to 512 tokens
    model_type="gemma3_text", num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1
) | dict(hidden_size=1152, head_dim=256, sliding_window=512, sliding_window_pattern=6)
DEEPSEEK_V3 = (
    dict(model_type="deepseek_v3", num_hidden_layers=61, num_attention_heads=128, hidden_size=7168)
    | dict(num_key_value_heads=128, kv_lora_rank=512, qk_rope_head_dim=64)
    | dict(qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256)
)
T = 32_768
HAND = {  # a model: its bytes per token and at T tokens, MHA's bytes per token; all in bfloat16
    "llama": (LLAMA, 131_072, 4 * 2**30, 524_288),
    "qwen3": (QWEN3, 147_456, 147_456 * T, 4 * 147_456),
    "gemma3": (GEMMA3, 26_624, 1024 * (4 * T + 22 * 512), 4 * 26_624),
    "deepseek_v3": (DEEPSEEK_V3, 70_272, 70_272 * T, 61 * 128 * (192 + 128) * 2),
    "smollm2": (SMOLLM2, 23_040, 23_040 * T, 69_120),
}


def rows_of(config):
    return {row.name: row for row in methods.rows(of_config(config, "config.json"))}


def own(config):
    return next(row for row in rows_of(config).values() if row.own)


@pytest.mark.parametrize("name", HAND)
def test_hand_numbers(name):
    config, per_token, per_sequence, mha = HAND[name]
    row = own(config)
    assert (row.cache_bytes(BFLOAT16), row.cache_bytes(BFLOAT16, T)) == (per_token, per_sequence)
    assert row.cache_bytes(FLOAT32) == 2 * per_token
    first = methods.rows(of_config(config, "config.json"))[0]
    assert first.name == "MHA" and first.cache_bytes(BFLOAT16) == mha


def test_rows_of_llama_by_hand():
    """Elements per token and layer: 1,024 keys and as many values in 8 KV heads of 128."""
    elements = {name: row.cache_bytes(BFLOAT16) / 32 / 2 for name, row in rows_of(LLAMA).items()}
    assert elements == {
        "MHA": 8192,
        "GQA, 8 KV heads (this model)": 2048,
        "MQA": 256,
        "LRKV, rank 64": 2 * (128 + 32 * 64),
        "LRKV, rank 32": 2 * (128 + 32 * 32),
        "LRKV, rank 16": 2 * (128 + 32 * 16),
        "LRKV, 8 KV heads, rank 64": 2 * (128 + 8 * 64),
        "LRKV, 8 KV heads, rank 32": 2 * (128 + 8 * 32),
        "LRKV, 8 KV heads, rank 16": 2 * (128 + 8 * 16),
        "thin keys, 64 of 128 channels": 8 * (64 + 128),
        "thin keys, 32 of 128 channels": 8 * (32 + 128),
        "factored keys, rank 32 per head": 8 * (32 + 128),
        "factored keys and values, ranks 512": 1024,
        "factored keys and values, ranks 256": 512,
        "Q-K=V, 8 KV heads": 1024,
        "Q-K=V, MQA": 128,
        "MLA, 512 + 64 (TransMLA)": 576,
        "MLA, 256 + 64 (TransMLA)": 320,
        "MLA, 512 + 128 (MHA2MLA)": 640,
        "MLA, 256 + 128 (MHA2MLA)": 384,
        "MLA, 128 + 128 (MHA2MLA)": 256,
    }


def test_two_kv_heads_may_become_one():
    """The row of one head for keys and values has half the elements of "Q-K=V, 2 KV heads"."""
    rows = rows_of(dict(LLAMA, num_key_value_heads=2))
    two, one = rows["Q-K=V, 2 KV heads"], rows["Q-K=V, MQA"]
    assert two.cache_bytes(BFLOAT16) == 2 * one.cache_bytes(BFLOAT16)


@pytest.mark.parametrize("name", comparison.MODELS)
def test_models_that_kvjax_imports_and_converts_cost_what_its_formulas_say(name):
    folder = comparison.PUBLISHED / name
    shape = published.read(str(folder))
    model = published_models.open(folder)
    rows = {row.name: row for row in methods.rows(shape)}
    (row,) = [row for row in rows.values() if row.own]
    for dtype in (BFLOAT16, FLOAT32):
        assert row.cache_bytes(dtype) == formulas.cache_bytes_per_token(model.transformer, dtype)
        for length in (4, 64):
            cost = formulas.decode_cost(model.transformer, length=length, batch=1, dtype=dtype)
            assert row.cache_bytes(dtype, length) == cost.cache_bytes
    heads, dim = shape.layers[0].kv_heads, shape.layers[0].key_dim
    norm = model.transformer.mechanisms[0].qk_norm  # a norm over all heads is not converted
    if shape.normed_keys or norm == "rms_whole" or not 1 < heads < shape.layers[0].num_heads:
        return
    for method, row_name in (
        (LowRankKV(rank=dim // 4), f"LRKV, {heads} KV heads, rank {dim // 4}"),
        (ThinKeys(rank=dim // 4, mode="per_head"), f"factored keys, rank {dim // 4} per head"),
        (
            ThinKeys(
                rank=heads * dim // 4, value_rank=heads * dim // 4, mode="joint", part="key_value"
            ),
            f"factored keys and values, ranks {heads * dim // 4}",
        ),
    ):
        converted = ConvertedModel(model, [method] * len(shape.layers), None).transformer
        expected = formulas.cache_bytes_per_token(converted, BFLOAT16)
        assert rows[row_name].cache_bytes(BFLOAT16) == expected


PLAIN = dict(num_hidden_layers=4, num_attention_heads=8, hidden_size=512)
SLIDING = dict(PLAIN, sliding_window=10)
ONE = 2 * 8 * 64 * 2  # bytes of a token in a layer of these
FAMILIES = {  # a config, and its bytes of 100 tokens
    "MHA": (PLAIN, 400 * ONE),
    "gpt2": (dict(n_layer=4, n_head=8, n_embd=512, n_ctx=1024), 400 * ONE),
    "window null": (dict(PLAIN, model_type="mistral", sliding_window=None), 400 * ONE),
    "mistral": (dict(SLIDING, model_type="mistral"), 40 * ONE),
    "mistral's default": (dict(PLAIN, model_type="mistral"), 400 * ONE),
    "qwen2 without": (dict(SLIDING, model_type="qwen2", max_window_layers=1), 400 * ONE),
    "qwen2": (
        dict(SLIDING, model_type="qwen2", use_sliding_window=True, max_window_layers=1),
        130 * ONE,
    ),
    "gemma2": (dict(SLIDING, model_type="gemma2", head_dim=64), 220 * ONE),
    "letters": (dict(SLIDING, sliding_window_pattern="LLG"), 130 * ONE),
    "layer_types": (
        dict(SLIDING, layer_types=["attention", "conv", *["sliding_attention"] * 2]),
        120 * ONE,
    ),
    "layers by letter": (dict(PLAIN, hybrid_override_pattern="M*-E"), 100 * ONE),
    "qwen3_next": (dict(PLAIN, linear_num_key_heads=2, full_attention_interval=2), 200 * ONE),
    "jamba": (dict(PLAIN, mamba_d_state=2, attn_layer_period=4, attn_layer_offset=2), 100 * ONE),
    "lfm2": (dict(PLAIN, conv_L_cache=3, full_attn_idxs=[1]), 100 * ONE),
    "llama4": (
        dict(
            text_config=dict(
                PLAIN, model_type="llama4_text", attention_chunk_size=10, num_key_value_heads=4
            )
        ),
        (100 + 30) * 2 * 4 * 128 * 2,
    ),
    "gemma3 by defaults": (  # 4B: 34 layers, of which 5 attend to everything
        dict(model_type="gemma3", text_config=dict(num_hidden_layers=34, sliding_window=10)),
        (5 * 100 + 29 * 10) * 2 * 4 * 256 * 2,
    ),
    "gemma3n": (  # 30 layers, of which 15 share another's: 3 of every 15 attend to everything
        dict(model_type="gemma3n_text", num_hidden_layers=30, sliding_window=10),
        (3 * 100 + 12 * 10) * 2 * 2 * 256 * 2,
    ),
    "gemma4": (
        dict(SLIDING, layer_types=["sliding_attention", "full_attention"] * 2, head_dim=64)
        | dict(global_head_dim=128, num_global_key_value_heads=2),
        20 * ONE + 200 * 2 * 2 * 128 * 2,
    ),
    "falcon": (dict(PLAIN, multi_query=True, num_kv_heads=8), 400 * ONE // 8),
    "falcon, grouped": (
        dict(PLAIN, multi_query=True, num_kv_heads=4, new_decoder_architecture=True),
        400 * ONE // 2,
    ),
    "chatglm": (
        dict(num_layers=4, num_attention_heads=8, kv_channels=64)
        | dict(multi_query_attention=True, multi_query_group_num=2),
        400 * ONE // 4,
    ),
    "dbrx": (dict(n_layers=4, n_heads=8, d_model=512, attn_config=dict(kv_n_heads=2)), 100 * ONE),
    "heads by layer": (dict(PLAIN, num_key_value_heads=[8, 4, 0, 2], head_dim=64), 175 * ONE),
    "an indexer": (dict(DEEPSEEK_V3, index_head_dim=128), 61 * 100 * (576 + 128) * 2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    config, expected = FAMILIES[name]
    assert own(config).cache_bytes(BFLOAT16, 100) == expected


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    "config, message",
    [
        (without(LLAMA, "num_hidden_layers"), "num_hidden_layers is missing"),
        (without(LLAMA, "num_attention_heads"), "num_attention_heads is missing"),
        (without(SMOLLM2, "hidden_size"), "hidden_size is missing"),
        (without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim is missing"),
        (without(DEEPSEEK_V3, "v_head_dim"), "v_head_dim is missing"),
        (SLIDING, "sliding_window = 10: needs layer_types"),
        (dict(PLAIN, layer_types=["sliding_attention"] * 4), "sliding_window is missing"),
        (dict(PLAIN, layer_types=["full"] * 4), "must be 4 of full_attention, attention"),
        (dict(PLAIN, mamba_d_state=2), "mamba_d_state = 2: needs layer_types"),
        (dict(PLAIN, n_kv_head=2), "n_kv_head = 2: is unknown; kvjax reads num_key_value_heads"),
        (dict(LLAMA, num_key_value_heads=5), "must divide num_attention_heads = 32"),
        (dict(LLAMA, num_attention_heads="32"), "num_attention_heads = '32' is a str"),
        (dict(PLAIN, is_encoder_decoder=True), "only decoders are supported"),
        (dict(PLAIN, layer_types=["mamba"] * 4), "no layer has keys and values: mamba"),
    ],
)
def test_keys_that_are_missing_or_contradict(config, message, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert command_line.status(command.main, [f"--model={file}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvjax: --model=") and message in error and error.count("\n") == 1


def test_a_gguf_file_costs_what_its_folder_does(tmp_path):
    for name, architecture in (("qwen3", "qwen3"), ("gpt2", "gpt2"), ("llama", "llama")):
        path = tmp_path / f"{name}.gguf"
        gguf_files.write(path, comparison.PUBLISHED / name, architecture)
        expected = published.read(str(comparison.PUBLISHED / name))
        shape = published.read(str(path))
        assert (shape.layers, shape.context, shape.family) == (
            (expected.layers, expected.context, expected.family)
        )
        assert shape.name == name and shape.weight_bytes == path.stat().st_size


def test_copies_of_weights_are_not_counted(tmp_path):
    """Mistral's repositories have all weights in a file of their own format, too."""
    shutil.copy(comparison.PUBLISHED / "llama" / "config.json", tmp_path)
    for name, size in (("model-1-of-2", 30), ("model-2-of-2", 20), ("consolidated", 50)):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    assert published.read(str(tmp_path)).weight_bytes == 50
    for file in tmp_path.glob("model-*"):
        file.unlink()
    assert published.read(str(tmp_path)).weight_bytes == 50


def test_tokens_that_fit_are_those_whose_cache_fits():
    device, context = datasheets.get("h100"), 10_000
    rows = methods.rows(of_config(GEMMA3, "config.json"))
    size = methods.free_bytes(device, 2, 10**9)
    assert size == 2 * 72 * 10**9 - 10**9
    for row in rows:
        tokens = row.tokens(context, BFLOAT16, size)
        mean = row.cache_bytes(BFLOAT16, context) / context  # per token; windows make it smaller
        assert size - mean < tokens * mean <= size and mean < row.cache_bytes(BFLOAT16)
    assert rows[0].tokens(context, BFLOAT16, -5) == 0


def test_a_mechanism_that_cannot_have_int4_leaves_the_other_rows(tmp_path, capsys):
    """LRKV's rank is 25, odd, with heads of 100 channels."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(head_dim=100)))
    options = [f"--model={tmp_path / 'config.json'}", "--cache_dtype=int4", "--device=h200"]
    command.main([*options, "--json"])
    rows = {row["mechanism"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    (own,) = (row for row in rows.values() if row["own"])
    assert own["tokens"]["h200"] > 0 and rows["LRKV, rank 25"]["tokens"]["h200"] is None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(head_dim=101)))
    with pytest.raises(UserError, match="caches base_key of 101 channels"):
        command.main(options)


def test_the_command(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "hub/models--meta--Llama-3-8B/snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    command.main(["--model=hf://meta/Llama-3-8B", "--device=h200", "--json", "--markdown"])
    out, text = capsys.readouterr()
    assert "KV cache: 131,072 bytes per token in bfloat16, 262,144 in float32" in text
    assert "beside 16.060 GB of weights (in bfloat16, by its config)" in text
    line = next(line for line in text.splitlines() if line.startswith("| GQA, 8 KV heads (this"))
    cells = line.strip("| ").split(" | ")[1:]
    assert cells == ["131,072", "262,144", "67,584", "34,816", *"0.250 1.074 2.147 845,642".split()]
    result = json.loads(out)
    assert (result["model"], result["context"]) == ("Llama-3-8B", 8192)
    assert len(result["rows"]) == 21 and result["rows"][1]["of_mha"] == 0.25
    command.main(["--model=hf://meta/Llama-3-8B", "--device=h200", "--json", "--cache_dtype=int4"])
    (fits,) = json.loads(capsys.readouterr().out)["rows"][1]["tokens"].values()
    assert fits == pytest.approx(845_642 * 131_072 / 34_816, rel=1e-3)
    command.main(["--model=hf://meta/Llama-3-8B", "--cache_dtype=int8", "--markdown"])
    assert " | 0.250 | 1.074 | 2.147 | 0.554 |" in capsys.readouterr().out  # the last in int8
    local = shutil.copytree(folder, tmp_path / "Llama-3-8B")
    command.main([f"--model={local}", "--context=10", "--json"])
    assert json.loads(capsys.readouterr().out)["rows"][1]["cache_bytes"]["float32"] == 2_621_440
    for other, message in (
        ("--batch=2", "--batch: cannot be combined with --model="),
        ("--config=lrkv_tiny", "--config: cannot be combined with --model"),
        (
            "--config.model.num_layers=2",
            "--config.model.num_layers: cannot be",
        ),
    ):
        with pytest.raises(UserError, match=message):
            command.main([f"--model={local}", other])
    (local / "config.json").write_text(json.dumps(without(LLAMA, "max_position_embeddings")))
    with pytest.raises(UserError, match="--context is missing: .* gives no context length"):
        command.main([f"--model={local}"])
