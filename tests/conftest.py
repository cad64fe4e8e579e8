"""Environment, options, order and fixtures of all tests.

The controller of several workers runs no test and does not import JAX.
"""

import gc
import importlib
import os
import signal

import pytest

from tests import draw, quick

gc.disable()  # until all tests are collected
_before = {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "XLA_FLAGS", "NPROC")}
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would spin beside another worker
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(quick.cpu_devices(8, f"{quick.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"))


def _interrupted(number, frame):
    """Does nothing: a handler, unlike SIG_IGN, is not inherited by subprocesses."""


# Under nohup, or in the background of a script, these signals are ignored.
for _signal in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, _interrupted)


# Files with cases of minutes run first, so that no worker has one of them left at the end.
# test_generate.py trains the run that tests of other workers wait for.
_FIRST = (
    "test_generate.py",
    "test_notebooks.py",
    "test_mid_training.py",
    "test_fuzz.py",
    "test_multihost.py",
    "test_scaling_table.py",  # may compile a model
)


def pytest_addoption(parser):
    draw.add_options(parser)


def pytest_configure(config):
    """Loads fixtures, and with them JAX; then restores the environment for subprocesses."""
    draw.check_options(config)
    if hasattr(config, "workerinput") or not _starts_workers(config):
        config.pluginmanager.register(importlib.import_module("tests.fixtures"))
    for name, value in _before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _starts_workers(config) -> bool:
    """Returns True in the controller of pytest-xdist."""
    return bool(getattr(config.option, "tx", None)) and not config.option.collectonly


def pytest_terminal_summary(terminalreporter, config):
    if line := draw.summary(config):
        terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)  # the draw is among the cases that -m and -k select
def pytest_collection_modifyitems(config, items):
    def rank(item):
        name = item.path.name
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    items.sort(key=rank)  # stable
    draw.deselect(config, items)


def pytest_collection_finish(session):
    """Exempts objects of imports from garbage collection, which would take 8 % of the time."""
    gc.freeze()
    gc.set_threshold(2000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.enable()  # in the controller too
