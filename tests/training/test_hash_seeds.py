"""The order of a set reaches no program and no file: it is drawn anew in every process."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from kvjax.foundation.checkout import ROOT
from tests import quick, runs
from tests.training.test_resume import assert_bitwise_equal, final_state

SEEDS = (1, 3)  # of which the sets of mesh axes have another order


def start(seed: int, *arguments: str, **environment: str) -> subprocess.Popen:
    """`python -m` with eight CPU devices and a hash seed."""
    own = dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", PYTHONHASHSEED=str(seed))
    own |= quick.cpu_devices(8)
    command = [sys.executable, "-m", *arguments]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | own | environment, **pipe)


def finish(process: subprocess.Popen) -> str:
    output, errors = process.communicate(timeout=540)
    assert process.returncode == 0, errors
    return output


@pytest.mark.slow
@pytest.mark.parametrize("how", ["quick", "all"])
def test_programs(how):
    """Lowered for several meshes: the text, and the text with the lines of Python it is from."""
    processes = [start(seed, "tests.lowered", how) for seed in SEEDS]
    one, two = (json.loads(finish(process)) for process in processes)
    assert len(one) == (8 if how == "quick" else 8 * (5 + 2 + 2))
    assert not {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)}


@pytest.fixture
def config(tmp_path):
    """A tokenizer is trained; folders are those of the process that asks."""
    path = tmp_path / "config.py"
    source = runs.write_text(tmp_path / "text.txt")
    text = runs.CONFIG_FILE.format(source=source, directory="")
    path.write_text(
        text.replace("return ", "config = ")
        + "    config.data.update(tokenizer='bpe', vocab_size=272)\n"
        + "    config.train.update(num_steps=6, eval_every=6, checkpoint_every=6)\n"
        + "    config.train.sample_tokens = 4\n"
        + "    return config\n"
    )
    return path


def files(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns a run's files without times and without checkpoints, whose arrays are compared."""
    timed = ("timing.jsonl", "curves.png", ".lock")
    paths = (p for p in folder.rglob("*") if p.is_file() and p.name not in timed)
    parts = {path: path.relative_to(folder).parts for path in paths}
    return {
        "/".join(names): path.read_bytes()
        for path, names in parts.items()
        if not {"checkpoints", "events"} & {*names}
    }


@pytest.mark.slow
def test_runs(config, tmp_path):
    """One launched twice: the same files and bits; the second has nothing to compile."""
    compiled, seen = tmp_path / "compiled", []
    for seed in SEEDS:
        workdir, cache = tmp_path / f"run-{seed}", tmp_path / f"cache-{seed}"
        mesh = [f"--config.mesh.{axis}=2" for axis in ("data", "fsdp", "sequence")]
        given = ["kvjax.main", f"--config={config}", f"--workdir={workdir}", *mesh]
        jax = dict(
            JAX_COMPILATION_CACHE_DIR=str(compiled),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )
        finish(start(seed, *given, KVJAX_CACHE=str(cache), **jax))
        seen.append({path.name for path in compiled.glob("*-cache")})
    assert len(seen[0]) > 3 and seen[1] == seen[0]
    one, two = (tmp_path / f"run-{seed}" for seed in SEEDS)
    written = files(one)
    assert {"config.json", "config.txt", "dataset.json", "tokenizer.json"} < written.keys()
    assert {"metrics.jsonl", "sample.txt"} < written.keys()
    assert files(two) == written
    assert_bitwise_equal(final_state(one), final_state(two))
    prepared = [files(tmp_path / f"cache-{seed}") for seed in SEEDS]
    assert prepared[0] == prepared[1] and len(prepared[0]) > 5
