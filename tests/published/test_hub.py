"""hf:// names: what is downloaded, what the cache answers alone, and every refusal in one line."""

import json
import os
import shutil
import subprocess
import sys

from huggingface_hub import constants
import numpy as np
import pytest

from kvjax.convert import __main__ as convert, model as model_lib
from kvjax.data import sources
from kvjax.data.config import DataConfig
from kvjax.foundation import command_line
from kvjax.foundation.errors import MissingDataError, UserError
from kvjax.published import hub
from tests.convert import comparison
from tests.published.hub_server import COMMIT, Hub

MODEL = comparison.PUBLISHED / "llama_tied_bias"
NAME = "hf://owner/tiny.1"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache, and a hub that nothing answers; the folder of the cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "[hub]"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    point_at(monkeypatch, "http://127.0.0.1:9")
    return tmp_path / "[hub]"


def point_at(monkeypatch, url):
    hub._looked_up.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def in_cache(cache, source, *, kind="model", name="owner/tiny.1", main=COMMIT):
    """Writes a folder into the cache as the client does: links from a snapshot to blobs."""
    folder = cache / f"{kind}s--{name.replace('/', '--')}"
    for i, path in enumerate(p for p in source.rglob("*") if p.is_file()):
        link = folder / "snapshots" / COMMIT / path.relative_to(source)
        blob = folder / f"blobs/{i}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if main:
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(main)
    return folder / "snapshots" / COMMIT


@pytest.fixture
def repository(tmp_path):
    """A model's repository, with much beside what kvjax reads."""
    folder = shutil.copytree(MODEL, tmp_path / "repository")
    for other in (
        "README.md",
        "pytorch_model.bin",
        "original/a.safetensors",
        "consolidated.safetensors",
        "onnx/b.json",
    ):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text("no weights")
    return folder


def test_a_model_is_downloaded_once_and_then_read_without_a_network(repository, cache, monkeypatch):
    read = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    with Hub("owner/tiny.1", repository).serving() as served:
        point_at(monkeypatch, served.url)
        model = model_lib.open(NAME)
        assert served.downloaded() == read and model.name == "tiny.1"
        num_requests = len(served.requests)
        model_lib.open(f"{NAME}@main")  # another name of the same commit: one request
        model_lib.open(f"{NAME}@{COMMIT}")
        assert served.downloaded() == read and len(served.requests) <= num_requests + 2
    expected = model_lib.open(str(MODEL))
    for path in expected.parameters():
        layer = 0 if path[0] == "segments" else None
        np.testing.assert_array_equal(model.read(path, layer), expected.read(path, layer))
    point_at(monkeypatch, served.url)  # which is gone
    assert model_lib.open(NAME).transformer == expected.transformer
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._looked_up.cache_clear()
    snapshot = hub.model("--source", NAME)
    assert snapshot == hub.model("--source", f"{NAME}@{COMMIT}")
    assert snapshot.relative_to(cache).parts[0] == "models--owner--tiny.1"


def test_the_cache_of_the_client_by_hand(cache, monkeypatch, tmp_path):
    """Weights in two parts, of which one is missing; and a config alone, which costs need."""
    source = shutil.copytree(MODEL, tmp_path / "source")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    in_cache(cache, source, name="owner/whole", main="")  # the only snapshot
    assert model_lib.open("hf://owner/whole").name == "whole"
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    files = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    (source / hub._INDEX).write_text(json.dumps(dict(weight_map=files)))
    snapshot = in_cache(cache, source, name="owner/part")
    with pytest.raises(UserError) as error:
        model_lib.open("hf://owner/part@main")
    assert str(error.value) == (
        f"--source = 'hf://owner/part@main': {snapshot} lacks model-00002-of-00002.safetensors, "
        "and HF_HUB_OFFLINE is set: with a network, run hf download owner/part --revision=main"
    )
    assert hub.config("--model", "hf://owner/part") == snapshot / "config.json"
    with pytest.raises(UserError, match="may be large: run hf download owner/part b.gguf first"):
        hub.config("--model", "hf://owner/part/b.gguf")


