"""The command: a published model in, a smaller cache out, generated from and tuned."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from kvjax import cache as cache_lib
from kvjax import recipes
from kvjax.convert import __main__ as command
from kvjax.convert import calibration
from kvjax.convert import into_workdir
from kvjax.convert import model as model_lib
from kvjax.convert import perplexity
from kvjax.convert.converted import ConvertedModel
from kvjax.convert.methods import LowRankKV
from kvjax.convert.methods import ThinKeys
from kvjax.costs import formulas
from kvjax.decoding.generator import Generator
from kvjax.experiment import resolve
from kvjax.foundation import command_line
from kvjax.foundation import progress
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.model import decoder
from kvjax.model.loss import token_losses
from kvjax.model.transformer import Compute
from kvjax.workdir import trained

PUBLISHED = pathlib.Path(__file__).parent / "published"
F32 = Compute()


@pytest.fixture
def run(monkeypatch, capsys):
    """A function of options: (status, standard output, standard error) of the command."""
    monkeypatch.setattr(runtime, "start", lambda **_: None)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)
    return lambda *options: (command_line.status(command.main, list(options)), *capsys.readouterr())


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """A function of a published model's name: its workdir, written once."""
    made = {}

    def workdir(name):
        if name not in made:
            out = tmp_path_factory.mktemp("imported") / name
            model = model_lib.open(str(PUBLISHED / name))
            into_workdir.write(model, into_workdir.check(str(out)), {})
            made[name] = out
        return made[name]

    return workdir


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Documents of words and blanks: other bytes the small tokenizers do not have."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("etaoinshr"), 4)) for _ in range(40)]
    lines = [json.dumps(dict(text=" ".join(rng.choice(words, 9)))) for _ in range(400)]
    file.write_text("\n".join(lines))
    return str(file)


def _logits(model, tokens):
    return np.asarray(model.logits(model(tokens, compute=F32), compute=F32))


def test_a_workdir_is_what_was_published(imported):
    """Read as any run's: the same logits, tokenizer and chat template."""
    source = model_lib.open(str(PUBLISHED / "llama_tied_bias"))
    loaded = trained.load(imported("llama_tied_bias"))
    tokens = np.random.default_rng(0).integers(0, 38, (2, 20))
    whole = model_lib.transformer(source)
    np.testing.assert_array_equal(_logits(loaded.model, tokens), _logits(whole, tokens))
    assert loaded.step == 0 and loaded.context == source.context
    workdir = imported("llama_tied_bias")
    assert (workdir / "tokenizer.json").read_text() == source.tokenizer_json
    assert not list(workdir.parent.glob(".staging*"))


def test_a_workdir_is_a_source_too(imported):
    """Parameter by parameter, layer by layer."""
    source, again = model_lib.open(str(PUBLISHED / "qwen3")), model_lib.open(str(imported("qwen3")))
    assert again.transformer == source.transformer
    assert dict(again.parameters()) == dict(source.parameters())
    for path in source.parameters():
        layer = 1 if path[0] == "segments" else None
        np.testing.assert_array_equal(again.read(path, layer), source.read(path, layer))


def test_perplexity_layer_by_layer_is_the_models(imported):
    """Of the model as a whole; the last few rows are fewer."""
    rows_BT = np.random.default_rng(3).integers(0, 38, (5, 12)).astype(np.int32)
    for name in ("gpt2", "llama_tied_bias", "mistral_window"):
        source = model_lib.open(str(imported(name)))
        whole = model_lib.transformer(source)
        nats_BT = token_losses(whole, rows_BT[:, :-1], rows_BT[:, 1:], compute=F32)
        expected = float(np.exp(np.asarray(nats_BT, np.float64).mean()))
        assert perplexity.perplexity(source, rows_BT) == pytest.approx(expected, rel=1e-5)


METHODS = {
    "thin": ["--method=thin_keys", "--rank=2"],
    "joint": ["--method=thin_keys", "--rank=3", "--mode=joint", "--objective=inputs"],
    "values": ["--method=thin_keys", "--rank=2", "--part=value"],
    "lrkv": ["--method=lrkv", "--rank=1"],
}


