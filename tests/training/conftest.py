"""Fixtures of runs: one device, programs that equal runs share, and the run of all tests."""

import dataclasses
import functools
import json
import types

import jax
import pytest

from kvjax.training import loop, program
from tests import trained_run

# Keys of config.train that set when things happen: programs do not depend on them.
WHEN = "log_every eval_every checkpoint_every keep_checkpoints snapshot_every stop_after".split()


@pytest.fixture(scope="session", autouse=True)
def compiled_once():
    """Shares programs between runs whose programs are equal, unless a test replaces a function.

    Tests in processes of their own check that newly compiled programs give the same numbers.
    """
    programs = {}
    any_time = {key: getattr(program.TrainConfig, key) for key in WHEN}

    def shared(experiment, *others):
        if not experiment.train.separate:  # then programs do not depend on the BOS
            others = others[:-1]
        train = dataclasses.replace(experiment.train, **any_time)
        key = (experiment.model, experiment.optimizer, experiment.data.sequence_length, train)
        key += (experiment.is_masked,)
        key += (*others, program.train_step, program.mean_loss, program.optax.apply_updates)
        if key not in programs:
            programs[key] = program.Program(experiment, *others)
            programs[key].lowered_step = functools.cache(programs[key].lowered_step)
        return programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Program", shared)
        yield


@pytest.fixture
def one_device(monkeypatch):
    """Hides all of JAX's devices but one."""
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])


@pytest.fixture(scope="session")
def whole(workdir):
    """The run that all tests share: its config, workdir, last figures and output."""
    output, last = (workdir.parent / name for name in ("output.txt", "last.json"))
    return types.SimpleNamespace(
        config=trained_run.config_of(workdir),
        workdir=workdir,
        last=json.loads(last.read_text()),
        output=output.read_text(),
    )
