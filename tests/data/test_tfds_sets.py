"""TFDS data sets by name, as a user builds them: the commands are those that messages print.

The data set is one of TFDS's catalogue that needs no network: files that users download by hand.
"""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from kvjax.data import source_kinds
from kvjax.foundation.checkout import ROOT
from tests import quick, runs

NAME = "newsroom"
COMMAND = re.compile(r"python -m (kvjax\.data\.prepare .*)$")
WORDS = ("title", "url", "date", "summary", "density_bin", "coverage_bin", "compression_bin")
OTHERS = dict.fromkeys(WORDS, "w") | dict.fromkeys(("density", "coverage", "compression"), 1.0)
AS_TFRECORD = f"""
import sys, tensorflow_datasets as tfds
tfds.builder({NAME!r}, data_dir=sys.argv[1]).download_and_prepare(file_format="tfrecord")
"""


def write_manual_files(folder):
    """The files that TFDS's instructions for this data set name; returns the folder."""
    manual, rng = folder / "downloads" / "manual", random.Random(0)
    manual.mkdir(parents=True)
    for name, count in (("train", 200), ("dev", 9), ("test", 9)):
        rows = [
            dict(text=f"{name} {i} {rng.choices('etaoin ', k=200)}", **OTHERS) for i in range(count)
        ]
        (manual / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(folder, *arguments, status=0):
    """Runs Python with TFDS_DATA_DIR; returns standard output and error."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | dict(TFDS_DATA_DIR=str(folder), XLA_FLAGS=quick.XLA_FLAGS),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == status, result.stdout
    return result.stdout


def told_command(output):
    """The arguments of the command in the message that ends a command's output."""
    message = output.strip().splitlines()[-1]
    assert message.startswith("kvjax: ") and "Traceback" not in output, output
    return ["-m", *shlex.split(COMMAND.search(message)[1])]


@pytest.fixture
def config(tmp_path):
    """A config of a run on the data set."""
    path = tmp_path / "config.py"
    settings = dict(source=f"tfds:{NAME}", directory=str(tmp_path / "data"))
    path.write_text(runs.CONFIG_FILE.format(**settings))
    return path


def training(config, workdir):
    """A run of 40 steps with a checkpoint every 10."""
    return "-m", "kvjax.main", f"--config={config}", f"--workdir={workdir}"


@pytest.mark.slow
def test_a_set_that_is_missing_is_built_and_a_killed_run_on_it_resumes(tmp_path, config):
    folder = write_manual_files(tmp_path / "tfds")
    output = run(folder, *training(config, tmp_path / "whole"), status=2)
    assert f"{folder}/{NAME}/1.0.0 does not exist" in output
    run(folder, *told_command(output))
    run(folder, *training(config, tmp_path / "whole"))
    environment = os.environ | dict(TFDS_DATA_DIR=str(folder), XLA_FLAGS=quick.XLA_FLAGS)
    command = [sys.executable, *training(config, tmp_path / "killed")]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while child.poll() is None and len(runs.records(tmp_path / "killed")) < 12:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert len(runs.records(tmp_path / "killed")) < 40
    run(folder, *training(config, tmp_path / "killed"))
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("killed", "whole")]
    assert metrics[0] == metrics[1]


@pytest.mark.slow
def test_a_set_of_tfrecord_is_converted_and_trains(tmp_path, config, monkeypatch):
    """Skipped without tensorflow, which CI does not install (1.9 GB): run `make test-tfds`."""
    pytest.importorskip("tensorflow")
    folder = write_manual_files(tmp_path / "tfds")
    run(folder, "-c", AS_TFRECORD, str(folder))
    output = run(folder, *training(config, tmp_path / "run"), status=2)
    assert f"is prepared as tfrecord in {folder}/{NAME}/1.0.0" in output
    run(folder, *told_command(output))
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    source = source_kinds.open_source(f"tfds:{NAME}", "text", "")
    lines = (folder / "downloads" / "manual" / "train.jsonl").read_text().splitlines()
    texts = {json.loads(line)["text"] for line in lines}
    assert len(texts) == 200 and {piece.text for piece in source.pieces("all", 0.0)} == texts
    run(folder, *training(config, tmp_path / "run"), "--config.train.num_steps=2")
