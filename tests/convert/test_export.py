"""python -m kvjax.convert.export: the chosen format, and bad options."""

import json

import jax.numpy as jnp
import pytest

from kvjax.convert import export, into_folder
from kvjax.foundation import command_line
from tests.convert import workdirs

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


@pytest.fixture
def told(tmp_path, capsys):
    """A function of a workdir, a folder and options: the message of the failing command."""

    def tell(workdir, out, *options):
        arguments = [f"--workdir={workdir}", f"--out={out}", *options]
        assert command_line.status(export.main, arguments) == 2
        return capsys.readouterr().err

    return tell


@pytest.mark.parametrize(
    "name, kind, said",
    [
        ("gqa", "huggingface", ""),
        ("thin_joint", "factored", "keeps the small cache, which --format=huggingface would mult"),
        ("mla", "factored", "transformers has no such model: config.attention.kind = 'mla': must"),
    ],
)
def test_auto(tmp_path, capsys, name, kind, said):
    block, mechanism, _ = workdirs.MODELS.get(name, ("nanochat", workdirs.mla(), ""))
    workdir = workdirs.write(tmp_path / "workdir", workdirs.config(block, mechanism))
    workdirs.export(workdir, tmp_path / "out", "--json")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["format"] == kind
    assert said in printed.err.replace("\n", " ")


def test_the_dtype_is_one_that_holds_all():
    embedding, attention = ("embedding",), ("attention", "query")

    def both(one, other):
        return {embedding: ((4, 2), one), attention: ((2, 2), other)}

    assert into_folder.dtype_name(both(BF16, BF16)) == "BF16"
    assert into_folder.dtype_name(both(BF16, F32)) == "F32"
    assert into_folder.dtype_name(both(F32, BF16)) == "F32"


def test_existing_folders(small, tmp_path, told):
    """An empty folder is taken, a full one is not."""
    (tmp_path / "out").mkdir()
    workdirs.export(small, tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "exists already: give another, or move it away" in told(small, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize(
    "options, said",
    [
        (["--out=o"], "--workdir is missing: give the workdir of a model"),
        (["--workdir=w"], "--out is missing: give a new folder"),
        (["--format=gguf"], "--format = 'gguf': must be one of 'auto', 'huggingface', 'factored'"),
        (["--dtype=float16"], "--dtype = 'float16': must be one of 'float32', 'bfloat16'"),
        (["--out=gs://bucket/x"], "--out = 'gs://bucket/x': must be local; copy it to the buc"),
        (["--out=o", "--formt=auto"], "unknown option --formt; did you mean '--format'?"),
    ],
)
def test_options(bucket, capsys, options, said):
    if len(options) == 1 and "missing" not in said:
        options = ["--workdir=w", "--out=o", *options]
    assert command_line.status(export.main, options) == 2
    assert said in capsys.readouterr().err


def test_a_workdir_without_a_checkpoint(small, tmp_path, told):
    for checkpoint in (small / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    assert "has no checkpoint yet: train on, or give another" in told(small, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unsupported_models_name_the_other_format(tmp_path, told):
    workdir = workdirs.write(tmp_path / "workdir", workdirs.config("nanochat", workdirs.mla()))
    said = told(workdir, tmp_path / "out", "--format=huggingface")
    assert "config.attention.kind = 'mla'" in said
    assert "--format=factored supports more models" in said
    assert not (tmp_path / "out").exists()
