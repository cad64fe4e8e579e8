"""Published models give transformers' logits; errors for files that do not belong together.

make_logits.py beside this file wrote the models; published/versions.json has its versions.
"""

import json
import shutil

from etils import epath
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import tokenizers

from kvjax.convert import published
from kvjax.data import tokenizer
from kvjax.foundation.errors import UserError
from tests import quick
from tests.convert import comparison


@pytest.fixture
def copied(tmp_path):
    """A function of a stored model's name: a copy of its folder."""

    def copy(name):
        return epath.Path(shutil.copytree(comparison.PUBLISHED / name, tmp_path / name))

    return copy


def edit(folder, change):
    """Applies a function to the tensors of a folder, by name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def configure(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


QUICK = ["gpt2", "qwen2", "qwen3_yarn", "olmo3", "smollm3_window", "gemma2", "gemma3"]


@pytest.mark.parametrize("name", quick.only(QUICK, comparison.MODELS))
def test_logits_equal_transformers(name):
    assert comparison.difference(comparison.PUBLISHED / name) < comparison.TOLERANCE


@pytest.mark.parametrize("name", quick.only(["olmo3", "gemma2"], comparison.MODELS))
def test_greedy_text_equals_transformers(name):
    """Decoded from a cache, token by token."""
    stored = np.load(comparison.PUBLISHED / name / "logits.npz")
    tokens_BT, greedy_BT = stored["tokens"], stored["greedy"]
    half = tokens_BT.shape[1] // 2
    source = published.open(comparison.PUBLISHED / name)
    np.testing.assert_array_equal(comparison.greedy(source, tokens_BT[:, :half], half), greedy_BT)


def test_a_model_as_it_is_published():
    model = published.open(comparison.PUBLISHED / "qwen2")
    assert model.name == "qwen2" and model.bos_token == "<|endoftext|>"
    assert model.chat_template.startswith("{% for message in messages %}")
    backend = tokenizer.from_json(model.tokenizer_json, "qwen2")
    assert backend.vocab_size == 38 and model.config.vocab_size == 40  # rows are padded
    assert backend.decode(backend.encode("a b 3")) == "a b 3"
    shapes = model.parameters()
    assert {str(dtype) for _, dtype in shapes.values()} == {"bfloat16"}
    path = ("segments", 0, "attention", "mechanism", "base_key_bias")
    assert shapes[path][0] == (2, 2, 4)
    stored = load_file(comparison.PUBLISHED / "qwen2" / "model.safetensors")
    for layer in range(2):
        bias = stored[f"model.layers.{layer}.self_attn.k_proj.bias"]
        np.testing.assert_array_equal(model.read(path, layer), bias.reshape(2, 4))
    np.testing.assert_array_equal(model.read(("embedding",)), stored["model.embed_tokens.weight"])


def test_mixed_dtypes(copied):
    folder = copied("qwen2")

    def change(tensors):
        name = "model.layers.1.input_layernorm.weight"
        tensors[name] = tensors[name].astype(np.float16)

    edit(folder, change)
    model = published.open(folder)
    path = ("segments", 0, "attention_norm", "gain")
    assert model.parameters()[path][1] == np.float32
    assert {model.read(path, layer).dtype for layer in range(2)} == {np.dtype(np.float32)}


def test_gpt2_as_it_was_first_published(copied):
    """Reads tensors without a prefix, beside attention masks."""
    folder = copied("gpt2")
    before = comparison.whole(published.open(folder))

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 24, 24), np.uint8)
        tensors["h.0.attn.masked_bias"] = np.array(-np.inf, np.float32)

    edit(folder, change)
    after = comparison.whole(published.open(folder))
    assert before.keys() == after.keys()
    for path in before:
        np.testing.assert_array_equal(after[path], before[path])


def test_a_head_that_is_stored_although_it_is_tied(copied):
    folder = copied("gpt2")
    edit(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"]}))
    assert ("head",) not in published.open(folder).parameters()
    edit(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}))
    with pytest.raises(
        UserError, match="lm_head.weight differs from transformer.wte.weight: set it to"
    ):
        published.open(folder)


@pytest.mark.parametrize(
    "value, template",
    [("one", "one"), ([dict(name="x", template="b"), dict(name="default", template="a")], "a")],
)
def test_tokenizer_config(copied, value, template):
    folder = copied("gpt2")
    assert published.open(folder).chat_template is None
    about = dict(chat_template=value, bos_token=dict(content="<s>", lstrip=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    model = published.open(folder)
    assert model.chat_template == template and model.bos_token == "<s>"
    (folder / "tokenizer_config.json").unlink()
    assert published.open(folder).bos_token is None


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop(Q), f"lacks tensors that its config describes: {Q}. Give the files"),
        (
            lambda t: t.update({"model.layers.2.x": t[Q]}),
            "has tensors that its config does not describe: model.layers.2.x. Give",
        ),
        (
            lambda t: t.update({Q: t[Q][:, 1:].copy()}),
            f"{Q} has shape (16, 15), but its config gives (16, 16): give the config that",
        ),
        (
            lambda t: t.update({Q: t[Q].astype(ml_dtypes.float8_e4m3fn)}),
            f"{Q} is stored as F8_E4M3; weights must be F32, F16, BF16: dequantise",
        ),
    ],
)
def test_tensors_must_match_the_config(copied, change, said):
    folder = copied("llama_tied_bias")
    edit(folder, change)
    with pytest.raises(UserError) as error:
        published.open(folder)
    assert str(folder) in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(
    "keys, said",
    [
        (dict(num_hidden_layers=3), "lacks tensors that its config describes: model.layers.2."),
        (dict(tie_word_embeddings=False), "lacks tensors that its config describes: lm_head.weig"),
        (dict(attention_bias=False), "does not describe: model.layers.0.self_attn.k_proj.bias, "),
        (
            dict(num_key_value_heads=4),
            "k_proj.weight has shape (8, 16), but its config gives (16, 16)",
        ),
        (dict(num_key_value_heads=3), "num_kv_heads = 3: must divide num_heads = 4"),
        (dict(head_dim=5), "RoPE rotates channels in pairs"),
        (dict(num_hidden_layers=10**6), "config.model.num_layers = 1000000: must be at"),
    ],
)
def test_config_must_match_the_tensors(copied, keys, said):
    folder = copied("llama_tied_bias")
    configure(folder, **keys)
    with pytest.raises(UserError) as error:
        published.open(folder)
    assert str(folder) in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(
    "file, text, said",
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", None, "config.json is missing: download it again"),
        ("tokenizer.json", None, "tokenizer.json is missing: give a model"),
        ("tokenizer.json", "{}", "its tokenizer.json cannot be read"),
        ("tokenizer_config.json", "no", "tokenizer_config.json is not JSON"),
        ("model.safetensors", None, "has neither model.safetensors nor"),
    ],
)
def test_files_that_are_missing_or_broken(copied, file, text, said):
    folder = copied("llama_tied_bias")
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(UserError) as error:
        published.open(folder)
    assert str(folder) in str(error.value) and said in str(error.value)


@pytest.mark.parametrize("name", ["llama_tied_bias", "llama"])  # with a head of its own
def test_an_added_token_without_a_row_gets_the_mean(copied, capsys, name):
    """Other rows are unchanged; a token in use must have a row."""
    folder = copied(name)
    before = published.open(folder)

    def add(token, about):
        definition = json.loads((comparison.PUBLISHED / name / "tokenizer.json").read_text())
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
        for i, content in ((38, "<a>"), (39, "<b>"), (40, token)):
            definition["added_tokens"].append(dict(id=i, content=content, special=True, **flags))
        (folder / "tokenizer.json").write_text(json.dumps(definition))
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        return published.open(folder)

    found = add("[PAD]", dict(pad_token="[PAD]"))
    assert "has 40 rows and none for [PAD], which is unused" in capsys.readouterr().err
    assert found.config.vocab_size == found.transformer.vocab_size == 41
    weights_before, weights_after = comparison.whole(before), comparison.whole(found)
    for path, weight in weights_before.items():
        new = weights_after[path].T if path == ("head",) else weights_after[path]
        old = weight.T if path == ("head",) else weight
        np.testing.assert_array_equal(new[: len(old)], old)
        if path[-1] in ("embedding", "head"):
            assert len(new) == 41
            mean = old.astype(np.float32).mean(axis=0)
            np.testing.assert_allclose(new[40].astype(np.float32), mean, rtol=0.01)
    for about in (dict(bos_token="<x>"), dict(eos_token="<x>"), dict(chat_template="a<x>b")):
        with pytest.raises(UserError, match="has 40 rows and none for <x>, which .*: give weights"):
            add("<x>", about)


@pytest.mark.parametrize(
    "tokens, rows, fits",
    [
        (2, 40, True),
        (257, 257 + 1024, True),
        (257, 257 + 1025, False),
        (95_000, 100_000, True),
        (94_999, 100_000, False),
        (50_257, 128_256, False),  # GPT-2's tokens for Llama 3's embedding
    ],
)
def test_spare_rows(tokens, rows, fits, capsys):
    """Embeddings may have spare rows, up to a limit; the message says how many."""
    words = tokenizers.models.WordLevel({"a": 0, "b": tokens - 1}, unk_token="a")
    text = tokenizers.Tokenizer(words).to_str()

    def check():
        return published.check_vocabulary(epath.Path("model"), text, rows)

    if fits:
        check()
        assert f"{rows - tokens} of its embedding's {rows} rows" in capsys.readouterr().err
        return
    said = f"model: its tokenizer has {tokens} tokens and its embedding {rows} rows: give the"
    with pytest.raises(UserError, match=said):
        check()


def test_values_that_are_not_finite(copied):
    """Checks bfloat16 weights; buffers are not read."""
    folder, name = copied("qwen2"), "model.layers.1.self_attn.v_proj.weight"

    def change(tensors):
        tensors[name][3, :2] = np.nan, np.inf
        frequencies = np.full(2, np.inf, np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = frequencies

    edit(folder, change)
    model, path = published.open(folder), ("segments", 0, "attention", "mechanism", "base_value")
    assert np.isfinite(model.read(path, 0).astype(np.float32)).all()
    with pytest.raises(UserError) as error:
        model.read(path, 1)
    assert str(folder) in str(error.value)
    assert f"{name} has 2 of 128 values that are not finite: download" in str(error.value)
