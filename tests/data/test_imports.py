"""Preparing data imports neither JAX nor libraries that need it, so that workers stay small."""

import json
import subprocess
import sys

import pytest

from kvjax.foundation.checkout import ROOT

NOT_NEEDED = ("jax", "jaxlib", "flax", "grain", "orbax", "optax", "matplotlib", "tensorflow")
IMPORTED = f"print([name for name in {NOT_NEEDED} if name in sys.modules])"


def imported(program, *arguments):
    """Returns the modules of NOT_NEEDED that a program has imported at its end."""
    command = [sys.executable, "-c", f"import sys\n{program}\n{IMPORTED}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_importing_the_preparation_imports_nothing_of_jax():
    assert imported("import kvjax.data.prepare, kvjax.data.pool") == "[]"


@pytest.mark.slow
def test_preparing_imports_nothing_of_jax(tmp_path):
    """Reads Parquet and JSON lines and trains a tokenizer, in one process."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"text {i} of a few words\n" for i in range(200)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "b.jsonl").write_text(lines)
    program = """
from kvjax.data import prepare
prepare.main([
    f"--source={sys.argv[1]}/a.parquet,{sys.argv[1]}/b.jsonl", f"--output={sys.argv[1]}/prepared",
    "--validation_fraction=0.1", "--vocab_size=300", "--sequence_length=16"])
"""
    assert imported(program, str(tmp_path)) == "[]"
