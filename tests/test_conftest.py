"""Processes of one run of pytest: who has JAX, what tests start, the order that all agree on."""

import json
import os
import subprocess
import sys

import pytest

from kvjax.foundation.checkout import ROOT

FLAG = "--xla_cpu_enable_fast_min_max=false"  # as somebody may have set it
PROBE = """
import json, os, pathlib, sys
def pytest_collection_finish(session):
    worker = getattr(session.config, "workerinput", {}).get("workerid", "none")
    env = {k: os.environ.get(k) for k in ("OPENBLAS_NUM_THREADS", "XLA_FLAGS", "NPROC")}
    cases, files = [item.nodeid for item in session.items], []
    for name, module in sys.modules.items():
        if name.startswith("tests.layers.test_"):
            files.append(name)
    told = dict(jax="jax" in sys.modules, env=env, cases=cases, files=files)
    pathlib.Path(os.environ["PROBE"], worker).write_text(json.dumps(told))
def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        told = dict(jax="jax" in sys.modules)
        pathlib.Path(os.environ["PROBE"], "all").write_text(json.dumps(told))
"""


@pytest.fixture
def processes(tmp_path):
    """A function of options of pytest: by process what it has, with tests of two folders."""
    (tmp_path / "probe.py").write_text(PROBE)
    found = tmp_path / "found"
    found.mkdir()

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "probe", *options]
        command += ["tests/layers", "tests/cache", "-k", "rope or stripes"]
        env = os.environ | dict(PROBE=str(found), PYTHONPATH=str(tmp_path), XLA_FLAGS=FLAG)
        env.pop("NPROC", None)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        told = {f.name: json.loads(f.read_text()) for f in found.iterdir()}
        return told, done

    return run


@pytest.mark.slow
@pytest.mark.whole
def test_workers(processes):
    told, done = processes("-n", "2", "--collect-only")  # which reads in the process itself
    assert told["none"]["jax"] and done.returncode == 0
    told, done = processes("-n", "2", "-m", "not slow")
    assert done.returncode == 0, done.stdout
    assert not told["all"]["jax"]
    one, other = told["gw0"], told["gw1"]
    assert one["jax"] and other["jax"]
    for worker in (one, other):
        assert worker["env"]["XLA_FLAGS"] == FLAG and worker["env"]["NPROC"] is None
    assert one["cases"] == other["cases"] and len(one["cases"]) > 20
    assert one["files"] == other["files"][::-1] and len(one["files"]) > 3


@pytest.mark.slow
def test_what_is_broken_is_told_where_it_is(tmp_path, processes):
    (tmp_path / "filelock.py").write_text("None.broken\n")  # which the fixtures import
    for options in ([], ["-n", "2"]):
        _, done = processes(*options)
        said = done.stdout + done.stderr
        assert done.returncode not in (0, 5) and "filelock.py" in said, (done.returncode, said)
        assert options or "INTERNALERROR" not in said
