"""Factors come back as they were, with what is told of them."""

import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.attention import PaperMLAConfig
from kvjax.convert import (
    factored_format,
    factored_readme,
    into_workdir,
    model as model_lib,
    published,
)
from kvjax.foundation.errors import UserError
from tests import damage, golden, quick
from tests.convert import comparison, workdirs
from tests.mechanisms import MECHANISMS

DESCRIBED = [
    name
    for name, (cls, keys) in MECHANISMS.items()
    if cls in factored_readme.KINDS and not {"query_rank", "output_gate"} & keys.keys()
]


@pytest.mark.parametrize("name", quick.only(["lrkv", "factored_joint", "mla"], DESCRIBED))
def test_factors_come_back_bit_for_bit(tmp_path, make_mechanism, name):
    config = workdirs.config("nanochat", make_mechanism(name))
    workdir = workdirs.write(tmp_path / "workdir", config)
    workdirs.export(workdir, tmp_path / "out", "--format=factored")
    before, after = model_lib.open(str(workdir)), model_lib.open(str(tmp_path / "out"))
    assert isinstance(after, factored_format.FactoredModel)
    comparison.exactly(after, before)
    assert after.tokenizer_json == before.tokenizer_json and after.context == before.context
    # README.md has every tensor, and what is cached in all.
    readme = (tmp_path / "out/README.md").read_text()
    for tensor in load_file(tmp_path / "out/model.safetensors"):
        assert f"| `{re.sub(r'^layers.[0-9]+', 'layers.{i}', tensor)}` |" in readme, tensor
    elements = sum(np.prod(field.shape) for m in config.mechanisms for field in m.entry().values())
    assert f"In all {elements:,} elements per token" in readme
    fields = {field for m in config.mechanisms for field in m.entry()}
    assert all(f"| {field} | " in readme for field in fields)


@pytest.mark.parametrize(
    "name, keys, message",
    [
        ("gla", {}, "kind = 'gla': --format=factored describes grouped, factored, mla, mla_paper"),
        ("mha", dict(query_rank=6), "query_rank = 6: --format=factored has no formulas"),
        ("mla", dict(latent_scale=True), "latent_scale = True: --format=factored has no formulas"),
        ("mqa", dict(output_gate=True), "output_gate = True: --format=factored has no formulas"),
    ],
)
def test_what_has_no_formulas_is_not_written(make_mechanism, name, keys, message):
    config = workdirs.config("nanochat", make_mechanism(name, **keys))
    with pytest.raises(UserError, match=rf"config\.attention\.{message}"):
        factored_readme.text("made", config, context=16)


def test_what_is_told_of_a_model():
    """The whole file of one model, and of others what it says beside the tensors, as it was read.

    One that was meant to say something else: delete tests/goldens/factored_readme.txt, run this
    test, which writes it, and read the difference.
    """
    of = workdirs.config
    nanochat, llama, gpt2 = (workdirs.BLOCKS[name] for name in ("nanochat", "llama", "gpt2"))
    block = dataclasses.replace
    plain = dict(qk_norm="none")
    scaled = dict(rope_factor=8.0, rope_low=1.5, rope_high=3.0, rope_original=64)
    _, by_layer, _ = workdirs.MODELS["lrkv_by_layer"]
    models = [
        of(nanochat, by_layer),
        of(llama, workdirs.grouped(2, 1, 3, qk_norm="rms_gain")),
        of(gpt2, workdirs.grouped(4, 2, 3, **plain, bias=True, latent_bias=True)),
        of(
            block(nanochat, **scaled, rope_fraction=0.5, rope_base=7.0, activation="gelu_exact"),
            workdirs.grouped(4, 4, tie="kv"),
        ),
        of(
            block(gpt2, positions="sinusoidal", norm_after=True, activation="relu", bias=False),
            workdirs.grouped(4, 4, **plain, tie="qk", position_channels=6),
        ),
        of(
            block(llama, positions="none", window=0, activation="gelu", norm_gain=False),
            workdirs.grouped(4, 1, 2, alibi=True, qk_norm="rms_gain"),
        ),
        of(block(nanochat, logit_softcap=0.0), workdirs.grouped(4, 2, 3, rope="shared")),
        of(nanochat, workdirs.factored(2, 1, 5, 4, **plain)),
        of(nanochat, workdirs.factored(4, 2, 0, 3, qk_norm="rms_gain", bias=True)),
        of(nanochat, workdirs.factored(4, 2, 3)),
        of(nanochat, workdirs.mla()),
        of(llama, workdirs.mla(**plain)),
        of(nanochat, PaperMLAConfig(num_heads=4, latent_dim=10, key_dim=8, value_dim=6)),
    ]
    texts = [factored_readme.text(f"model {i}", one, context=2048) for i, one in enumerate(models)]
    first, *others = texts
    found = [first, *(f"# {i}\n{one[one.index('Letters: ') :]}" for i, one in enumerate(others, 1))]
    golden.check_text("\n".join(found), "factored_readme", 0)


