"""Exports as transformers' families; models of no family are refused by key and value."""

import dataclasses
import json

from etils import epath
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
import tokenizers

from kvjax.convert import huggingface, into_folder, into_workdir, model as model_lib, published
from kvjax.convert.dense import DenseModel
from kvjax.data import tokenizer
from kvjax.foundation.errors import UserError
from tests import quick
from tests.convert import comparison, workdirs

INNER = ("segments", 0, "attention", "mechanism")
TOKENS = np.random.default_rng(0).integers(0, workdirs.VOCABULARY, (2, 24), np.int32)


# Models that another family computes, too: written as the first of those.
AS_ANOTHER = dict(phi3="LlamaForCausalLM", phi3_window="MistralForCausalLM")


@pytest.mark.parametrize("name", quick.only(AS_ANOTHER, AS_ANOTHER))
def test_a_model_of_two_families_keeps_every_weight(tmp_path, name):
    before = published.open(comparison.PUBLISHED / name)
    plan = huggingface.plan(before, "F32")
    assert plan.title == AS_ANOTHER[name]
    into_folder.write(plan, into_workdir.check(str(tmp_path / "out")), "F32")
    comparison.exactly(published.open(tmp_path / "out"), before)


OWN = [name for name in comparison.MODELS if name not in AS_ANOTHER]


def _angles(config):
    """Returns the RoPE of a config, or that of each type of its layers."""
    angles, kinds = config.get("rope_parameters") or {}, set(config.get("layer_types") or ())
    return {kind: angles[kind] for kind in kinds} if kinds & {*angles} else angles


@pytest.mark.parametrize("name", quick.every(3, OWN))
def test_a_published_model_is_published_again(tmp_path, name):
    """Exports its tensors byte for byte, under transformers' names."""
    before = published.open(comparison.PUBLISHED / name)
    workdir = into_workdir.check(str(tmp_path / "workdir"))
    into_workdir.write(before, workdir, {})
    workdirs.export(workdir, tmp_path / "out")
    theirs = json.loads((comparison.PUBLISHED / name / "config.json").read_text())
    ours = json.loads((tmp_path / "out/config.json").read_text())
    for key in ("model_type", "architectures", "dtype", "bos_token_id", "eos_token_id"):
        assert ours[key] == theirs[key], key
    if name != "gpt2":  # which has no RoPE
        assert _angles(ours) == _angles(theirs)
    stored = {}
    for file in (comparison.PUBLISHED / name).glob("*.safetensors"):
        stored |= load_file(file)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == stored.keys()
    for tensor, array in written.items():
        assert array.dtype == stored[tensor].dtype
        np.testing.assert_array_equal(array, stored[tensor], err_msg=tensor)
    after = published.open(tmp_path / "out")
    comparison.exactly(after, before)
    assert after.tokenizer_json == before.tokenizer_json
    assert (after.bos_token, after.context) == (before.bos_token, before.context)
    assert after.chat_template == before.chat_template


@pytest.mark.parametrize("name", quick.only(["lrkv_by_layer"], workdirs.MODELS))
def test_factors_are_multiplied_out(tmp_path, capsys, name):
    """The dense export has the workdir's logits, and the reported cache size."""
    block, mechanisms, title = workdirs.MODELS[name]
    config = workdirs.config(block, mechanisms)
    workdir = workdirs.write(tmp_path / "workdir", config)
    workdirs.export(workdir, tmp_path / "out", "--format=huggingface", "--json")
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["format"], result["model"]) == ("huggingface", title)
    after = published.open(tmp_path / "out")
    logits_BTV = comparison.logits(model_lib.open(str(workdir)), TOKENS)
    assert comparison.difference_of(after, TOKENS, logits_BTV) < comparison.TOLERANCE
    costs = result["cache_bytes_per_token"]
    heads = after.transformer.mechanisms[0].num_kv_heads
    assert costs["out"] == workdirs.LAYERS * 2 * heads * 8 * 2  # bytes of bfloat16
    larger = costs["out"] > costs["workdir"]
    assert larger == ("which multiplies the factors" in printed.err.replace("\n", " "))
    assert larger == (name not in ("mha", "gqa", "mqa", "lrkv_gqa"))


