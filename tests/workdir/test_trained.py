"""A workdir alone suffices to load its model; messages name what a workdir lacks."""

import json
import pathlib
import shutil

from etils import epath
from flax import nnx
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
import pytest

from kvjax.decoding.generator import Generator
from kvjax.decoding.text import generate
from kvjax.foundation.errors import UserError
from kvjax.workdir import trained
from kvjax.workdir.trained import experiment_of, load
from tests import trained_run
from tests.trained_run import EARLIER, STEPS


@pytest.fixture
def copy(workdir, tmp_path):
    """A copy of the workdir whose training text is gone."""
    copy = pathlib.Path(shutil.copytree(workdir, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["data"]["source"] = "/nowhere/text.txt"
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture
def run(workdir, capsys, monkeypatch):
    """A function of flags: (exit status, standard output, standard error) of the command line."""
    return trained_run.command_line_of(workdir, capsys, monkeypatch)


def test_a_workdir_alone_loads(copy):
    loaded = load(epath.Path(copy))
    state = ocp.load(copy / "checkpoints" / str(STEPS), checkpointable_name="state")
    loaded_weights = [np.asarray(x) for x in jax.tree.leaves(nnx.state(loaded.model))]
    saved_weights = [np.asarray(x) for x in jax.tree.leaves(state["params"])]
    jax.tree.map(np.testing.assert_array_equal, loaded_weights, saved_weights)
    assert loaded.step == STEPS and loaded.context == 32
    assert loaded.tokenizer.encode("a") == [97]


def test_an_earlier_step(workdir, loaded, monkeypatch):
    monkeypatch.chdir(workdir.parent)
    earlier = load(epath.Path(workdir.name), step=EARLIER)
    embeddings = [np.asarray(m.embedding[...]) for m in (loaded.model, earlier.model)]
    assert np.any(embeddings[0] != embeddings[1])


def test_weights_have_the_given_dtype(workdir):
    half = load(epath.Path(workdir), dtype="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(half.model))} == {"bfloat16"}
    assert half.compute.dtype == np.dtype("bfloat16")
    narrow = load(epath.Path(workdir), dtype="bfloat16", cache_dtype="int8")  # basis unchanged yet
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(narrow.model)))
    found = {("attention" in jax.tree_util.keystr(path), str(w.dtype)) for path, w in leaves}
    assert found == {(True, "float32"), (False, "bfloat16")}


@pytest.mark.slow
def test_the_sample_of_training_is_what_its_checkpoint_generates(workdir, loaded):
    generator = Generator(loaded.model, loaded.compute)
    options = dict(num_tokens=4, seed=0, end_at_special=False)
    result = generate(generator, loaded.tokenizer, ["The king "], **options)
    assert (workdir / "sample.txt").read_text() == f"The king {result.texts[0]}\n"


@pytest.mark.slow
@pytest.mark.whole
def test_a_loaded_model_is_compiled_once(loaded):
    """Its weights are committed to a device, and with them a step's outputs."""
    generator = Generator(loaded.model, loaded.compute)
    generate(generator, loaded.tokenizer, ["The king "], num_tokens=3)
    assert [f._cache_size() for f in (generator.engine.prefill, generator.engine.decode_step)] == [
        1,
        1,
    ]


# -- damaged workdirs ------------------------------------------------------------------------------


def expect(run, workdir, *messages):
    status, out, err = run("--prompt=a", workdir=workdir)
    assert (status, out) == (2, "") and "Traceback" not in err
    for message in messages:
        assert message in err, err


def test_a_workdir_without_a_checkpoint(run, copy):
    shutil.rmtree(copy / "checkpoints")
    expect(run, copy, "has no checkpoint yet")
    assert not (copy / "checkpoints").exists()  # loading creates no folder


def test_a_checkpoint_of_another_architecture(run, copy, tmp_path):
    config = json.loads((copy / "config.json").read_text())
    config["attention"]["rank"] = 8
    (copy / "config.json").write_text(json.dumps(config))
    name = "segments.0.attention.mechanism.expand_key: checkpoint (2, 2, 4, 16)"
    expect(run, copy, "holds another model", name, "config (2, 2, 8, 16)")
    config["attention"].update(rank=0)
    (copy / "config.json").write_text(json.dumps(config))
    expect(run, copy, "holds another model", "expand_key: checkpoint (2, 2, 4, 16), config none")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read(run, copy):
    for file in (copy / "checkpoints" / str(STEPS) / "state").rglob("d/*"):
        file.write_bytes(b"\0" * file.stat().st_size)
    expect(
        run,
        copy,
        f"checkpoints/{STEPS} cannot be read",
        f"other checkpoints there: steps [{EARLIER}]",
    )
    assert run("--prompt=a", f"--step={EARLIER}", workdir=copy)[0] == 0


def test_the_tokenizer_of_a_workdir(run, copy):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | dict(id=257, content="<x>"))
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    expect(run, copy, "tokenizer.json has 258 tokens, the model 257")
    (copy / "tokenizer.json").write_text("{}")
    expect(run, copy, "is not a tokenizer.json")
    (copy / "tokenizer.json").unlink()
    expect(run, copy, "tokenizer.json is missing: run the command that trained")


def test_a_config_that_cannot_be_read(copy):
    config = json.loads((copy / "config.json").read_text())
    misspelled = config | dict(model=config["model"] | dict(d_modle=3))
    for content, message in (
        (json.dumps(misspelled), "config.json: config.model.d_modle: no such key"),
        (json.dumps(config | dict(attention=3)), "config.json: 'int' object"),
        (
            '{"model_type": "llama"}',
            "is a published model, and no workdir yet: `python -m kvjax.conv",
        ),
        ("[1]", "config.json is not a JSON object"),
        ("{}", "config.json: config: unknown"),
        ("{", "config.json is not JSON"),
        (b"\xff\xfe{", "config.json is not JSON"),
        ("[" * 200_000, "config.json is not JSON .nested too deeply"),
        ('{"a": ' * 500 + "1" + "}" * 500, "config.json: "),
    ):
        content = content if isinstance(content, bytes) else content.encode()
        (copy / "config.json").write_bytes(content)
        with pytest.raises(UserError, match=f"^{copy}.*{message}"):
            experiment_of(copy)
    with pytest.raises(UserError, match="is no workdir"):
        load(epath.Path(copy / "checkpoints"))


def test_unsupported_workdirs():
    with pytest.raises(UserError, match="^--workdir = 'hdfs://host/run': hdfs:// is not supported"):
        trained.experiment_of("hdfs://host/run")
