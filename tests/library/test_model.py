"""kvjax.load, train, convert_model and evaluate_model, and the public names."""

import json
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.costs import formulas
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.decoding.text import generate
from kvjax.evaluate import __main__ as evaluate
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.published import hub
from tests import runs
from tests.convert.comparison import PUBLISHED


@pytest.fixture(scope="module")
def model(workdir):
    return kvjax.load(workdir, dtype="float32")


def test_a_model_generates_what_the_command_does(model, loaded):
    options = dict(num_tokens=7, seed=3)
    generator = Generator(loaded.model, loaded.compute)
    prompts = ["the thin", "rest"]
    sampling = Sampling(temperature=0.7, top_k=9)
    expected = generate(generator, loaded.tokenizer, prompts, sampling=sampling, **options).texts
    options |= dict(temperature=0.7, top_k=9)
    assert model.generate(prompts, **options) == expected
    assert [model.generate("rest", **options)] == [["".join(model.stream("rest", **options))]]
    assert model.generate("rest", **options) == expected[1:]
    assert (
        model.generate(
            "rest",
            **options | dict(stop=[expected[1][2:4]]),
        )[0]
        == expected[1][:2]
    )
    assert model.cache_bytes(10, batch=2) == 20 * formulas.cache_bytes_per_token(
        loaded.model.config, jnp.float32
    )


def test_logits_are_those_of_the_whole_pass(model, loaded):
    tokens_BT = np.random.default_rng(0).integers(0, 200, (2, 9))
    x_BTD = loaded.model(jnp.asarray(tokens_BT), compute=loaded.compute)
    expected = loaded.model.logits(x_BTD)
    np.testing.assert_allclose(model.logits(tokens_BT), expected, atol=2e-4)
    np.testing.assert_allclose(model.logits(tokens_BT[1]), expected[1], atol=2e-4)
    with pytest.raises(kvjax.UserError, match="the vocabulary has"):
        model.logits([0, 10_000])


def test_logits_end_with_the_models_positions(model, monkeypatch):
    monkeypatch.setattr(type(model._generator), "positions", 8)
    assert model.logits([1] * 8).shape[0] == 8
    with pytest.raises(kvjax.UserError, match="tokens: 9 of them, more than the model's 8 pos"):
        model.logits([1] * 9)


def test_published_models_are_converted_and_loaded(tmp_path, monkeypatch):
    """The first weights of a published model, read directly and by way of a workdir, are equal."""
    monkeypatch.setattr(runtime, "start", lambda **_: None)
    published, out = PUBLISHED / "llama", tmp_path / "out"
    options = dict(objective="weights", evaluate_tokens=0)
    with pytest.raises(kvjax.UserError, match="unknown option --rnak; did you mean '--rank'?"):
        kvjax.convert_model(published, out, method="thin_keys", rnak=4, **options)
    report = kvjax.convert_model(published, out, method="thin_keys", rank=2, **options)
    assert report["ranks"] == [2, 2]
    direct, converted = kvjax.load(published), kvjax.load(out)
    assert (direct.name, converted.dtype) == ("llama", jnp.float32)
    assert converted.cache_bytes() < direct.cache_bytes()
    assert report["cache_bytes_per_token"]["after"] * 2 == converted.cache_bytes()
    kvjax.convert_model(published, tmp_path / "same")
    tokens_T = np.arange(1, 9)
    same = kvjax.load(tmp_path / "same", dtype="float32")
    np.testing.assert_array_equal(same.logits(tokens_T), direct.logits(tokens_T))
    with pytest.raises(kvjax.UserError, match="step = 3: .*llama is a published model"):
        kvjax.load(published, step=3)
    with pytest.raises(kvjax.UserError, match="nowhere is no workdir of a run"):
        kvjax.load(tmp_path / "nowhere")


def test_a_config_is_trained(tmp_path, monkeypatch):
    """A ConfigDict, and a file with overrides, give the same numbers."""
    monkeypatch.setattr(runtime, "start", lambda **_: None)
    given = runs.write_text(tmp_path / "text.txt"), str(tmp_path / "data")
    config = runs.small_config(*given, num_steps=2, eval_every=2)
    kept = []
    mine = types.SimpleNamespace(
        write=lambda step, record: kept.append({"step": step, **record}),
        close=lambda: kept.append("closed"),
    )
    last = kvjax.train(config, tmp_path / "a", trackers=[mine])
    assert isinstance(mine, kvjax.Tracker) and kept.pop() == "closed"
    assert [r for r in kept if "tokens" in r] == runs.records(tmp_path / "a")
    assert not (tmp_path / "a" / "events").exists()
    assert (last["step"], last.keys()) == (
        2,
        {"step", "tokens", "validation_loss", "validation_bpb"},
    )
    file = tmp_path / "config.py"
    file.write_text(runs.CONFIG_FILE.format(source=given[0], directory=given[1]))
    overrides = {"train.num_steps": 2, "train.eval_every": 2}
    assert kvjax.train(file, tmp_path / "b", overrides=overrides) == last
    with pytest.raises(kvjax.UserError, match="config has no key 'trian'"):
        kvjax.train("lrkv_tiny", tmp_path / "c", overrides={"trian.num_steps": 2})
    with pytest.raises(kvjax.UserError, match="overrides: set the values in the ConfigDict"):
        kvjax.train(config, tmp_path / "c", overrides=overrides)


def test_benchmarks_are_evaluated_as_by_the_command(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "start", lambda **_: None)
    with pytest.raises(kvjax.UserError, match="--tasks"):
        kvjax.evaluate_model(workdir, tasks=["mmul"])
    with pytest.raises(kvjax.UserError, match="arc_easy"):
        kvjax.evaluate_model(workdir, tasks=["arc_easy"], data=tmp_path)
    monkeypatch.setattr(evaluate, "main", lambda arguments: print(json.dumps(arguments)))
    options = dict(file=["a=1", "b=2"], ruler_lengths=(1024, 2048), step=3)
    given = kvjax.evaluate_model("w", tasks="mmlu", allow_unsandboxed_code=False, **options)
    assert given == [
        *("--json", "--workdir=w", "--tasks=mmlu"),
        *("--file=a=1", "--file=b=2", "--ruler_lengths=1024,2048", "--step=3"),
    ]


def test_public_names_are_there_and_imported_late():
    assert all(getattr(kvjax, name) is not None for name in kvjax.__all__)
    assert set(kvjax.__all__) <= set(dir(kvjax))
    assert not hasattr(kvjax, "no_such_name")
    code = "import sys, kvjax; assert not {'jax', 'numpy', 'flax'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bad_cache_dtype_is_refused_before_a_download(monkeypatch):
    monkeypatch.setattr(hub, "model", lambda *given: pytest.fail("downloaded"))
    for given in (dict(cache_dtype="int5"), dict(dtype="float64")):
        with pytest.raises(UserError, match="must be one of"):
            kvjax.load("hf://owner/name", **given)