@pytest.mark.parametrize("source", ["llama_tied_bias", "gpt2", "qwen2"])
@pytest.mark.parametrize("method", METHODS)
def test_smaller_caches(run, imported, text, tmp_path, source, method):
    """What is claimed is what lies in memory, and decoding from it is the whole forward pass."""
    out = tmp_path / "out"
    options = [f"--source={imported(source)}", f"--out={out}", "--row_length=16", "--json"]
    options += [f"--calibrate={text}", "--calibrate_tokens=256", f"--evaluate={text}"]
    status, printed, errors = run(*options, "--evaluate_tokens=64", *METHODS[method])
    assert status == 0, errors
    result = json.loads(printed)
    claimed = result["cache_bytes_per_token"]
    assert claimed["after"] < claimed["before"]
    assert 0 < max(max(layer.values()) for layer in result["errors"].values()) < 1
    assert result["perplexity"]["before"] != result["perplexity"]["after"]
    record = json.loads((out / "conversion.json").read_text())
    assert record == {key: result[key] for key in result if key != "name"}
    given = dict(option.removeprefix("--").split("=") for option in METHODS[method][1:])
    assert given.items() <= {key: str(value) for key, value in record["options"].items()}.items()
    assert record["options"]["calibrate_tokens"] == 256 and record["options"]["row_length"] == 16
    layers = len(record["errors"])
    assert record["ranks"] == [int(given["rank"])] * layers

    loaded = trained.load(out)
    config = loaded.model.config
    half = jnp.dtype(jnp.bfloat16)
    cache = cache_lib.allocate(config.mechanisms, batch=1, capacity=128, dtype=half)
    assert cache_lib.live_bytes(cache) == 128 * claimed["after"]
    assert formulas.cache_bytes_per_token(config, half) == claimed["after"]

    tokens = np.random.default_rng(1).integers(0, 38, (2, 12)).astype(np.int32)
    expected = _logits(loaded.model, tokens)
    decoding = decoder.Decoder(loaded.model)
    cache = decoder.allocate(config, F32, batch=2, capacity=128)
    step = jax.jit(lambda tokens, cache: decoding(tokens, cache, jnp.ones(2, jnp.int32)))
    for t in range(12):
        x, cache = step(tokens[:, t : t + 1], cache)
        z = np.asarray(decoding.logits(x))[:, 0]
        assert np.abs(z - expected[:, t]).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("method", [[], ["--method=lrkv", "--rank=1", "--objective=weights"]])
def test_weights_that_are_not_finite(run, tmp_path, method):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(PUBLISHED / "llama_tied_bias", source)
    name, file = "model.layers.1.self_attn.v_proj.weight", source / "model.safetensors"
    tensors = load_file(file)
    tensors[name][0, 0] = np.nan
    save_file(tensors, file)
    options = [f"--source={source}", f"--out={out}", "--evaluate_tokens=0", *method]
    status, _, errors = run(*options)
    assert status == 2 and f"{name} has 1 of 128 values that are not finite" in errors
    assert not out.exists()


def test_full_rank_changes_no_logits(imported):
    for name in ("llama_tied_bias", "gpt2", "qwen2", "qwen3"):
        source = model_lib.open(str(imported(name)))
        mechanism = source.transformer.mechanisms[0]
        tokens = np.random.default_rng(0).integers(0, 38, (2, 16))
        moments = calibration.moments(source, tokens)
        before = _logits(model_lib.transformer(source), tokens)
        for method in (
            ThinKeys(rank=mechanism.key_dim),
            LowRankKV(rank=0, bases=mechanism.num_kv_heads),
        ):
            layers = source.transformer.block.num_layers
            converted = ConvertedModel(source, [method] * layers, moments)
            after = _logits(model_lib.transformer(converted), tokens)
            assert np.abs(after - before).max() < 1e-4 * before.std(), (name, method)