def test_layers_are_numbered_through(tmp_path):
    """Layers of different ranks lie in several segments, and their numbers run on across these."""
    block, mechanisms, _ = workdirs.MODELS["lrkv_by_layer"]
    workdir = workdirs.write(tmp_path / "workdir", workdirs.config(block, mechanisms))
    workdirs.export(workdir, tmp_path / "out", "--format=factored")
    for file, indent in (("config.json", 2), ("digests.json", 1)):  # people read them too
        text = (tmp_path / "out" / file).read_text()
        assert text == json.dumps(json.loads(text), indent=indent) + "\n"
    tensors = load_file(tmp_path / "out/model.safetensors")
    name = "layers.{}.attention.mechanism.latent_key"
    assert tensors[name.format(0)].shape == (24, 4, 3)
    assert name.format(1) not in tensors and tensors[name.format(2)].shape == (24, 4, 5)
    made = workdirs.Made(workdirs.config(block, mechanisms))
    path = ("segments", 2, "attention", "mechanism", "latent_key")
    np.testing.assert_array_equal(tensors[name.format(2)], made.read(path, 0))
    comparison.exactly(model_lib.open(str(tmp_path / "out")), model_lib.open(str(workdir)))


def test_a_chat_template_comes_along(tmp_path):
    workdir = into_workdir.check(str(tmp_path / "workdir"))
    before = published.open(comparison.PUBLISHED / "qwen2")
    into_workdir.write(before, workdir, {})
    workdirs.export(workdir, tmp_path / "out", "--format=factored")
    after = model_lib.open(str(tmp_path / "out"))
    assert after.chat_template == before.chat_template
    comparison.exactly(after, before)  # in bfloat16, as it was


@pytest.mark.parametrize("flips", [40, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_or_harmless(tmp_path, capsys, flips):
    """Flips bits in every file, weights and digests too; no program reads README.md."""
    workdir = into_workdir.check(str(tmp_path / "workdir"))
    into_workdir.write(published.open(comparison.PUBLISHED / "qwen2"), workdir, {})
    out = tmp_path / "out"
    workdirs.export(workdir, out, "--format=factored")
    before = model_lib.open(str(out))
    parts = ("tokenizer_json", "chat_template", "token_files", "transformer", "context")
    files = sorted(path for path in out.iterdir() if path.name != "README.md")
    assert "chat_template.jinja" in {path.name for path in files}
    refused = 0
    for file in damage.flips(files, flips):
        try:
            after = model_lib.open(str(out))
            comparison.exactly(after, before)
            assert all(getattr(after, part) == getattr(before, part) for part in parts), file
        except UserError:
            refused += 1
    assert refused > 0.8 * flips
    (out / "digests.json").unlink()  # older exports have none, nor any in the metadata
    tensors = load_file(out / "model.safetensors")
    save_file(tensors, out / "model.safetensors")
    comparison.exactly(model_lib.open(str(out)), before)


@pytest.mark.parametrize(
    "change, said",
    quick.every(
        2,
        [
            (
                dict(format_version=2),
                "format_version = 2: must be 1 in this version of kvjax",
            ),
            (dict(format_version=None), "format_version = None: must be 1"),
            (dict(model_type="kv"), "model_type = 'kv': must be one of gpt2, llama"),
            (dict(context="long"), "config.json: context = 'long' is a str; it must be"),
            (dict(model=None), "config.json: model = None is a NoneType; it must be"),
            (
                dict(attention=dict(kind="x")),
                "config.json: config.attention.kind = 'x': must be one",
            ),
            (dict(vocab_size=9), "its tokenizer has 257 tokens and its embedding 9 rows"),
            (
                dict(vocab_size=261),
                "embedding has shape (260, 24), and (261, 24) by its config: give",
            ),
        ],
    ),
)
def test_configs_that_are_not_of_the_format(small, tmp_path, change, said):
    workdirs.export(small, tmp_path / "out", "--format=factored")
    path = tmp_path / "out/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as error:
        model_lib.open(str(tmp_path / "out"))
    assert str(tmp_path) in str(error.value) and said in str(error.value)


def test_values_that_are_not_finite(small, tmp_path):
    workdirs.export(small, tmp_path / "out", "--format=factored")
    path = tmp_path / "out/model.safetensors"
    tensors = load_file(path)
    tensors["layers.1.mlp.up"][0, 0] = np.nan
    save_file(tensors, path)
    model = model_lib.open(str(tmp_path / "out"))
    model.read(("segments", 0, "mlp", "up"), 0)
    with pytest.raises(UserError, match="layers.1.mlp.up has 1 of 480 values that are not finite"):
        model.read(("segments", 0, "mlp", "up"), 1)


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("num_layers", 4, "lacks tensors that its config describes: layers.3.attention."),
        ("num_layers", 2, "has tensors that its config does not describe: layers.2.attention."),
        ("colour", 1, "config.model.colour: no such key"),
    ],
)
def test_sections_that_are_not_of_the_tensors(small, tmp_path, key, value, said):
    workdirs.export(small, tmp_path / "out", "--format=factored")
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    config["model"][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        model_lib.open(str(tmp_path / "out"))
    assert str(tmp_path) in str(error.value) and said in str(error.value)