def test_nanochat_rotates_in_the_other_direction():
    """Swaps the halves of queries' and keys' heads, not of values'."""
    block, mechanism, _ = workdirs.MODELS["gqa"]
    made = workdirs.Made(workdirs.config(block, mechanism))
    plan = huggingface.plan(made, "F32")
    first = ("segments", 0, "attention", "mechanism")
    layer = "model.layers.2.self_attn."
    for name, tensor, is_rotated in (
        ("query", "q_proj", True),
        ("base_key", "k_proj", True),
        ("base_value", "v_proj", False),
    ):
        w_DKH = made.read((*first, name), 2)
        if is_rotated:
            w_DKH = np.concatenate([w_DKH[..., 4:], w_DKH[..., :4]], axis=-1)
        written = plan.tensors[f"{layer}{tensor}.weight"].read()
        np.testing.assert_array_equal(written, w_DKH.reshape(24, -1).T)


def _halved(block, mechanism):
    """Returns a model with bfloat16 weights, and by path the weights of layer 1."""
    made = workdirs.Made(workdirs.config(block, mechanism))
    made.weights = {path: w.astype(ml_dtypes.bfloat16) for path, w in made.weights.items()}
    return made, {path: w[1] if path[0] == "segments" else w for path, w in made.weights.items()}


def _check_dense(made, expected):
    dense = DenseModel(made)
    assert (dense.name, dense.context, dense.tokenizer_json) == ("made", 40, made.tokenizer_json)
    shapes = dense.parameters()
    assert shapes.keys() == expected.keys()
    for path, w in expected.items():
        layers = (3,) if path[0] == "segments" else ()
        found = dense.read(path, 1 if layers else None)
        assert found.dtype == shapes[path][1] == w.dtype, path
        assert found.shape == w.shape and (*layers, *w.shape) == shapes[path][0], path
        np.testing.assert_allclose(*(x.astype(np.float64) for x in (found, w)), rtol=1e-6)


def test_factors_are_multiplied_out_in_float32():
    """Parameters without factors keep their dtype, and are not copied."""
    mechanism = workdirs.grouped(4, 2, 3, bias=True, latent_bias=True, out_bias=False)
    made, expected = _halved("nanochat", mechanism)
    assert not DenseModel(made).is_source
    for part in ("key", "value"):
        expand = expected.pop((*INNER, f"expand_{part}")).astype(np.float64)
        for end in ("", "_bias"):
            latent = expected.pop((*INNER, f"latent_{part}{end}")).astype(np.float64)
            bases = expected[*INNER, f"base_{part}{end}"].astype(np.float64)
            whole = np.repeat(bases, 2, axis=-2) + np.einsum("...KR,KRH->...KH", latent, expand)
            expected[*INNER, f"base_{part}{end}"] = whole.astype(np.float32)
    _check_dense(made, expected)
    made = workdirs.Made(workdirs.config("nanochat", workdirs.grouped(2, 2)))
    path = (*INNER, "base_key")
    assert np.shares_memory(DenseModel(made).read(path, 1), made.weights[path])


def test_narrow_heads_are_padded_with_zeros():
    """Queries are scaled to compensate for the logits' division by a wider head's root."""
    dims = dict(query=6, base_key=6, base_value=5)
    narrow = workdirs.grouped(2, 2, qk_norm="none", key_dim=6, value_dim=5, bias=True)
    made, expected = _halved("gpt2", narrow)
    assert DenseModel(made).is_source
    for part, channels in dims.items():
        for path in ((*INNER, part), (*INNER, f"{part}_bias")):
            w = expected[path]
            filled = np.zeros((*w.shape[:-1], 8), w.dtype)
            filled[..., :channels] = w
            expected[path] = filled
            if part == "query":
                expected[path] = (filled.astype(np.float64) * (8 / 6) ** 0.5).astype(np.float32)
    out = ("segments", 0, "attention", "out")
    filled = np.zeros((4, 8, 32), expected[out].dtype)
    filled[:, :5] = expected[out]
    _check_dense(made, expected | {out: filled})


