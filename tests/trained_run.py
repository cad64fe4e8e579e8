"""A run trained once for all tests that read one, and the command line that generates from it."""

from collections.abc import Callable
import pathlib
import shutil

from etils import epath
import jax
import ml_collections
import pytest

from kvjax import generate as generate_lib
from kvjax.foundation import command_line
from kvjax.foundation import progress
from kvjax.foundation import runtime
from kvjax.training import loop
from tests import runs

STEPS = 10


def config_of(workdir: pathlib.Path) -> ml_collections.ConfigDict:
    """The config of that run."""
    return runs.small_config(
        *(str(workdir.parent / "text.txt"), str(workdir.parent / "data")),
        **dict(num_steps=STEPS, checkpoint_every=4, eval_rows=8, sample_tokens=4),
    )


def trained(folder: pathlib.Path) -> pathlib.Path:
    """The workdir of a run of 10 steps, with checkpoints of steps 8 and 10; its data is gone.

    It is trained if it is not there yet, whole.
    """
    whole = folder / "whole"
    if whole.exists():
        return folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    runs.write_text(folder / "text.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
        loop.train(config_of(folder / "run"), epath.Path(folder / "run"))
    shutil.rmtree(folder / "data")
    whole.touch()
    return folder / "run"


def command_line_of(workdir, capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """A function of flags: (exit status, standard output, standard error) of `kvjax.generate`."""
    monkeypatch.setattr(runtime, "start", lambda: None)  # the tests' own cache stays
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)  # a busy machine's waits are no message

    def command(*given, workdir=workdir):
        arguments = [f"--workdir={workdir}", "--num_tokens=6", *given]
        return command_line.status(generate_lib.main, arguments), *capsys.readouterr()

    return command
