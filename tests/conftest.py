"""What pytest is told of all tests: their environment, options, order, and fixtures.

Of several processes, the one that only tells workers what to run has no use for JAX.
"""

import gc
import importlib
import os
import re
import signal
import traceback

import pytest

from tests import draw, quick

gc.disable()  # until all tests are collected
_theirs = {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "XLA_FLAGS", "NPROC")}
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # others wait for work in a loop, beside another worker
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
quick.keep_to_own_cores()
os.environ.update(quick.cpu_devices(8, f"{quick.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"))

# Under nohup, or in the background of a script, these are ignored, also by what tests start.
for _signal in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, lambda number, frame: None)


# Files with cases of minutes: begun last, one of them would keep one worker busy and others idle.
_FIRST = ("test_notebooks.py", "test_mid_training.py", "test_fuzz.py", "test_multihost.py")
_FIRST += ("test_scaling_table.py",)  # compiles a model, where it does
# Its first test trains a run: tests of another worker that read it would wait for it.
_VERY_FIRST = "test_generate.py"


def pytest_addoption(parser):
    draw.add_options(parser)


def pytest_configure(config):
    """Loads fixtures, and with them JAX; what tests start sees the machine as it is."""
    draw.check_options(config)
    if _is_worker(config) or not _tells_workers(config):
        try:
            fixtures = importlib.import_module("tests.fixtures")
        except Exception as error:
            if _is_worker(config):
                raise  # after an exit, the others would say that there are no tests
            pytest.exit("".join(traceback.format_exception(error)), returncode=3)
        config.pluginmanager.register(fixtures)
    for name, value in _theirs.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _is_worker(config) -> bool:
    """Whether this is one of several processes of pytest-xdist that run tests."""
    return hasattr(config, "workerinput")


def _tells_workers(config) -> bool:
    """Whether other processes run the tests."""
    option = lambda name: getattr(config.option, name, None)  # none without pytest-xdist
    only_reads = option("collectonly") or option("showfixtures")
    return option("dist") not in (None, "no") and bool(option("tx")) and not only_reads


def pytest_terminal_summary(terminalreporter, config):
    if line := draw.said(config):
        terminalreporter.write_line(line)


class _FromTheEnd(pytest.Dir):
    """A folder whose last file is read first."""

    def collect(self):
        return reversed(list(super().collect()))


def pytest_collect_directory(path, parent):
    """Folders are read from both ends: each worker rewrites half of the asserts, where none are."""
    worker = getattr(parent.config, "workerinput", {}).get("workerid", "")
    if re.fullmatch(r"gw\d*[13579]", worker):
        return _FromTheEnd.from_parent(parent, path=path)
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """All workers have the same order; draws when what other markers leave out is out."""
    if _is_worker(config):
        items.sort(key=lambda item: item.path)
    rank = lambda name: 0 if name == _VERY_FIRST else 1 if name in _FIRST else 2
    items.sort(key=lambda item: rank(item.path.name))  # stable, as the other
    result = yield
    draw.deselect(config, items)
    return result


def pytest_collection_finish(session):
    """What imports have left stays; tracing leaves much, and the collector would take 8 %."""
    gc.freeze()
    gc.set_threshold(2000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.enable()  # also in the process that only tells workers what to run
