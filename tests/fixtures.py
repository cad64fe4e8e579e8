"""Fixtures of all tests (mechanisms, weights, runs, buckets), and JAX's options."""

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
    os.environ.setdefault(_key.upper(), str(_value))  # subprocesses share the cache
jax.devices()  # reads XLA_FLAGS, which conftest.py has set for this process alone

_MAX_BYTES = 2.0e9  # memory of a worker from which on it drops its compiled programs


@pytest.fixture(scope="module", autouse=True)
def no_program_outlives_its_tests():
    """Drops a worker's compiled programs at _MAX_BYTES: all together they are gigabytes."""
    yield
    if psutil.Process().memory_info().rss > _MAX_BYTES:
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
            trim(0)  # else freed memory still counts, and every module would clear the caches


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
    """Names of all mechanisms, and of variants whose shapes take other paths through the code."""
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
    """A function that maps a module's constructor to (module, weights), no weight zero.

    The constructor is traced only, so nothing depends on its initialisation.
    """

    def build(make, *, seed=0, dtype=np.float64):
        graph, state = nnx.split(nnx.eval_shape(make))
        weights = random_values(state, seed, dtype)
        return nnx.merge(graph, jax.tree.map(jax.numpy.asarray, weights)), weights

    return build


# Modules that train are imported where they are used: an error there fails no other test.


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A text file, and a folder for the rows that runs prepare of it."""
    from tests import runs

    folder = tmp_path_factory.mktemp("source")
    return runs.write_text(folder / "text.txt"), str(folder / "data")


@pytest.fixture(scope="session")
def workdir(request, tmp_path_factory):
    """A run of 40 steps, with checkpoints of steps 30 and 40.

    All workers share it: the first that needs it trains it.
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
    """A folder whose subfolder `x` is the bucket gs://x for epath."""
    folder = tmp_path / "buckets"
    folder.mkdir()
    system = Buckets(str(folder), fsspec.filesystem("file", auto_mkdir=True))
    monkeypatch.setattr(type(epath.backend.fsspec_backend), "fs", lambda self, path: system)
    monkeypatch.setitem(runtime.BUCKETS, "gs", ("fsspec", ""))
    return folder
