"""Exports with factors: read back bit for bit, and their README."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax import attention
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

_CLASSES = [attention.MECHANISMS[kind] for kind in factored_readme.KINDS]
DESCRIBED = [
    name
    for name, (cls, keys) in MECHANISMS.items()
    if cls in _CLASSES and not {"query_rank", "output_gate"} & keys.keys()
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
    # README.md lists every tensor, and the total cache size.
    readme = (tmp_path / "out/README.md").read_text()
    for tensor in load_file(tmp_path / "out/model.safetensors"):
        assert f"| `{re.sub(r'^layers.[0-9]+', 'layers.{i}', tensor)}` |" in readme, tensor
    elements = sum(np.prod(field.shape) for m in config.mechanisms for field in m.entry().values())
    assert f"In all {elements:,} elements per token" in readme
    fields = {field for m in config.mechanisms for field in m.entry()}
    assert all(f"| {field} " in readme for field in fields)


@pytest.mark.parametrize(
    "name, keys, message",
    [
        ("gla", {}, "kind = 'gla': --format=factored keeps grouped, factored, mla, mla_paper"),
        ("mha", dict(query_rank=6), "query_rank = 6: --format=factored does not keep"),
        ("mla", dict(latent_scale=True), "latent_scale = True: --format=factored does not keep"),
        ("mqa", dict(output_gate=True), "output_gate = True: --format=factored does not keep"),
    ],
)
def test_unsupported_mechanisms_are_refused(make_mechanism, name, keys, message):
    config = workdirs.config("nanochat", make_mechanism(name, **keys))
    with pytest.raises(UserError, match=rf"config\.attention\.{message}"):
        factored_readme.text("made", config, context=16)


def test_readme():
    """Compares the README of a model whose layers differ with its golden.

    After a deliberate change: delete tests/goldens/factored_readme.txt, run this test, which writes
    it, and read the difference.
    """
    _, by_layer, _ = workdirs.MODELS["lrkv_by_layer"]
    config = workdirs.config("nanochat", by_layer)
    golden.check_text(factored_readme.text("made", config, context=2048), "factored_readme", 0)


def test_layers_are_numbered_through(tmp_path):
    """Layers of different ranks lie in several segments and are numbered across them."""
    block, mechanisms, _ = workdirs.MODELS["lrkv_by_layer"]
    workdir = workdirs.write(tmp_path / "workdir", workdirs.config(block, mechanisms))
    workdirs.export(workdir, tmp_path / "out", "--format=factored")
    for file, indent in (("config.json", 2), ("digests.json", 1)):  # people read these files, too
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


@pytest.mark.parametrize("flips", [40, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_or_harmless(tmp_path, capsys, flips):
    """Flips bits in every file but README.md, weights and digests included."""
    workdir = into_workdir.check(str(tmp_path / "workdir"))
    source = published.open(comparison.PUBLISHED / "qwen2")
    into_workdir.write(source, workdir, {})
    out = tmp_path / "out"
    workdirs.export(workdir, out, "--format=factored")
    before = model_lib.open(str(out))
    comparison.exactly(before, source)  # in bfloat16
    assert before.chat_template == source.chat_template
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
    (out / "digests.json").unlink()  # older exports have no digests
    tensors = load_file(out / "model.safetensors")
    save_file(tensors, out / "model.safetensors")
    comparison.exactly(model_lib.open(str(out)), before)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(format_version=2), "format_version = 2: must be 1 in this version of kvjax"),
        (dict(model_type="kv"), "model_type = 'kv': must be one of gpt2, llama"),
        (dict(context="long"), "config.json: context = 'long' is a str; it must be"),
        (dict(attention=dict(kind="x")), "config.json: config.attention.kind = 'x': must be one"),
        (dict(vocab_size=9), "its tokenizer has 257 tokens and its embedding 9 rows"),
        (
            dict(vocab_size=261),
            "embedding has shape (260, 24), but its config gives (261, 24): give",
        ),
        (dict(num_layers=4), "lacks tensors that its config describes: layers.3.attention."),
        (dict(num_layers=2), "has tensors that its config does not describe: layers.2.attention."),
        (dict(colour=1), "config.model.colour: no such key"),
    ],
)
def test_bad_configs(small, tmp_path, change, said):
    """Changes a key at the top or in the section model."""
    workdirs.export(small, tmp_path / "out", "--format=factored")
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    top = change.keys() <= config.keys()
    path.write_text(json.dumps(config | (change if top else dict(model=config["model"] | change))))
    with pytest.raises(UserError) as error:
        model_lib.open(str(tmp_path / "out"))
    assert str(tmp_path) in str(error.value) and said in str(error.value)
