"""The command: a published model in, a smaller cache out, generated from and tuned."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax import recipes
from kvjax.convert import __main__ as command
from kvjax.convert import calibration
from kvjax.convert import into_workdir
from kvjax.convert import model as model_lib
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
    assert json.loads((out / "conversion.json").read_text())["errors"] == result["errors"]

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
        ["--source=SRC", "--out=OUT", "--method=lrkv", "--cache=0.1", *BY_WEIGHTS],
        "more than the",
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
    for _ in generation:
        pass
    assert len(generation.tokens[0]) == 4
