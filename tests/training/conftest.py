"""A run on one device, from its first step to its sample."""

import contextlib
import io
import types

from etils import epath
import jax
import pytest

from kvjax.training import loop
from tests import runs


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
