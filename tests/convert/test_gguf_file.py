"""GGUF files against the folders that they are written from, and errors for unsupported ones."""

import math
import shutil
import struct

import gguf
import numpy as np
import pytest
import tokenizers

from kvjax.convert import gguf_file, model as model_lib, published
from kvjax.data import tokenizer
from kvjax.foundation.errors import UserError
from kvjax.published import gguf_header
from tests.convert import comparison
from tests.convert.gguf_files import ADDED, SPECIAL, tokens_of, write

ARCHITECTURES = {
    "gpt2": "gpt2",
    "gpt2_exact_gelu": "gpt2",
    "llama": "llama",
    "llama_tied_bias": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
FREQUENCIES = "rope_freqs.weight"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_holds_the_model_of_its_folder(tmp_path, name):
    folder, path = comparison.PUBLISHED / name, tmp_path / "tiny.gguf"
    write(path, folder, ARCHITECTURES[name])
    model, original = published.open(path), published.open(folder)
    assert model.name == "tiny" and model.config.vocab_size == 300
    assert model.config.context == original.config.context
    assert model.config.attention == original.config.attention
    expected = original.config.model
    if name == "gpt2_exact_gelu":
        # No key of GGUF names it; llama.cpp's is by tanh.
        expected = expected | dict(activation="gelu")
    assert model.config.model == expected
    found, there = comparison.whole(model), comparison.whole(original)
    assert found.keys() == there.keys()
    for key, array in there.items():
        assert found[key].dtype == np.float32
        if key == ("embedding",):
            array = np.resize(array, found[key].shape)
        if key == ("head",):
            array = np.resize(array.T, found[key].shape[::-1]).T
        np.testing.assert_array_equal(found[key], array.astype(np.float32))


def test_a_folder_of_files(tmp_path):
    """Reads the only GGUF file of a folder, also beside a config.json; refuses several."""
    (tmp_path / "m").mkdir()
    write(tmp_path / "m" / "tiny.gguf", comparison.PUBLISHED / "llama", "llama")
    shutil.copy(comparison.PUBLISHED / "llama" / "config.json", tmp_path / "m")
    assert model_lib.open(str(tmp_path / "m")).name == "tiny"
    shutil.copy(tmp_path / "m" / "tiny.gguf", tmp_path / "m" / "other.gguf")
    with pytest.raises(UserError, match="several GGUF files: give one of them: other.gguf, tiny.g"):
        model_lib.open(str(tmp_path / "m"))


@pytest.mark.parametrize(
    "kind, most",  # half a quantisation step in [-1, 1]
    [("F16", 2.0**-12), ("BF16", 2.0**-9), ("Q8_0", 1 / 254), ("Q4_1", 1 / 15)],
)
def test_tensors_are_dequantised(tmp_path, kind, most):
    def widen(writer, written):
        """Widens the MLP to whole quantisation blocks of 32."""
        for i in range(2):
            for name in ("up", "gate", "down"):
                shape = (16, 32) if name == "down" else (32, 16)
                drawn = np.random.default_rng(i).uniform(-1, 1, shape)
                written[f"blk.{i}.ffn_{name}.weight"] = drawn.astype(np.float32)
        writer.kv_data[0]["llama.feed_forward_length"].value = 32

    folder, path = comparison.PUBLISHED / "llama_tied_bias", tmp_path / "tiny.gguf"
    written = write(path, folder, "llama", quantise=gguf.GGMLQuantizationType[kind], edit=widen)
    model = published.open(path)
    down_MD = model.read(("segments", 0, "mlp", "down"), 1)
    error = np.abs(down_MD - written["blk.1.ffn_down.weight"].T).max()
    assert down_MD.dtype == np.float32
    assert most / 2 < error < 1.05 * most  # the scales are rounded, too


def test_llama3_rope_is_found_from_its_divisors(tmp_path):
    """Computes the divisors pair by pair, as llama.cpp's converter."""
    base, factor, low, high, original = 500_000.0, 8.0, 1.0, 4.0, 8192

    def scale(writer, written):
        divisors = []
        for i in range(4):
            wavelength = 2 * math.pi * base ** (i / 4)
            if wavelength < original / high:
                divisors.append(1.0)
            elif wavelength > original / low:
                divisors.append(factor)
            else:
                smooth = (original / wavelength - low) / (high - low)
                divisors.append(1 / ((1 - smooth) / factor + smooth))
        written["rope_freqs.weight"] = np.array(divisors, np.float32)
        writer.kv_data[0]["llama.rope.freq_base"].value = base

    folder, path = comparison.PUBLISHED / "llama3_rope", tmp_path / "tiny.gguf"
    write(path, folder, "llama", edit=scale)
    keys = dict(rope_base=base, rope_factor=8.0, rope_low=low, rope_high=high, rope_original=8192)
    assert keys.items() <= published.open(path).config.model.items()

    def other(writer, written):
        scale(writer, written)
        written["rope_freqs.weight"][1] *= 1.01

    write(path, folder, "llama", edit=other)
    with pytest.raises(
        UserError,
        match="is not Llama 3's scaling of 4 channel pairs with factor 8",
    ):
        published.open(path)


@pytest.mark.parametrize(
    "architecture, said",
    [
        ("llama", "rope_freqs.weight is not Llama 3's scaling of 2 channel pairs"),
        ("qwen2", "that its config does not describe: rope_freqs.weight"),  # llama.cpp ignores it
    ],
)
def test_unsupported_rope_divisors(tmp_path, architecture, said):
    path = tmp_path / "tiny.gguf"
    folder = dict(llama="llama_tied_bias", qwen2="qwen2")[architecture]
    write(
        path,
        comparison.PUBLISHED / folder,
        architecture,
        edit=lambda writer, written: written.update({FREQUENCIES: np.ones(5, np.float32)}),
    )
    with pytest.raises(UserError, match=said):
        published.open(path)


SCALING = "llama.rope.scaling"


@pytest.mark.parametrize(
    "keys",
    [
        {"type": "none"},
        {"factor": 1.0},
        # As llama.cpp itself saves a model without scaling.
        {
            **{"type": "linear", "factor": 0.0, "attn_factor": 1.0, "yarn_log_multiplier": 0.0},
            **{"original_context_length": 24, "finetuned": False},
        },
    ],
)
def test_unscaled_rope(tmp_path, keys):
    path = tmp_path / "tiny.gguf"
    write(path, comparison.PUBLISHED / "llama_tied_bias", "llama", edit=scaling(keys))
    model = published.open(path).config.model
    assert (model["rope_factor"], model["rope_base"]) == (1.0, 10_000.0)


def scaling(keys):
    """Writes keys of RoPE's scaling, in the types that llama.cpp has for them."""
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}
    kinds |= {float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}

    def edit(writer, written):
        for name, value in keys.items():
            writer.add_key_value(f"{SCALING}.{name}", value, kinds[type(value)])

    return edit


