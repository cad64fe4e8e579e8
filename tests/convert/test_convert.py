"""python -m kvjax.convert: published models to smaller caches, reports and bad options."""

import argparse
import dataclasses
import itertools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax import cache as cache_lib, recipes
from kvjax.config import resolve
from kvjax.convert import (
    __main__ as command,
    choice,
    model as model_lib,
    options as options_lib,
    perplexity,
)
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.model import decoder
from kvjax.workdir import trained
from tests import quick
from tests.convert import comparison, workdirs

METHODS = {
    "thin": ["--method=thin_keys", "--rank=2"],
    "joint": ["--method=thin_keys", "--rank=3", "--mode=joint", "--objective=inputs"],
    "values": ["--method=thin_keys", "--rank=2", "--part=value"],
    "split": ["--cache=0.5", "--multiple=1"],
    "lrkv": ["--method=lrkv", "--rank=1"],
}
BY_WEIGHTS = ("--objective=weights", "--evaluate_tokens=0")


@pytest.mark.parametrize(
    "source, method",
    quick.only(
        [("smollm3", "thin")],
        itertools.product(["llama_tied_bias", "gpt2", "qwen2", "smollm3", "gemma3"], METHODS),
    ),
)
def test_smaller_caches(run, imported, text, tmp_path, source, method):
    """The reported cache bytes are allocated, and decoding equals the forward pass."""
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
    if method == "split":
        assert claimed["after"] == claimed["before"] / 2

    loaded = trained.load(out)
    config = loaded.model.config
    half = jnp.dtype(jnp.bfloat16)
    cache = cache_lib.allocate(config.mechanisms, batch=1, capacity=128, dtype=half)
    assert cache_lib.live_bytes(cache) == 128 * claimed["after"]
    assert formulas.cache_bytes_per_token(config, half) == claimed["after"]

    tokens = np.random.default_rng(1).integers(0, 38, (2, 12)).astype(np.int32)
    expected = workdirs.logits(loaded.model, tokens)
    decoding = decoder.Decoder(loaded.model)
    cache = decoder.allocate(config, workdirs.F32, batch=2, capacity=128)
    step = jax.jit(lambda tokens, cache: decoding(tokens, cache, jnp.ones(2, jnp.int32)))
    for t in range(12):
        x, cache = step(tokens[:, t : t + 1], cache)
        z = np.asarray(decoding.logits(x))[:, 0]
        assert np.abs(z - expected[:, t]).max() < 1e-4 * expected.std()


