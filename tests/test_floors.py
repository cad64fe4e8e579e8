"""The linter of imports, which `make lint` runs, finds imports against the order of packages."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from kvjax.foundation.checkout import PACKAGE, ROOT
from tests import quick


@pytest.mark.parametrize(
    "file, line, message",
    quick.every(
        2,
        [
            ("kvjax/layers/norm.py", "", "0 broken"),
            (
                "kvjax/foundation/errors.py",
                "from kvjax.model import mlp",
                "kvjax.foundation is not allowed",
            ),
            (
                "kvjax/kernels/decode_attention/api.py",
                "import kvjax.kernels.profile.timing",
                "decode_att",
            ),
            (
                "kvjax/decoding/sampling.py",
                "from kvjax.decoding import text",
                "No circles in a folder BROKEN",
            ),
            ("kvjax/loose.py", "import json", "loose"),
            (
                "experiments/benchmarks/machine.py",
                "from experiments.tables import cards",
                "experiments.benchmarks is not allowed",
            ),
            (
                "kvjax/analysis/measures/logits.py",
                "from kvjax.analysis.page import draw",
                "kvjax.analysis.measures is not allowed to import kvjax.analysis.page",
            ),
        ],
        first=1,
    ),
)
def test_imports_that_do_not_point_down(tmp_path, file, line, message):
    for name in ("kvjax", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__", "results", "figures")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / file
    path.write_text(f"{path.read_text() if path.exists() else ''}\n{line}\n")
    linter = pathlib.Path(sys.executable).with_name("lint-imports")
    run = subprocess.run(
        [linter, "--no-cache", "--no-logo"], cwd=tmp_path, capture_output=True, text=True
    )
    assert message in " ".join(run.stdout.split()) and run.returncode == bool(line), run.stdout


def test_the_root_has_at_most_a_dozen_modules():
    assert len(list(PACKAGE.glob("*.py"))) <= 12