@pytest.mark.parametrize(
    "pre, words",
    [
        ("gpt-2", ["ab", "Ġ1212", "ĠABc", "'s"]),
        ("smollm", ["ab", "Ġ", "1", "2", "1", "2", "ĠABc", "'s"]),
        ("llama-v3", ["ab", "Ġ", "121", "2", "ĠABc", "'s"]),
        ("deepseek-r1-qwen", ["ab", "Ġ", "1", "2", "1", "2", "ĠABc", "'s"]),
    ],
)
def test_tokenizers(tmp_path, pre, words):
    path = tmp_path / "tiny.gguf"

    def edit(writer, written):
        writer.kv_data[0]["tokenizer.ggml.pre"].value = pre

    write(path, comparison.PUBLISHED / "llama_tied_bias", "llama", edit=edit)
    model = published.open(path)
    assert model.bos_token == SPECIAL and model.chat_template == "{{ messages }}"
    backend = tokenizers.Tokenizer.from_str(model.tokenizer_json)
    split = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("ab 1212 ABc's")]
    assert split == words
    ours = tokenizer.from_json(model.tokenizer_json, "tiny")
    ids = {token: i for i, (token, _) in enumerate(tokens_of(300))}
    assert ours.encode("ab") == [ids["ab"]] and ours.bos_id == 0
    assert ours.encode(f"a{ADDED}b") == [ids["a"], ids[ADDED], ids["b"]]
    assert ours.vocab_size == 1 + ids[ADDED]  # the rows after it are padding
    text = "naïve 12 12\n\tab's 🙂"
    assert ours.decode(ours.encode(text)) == text


def key(name, value):
    return lambda writer, written: writer.add_key_value(name, value, gguf.GGUFValueType.UINT32)


def text(name, value):
    def edit(writer, written):
        writer.kv_data[0].pop(name, None)
        writer.add_string(name, value)

    return edit


def without(name):
    return lambda writer, written: written.pop(name)


