"""Fixtures of all tests, and JAX as they have it: mechanisms, weights, runs, buckets."""

import ctypes
import dataclasses
import gc
import os

from etils import epath
import filelock
from flax import nnx
import fsspec
import jax
import numpy as np
import psutil
import pytest

from kvjax.foundation import runtime
from tests import quick
from tests.buckets import Buckets
from tests.mechanisms import FAMILIES, MECHANISMS, random_values

jax.config.update("jax_numpy_rank_promotion", "raise")
for _key, _value in quick.compilation_cache().items():
    jax.config.update(_key, _value)
    os.environ.setdefault(_key.upper(), str(_value))  # what tests start finds it, and adds to it
jax.devices()  # reads XLA_FLAGS, which conftest.py has set for this process alone

_ROOM = 2.0e9  # bytes that a worker may hold before it forgets what it compiled


@pytest.fixture(scope="module", autouse=True)
def no_program_outlives_its_tests():
    """All programs together are gigabytes: a worker that is full forgets its own."""
    yield
    if psutil.Process().memory_info().rss > _ROOM:
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
            trim(0)  # else it counts as this process's still: each module would forget all again


@pytest.fixture(scope="session")
def make_mechanism():
    """A function of a name of MECHANISMS and config keys: the mechanism's config, 4 heads of 8."""

    def make(name, **keys):
        cls, own = MECHANISMS[name]
        known = {field.name for field in dataclasses.fields(cls)}
        sizes = dict(num_heads=4) | dict.fromkeys({"key_dim", "value_dim"} & known, 8)
        return cls(**(sizes | own | keys))

    return make


@pytest.fixture(scope="module")
def no_compilation_cache():
    """Disables JAX's compilation cache: programs for absent devices cannot be read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture(params=MECHANISMS)
def mechanism_name(request):
    """Every mechanism, and the shapes that only some of its code sees."""
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request):
    """One name per mechanism that the papers compare."""
    return request.param


@pytest.fixture
def x64():
    """64-bit types for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def randomise():
    """A function of a function that builds a module: (module, weights), no weight zero.

    The module is never computed, so nothing depends on its initialisation.
    """

    def build(make, *, seed=0, dtype=np.float64):
        graph, state = nnx.split(nnx.eval_shape(make))
        weights = random_values(state, seed, dtype)
        return nnx.merge(graph, jax.tree.map(jax.numpy.asarray, weights)), weights

    return build


# Runs are imported where they are used: what is broken there fails no other test.


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A text file, and a folder for the rows that runs prepare of it."""
    from tests import runs

    folder = tmp_path_factory.mktemp("source")
    return runs.write_text(folder / "text.txt"), str(folder / "data")


@pytest.fixture(scope="session")
def workdir(request, tmp_path_factory):
    """A run of 40 steps, with checkpoints of steps 30 and 40.

    All workers have the same: who needs it first trains it.
    """
    from tests import trained_run

    folder = tmp_path_factory.getbasetemp()
    among_workers = hasattr(request.config, "workerinput")
    folder = (folder.parent if among_workers else folder) / "trained"
    with filelock.FileLock(folder.with_suffix(".lock")):
        return trained_run.trained(folder)


@pytest.fixture(scope="session")
def loaded(workdir):
    """The model that the run of `workdir` trained."""
    from kvjax.workdir import trained

    return trained.load(epath.Path(workdir))


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The folder whose folder `x` is what epath finds at gs://x."""
    folder = tmp_path / "buckets"
    folder.mkdir()
    system = Buckets(str(folder), fsspec.filesystem("file", auto_mkdir=True))
    monkeypatch.setattr(type(epath.backend.fsspec_backend), "fs", lambda self, path: system)
    monkeypatch.setitem(runtime.BUCKETS, "gs", ("fsspec", ""))
    return folder