@pytest.mark.parametrize(
    "method, keys",
    [
        (LowRankKV(rank=1), ["rank"]),
        (ThinKeys(rank=1, mode="joint"), ["key_rank"]),
        (ThinKeys(rank=1, part="value", absorb=False), ["value_rank"]),
        (ThinKeys(rank=1, part="key_value", mode="joint"), ["key_rank", "value_rank"]),
        (ThinKeys(rank=1, part="key_value", absorb=False), ["key_rank", "value_rank"]),
    ],
)
def test_ranks_that_differ_by_layer(imported, tmp_path, method, keys):
    """Layers of other ranks are segments of their own; the config says `layer_ranks`."""
    source = model_lib.open(str(imported("llama_tied_bias")))
    layers = source.transformer.block.num_layers
    ranks = [1 + i % 3 for i in range(layers)]
    at = lambda rank: dataclasses.replace(method, rank=rank, objective="weights")
    converted = ConvertedModel(source, list(map(at, ranks)), None)
    into_workdir.write(converted, into_workdir.check(str(tmp_path / "out")), {})
    loaded = trained.load(tmp_path / "out")
    for key in keys:
        assert [getattr(m, key) for m in loaded.model.config.mechanisms] == ranks
    tokens = np.random.default_rng(0).integers(0, 38, (1, 9))
    again = model_lib.transformer(converted)
    np.testing.assert_array_equal(_logits(loaded.model, tokens), _logits(again, tokens))
    again = model_lib.open(str(tmp_path / "out"))
    assert again.transformer == converted.transformer


def test_moments_are_those_of_the_models_inputs(imported):
    """Against the activations of the model as a whole."""
    source = model_lib.open(str(imported("qwen2")))
    rows = np.random.default_rng(0).integers(0, 38, (5, 11))
    model = model_lib.transformer(source)
    seen = []
    decoding = decoder.Decoder(model)
    x = decoding.embed(jnp.asarray(rows), np.arange(11)[None], F32)
    c = source.transformer.block
    for layer, mechanism in zip(decoding.layers, source.transformer.mechanisms, strict=True):
        h = np.asarray(layer.attention_norm(x), np.float64).reshape(-1, c.d_model)
        h = np.concatenate([h, np.ones((len(h), 1))], axis=1)
        seen.append(h.T @ h / len(h))
        positions = rope.positions(np.arange(11)[None], mechanism.rope_dim, c.angles_base)
        x = layer(x, positions, causal=True, window=c.window, compute=F32)
    for got, wanted in zip(calibration.moments(source, rows), seen, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())


def test_a_conversion_is_tuned_by_the_file_it_leaves(imported, text, tmp_path):
    out = tmp_path / "thin"
    source = model_lib.open(str(imported("llama_tied_bias")))
    layers = source.transformer.block.num_layers
    converted = ConvertedModel(source, [ThinKeys(rank=2, objective="weights")] * layers, None)
    into_workdir.write(converted, into_workdir.check(str(out)), {})
    config = command_line.load_config(
        out / "recover.py",
        [f"--config.data.source={text}", "--config.data.sequence_length=16"],
    )
    experiment = resolve(config)
    assert experiment.model == converted.transformer
    assert experiment.optimizer.tuned == recipes.TUNED["qk"]
    assert experiment.optimizer.matrix_learning_rate == 5e-5
    assert experiment.train.parent == str(out)
    assert experiment.data.sequence_length == 16
    assert (experiment.train.batch_size, experiment.train.grad_accumulation) == (8, 8)


@pytest.mark.parametrize(
    "source, options, tune",
    [
        ("gpt2", ["--method=thin_keys", "--rank=2"], "qk"),
        ("gpt2", ["--method=thin_keys", "--rank=2", "--part=value"], "qkv"),
        ("llama_tied_bias", ["--method=lrkv", "--rank=1"], "qkv"),
    ],
)
def test_what_was_converted_is_tuned(run, imported, tmp_path, source, options, tune):
    """Values too where they were, on rows that positions reach."""
    out = tmp_path / "out"
    status, _, errors = run(f"--source={imported(source)}", f"--out={out}", *options, *BY_WEIGHTS)
    assert status == 0, errors
    experiment = resolve(command_line.load_config(out / "recover.py", []))
    assert experiment.optimizer.tuned == recipes.TUNED[tune]
    context = model_lib.open(str(imported(source))).context
    assert experiment.data.sequence_length == min(2048, context)


