"""Worker processes: they write the same bytes as one process, and killed ones lose nothing."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest

from kvjax.data import pool, prepare
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import DataError, UserError
from tests.data.corpora import PART, begun, files, num_parts
from tests.job import Job

# A preparation in a process of its own, of small parts.
PREPARE = f"""
import sys
from kvjax.data import config, parts, prepare
if __name__ == "__main__":
    parts.PART_BYTES, parts._ROWS = {PART}, 1
    path = prepare.prepare(config.DataConfig(**eval(sys.argv[1])), workers=int(sys.argv[2]))
    print(path)
"""


def start(config, workers, script) -> subprocess.Popen:
    """Starts a script like PREPARE in a process of its own."""
    command = [sys.executable, str(script), repr(dataclasses.asdict(config)), str(workers)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_training_processes_share_it(config, expected, tmp_path):
    arguments = json.dumps([dataclasses.asdict(config), PART])
    job = Job([["tests.job", "prepared", arguments]] * 2, devices=1, logs=tmp_path / "logs")
    outputs = [json.loads(o.splitlines()[-1]) for o in job.succeed()]
    count = num_parts(config)
    assert [o["made"] for o in outputs] == [list(range(0, count, 2)), list(range(1, count, 2))]
    assert outputs[0]["path"] == outputs[1]["path"] and files(outputs[0]["path"]) == expected


@pytest.mark.slow
def test_kills_change_nothing_and_no_worker_outlives_its_preparation(config, expected, tmp_path):
    """Kills four preparations at random moments, half of them while workers start."""
    datasets, limit = tmp_path / "cache" / "datasets", tmp_path / "limit"
    held = tmp_path / "held.py"  # at most about four parts per attempt, on any machine
    held.write_text(
        "import pathlib, time\nfrom kvjax.data import tokenized_part\n"
        "write = tokenized_part.write\n"
        "def hold(*args, **kwargs):\n"
        f"    while len(list(pathlib.Path({str(datasets)!r}).glob('.under-way-*/done/*')))"
        f" >= int(pathlib.Path({str(limit)!r}).read_text()):\n"
        "        time.sleep(0.05)\n"
        "    return write(*args, **kwargs)\n"
        f"tokenized_part.write = hold\n{PREPARE}"
    )
    rng, done, workers = random.Random(0), [0], []
    for i in range(4):
        limit.write_text(str(4 * (i + 1)))
        process = start(config, 3, held)
        while i % 2 and len(list(datasets.glob(".under-way-*/done/*"))) == done[-1]:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3 if i % 2 else 3))
        workers += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        done.append(len(list(datasets.glob(".under-way-*/done/*"))))
        assert not list(datasets.glob("[!.]*"))
    assert done == sorted(done) and done[-1] >= 2  # no finished part was lost
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert workers and not alive
    assert files(prepare.prepare(config, workers=2)) == expected
    assert not list(datasets.glob(".under-way-*"))


class _Workers(concurrent.futures.Executor):
    """Runs the work of a process pool in this process, with pickled arguments."""

    def __init__(self, count, context, *, initializer, initargs):
        self.count, self.method, self.ended = count, context.get_start_method(), None
        initializer(*pickle.loads(pickle.dumps(initargs)))

    def submit(self, function, part):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(pickle.loads(pickle.dumps(part))))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **options):
        self.ended = options


def test_what_workers_are_given(config, monkeypatch):
    """Covers how workers end, too: with their caller, or when one of them fails."""
    (pathlib.Path(config.source) / "2.jsonl").unlink()
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    job = begun(config)
    pools, calls, killed = [], [], []

    def make(*args, **options):
        pools.append(_Workers(*args, **options))
        return pools[-1]

    monkeypatch.setattr(pool.concurrent.futures, "ProcessPoolExecutor", make)
    monkeypatch.setattr(pool.signal, "signal", lambda *args: calls.append(args))

    def thread(*, target, daemon):
        return types.SimpleNamespace(start=lambda: calls.append((target, daemon)))

    monkeypatch.setattr(pool.threading, "Thread", thread)
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")

    def child(name):
        return types.SimpleNamespace(kill=lambda: killed.append(name))

    children = [child("another's")]
    monkeypatch.setattr(pool.multiprocessing, "active_children", lambda: list(children))
    made_parts, count = [], len(job.corpus.parts)
    keys = dict(skip_broken=False, made=made_parts.append)

    def make_parts(parts, workers):
        return pool.make(config, job.tokenizer, parts, job.partial, workers=workers, **keys)

    make_parts(job.corpus.parts[:3], workers=2)
    assert sorted(part.index for part in made_parts) == [0, 1, 2]
    assert job.partial.missing() == list(range(3, count))
    (executor,) = pools
    assert (executor.count, executor.method) == (2, "spawn")
    assert executor.ended == dict(wait=True, cancel_futures=True)
    assert calls == [(signal.SIGINT, signal.SIG_IGN), (pool._end_with_parent, True)]
    assert os.environ["RAYON_NUM_THREADS"] == "1" and pool._arguments[1]._threads == 1
    monkeypatch.setattr(pool.os, "_exit", calls.append)
    parent = types.SimpleNamespace(join=lambda: calls.append("the caller ended"))
    monkeypatch.setattr(pool.multiprocessing, "parent_process", lambda: parent)
    pool._end_with_parent()
    assert calls[2:] == ["the caller ended", 1]
    for error, kind, message in (
        (concurrent.futures.process.BrokenProcessPool("x"), UserError, "a worker of the prep.*was"),
        (DataError("a bad source"), DataError, "^a bad source$"),
    ):

        def fails(*args, error=error, **kwargs):
            children.append(child("a worker"))
            raise error

        monkeypatch.setattr(pool, "make_part", fails)
        with pytest.raises(kind, match=message):
            make_parts(job.corpus.parts[3:], workers=99)
        assert pools[-1].count == count - 3 and pools[-1].ended
    assert set(killed) == {"a worker"}
    make_parts(job.corpus.parts[:0], workers=2)
    assert len(pools) == 3


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_and_what_is_done_stays(config, tmp_path):
    die = "import os, signal\nfrom kvjax.data import pool\n"
    die += "make = pool.make_part\ndef die(config, part, *args, **kwargs):\n"
    die += "    if part.index == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
    die += "    make(config, part, *args, **kwargs)\n"
    die += "pool.make_part = die\n"
    script = tmp_path / "die.py"
    script.write_text(die + PREPARE)
    _, stderr = start(config, 2, script).communicate()
    assert "a worker of the preparation was killed" in stderr, stderr
    assert list(config.root.glob("datasets/.under-way-*/done/*"))
    prepare.prepare(config, workers=1)
