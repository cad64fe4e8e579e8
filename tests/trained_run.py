"""A run trained once for all tests that read one, and the command line that generates from it."""

from collections.abc import Callable
import contextlib
import io
import json
import pathlib
import shutil

from etils import epath
import jax
import ml_collections
import pytest

from kvjax import generate as generate_lib
from kvjax.decoding.generator import Generator
from kvjax.foundation import command_line, progress, runtime
from kvjax.training import loop
from tests import runs

EARLIER, STEPS = 30, 40  # steps of its checkpoints


def config_of(workdir: pathlib.Path) -> ml_collections.ConfigDict:
    """Returns the run's config: `runs.small_config` with the compute options of recipes."""
    data = str(workdir.parent / "text.txt"), str(workdir.parent / "data")
    config = runs.small_config(*data, num_steps=STEPS, sample_tokens=4, log_every=2)
    config.compute.update(unroll="auto", query_chunk=-1, loss_chunks=8)
    config.optimizer.newton_schulz_steps = 5
    return config


def trained(folder: pathlib.Path) -> pathlib.Path:
    """Returns the run's workdir, in a folder with its output (`output.txt`).

    Trains the run unless it is complete: `last.json`, its last figures, is written last.
    """
    last = folder / "last.json"
    if last.exists():
        return folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    runs.write_text(folder / "text.txt")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
        figures = loop.train(config_of(folder / "run"), epath.Path(folder / "run"))
    (folder / "output.txt").write_text(output.getvalue())
    last.write_text(json.dumps(figures))
    return folder / "run"


def command_line_of(workdir, capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Returns a function: flags of `kvjax.generate` -> (exit status, stdout, stderr)."""
    monkeypatch.setattr(runtime, "start", lambda: None)  # keeps the tests' compilation cache

    def unstored(*given, stored, **options):  # stored programs are compiled without tests' cache
        return Generator(*given, **options)

    monkeypatch.setattr(generate_lib, "Generator", unstored)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)  # no messages of waits on a busy machine

    def command(*flags, workdir=workdir):
        arguments = [f"--workdir={workdir}", "--num_tokens=6", *flags]
        return command_line.status(generate_lib.main, arguments), *capsys.readouterr()

    return command
