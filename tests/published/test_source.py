"""Locates published models: in a hub's cache, under any file name; errors for other folders."""

import os
import shutil

from etils import epath
import pytest

from kvjax.convert import model as model_lib
from kvjax.foundation.errors import UserError
from tests.convert import comparison

MODEL = comparison.PUBLISHED / "llama_tied_bias"
WEIGHTS = "model.safetensors"
OLD, NEW = "0" * 40, "1" * 40


def plain(folder, **files):
    """Copies the model's folder; `files` are written into it, or removed (None)."""
    shutil.copytree(MODEL, folder)
    for name, text in files.items():
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_text(text)
    return folder


def named(folder, name):
    plain(folder)
    os.rename(folder / WEIGHTS, folder / name)
    return folder


def cached(folder, *commits, main=None):
    """Writes a folder of the hub's cache, whose snapshots are links to blobs."""
    plain(folder / "blobs")
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
        for file in (folder / "blobs").iterdir():
            os.symlink(f"../../blobs/{file.name}", folder / "snapshots" / commit / file.name)
    (folder / "snapshots").mkdir(exist_ok=True)
    if main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)
    return folder


HUB = "models--owner--A-model"


def test_models_that_are_found(tmp_path):
    (tmp_path / "c" / "datasets--owner--A-set").mkdir(parents=True)
    (cached(tmp_path / "e" / "huggingface" / "hub" / HUB, NEW) / ".no_exist").mkdir()
    for source, name in (
        (named(tmp_path / "a", "consolidated.safetensors"), "a"),
        (named(tmp_path / "b", "model-00001-of-00001.safetensors"), "b"),
        (cached(tmp_path / "c" / HUB, NEW), "A-model"),
        (cached(tmp_path / "d" / HUB, OLD, NEW, main=NEW), "A-model"),
        (tmp_path / "d" / HUB / "snapshots" / OLD, "A-model"),
        *((tmp_path / "d" / HUB / part, "A-model") for part in ("snapshots", "refs", "blobs")),
        *((tmp_path / "e" / above, "A-model") for above in (".", "huggingface", "huggingface/hub")),
    ):
        model = model_lib.open(str(source))
        assert model.name == name
        comparison.exactly(model, model_lib.open(str(MODEL)))


def test_sources_without_one_model(tmp_path):
    def at(name):
        return tmp_path / name

    several = named(at("several"), "a.safetensors")
    shutil.copy(several / "a.safetensors", several / "b.safetensors")
    for owner in "ab":
        (at("h") / "hub" / f"models--{owner}--x").mkdir(parents=True)
    for source, message in (
        (plain(at("a"), **{"adapter_config.json": "{}"}), "holds an adapter"),
        (plain(at("d"), **{"tokenizer.json": None}), "tokenizer.json is missing: give a model wit"),
        (named(at("e"), "model-00001-of-00002.safetensors"), "has neither model.safetensors nor"),
        (several, "(other weights: a.safetensors, b.safetensors)"),
        (
            cached(at("f") / HUB, OLD, NEW, main="2" * 40),
            f"give one of them: snapshots/{OLD}, snap",
        ),
        (cached(at("g") / HUB), "and refs/main names none of them: download"),
        (at("f"), f"give one of them: snapshots/{OLD}, snap"),
        (at("h"), "hub is the hub's cache: give a folder of it: models--a--x, models--b--x"),
        (at("a") / WEIGHTS, "is one file of a model: give its folder"),
    ):
        with pytest.raises(UserError) as error:
            model_lib.open(str(epath.Path(source)))
        assert message in str(error.value)
