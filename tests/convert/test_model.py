"""Models read from workdirs and conversions: equal weights and logits."""

import dataclasses
import re

import numpy as np
import pytest

from kvjax.convert import calibration, into_workdir, model as model_lib
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.foundation.errors import UserError
from kvjax.workdir import trained
from tests import quick
from tests.convert import comparison, workdirs


def test_a_workdir_with_values_that_are_not_finite(tmp_path):
    block, mechanism, _ = workdirs.MODELS["gqa"]
    made = workdirs.Made(workdirs.config(block, mechanism))
    path = ("segments", 0, "mlp", "up")
    made.weights[path][1].flat[:2] = np.nan, -np.inf
    into_workdir.write(made, into_workdir.check(str(tmp_path / "out")), {})
    source = model_lib.open(str(tmp_path / "out"))
    source.read(path, 0)
    with pytest.raises(UserError, match="segments.0.mlp.up has 2 of 480 values that are not fin"):
        source.read(path, 1)


def test_a_damaged_checkpoint_names_the_parameter(tmp_path):
    """The error is a UserError that names the parameter."""
    block, mechanism, _ = workdirs.MODELS["gqa"]
    workdir = workdirs.write(tmp_path / "out", workdirs.config(block, mechanism))
    source = model_lib.open(str(workdir))
    paths = list(source.parameters())
    for file in (tmp_path / "out/checkpoints").rglob("*"):
        if file.is_file() and file.parent.name == "d" and file.stat().st_size > 1000:
            content = np.frombuffer(file.read_bytes(), np.uint8).copy()
            content[::50] ^= 16
            file.write_bytes(content.tobytes())
    refused = []
    for path in paths:
        try:
            source.read(path, 1 if path[0] == "segments" else None)
        except UserError as error:
            refused.append(path)
            named = re.escape(".".join(map(str, path)))
            said = rf"{re.escape(str(workdir))}/checkpoints/0/state: {named} cannot be read \(.+\)"
            assert re.match(said + ": restore its files", str(error))
    assert refused


def test_a_part_of_a_layer_is_read_alone(monkeypatch):
    block, mechanism, _ = workdirs.MODELS["lrkv"]
    model = workdirs.Made(workdirs.config(block, mechanism))
    whole, read, asked = model_lib.read_layer(model, 2)["attention"], model.read, []
    monkeypatch.setattr(model, "read", lambda path, *at: (asked.append(path), read(path, *at))[1])
    found = model_lib.read_layer(model, 2, "attention", "mechanism")
    assert found.keys() == whole["mechanism"].keys() and len(asked) == len(found)
    for name, weight in found.items():
        np.testing.assert_array_equal(weight, whole["mechanism"][name])


def test_layers_in_a_config():
    """A layer's segment; the config section of layers that differ in rank alone."""
    of = workdirs.config
    block, by_layer, _ = workdirs.MODELS["lrkv_by_layer"]
    model = workdirs.Made(of(block, [*by_layer[:2], by_layer[1]]))
    assert [model_lib.layer_of(model, i) for i in range(3)] == [(0, 0), (1, 0), (1, 1)]
    with pytest.raises(IndexError):
        model_lib.layer_of(model, 3)
    lrkv, thin = workdirs.grouped(4, 2, 3), workdirs.factored(2, 1, 5)
    thin_by_layer = [workdirs.factored(2, 1, rank) for rank in (5, 3, 5)]
    for mechanisms, kind, ranks in (
        (lrkv, "grouped", ()),
        (by_layer, "grouped", (3, 0, 5)),
        (thin, "factored", ()),
        (thin_by_layer, "factored", (5, 3, 5)),
        (workdirs.mla(), "mla", None),
    ):
        config = of(block, mechanisms)
        found = model_lib.attention_section(config)
        assert (found.pop("kind"), found.pop("layer_ranks", None)) == (kind, ranks)
        assert found == dataclasses.asdict(config.mechanisms[0])
    for other in (thin, workdirs.grouped(2, 2, 3), dataclasses.replace(lrkv, qk_norm="none")):
        with pytest.raises(UserError, match="layers differ in more than their rank: no config"):
            model_lib.attention_section(of(block, [lrkv, lrkv, other]))


def test_a_workdir_has_the_published_model(imported):
    """Its parameters, as a source and as a run, and its tokenizer."""
    source, workdir = model_lib.open(str(comparison.PUBLISHED / "qwen3")), imported("qwen3")
    comparison.exactly(model_lib.open(str(workdir)), source)
    loaded = trained.load(workdir)
    tokens = np.random.default_rng(0).integers(0, 38, (2, 20))
    np.testing.assert_array_equal(
        workdirs.logits(loaded.model, tokens),
        workdirs.logits(model_lib.transformer(source), tokens),
    )
    assert loaded.step == 0 and loaded.context == source.context
    assert (workdir / "tokenizer.json").read_text() == source.tokenizer_json
    assert not list(workdir.parent.glob(".staging*"))


@pytest.mark.parametrize(
    "name",
    quick.only(
        ["smollm3", "gemma3"],
        ["llama_tied_bias", "gpt2", "qwen2", "qwen3", "smollm3", "qwen3_yarn", "gemma2", "gemma3"],
    ),
)
def test_full_rank_changes_no_logits(imported, name):
    source = model_lib.open(str(imported(name)))
    mechanism = source.transformer.mechanisms[0]
    tokens = np.random.default_rng(0).integers(0, 38, (2, 16))
    moments = calibration.moments(source, tokens)
    before = workdirs.logits(model_lib.transformer(source), tokens)
    for method in (
        ThinKeys(rank=mechanism.key_dim),
        LowRankKV(rank=0, bases=mechanism.num_kv_heads),
    ):
        layers = source.transformer.block.num_layers
        converted = ConvertedModel(source, [method] * layers, moments)
        after = workdirs.logits(model_lib.transformer(converted), tokens)
        assert np.abs(after - before).max() < 1e-4 * before.std(), method


RANKS = [
    (LowRankKV(rank=1), ["rank"]),
    (ThinKeys(rank=1, mode="joint"), ["key_rank"]),
    (ThinKeys(rank=1, part="value", absorb=False), ["value_rank"]),
    (ThinKeys(rank=1, part="key_value", mode="joint"), ["key_rank", "value_rank"]),
    (ThinKeys(rank=1, part="key_value", absorb=False), ["key_rank", "value_rank"]),
]


@pytest.mark.parametrize("method, keys", quick.only([RANKS[0]], RANKS))
def test_ranks_that_differ_by_layer(imported, tmp_path, method, keys):
    """Layers of another rank form their own segment; the config has `layer_ranks`."""
    source = model_lib.open(str(imported("llama_tied_bias")))
    layers = source.transformer.block.num_layers
    ranks = [1 + i % 3 for i in range(layers)]

    def at(rank):
        return dataclasses.replace(method, rank=rank, objective="weights")

    converted = ConvertedModel(source, list(map(at, ranks)), None)
    into_workdir.write(converted, into_workdir.check(str(tmp_path / "out")), {})
    loaded = trained.load(tmp_path / "out")
    for key in keys:
        assert [getattr(m, key) for m in loaded.model.config.mechanisms] == ranks
    tokens = np.random.default_rng(0).integers(0, 38, (1, 9))
    again = model_lib.transformer(converted)
    np.testing.assert_array_equal(
        workdirs.logits(loaded.model, tokens), workdirs.logits(again, tokens)
    )
    again = model_lib.open(str(tmp_path / "out"))
    assert again.transformer == converted.transformer