def test_a_config_of_recovery_names_what_is_wrong(imported, tmp_path):
    with pytest.raises(UserError, match="section = 'trian': must be one of"):
        recipes.recover(imported("gpt2"), trian=dict(num_steps=1))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is no workdir of a model .config.json has no 'model'"):
        recipes.recover(tmp_path)


BY_WEIGHTS = ("--objective=weights", "--evaluate_tokens=0")
BAD = [
    ([], "--source is missing: give a folder"),
    (["--source=X"], "--out is missing"),
    (["--source=X", "--out=OUT", "--method=svd"], "--method = 'svd': must be one of 'none'"),
    (
        ["--source=X", "--out=OUT", "--method=lrkv"],
        "--rank is missing: --method=lrkv needs one, as --rank=32, or --energy",
    ),
    (["--source=X", "--out=OUT", "--rank=3"], "--rank=3: is of --method=thin_keys and lrkv alone"),
    (
        ["--source=X", "--out=OUT", "--method=lrkv", "--rank=3", "--mode=joint"],
        "--mode=joint: is of --method=thin_keys alone",
    ),
    (
        ["--source=X", "--out=OUT", "--method=lrkv", "--rank=3", "--cache=0.5"],
        "--rank and --cache: give one of them",
    ),
    (
        [
            *("--source=X", "--out=OUT", "--method=thin_keys", "--part=key_value"),
            *("--value_rank=3", "--cache=0.5"),
        ],
        "--value_rank=3: is of --rank alone, not of --cache",
    ),
    (
        ["--source=X", "--out=OUT", "--method=lrkv", "--energy=2"],
        "--energy = 2.0: must be at least 0 and at most 1",
    ),
    (
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--cache=0.1", "--multiple=1", *BY_WEIGHTS],
        "more than the",
    ),
    (
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--rank=4", *BY_WEIGHTS],
        "--rank = 4: takes 48 bytes per token in a layer, and the source 32: give at most 2",
    ),
    (
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--energy=0", *BY_WEIGHTS],
        "--multiple = 4: takes",
    ),
    (
        ["--source=X", "--out=OUT", "--method=thin_keys", "--part=query", "--cache=0.5"],
        "--cache=0.5: queries are not cached",
    ),
    (
        ["--source=X", "--out=OUT", "--method=lrkv", "--rank=1", "--calibrate=x", *BY_WEIGHTS],
        "--calibrate=x: is of --objective=inputs and outputs alone",
    ),
    (["--source=/nowhere", "--out=OUT"], "there is no such folder or file"),
    (["--source=SRC", "--out=SRC"], "is there already: give another"),
    (["--source=SRC", "--out=gs://bucket/x"], "local"),
    (
        ["--source=SRC", "--out=OUT", "--method=thin_keys", "--rank=9"],
        r"--rank = 9: must lie in [1, 4]",
    ),
    (
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--rank=1", "--bases=3"],
        "--bases = 3: must divide",
    ),
    (
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--rank=1", "--objective=best"],
        "--objective = 'best': must be one of",
    ),
    (
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--rank=1", "--calibrate="],
        "--calibrate='': give text",
    ),
    (
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--rank=1", "--calibrate=/nowhere.txt"],
        "/nowhere.txt",
    ),
    (
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--rank=1", "--row_length=0"],
        "--row_length = 0: must be at least 1",
    ),
]