def test_bfloat16(small, tmp_path):
    workdirs.export(small, tmp_path / "out", "--format=huggingface", "--dtype=bfloat16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    plan = huggingface.plan(model_lib.open(str(small)), "F32")
    for name, array in load_file(tmp_path / "out/model.safetensors").items():
        rounded = plan.tensors[name].read().astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(array, rounded, err_msg=name)


def test_angles_for_transformers_4_and_5():
    plan = huggingface.plan(published.open(comparison.PUBLISHED / "llama3_rope"), "F32")
    config = json.loads(plan.files["config.json"])
    assert config["rope_scaling"] == {
        key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"
    }
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50.0


def test_bos_opens_a_text(small, tmp_path):
    """The exported tokenizer of a kvjax run puts BOS before a text."""
    workdirs.export(small, tmp_path / "out", "--format=huggingface")
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).encode("a").ids
    assert ids == [256, ord("a")]
    about = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert about["bos_token"] == about["eos_token"] == tokenizer.BOS
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["bos_token_id"] == config["eos_token_id"] == 256


def test_the_token_that_ends_a_document():
    def of(*names):
        return json.dumps(
            dict(added_tokens=[dict(content=n, id=i, special=True) for i, n in enumerate(names)])
        )

    assert huggingface._document_tokens(of("</s>", "<s>")) == (("<s>", 1), ("</s>", 0))
    assert huggingface._document_tokens(of("<s>")) == (("<s>", 0), ("<s>", 0))
    assert huggingface._document_tokens(of("<x>")) == (None, None)
    assert tuple(huggingface._ENDS) == tokenizer._BOS_NAMES


PLAIN = workdirs.grouped(4, 4)


def _block(name, **keys):
    return dataclasses.replace(workdirs.BLOCKS[name], **keys)


def _attention(**keys):
    """Returns the mechanism of GPT-2 and Llama, with some keys changed."""
    return workdirs.grouped(4, 4, **dict(qk_norm="none") | keys)


@pytest.mark.parametrize(
    "block, mechanisms, said",
    [
        ("nanochat", workdirs.mla(), "attention.kind = 'mla': must be 'grouped' or 'factored'"),
        ("nanochat", workdirs.grouped(4, 4, tie="kv"), "attention.tie = 'kv': must be 'none'"),
        ("nanochat", workdirs.grouped(4, 4, position_channels=6), "position_channels = 6: must be"),
        ("nanochat", workdirs.grouped(4, 1, 3, rope="shared"), "rope = 'shared': must be 'full'"),
        (_block("nanochat", rope_fraction=0.5), PLAIN, "rope_fraction = 0.5: must be 1.0 in Nano"),
        (
            _block("nanochat", positions="none"),
            workdirs.grouped(4, 4, alibi=True),
            "attention.alibi = True: must be False: positions come from RoPE only",
        ),
        (
            "nanochat",
            [PLAIN, workdirs.grouped(4, 4, key_dim=4), PLAIN],
            "attention.key_dim = 4 in layer 1: must be 8 as in layer 0",
        ),
        ("nanochat", workdirs.grouped(4, 4, key_dim=4), "value_dim = 8: must be 4 in NanoChatForC"),
        ("nanochat", _attention(), "attention.qk_norm = 'none': must be 'rms' in NanoChatForCausa"),
        ("nanochat", workdirs.grouped(4, 4, norm_epsilon=1e-3), "norm_epsilon = 0.001: must be 0."),
        (
            "nanochat",
            workdirs.grouped(4, 4, bias=True, out_bias=False),
            "out_bias = False: must be",
        ),
        (
            _block("llama", residual_scale=0.5, logit_divisor=2.0),
            _attention(),
            "model.window = 6: must be 0 in GraniteForCausalLM",
        ),
        (_block("nanochat", bias=True), PLAIN, "model.bias = True: must be False in NanoChat"),
        (_block("nanochat", positions="none"), PLAIN, "model.positions = 'none': must be 'rope'"),
        (
            _block("llama", logit_softcap=4.0, window=0),
            _attention(),
            "model.logit_softcap = 4.0: must be 0.0 in LlamaForCausalLM",
        ),
        (_block("gpt2", activation="relu2"), _attention(bias=True), "'relu2': must be 'gelu' in G"),
        (
            _block("gpt2", d_model=24),
            _attention(bias=True),
            "attention.key_dim = 8: must be 6; config.attention.value_dim = 8: must be 6 in GPT2",
        ),
    ],
)
def test_models_of_no_family(block, mechanisms, said):
    model = workdirs.Made(workdirs.config(block, mechanisms))
    with pytest.raises(UserError) as error:
        huggingface.plan(model, "F32")
    assert str(error.value).startswith("config.") and said in str(error.value)


