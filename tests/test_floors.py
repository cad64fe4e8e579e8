"""The linter of imports, which `make lint` runs, finds what would bring the house into disorder."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from kvjax.foundation.checkout import PACKAGE
from kvjax.foundation.checkout import ROOT
from tests import quick


@pytest.mark.parametrize(
    "file, line, said",
    quick.every(
        2,
        [
            ("layers/norm.py", "", "0 broken"),
            (
                "foundation/errors.py",
                "from kvjax.model import mlp",
                "kvjax.foundation is not allowed",
            ),
            (
                "kernels/decode_attention/api.py",
                "import kvjax.kernels.profile.timing",
                "decode_att",
            ),
            (
                "decoding/sampling.py",
                "from kvjax.decoding import text",
                "No circles in a folder BROKEN",
            ),
            ("loose.py", "import json", "loose"),
        ],
        first=1,
    ),
)
def test_imports_that_do_not_point_down(tmp_path, file, line, said):
    shutil.copytree(PACKAGE, tmp_path / "kvjax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "kvjax" / file
    path.write_text(f"{path.read_text() if path.exists() else ''}\n{line}\n")
    linter = pathlib.Path(sys.executable).with_name("lint-imports")
    run = subprocess.run(
        [linter, "--no-cache", "--no-logo"], cwd=tmp_path, capture_output=True, text=True
    )
    assert said in " ".join(run.stdout.split()) and run.returncode == bool(line), run.stdout


def test_the_root_has_at_most_a_dozen_modules():
    assert len(list(PACKAGE.glob("*.py"))) <= 12