@pytest.mark.parametrize("options, message", BAD, ids=lambda x: str(x)[-40:])
def test_bad_options(run, imported, tmp_path, options, message):
    source, out = str(imported("llama_tied_bias")), str(tmp_path / "out")
    options = [o.replace("SRC", source).replace("OUT", out) for o in options]
    status, _, errors = run(*options)
    assert status == 2 and message in errors and "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_a_damaged_source_leaves_nothing(run, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(PUBLISHED / "gpt2", folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    status, _, errors = run(f"--source={folder}", f"--out={tmp_path / 'out'}")
    assert status == 2 and "model.safetensors" in errors
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_row_longer_than_positions_names_the_option(run, imported, tmp_path):
    options = [f"--source={imported('gpt2')}", f"--out={tmp_path / 'out'}", "--method=lrkv"]
    status, _, errors = run(*options, "--rank=1", "--row_length=1000")
    assert status == 2 and "--row_length = 1000: learned positions reach" in errors


def test_shapes_are_checked_before_text_is_read(run, imported, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("this was to be refused")

    monkeypatch.setattr(command, "_rows", fail)
    options = [f"--source={imported('llama_tied_bias')}", f"--out={tmp_path / 'out'}"]
    for wrong, message in (
        (["--rank=4"], "--rank = 4: takes"),
        (["--cache=0.1", "--multiple=1"], "--cache: a rank of 1 in every layer takes"),
        (["--energy=0.9"], "--multiple = 4: takes"),
    ):
        status, _, errors = run(*options, "--method=lrkv", *wrong)
        assert status == 2 and message in errors
    monkeypatch.setattr(into_workdir.os.path, "ismount", lambda path: path.name == "out")
    status, _, errors = run(*options)
    assert status == 2 and "is a mount point" in errors


def test_text_that_is_too_short_names_the_options(run, imported, tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    options = [f"--source={imported('llama_tied_bias')}", f"--out={tmp_path / 'out'}"]
    options += ["--method=lrkv", "--rank=1", f"--calibrate={tmp_path / 'short.txt'}"]
    status, _, errors = run(*options)
    assert status == 2 and "--calibrate" in errors, errors
    assert not re.search(r"--(source|tokenizer|sequence_length|validation)", errors), errors


def test_a_link_is_followed(imported, tmp_path):
    source = model_lib.open(str(imported("llama_tied_bias")))
    for target in ("empty", "missing"):
        (tmp_path / f"{target}_link").symlink_to(tmp_path / target)
    (tmp_path / "empty").mkdir()
    for target in ("empty", "missing"):
        into_workdir.write(source, into_workdir.check(str(tmp_path / f"{target}_link")), {})
        assert (tmp_path / target / "config.txt").exists()
        assert (tmp_path / f"{target}_link").is_symlink()


def test_what_was_made_is_kept_where_its_name_was_taken_meanwhile(imported, tmp_path):
    source = model_lib.open(str(imported("llama_tied_bias")))
    out = into_workdir.check(str(tmp_path / "model.v1"))
    with pytest.raises(UserError, match=r"put there meanwhile; what was made is .*model.v1-3$"):
        with into_workdir.staged(out) as staging:
            (staging / "weights").write_text("all")
            (tmp_path / "model.v1-2").write_text("")
            (tmp_path / "model.v1").mkdir()
            (tmp_path / "model.v1/theirs").write_text("")
    assert (tmp_path / "model.v1-3/weights").read_text() == "all"
    names = ["model.v1", "model.v1-2", "model.v1-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    into_workdir.write(source, into_workdir.check(str(tmp_path / "other")), {})


def test_nothing_half_written_has_the_name(imported, tmp_path, monkeypatch):
    source = model_lib.open(str(imported("llama_tied_bias")))
    real = source.read
    count = []

    def failing(path, layer=None):
        count.append(path)
        if len(count) > 8:
            raise OSError(28, "No space left on device")
        return real(path, layer)

    monkeypatch.setattr(source, "read", failing)
    out = into_workdir.check(str(tmp_path / "out"))
    with pytest.raises(UserError, match="cannot be written: No space left on device; nothing"):
        into_workdir.write(source, out, {})
    assert not list(tmp_path.iterdir())


def test_generation_from_a_conversion(imported):
    loaded = trained.load(imported("llama_tied_bias"))
    generation = Generator(loaded.model, loaded.compute).start([[1, 2, 3]], num_tokens=4)
    assert len(list(generation)) == 4
    assert len(generation.tokens[0]) == 4
