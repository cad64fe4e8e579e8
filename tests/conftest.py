"""Eight CPU devices, a compilation cache, mechanisms, weights without a zero, runs, buckets."""

import gc
import os

gc.disable()  # until all tests are collected
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_theirs = {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "XLA_FLAGS", "NPROC")}
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # others wait for work in a loop, beside another worker

from tests import draw
from tests import quick

quick.keep_to_own_cores()
os.environ.update(quick.cpu_devices(8, f"{quick.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"))

import math
import signal

from etils import epath
import filelock
from flax import nnx
import fsspec
import jax
import numpy as np
import psutil
import pytest

from kvjax.attention import FactoredConfig
from kvjax.attention import GLAConfig
from kvjax.attention import GroupedConfig
from kvjax.attention import GTAConfig
from kvjax.attention import MFAKRConfig
from kvjax.attention import MLAConfig
from kvjax.attention import MLALRKVConfig
from kvjax.attention import MLRAConfig
from kvjax.attention import PaperMLAConfig
from kvjax.attention import SharedKVConfig
from kvjax.attention import TPAConfig
from kvjax.foundation import runtime
from kvjax.layers.weight import Axes
from tests.buckets import Buckets

jax.config.update("jax_numpy_rank_promotion", "raise")
for _key, _value in quick.compilation_cache().items():
    jax.config.update(_key, _value)
    os.environ.setdefault(_key.upper(), str(_value))  # what tests start finds it, and adds to it
jax.devices()  # reads them; processes that tests start see the machine as it is
for _name, _value in _theirs.items():
    os.environ.pop(_name)
    if _value is not None:
        os.environ[_name] = _value

# Under nohup, or in the background of a script, these are ignored, also by what tests start.
for _signal in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, lambda number, frame: None)


# Files with cases of minutes: begun last, one of them would keep one worker busy and others idle.
_FIRST = ("test_notebooks.py", "test_mid_training.py", "test_fuzz.py", "test_multihost.py")
_FIRST += ("test_scaling_table.py",)  # compiles a model, where it does


def pytest_addoption(parser):
    draw.add_options(parser)


def pytest_terminal_summary(terminalreporter, config):
    if line := draw.said(config):
        terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)  # when what other markers leave out is out
def pytest_collection_modifyitems(config, items):
    draw.deselect(config, items)
    items.sort(key=lambda item: item.path.name not in _FIRST)  # stable


def pytest_collection_finish(session):
    """What imports have left stays; tracing leaves much, and the collector would take 8 %."""
    gc.freeze()
    gc.set_threshold(2000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.enable()  # also in the process that only tells workers what to run


_ROOM = 1.4e9  # bytes that a worker may hold before it forgets what it compiled


@pytest.fixture(scope="module", autouse=True)
def no_program_outlives_its_tests():
    """All programs together are gigabytes: a worker that is full forgets its own."""
    yield
    if psutil.Process().memory_info().rss > _ROOM:
        jax.clear_caches()
        gc.collect()


MECHANISMS = {
    "mha": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0)),
    "gqa": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0)),
    "mqa": (GroupedConfig, dict(num_kv_heads=1, num_bases=1, rank=0)),
    "lrkv": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3)),
    "lrkv_gqa": (GroupedConfig, dict(num_heads=8, num_kv_heads=4, num_bases=2, rank=3)),
    "lrkv_latent_bias": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=1, rank=3, bias=True, latent_bias=True, out_bias=False),
    ),
    "thin_keys": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0, key_dim=4)),
    "lrkv_wide_keys": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3, value_dim=6)),
    "lrkv_shared_rope": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=1, rank=3, value_dim=6, rope="shared"),
    ),
    "kv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="kv")),
    "kv_tied_gqa": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0, tie="kv")),
    "lrkv_kv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3, tie="kv")),
    "qk_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="qk", value_dim=6)),
    "qkv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="qkv")),
    "qk_tied_plus": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=4, rank=0, tie="qk", position_channels=6),
    ),
    "qkv_tied_plus": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=4, rank=0, tie="qkv", position_channels=6),
    ),
    "factored": (FactoredConfig, dict(num_kv_heads=4, num_latents=4, key_rank=3, value_rank=0)),
    "factored_joint": (
        FactoredConfig,
        dict(num_heads=8, num_kv_heads=4, num_latents=1, key_rank=5, value_rank=3, value_dim=6),
    ),
    "factored_values": (
        FactoredConfig,
        dict(num_kv_heads=2, num_latents=2, key_rank=0, value_rank=3),
    ),
    "mla": (MLAConfig, dict(latent_dim=10, rope_key_dim=4, value_dim=6)),
    "mla_lrkv": (
        MLALRKVConfig,
        dict(latent_dim=6, rope_key_dim=4, value_dim=6, rank=3),
    ),
    "mla_paper": (PaperMLAConfig, dict(latent_dim=10)),
    "mfa": (
        GroupedConfig,
        dict(num_kv_heads=1, num_bases=1, rank=0, query_rank=5, output_gate=True),
    ),
    "gla": (
        GLAConfig,
        dict(num_latents=2, latent_dim=6, rope_key_dim=4, value_dim=6, query_rank=5),
    ),
    "mlra": (
        MLRAConfig,
        dict(num_branches=2, num_latents=2, latent_dim=6, rope_key_dim=4, latent_scale=True),
    ),
    "gta": (GTAConfig, dict(num_kv_heads=2, rope_key_dim=4)),
    "shared_kv": (SharedKVConfig, dict(num_kv_heads=2, rope_key_dim=4)),
    "mfa_kr": (MFAKRConfig, dict(num_kv_heads=2)),
    "tpa": (
        TPAConfig,
        dict(query_factors=3, key_rank=2, value_rank=3, value_dim=6),
    ),
}
WITHOUT_VALUE_DIM = ("gta", "shared_kv", "mfa_kr")  # values have a key's channels
FAMILIES = ("mha", "gqa", "mqa", "lrkv", "mla", "mla_paper")


@pytest.fixture(scope="session")
def make_mechanism():
    """A function of a name above and config keys: the mechanism's config, 4 heads of 8."""

    def make(name, **keys):
        cls, own = MECHANISMS[name]
        dims = dict(key_dim=8) if name in WITHOUT_VALUE_DIM else dict(key_dim=8, value_dim=8)
        return cls(**(dict(num_heads=4) | dims | own | keys))

    return make


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


def random_values(state, seed=0, dtype=np.float64):
    """Values for every variable of an nnx.State, none of them zero, as a pure dict.

    A recipe starts with zeros in its output projections; with those, everything passes. Matrices
    are N(0, 1/in); vectors (gains, biases) lie in [0.5, 1.5].
    """
    rng = np.random.default_rng(seed)

    def draw(variable):
        axes, shape = Axes.parse(variable.axes), variable.shape
        if not axes.is_matrix and "V" not in axes.names and "T" not in axes.names:
            return rng.uniform(0.5, 1.5, shape).astype(dtype)
        first = len(shape) - len(axes.reduction) - len(axes.output)
        fan_in = math.prod(shape[first : first + len(axes.reduction)])
        return (rng.standard_normal(shape) / math.sqrt(fan_in)).astype(dtype)

    is_variable = lambda v: isinstance(v, nnx.Variable)
    values = nnx.to_pure_dict(jax.tree.map(draw, state, is_leaf=is_variable))
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(values))
    return values


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
    """A run of 10 steps, with checkpoints of steps 8 and 10; its prepared data is gone.

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
    """What that run trained."""
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
