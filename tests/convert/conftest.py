"""The command, workdirs of small models, and text in their vocabulary."""

import json

import numpy as np
import pytest

from kvjax.convert import __main__ as command, into_workdir, model as model_lib
from kvjax.foundation import command_line, progress, runtime
from tests.convert import comparison, workdirs


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
            model = model_lib.open(str(comparison.PUBLISHED / name))
            into_workdir.write(model, into_workdir.check(str(out)), {})
            made[name] = out
        return made[name]

    return workdir


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Documents of words and blanks, the only bytes in the small tokenizers."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("etaoinshr"), 4)) for _ in range(40)]
    lines = [json.dumps(dict(text=" ".join(rng.choice(words, 9)))) for _ in range(400)]
    file.write_text("\n".join(lines))
    return str(file)


@pytest.fixture
def small(tmp_path):
    """The workdir of an LRKV model."""
    block, mechanism, _ = workdirs.MODELS["lrkv"]
    return workdirs.write(tmp_path / "small", workdirs.config(block, mechanism))