@pytest.mark.parametrize(
    "name, message",
    [
        ("hf://owner/other", "there is no such model, or it is private (then run hf auth login"),
        (f"{NAME}@v2", "the repository has no branch, tag or commit 'v2'"),
        (f"{NAME}/a.gguf", "the repository has no such file"),
        ("hf://owner", "give hf://OWNER/NAME, @REVISION behind the NAME"),
        (f"{NAME}/../../x", "give hf://OWNER/NAME, @REVISION behind the NAME"),
        ("hf://datasets/owner/tiny", "is a data set; a model is hf://OWNER/NAME"),
    ],
)
def test_refusals_of_a_hub(name, message, repository, monkeypatch, capsys):
    with Hub("owner/tiny.1", repository).serving() as served:
        point_at(monkeypatch, served.url)
        assert command_line.status(convert.main, [f"--source={name}", "--out=nowhere"]) == 2
    assert capsys.readouterr().err.startswith(f"kvjax: --source = {name!r}: {message}")


def test_a_hub_that_fails_and_one_of_gguf_files(repository, monkeypatch):
    with Hub("owner/tiny.1", repository).serving() as served:
        point_at(monkeypatch, served.url)
        served.failing = {f"/owner/tiny.1/resolve/{COMMIT}/tokenizer.json"}
        with pytest.raises(UserError, match="finished files stay; run the same command again"):
            hub.model("--source", NAME)
    (repository / "config.json").unlink()
    (repository / "b.gguf").write_text("GGUF")
    with Hub("owner/gguf", repository).serving() as served:
        point_at(monkeypatch, served.url)
        with pytest.raises(UserError, match="give one of its files, as hf://OWNER/NAME/FILE.gguf"):
            hub.model("--source", "hf://owner/gguf")
        assert hub.model("--source", "hf://owner/gguf/b.gguf").read_text() == "GGUF"
    with pytest.raises(UserError, match=r"cannot be reached \(.*\): with a network, run hf downl"):
        point_at(monkeypatch, served.url)
        hub.model("--source", "hf://owner/other")


def test_a_data_set_by_glob_folder_and_file(cache, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "data"
    for name in ("a.txt", "b.txt", "README.md", "more/c.txt", "more/deep/d.txt"):
        (folder / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "text" / name).write_text(f"{name} says more than a word. " * 20)
    name = "hf://datasets/owner/texts"

    def names(path):
        config = DataConfig(source=f"{name}{path}")
        paths = [name for name, _ in sources.fingerprints(config)["source"]]
        assert all(str(cache) in file for file in paths)
        return [file.partition("/text/")[2] for file in paths]

    with Hub("owner/texts", folder, kind="dataset").serving() as served:
        point_at(monkeypatch, served.url)
        assert names("/text/more/deep/d.txt") == ["more/deep/d.txt"]
        assert names("/text") == ["a.txt", "b.txt"]
        assert served.downloaded() == ["text/a.txt", "text/b.txt", "text/more/deep/d.txt"]
        assert names("@main/text/*/c*") == ["more/c.txt"]
        assert names("/text/**/*.txt") == ["a.txt", "b.txt", "more/c.txt", "more/deep/d.txt"]
        with pytest.raises(MissingDataError, match=r"x\*.txt': matches no file; give 'embedded'"):
            names("/text/x*.txt")
    point_at(monkeypatch, served.url)
    capsys.readouterr()
    assert names("/text/*.txt") == ["a.txt", "b.txt"]
    assert "only files that are in" in capsys.readouterr().err
    command = "hf download owner/texts --repo-type=dataset text/e.txt"
    with pytest.raises(UserError, match=f"with a network, run {command}"):
        names("/text/e.txt")
    with pytest.raises(UserError, match="'hf://owner/texts/a.txt': is a model; a data set is"):
        DataConfig(source="hf://owner/texts/a.txt")


def test_the_environment_names_hub_and_cache(repository, tmp_path):
    program = f"from kvjax.published import hub; print(hub.config('--model', {NAME!r}))"
    with Hub("owner/tiny.1", repository).serving() as served:
        environment = {name: value for name, value in os.environ.items() if name[:3] != "HF_"}
        environment |= dict(HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=served.url)
        run = [sys.executable, "-c", program]
        process = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
        assert served.downloaded() == ["config.json"]
    snapshot = tmp_path / "home/hub/models--owner--tiny.1/snapshots" / COMMIT
    assert process.stdout.strip() == str(snapshot / "config.json")