def test_weights_that_are_not_finite(run, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(comparison.PUBLISHED / "llama_tied_bias", source)
    name, file = "model.layers.1.self_attn.v_proj.weight", source / "model.safetensors"
    tensors = load_file(file)
    tensors[name][0, 0] = np.nan
    save_file(tensors, file)
    status, _, errors = run(f"--source={source}", f"--out={out}")
    assert status == 2 and f"{name} has 1 of 128 values that are not finite" in errors
    assert not out.exists()


@pytest.mark.parametrize(
    "source, options, tune",
    [
        ("gpt2", ["--method=thin_keys", "--rank=2"], "qk"),
        ("gpt2", ["--method=thin_keys", "--rank=2", "--part=value"], "qkv"),
        ("llama_tied_bias", ["--method=lrkv", "--rank=1"], "qkv"),
    ],
)
def test_recovery_tunes_converted_projections(run, imported, tmp_path, source, options, tune):
    out = tmp_path / "out"
    status, _, errors = run(f"--source={imported(source)}", f"--out={out}", *options, *BY_WEIGHTS)
    assert status == 0, errors
    experiment = resolve(command_line.load_config(out / "recover.py", []))
    assert experiment.optimizer.tuned == recipes.TUNED[tune]
    context = model_lib.open(str(imported(source))).context
    assert experiment.data.sequence_length == min(2048, context)


# Options besides --source=X --out=OUT, and the message.
BAD = [
    ("--source=", "--source is missing: give a folder"),
    ("--out=", "--out is missing"),
    ("--method=svd", "--method = 'svd': must be one of 'none'"),
    ("--method=lrkv", "--rank is missing: --method=lrkv needs one of --rank=32, --energy"),
    ("--rank=3", "--rank=3: only with --method=thin_keys or lrkv"),
    ("--method=mla --energy=0.9", "--energy=0.9: only with --method=thin_keys or lrkv"),
    ("--method=mla", "--rank is missing: --method=mla needs one of --rank=32, --cache=0.5"),
    ("--method=mla --rank=7 --source=PLAIN", "rank = 7: must be even, and at most "),
    (
        "--method=mla --rank=4 --rope_dim=3 --source=PLAIN",
        "rope_dim = 3: must be even, and at most",
    ),
    ("--method=mla --rank=4 --source=GPT2", "--method=mla: needs a model with RoPE in every"),
    ("--method=mla --rank=4 --source=NOPE", "--method=mla: needs a model with RoPE in every layer"),
    ("--method=lrkv --rank=1 --source=OLMO", "qk_norm = 'rms_whole': must be 'rms', 'rms_gain' or"),
    (
        "--method=mla --rank=4 --source=NORMED",
        "config.attention.qk_norm = 'rms_gain': must be 'none', since MLA",
    ),
    ("--method=mla --cache=0.01 --source=PLAIN", "--cache=0.01: leaves 0 elements per token"),
    ("--method=mla --rank=4 --objective=weights", "--objective=weights: only with --method=thin_k"),
    ("--method=gqa --rank=3 --source=SRC", "rank = 3: must divide the 2 KV heads"),
    ("--method=gqa --cache=0.4 --source=SRC", "--cache=0.4: one KV head of 2 is 0.500 of the"),
    ("--method=gqa --rank=1 --calibrate=x", "--calibrate=x: only with --method=thin_keys or lrkv"),
    ("--method=auto", "--cache is missing: --method=auto needs --cache=0.5"),
    ("--method=auto --rank=3", "--rank=3: only with --method=thin_keys or lrkv or mla or gqa"),
    ("--rope_dim=8 --method=lrkv --rank=2", "--rope_dim=8: only with --method=mla"),
    ("--method=none --cache=0.5", "--cache=0.5: only with --method=thin_keys or lrkv"),
    ("--method=lrkv --rank=3 --mode=joint", "--mode=joint: only with --method=thin_keys"),
    ("--method=lrkv --rank=3 --cache=0.5", "--rank and --cache: give one of them"),
    ("--cache=0.5 --part=key_value --value_rank=3", "--value_rank=3: only with --rank, not --cac"),
    ("--method=lrkv --energy=2", "--energy = 2.0: must be at least 0 and at most 1"),
    ("--cache=0", "--cache=0: must be more than 0"),
    ("--cache=0.5 --part=query", "--cache=0.5: queries are not cached"),
    (
        "--method=lrkv --rank=1 --objective=weights --calibrate=x",
        "--calibrate=x: only with --objective=inputs or outputs",
    ),
    ("--method=thin_keys --rank=3 --value_rank=2", "--value_rank=2: only with --part=key_value"),
    (
        "--method=thin_keys --rank=3 --part=key_value --value_rank=0",
        "--value_rank = 0: must be at least 1",
    ),
    ("--source=/nowhere", "there is no such folder or file"),
    ("--out=SRC", "exists already: give another"),
    ("--out=gs://bucket/x", "local"),
    ("--out=OUT/.hidden", "--out = '.hidden': must be a folder's name"),
    ("--out=OUT@3", "must not end in @NUMBER"),
    ("--out=.", "--out = '.': cannot be replaced: give a new folder in it"),
    ("--source=SRC --method=thin_keys --rank=9", "--rank = 9: must lie in [1, 4]"),
    ("--source=SRC --method=lrkv --rank=1 --bases=3", "--bases = 3: must divide"),
    ("--method=lrkv --rank=1 --objective=best", "--objective = 'best': must be one of"),
    ("--source=SRC --method=lrkv --rank=1 --calibrate=", "--calibrate='': give a text"),
    ("--source=SRC --method=lrkv --rank=1 --calibrate=/nowhere.txt", "/nowhere.txt"),
    ("--method=lrkv --rank=1 --row_length=0", "--row_length = 0: must be at least 1"),
    ("--source=GPT2 --method=lrkv --rank=1 --row_length=99", "learned positions reach"),
]


def test_bad_options(run, imported, tmp_path, monkeypatch):
    sources = dict(SRC="llama_tied_bias", PLAIN="llama3_rope", NORMED="qwen3", GPT2="gpt2")
    sources |= dict(NOPE="smollm3", OLMO="olmo3")
    places = dict(OUT=tmp_path / "out") | {key: imported(name) for key, name in sources.items()}
    monkeypatch.chdir(tmp_path)
    for options, message in BAD:
        for name, path in places.items():
            options = options.replace(name, str(path))
        status, _, errors = run("--source=X", f"--out={places['OUT']}", *options.split())
        assert status == 2 and message in errors and "Traceback" not in errors, (options, errors)
        assert not list(tmp_path.iterdir())


@pytest.fixture
def converted(run, tmp_path, monkeypatch):
    """A function of a folder and options: lines printed, warnings, and conversion.json."""
    block = dataclasses.replace(workdirs.BLOCKS["llama"], num_layers=6)
    mechanism = workdirs.grouped(2, 2, qk_norm="none")
    workdirs.write(tmp_path / "source", workdirs.config(block, mechanism))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def convert(out, *options):
        status, printed, errors = run("--source=source", f"--out={out}", *options)
        assert status == 0, errors
        record = json.loads((tmp_path / out / "conversion.json").read_text())
        del record["made_by"]
        return printed.strip().splitlines(), " ".join(errors.split()), record

    return convert


def test_report_and_record(converted, text, tmp_path):
    """Converts with texts that are too short and rows that are too long."""
    shutil.copy(text, tmp_path / "calibration.jsonl")
    shutil.copy(text, tmp_path / "held.jsonl")
    texts = ["--calibrate=calibration.jsonl", "--evaluate=held.jsonl", "--row_length=48"]
    options = ["--cache=0.5", "--multiple=1", "--calibrate_tokens=200"]
    printed, errors, record = converted("half", *options, *texts)
    lost, perplexity = record.pop("errors"), record.pop("perplexity")
    outputs_lost = record.pop("outputs_lost")
    assert all(0 < after <= before for before, after in outputs_lost.values())
    mean = np.mean(list(outputs_lost.values()), axis=0)
    assert record == dict(
        source="source",
        method="thin_keys",
        cache_bytes_per_token=dict(before=384, after=192),
        cache_dtype="bfloat16",
        options=dict(
            cache=0.5,
            multiple=1,
            objective="outputs",
            calibrate="calibration.jsonl",
            calibrate_tokens=200,
            refit=True,
            mode="joint",
            part="key_value",
            row_length=48,
        ),
        ranks=[6] * 6,
        value_ranks=[10] * 6,
        calibrated=dict(text="calibration.jsonl", tokens=240),
        evaluated=dict(text="held.jsonl", tokens=96),
    )
    shares = [0.04231, 0.09556, 0.12163, 0.12331, 0.13212, 0.13868]
    assert [x["key"] for x in lost.values()] == pytest.approx(shares, rel=1e-3)
    shares = [0.00051521, 0.018403, 0.031830, 0.034476, 0.024851, 0.033489]
    assert [x["value"] for x in lost.values()] == pytest.approx(shares, rel=1e-3)
    assert perplexity == pytest.approx(dict(before=451.9693, after=445.1253), rel=1e-4)
    assert printed == [
        "written: half, from source",
        "calibrated on 240 tokens (calibration.jsonl)",
        "ranks in every layer: keys 6, values 10",
        "Share of energy lost",
        "",
        "layer     key   value",
        "-----  ------  ------",
        *(f"{i}      {x['key']:.4f}  {x['value']:.4f}" for i, x in lost.items()),
        "",
        f"lost share of attention's outputs, mean over layers: {mean[0]:.4f} before the "
        f"regression, {mean[1]:.4f} after (on",
        "held-out calibration rows)",
        "",
        "perplexity on 96 held-out tokens (held.jsonl): "
        f"{perplexity['before']:.3f} before, {perplexity['after']:.3f} after",
        "",
        "cache: 192 bytes per token in bfloat16, 0.500 of 384",
        "",
        "python -m kvjax.generate --workdir=half --prompt='Once'",
    ]
    longer = "WARNING: --row_length = 48: source was trained on rows of 40 tokens "
    few = "WARNING: --evaluate=held.jsonl: has 96 tokens, fewer than --evaluate_tokens = 16,384"
    assert errors == longer * 2 + few


@pytest.mark.parametrize("words, warned", [("a plain text", False), ("ერთი წიგნი", True)])
def test_a_text_of_fragments_is_warned_of(tmp_path, capsys, words, warned):
    """The model's tokens are bytes: three per Georgian character."""
    file = tmp_path / "text.txt"
    file.write_text(f"{words}\n" * 400)
    options = dict(split="train", length=16, tokens=64, key="calibrate")
    model = workdirs.Made(workdirs.config("llama", workdirs.mla()))
    perplexity.model_rows(model, str(file), **options)
    said = "tokens per character: the tokenizer has no words of this language"
    assert (said in capsys.readouterr().err) is warned


def test_padding_at_the_end_of_a_split_is_no_text(tmp_path):
    """Bytes as tokens; 0.5 % of the text, 1,250 bytes, are held out."""
    model = workdirs.Made(workdirs.config("llama", workdirs.mla()))
    (tmp_path / "a.txt").write_text(("a" * 49 + "\n") * 5000)
    for length, shape in ((512, (2, 513)), (2048, (1, 1251))):
        options = dict(split="validation", length=length, tokens=9999, key="evaluate")
        rows_BT = perplexity.model_rows(model, str(tmp_path / "a.txt"), **options)
        assert rows_BT.shape == shape
    with pytest.raises(UserError, match="--evaluate=prepared:x: prepared rows may have other"):
        perplexity.model_rows(model, "prepared:x", **options)


def test_calibration_texts_alternate_with_equal_shares(tmp_path):
    """The model's tokens are bytes. The second text has fewer than 1,024 of them."""
    model = workdirs.Made(workdirs.config("llama", workdirs.mla()))
    for name, line in (("a", "a" * 15), ("b", "bbb")):
        (tmp_path / f"{name}.txt").write_text(f"{line}\n" * 250)
    texts = f"{tmp_path}/a.txt, {tmp_path}/b.txt"
    for tokens, counts in ((64, [2, 2]), (2048, [64, 62])):
        rows_BT = perplexity.calibration_rows(model, texts, length=16, tokens=tokens)
        of_b = (rows_BT == ord("b")).any(axis=1)
        assert [(~of_b).sum(), of_b.sum()] == counts
        assert not any(of_b[i] == of_b[i + 1] == of_b[i + 2] for i in range(len(of_b) - 2))
    with pytest.raises(UserError, match="b.txt: .*the train split has 997 tokens, and a row"):
        perplexity.calibration_rows(model, texts, length=2000, tokens=4000)


def test_ranks_by_layer(converted):
    """Converts by energy, by a share of the cache, and without a method."""
    record = dict(source="source", cache_dtype="bfloat16")
    lrkv, shared = ("--method=lrkv", *BY_WEIGHTS), dict(objective="weights", bases=1)
    _, errors, by_energy = converted("kept", *lrkv, "--energy=0.99", "--multiple=3")
    lost = by_energy.pop("errors")
    assert by_energy == record | dict(
        method="lrkv",
        cache_bytes_per_token=dict(before=384, after=336),
        options=dict(energy=0.99, multiple=3, align=True, **shared),
        ranks=[3] * 6,
    )
    shares = [0.02572, 0.03185, 0.02347, 0.03408, 0.03070, 0.01831]
    assert [x["key"] for x in lost.values()] == pytest.approx(shares, rel=1e-3)
    shares = [0.01080, 0.01679, 0.00859, 0.02198, 0.01842, 0.01793]
    assert [x["value"] for x in lost.values()] == pytest.approx(shares, rel=1e-3)
    assert errors == (
        "WARNING: --energy=0.99: no rank that makes the cache smaller keeps this share: layer 0 "
        "keeps 0.9817 at rank 3, layer 1 keeps 0.9757 at rank 3, layer 2 keeps 0.9840 at rank 3, "
        "layer 3 keeps 0.9720 at rank 3 and 2 more"
    )
    _, errors, _ = converted("enough", *lrkv, "--energy=0.98", "--multiple=3")
    assert errors.count("layer") == 3 and "more" not in errors.partition("smaller")[2]
    _, errors, by_cache = converted("share", *lrkv, "--cache=0.8", "--multiple=1", "--no-align")
    del by_cache["errors"]
    assert not errors and by_cache == record | dict(
        method="lrkv",
        cache_bytes_per_token=dict(before=384, after=304),
        options=dict(cache=0.8, multiple=1, align=False, **shared),
        ranks=[3, 2, 2, 2, 2, 3],
    )
    printed, errors, unconverted = converted("whole")
    assert unconverted == record | dict(
        method="none", cache_bytes_per_token=dict(before=384, after=384)
    )
    assert not errors and printed == [
        "written: whole, from source",
        "",
        "cache: 384 bytes per token in bfloat16",
        "",
        "python -m kvjax.generate --workdir=whole --prompt='Once'",
    ]


def test_methods_of_options():
    """Compares each method and its options in conversion.json, defaults included."""
    by_text = dict(calibrate="embedded,embedded:lookups", calibrate_tokens=32_768, row_length=512)
    outputs = by_text | dict(multiple=8, objective="outputs", refit=True)
    thin = dict(mode="per_head", part="key")
    joint = dict(mode="joint", part="key")
    cases = [
        ("", None, dict(row_length=512)),
        (
            "--cache=0.5",
            ThinKeys(rank=1, mode="joint", part="key_value"),
            outputs | dict(cache=0.5, mode="joint", part="key_value"),
        ),
        ("--method=thin_keys --rank=3", ThinKeys(rank=3), outputs | thin | dict(rank=3)),
        (
            "--method=thin_keys --energy=0.9",
            ThinKeys(rank=1, mode="joint", absorb=False),
            outputs | joint | dict(energy=0.9),
        ),
        (
            "--cache=0.5 --part=value --mode=per_head",
            ThinKeys(rank=1, part="value", absorb=False),
            outputs | dict(cache=0.5, part="value", mode="per_head"),
        ),
        (
            "--method=thin_keys --rank=3 --part=key_value --value_rank=2 --objective=inputs",
            ThinKeys(rank=3, part="key_value", value_rank=2, objective="inputs"),
            outputs
            | dict(rank=3, part="key_value", value_rank=2, objective="inputs", mode="per_head"),
        ),
        (
            "--method=lrkv --rank=3 --bases=2 --no-align --objective=weights",
            LowRankKV(rank=3, bases=2, align=False, objective="weights"),
            dict(rank=3, bases=2, align=False, objective="weights", multiple=8),
        ),
        (
            "--method=lrkv --cache=0.5 --multiple=4 --calibrate=x --calibrate_tokens=9",
            LowRankKV(rank=1, step=4),
            outputs
            | dict(cache=0.5, multiple=4, calibrate="x", calibrate_tokens=9)
            | dict(bases=1, align=True),
        ),
    ]
    for arguments, method, recorded in cases:
        options = command.make_parser().parse(["--source=a", "--out=b", *arguments.split()])
        options_lib.fill_defaults(options, command.make_parser().get_default)
        assert (
            options_lib.make_method(options) == method and options_lib.recorded(options) == recorded
        ), arguments
        assert options_lib.splits_budget(options) == (arguments == "--cache=0.5")


@pytest.mark.slow
def test_infinite_perplexity(run, text, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(comparison.PUBLISHED / "qwen3", source)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] *= 3e4
    save_file(tensors, source / "model.safetensors")
    options = [f"--source={source}", f"--out={out}", "--method=thin_keys", "--rank=2"]
    options += ["--objective=weights", f"--evaluate={text}", "--row_length=16"]
    status, _, errors = run(*options)
    assert status == 2 and "perplexity of source on this text overflows" in errors
    assert "--evaluate_tokens=0 skips it" in errors and not out.exists()
    status, _, errors = run(*options[:-3], "--objective=weights", "--evaluate_tokens=0")
    assert status == 0, errors


def test_allowed_cache_bytes(imported):
    """A share of the cache is not rounded down: 0.7 * 23,040 is 16,127.999... in floats."""
    source = model_lib.open(str(imported("llama_tied_bias")))
    whole = choice.cache_bytes(source)
    for i in range(1, whole):
        assert choice._allowed(argparse.Namespace(cache=i / whole), source) == i


def test_shapes_are_checked_before_text_is_read(run, imported, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("text was read")

    monkeypatch.setattr(command, "_rows", fail)
    options = [f"--source={imported('llama_tied_bias')}", f"--out={tmp_path / 'out'}"]
    for wrong, message in (
        (
            ["--rank=4"],
            "--rank = 4: takes 48 bytes per token and layer in bfloat16, and the source 32: give",
        ),
        (["--cache=0.1", "--multiple=1"], "--cache: rank 1 in every layer takes"),
        (["--energy=0.9"], "--multiple = 4: takes"),
    ):
        status, _, errors = run(*options, "--method=lrkv", *wrong)
        assert status == 2 and message in errors


def test_text_that_is_too_short_names_the_options(run, imported, tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "a.jsonl").write_text('{"said": "a few words"}\n')
    options = [f"--source={imported('llama_tied_bias')}", f"--out={tmp_path / 'out'}"]
    options += ["--method=lrkv", "--rank=1"]
    for name, more, message in (
        ("short.txt", [], "too few documents"),
        ("a.jsonl", [], "a.jsonl, line 1 has no key 'text'; it has ['said']. Set --text_key"),
        ("a.jsonl", ["--text_key=said"], "too few documents"),
    ):
        status, _, errors = run(*options, f"--calibrate={tmp_path / name}", *more)
        assert status == 2 and f"--calibrate={tmp_path / name}: " in errors, errors
        assert message in errors, errors
    assert not re.search(r"--(source|tokenizer|sequence_length)|validation", errors), errors
