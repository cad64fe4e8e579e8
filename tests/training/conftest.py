"""A run on one device, from its first step to its sample; what runs of one kind compile once."""

import contextlib
import dataclasses
import functools
import io
import types

from etils import epath
import jax
import pytest

from kvjax.training import loop
from kvjax.training import program
from tests import runs

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
def whole(source, tmp_path_factory):
    """The workdir of a run as the recipe has it, from its first step to its sample; its figures."""
    workdir = tmp_path_factory.mktemp("whole")
    config = runs.small_config(*source, sample_tokens=4, log_every=2)
    config.compute.update(unroll="auto", query_chunk=-1, loss_chunks=8)
    config.optimizer.newton_schulz_steps = 5
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(jax, "devices", lambda *a, real=jax.devices: real(*a)[:1])
        last = loop.train(config, epath.Path(workdir))
    return types.SimpleNamespace(
        config=config, workdir=workdir, last=last, output=output.getvalue()
    )
