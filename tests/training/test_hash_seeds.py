"""Lowered programs do not depend on the order of sets, which differs between processes."""

import json
import os
import subprocess
import sys

import pytest

from kvjax.foundation.checkout import ROOT
from tests import quick

SEEDS = (1, 3)  # with these, sets of mesh axes iterate in different orders


def start(seed: int, selection: str) -> subprocess.Popen:
    """Starts `python -m tests.lowered` with eight CPU devices and a hash seed."""
    settings = dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", PYTHONHASHSEED=str(seed))
    settings |= quick.cpu_devices(8)
    command = [sys.executable, "-m", "tests.lowered", selection]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, **pipe)


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["quick", "all"])
def test_programs(selection):
    """Compares the text of programs on several meshes, with and without their source lines."""
    processes = [start(seed, selection) for seed in SEEDS]
    outputs = [process.communicate(timeout=540) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    first, second = (json.loads(output) for output, _ in outputs)
    assert len(first) == (8 if selection == "quick" else 8 * (5 + 2 + 2))
    assert first == second