NARROW = [
    ("gpt2", _attention(bias=True, key_dim=3)),
    ("gpt2", _attention(bias=True, key_dim=5, value_dim=3)),
    ("gpt2", workdirs.grouped(4, 1, 2, qk_norm="none", bias=True, value_dim=6)),
    ("llama", workdirs.grouped(4, 2, qk_norm="none", value_dim=5)),
    ("nanochat", workdirs.grouped(2, 2, value_dim=3)),
]


@pytest.mark.parametrize("block, mechanism", quick.only(NARROW[:1], NARROW))
def test_padded_heads_change_no_logits(tmp_path, block, mechanism):
    """Thin keys whose up-projection is absorbed have narrow heads."""
    made = workdirs.Made(workdirs.config(block, mechanism))
    plan = huggingface.plan(made, "F32")
    into_folder.write(plan, into_workdir.check(str(tmp_path / "out")), "F32")
    again = published.open(epath.Path(tmp_path / "out"))
    tokens = np.random.default_rng(0).integers(0, 250, (2, 11))
    before, after = (
        workdirs.logits(model_lib.transformer(model), tokens) for model in (made, again)
    )
    assert np.abs(after - before).max() < 1e-5 * before.std()
    assert len(set(before.round(3).flat)) > 1000


def test_nanochat_options_beyond_the_recipe():
    block = _block(
        "nanochat", tied_head=True, logit_softcap=0.0, activation="gelu_exact", rope_factor=4.0
    )
    plan = huggingface.plan(workdirs.Made(workdirs.config(block, PLAIN)), "F32")
    config = json.loads(plan.files["config.json"])
    assert plan.title == "NanoChatForCausalLM" and "lm_head.weight" not in plan.tensors
    assert config["final_logit_softcapping"] is None and config["tie_word_embeddings"]
    assert config["hidden_act"] == "gelu"
    assert config["rope_parameters"]["rope_type"] == "llama3"


def test_context_of_a_tuned_model(tmp_path):
    """A run on shorter rows keeps the context of its parent, which may be gone."""
    model = published.open(comparison.PUBLISHED / "llama")
    workdir = into_workdir.check(str(tmp_path / "workdir"))
    into_workdir.write(model, workdir, {})
    (workdir / "context.json").write_text('{"context": 8192}')
    for kind in ("huggingface", "factored"):
        workdirs.export(workdir, tmp_path / kind, f"--format={kind}")
        assert model_lib.open(str(tmp_path / kind)).context == 8192
    config = json.loads((tmp_path / "huggingface/config.json").read_text())
    about = json.loads((tmp_path / "huggingface/tokenizer_config.json").read_text())
    assert config["max_position_embeddings"] == about["model_max_length"] == 8192