UNKNOWN = [
    (text("general.architecture", "gemma3"), "general.architecture = 'gemma3': must be one of"),
    (
        text("tokenizer.ggml.model", "t5"),
        "model = 't5': must be one of 'gpt2'",
    ),
    (text("tokenizer.ggml.pre", "tekken"), "tokenizer.ggml.pre = 'tekken': must be one of"),
    (text("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type = 'yarn': kvjax supports"),
    (
        scaling({"factor": 2.0}),
        "factor = 2.0: kvjax supports only 0 or 1: RoPE must be unscaled",
    ),
    (scaling({"attn_factor": 0.5}), "llama.rope.scaling.attn_factor = 0.5: kvjax supports only"),
    (scaling({"yarn_ext_factor": 1.0}), "yarn_ext_factor = 1.0: is unknown, and may cha"),
    (text("general.type", "adapter"), "is an adapter (LoRA), not a model"),
    (key("llama.expert_count", 8), "llama.expert_count = 8: is unknown, and may change"),
    (key("split.count", 3), "split.count = 3: merge the parts first"),
    (without("blk.1.attn_q.weight"), "lacks tensors that its config describes: blk.1.attn_q.w"),
    (without("blk.0.attn_q.bias"), "does not describe: blk.0.attn_k.bias, blk.0."),
    (
        lambda writer, written: written.update({"blk.0.attn_v.weight": np.ones((4, 16), "f4")}),
        "blk.0.attn_v.weight has shape (4, 16), but its config gives (8, 16)",
    ),
    (
        lambda writer, written: writer.kv_data[0].pop("llama.block_count"),
        "llama.block_count is missing",
    ),
    (
        lambda writer, written: writer.kv_data[0]["tokenizer.ggml.merges"].value.append("x yz"),
        ".token_type and .merges are not a BPE",
    ),
    (
        lambda writer, written: writer.kv_data[0]["tokenizer.ggml.token_type"].value.pop(),
        ".token_type and .merges are not a BPE",
    ),
]


def test_unsupported_metadata_is_named(tmp_path):
    path = tmp_path / "tiny.gguf"
    for edit, said in UNKNOWN:
        write(path, comparison.PUBLISHED / "llama_tied_bias", "llama", edit=edit)
        with pytest.raises(UserError) as error:
            published.open(path)
        assert str(path) in str(error.value) and said in str(error.value)


def test_a_type_that_gguf_does_not_read(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write(path, comparison.PUBLISHED / "llama_tied_bias", "llama")

    def dequantize(data, kind):
        raise NotImplementedError

    monkeypatch.setattr(gguf_file.gguf, "dequantize", dequantize)
    with pytest.raises(
        UserError, match="is stored as F32, which the package gguf does not support"
    ):
        published.open(path)


def test_damaged_files(tmp_path):
    """Truncates a file at any point, and replaces it by text."""
    path = tmp_path / "tiny.gguf"
    write(path, comparison.PUBLISHED / "llama_tied_bias", "llama")
    content = path.read_bytes()
    parts = [content[: int(part * len(content))] for part in (0, 1e-4, 0.01, 0.3, 0.6, 0.9, 0.99)]
    for damaged in (*parts, b"not at all" * 100):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="is not a GGUF file, or is damaged"):
            published.open(path)


def test_counts_beyond_the_file_take_no_memory(tmp_path, monkeypatch):
    """Refuses counts of tensors, keys, values, characters, axes and bytes, and long headers."""
    path, huge = tmp_path / "tiny.gguf", struct.pack("<Q", 1 << 35)
    key = struct.pack("<Q1sI", 1, b"a", gguf.GGUFValueType.ARRAY)
    of_bytes = key + struct.pack("<I", gguf.GGUFValueType.UINT8)
    start, one, none = struct.pack("<4sI", b"GGUF", 3), struct.pack("<Q", 1), struct.pack("<Q", 0)
    tensor = struct.pack("<Q1sI", 1, b"a", 1)
    for data in (
        huge + none,
        none + huge,
        none + one + huge,
        none + one + of_bytes + huge,
        none + one + key + struct.pack("<I", gguf.GGUFValueType.ARRAY) + huge,
        one + none + struct.pack("<Q1sI", 1, b"a", 1 << 31),
        one + none + tensor + huge + struct.pack("<IQ", 0, 0),
        one + none + tensor + one + struct.pack("<IQ", 0, 1 << 35),
    ):
        path.write_bytes(start + data + bytes(500))
        with pytest.raises(UserError, match=r"damaged \((it has [\d,]+ bytes of|'Duplicate)"):
            published.open(path)
    monkeypatch.setattr(gguf_header, "_MOST_VALUES", 300)
    path.write_bytes(start + none + one + of_bytes + struct.pack("<Q", 400) + bytes(500))
    with pytest.raises(UserError, match="its header has more than 300 values"):
        published.open(path)
