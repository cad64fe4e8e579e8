"""A run on one device, from its first step to its sample; what runs of one kind compile once."""

import dataclasses
import functools
import json
import types

import jax
import pytest

from kvjax.training import loop, program
from tests import trained_run

# Keys of config.train that say when to do what, which is no part of a program.
WHEN = "log_every eval_every checkpoint_every keep_checkpoints snapshot_every stop_after".split()


@pytest.fixture(scope="session", autouse=True)
def compiled_once():
    """Runs whose programs are the same share them, unless a test puts another function in.

    That a program compiled anew gives the same numbers is tested in processes of their own.
    """
    made = {}
    any_time = {key: getattr(program.TrainConfig, key) for key in WHEN}

    def shared(experiment, *others):
        if not experiment.train.separate:  # then no program asks which token begins a document
            others = others[:-1]
        train = dataclasses.replace(experiment.train, **any_time)
        key = (experiment.model, experiment.optimizer, experiment.data.sequence_length, train)
        key += (experiment.is_masked,)
        key += (*others, program.train_step, program.mean_loss, program.optax.apply_updates)
        if key not in made:
            made[key] = program.Program(experiment, *others)
            made[key].lowered_step = functools.cache(made[key].lowered_step)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Program", shared)
        yield


@pytest.fixture
def one_device(monkeypatch):
    """JAX has one of its devices only."""
    monkeypatch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])


@pytest.fixture(scope="session")
def whole(workdir):
    """The run that all tests share, its config, workdir, last figures and what it printed."""
    output, last = (workdir.parent / name for name in ("output.txt", "last.json"))
    return types.SimpleNamespace(
        config=trained_run.config_of(workdir),
        workdir=workdir,
        last=json.loads(last.read_text()),
        output=output.read_text(),
    )
