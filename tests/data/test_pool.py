"""Worker processes write the same bytes as one process; killed ones lose no finished part."""

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
from tests.data.corpora import PART, begin_preparation, files, num_parts
from tests.job import Job

# A script that prepares data in small parts; its arguments: repr of a config's dict, and workers.
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
def test_two_training_processes_share_a_preparation(config, expected, tmp_path):
    arguments = json.dumps([dataclasses.asdict(config), PART])
    job = Job([["tests.job", "prepared", arguments]] * 2, devices=1, logs=tmp_path / "logs")
    results = [json.loads(output.splitlines()[-1]) for output in job.succeed()]
    count = num_parts(config)
    assert [result["made"] for result in results] == [
        list(range(0, count, 2)),
        list(range(1, count, 2)),
    ]
    assert results[0]["path"] == results[1]["path"] and files(results[0]["path"]) == expected


@pytest.mark.slow
def test_kills_change_nothing_and_no_worker_outlives_its_preparation(config, expected, tmp_path):
    """Kills four preparations at random moments, half of them while workers start."""
    datasets, limit_file = tmp_path / "cache" / "datasets", tmp_path / "limit"
    script = tmp_path / "prepare_up_to_limit.py"
    # Workers wait while as many parts are finished as the limit allows (about four more in each
    # attempt): however fast the machine is, no attempt ends before it is killed.
    script.write_text(
        "import pathlib, time\nfrom kvjax.data import tokenized_part\n"
        "write = tokenized_part.write\n"
        "def wait_then_write(*args, **kwargs):\n"
        f"    while len(list(pathlib.Path({str(datasets)!r}).glob('.under-way-*/done/*')))"
        f" >= int(pathlib.Path({str(limit_file)!r}).read_text()):\n"
        "        time.sleep(0.05)\n"
        "    return write(*args, **kwargs)\n"
        f"tokenized_part.write = wait_then_write\n{PREPARE}"
    )
    rng, finished_counts, workers = random.Random(0), [0], []
    for i in range(4):
        limit_file.write_text(str(4 * (i + 1)))
        process = start(config, 3, script)
        while i % 2 and len(list(datasets.glob(".under-way-*/done/*"))) == finished_counts[-1]:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3 if i % 2 else 3))
        workers += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        finished_counts.append(len(list(datasets.glob(".under-way-*/done/*"))))
        assert not list(datasets.glob("[!.]*"))
    assert finished_counts == sorted(finished_counts)  # no finished part was lost
    assert finished_counts[-1] >= 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert workers and not alive
    assert files(prepare.prepare(config, workers=2)) == expected
    assert not list(datasets.glob(".under-way-*"))


class _InProcessExecutor(concurrent.futures.Executor):
    """Runs the work of a process pool in this process, with pickled arguments."""

    def __init__(self, count, context, *, initializer, initargs):
        self.count, self.start_method = count, context.get_start_method()
        self.shutdown_options = None
        initializer(*pickle.loads(pickle.dumps(initargs)))

    def submit(self, function, part):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(pickle.loads(pickle.dumps(part))))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **options):
        self.shutdown_options = options


def test_arguments_and_end_of_workers(config, monkeypatch):
    """Workers end with the process that started them, and are killed if one of them fails."""
    (pathlib.Path(config.source) / "2.jsonl").unlink()
    config = dataclasses.replace(config, tokenizer="byte", vocab_size=257)
    preparation = begin_preparation(config)
    executors, calls, killed = [], [], []

    def make_executor(*args, **options):
        executors.append(_InProcessExecutor(*args, **options))
        return executors[-1]

    monkeypatch.setattr(pool.concurrent.futures, "ProcessPoolExecutor", make_executor)
    monkeypatch.setattr(pool.signal, "signal", lambda *args: calls.append(args))

    def thread(*, target, daemon):
        return types.SimpleNamespace(start=lambda: calls.append((target, daemon)))

    monkeypatch.setattr(pool.threading, "Thread", thread)
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")

    def child(name):
        return types.SimpleNamespace(kill=lambda: killed.append(name))

    children = [child("not a worker")]
    monkeypatch.setattr(pool.multiprocessing, "active_children", lambda: list(children))
    parts, partial = preparation.corpus.parts, preparation.partial
    made_parts, count = [], len(parts)
    keys = dict(skip_broken=False, made=made_parts.append)

    def make_parts(parts, workers):
        return pool.make(config, preparation.tokenizer, parts, partial, workers=workers, **keys)

    make_parts(parts[:3], workers=2)
    assert sorted(part.index for part in made_parts) == [0, 1, 2]
    assert partial.missing() == list(range(3, count))
    (executor,) = executors
    assert (executor.count, executor.start_method) == (2, "spawn")
    assert executor.shutdown_options == dict(wait=True, cancel_futures=True)
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

        def fail(*args, error=error, **kwargs):
            children.append(child("a worker"))
            raise error

        monkeypatch.setattr(pool, "make_part", fail)
        with pytest.raises(kind, match=message):
            make_parts(parts[3:], workers=99)
        assert executors[-1].count == count - 3 and executors[-1].shutdown_options
    assert set(killed) == {"a worker"}
    make_parts(parts[:0], workers=2)
    assert len(executors) == 3


@pytest.mark.slow
def test_a_killed_worker_is_reported_and_finished_parts_stay(config, tmp_path):
    script = tmp_path / "kill_at_part_7.py"
    script.write_text(
        "import os, signal\nfrom kvjax.data import pool\n"
        "make_part = pool.make_part\n"
        "def kill_at_part_7(config, part, *args, **kwargs):\n"
        "    if part.index == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    make_part(config, part, *args, **kwargs)\n"
        f"pool.make_part = kill_at_part_7\n{PREPARE}"
    )
    _, stderr = start(config, 2, script).communicate()
    assert "a worker of the preparation was killed" in stderr, stderr
    assert list(config.root.glob("datasets/.under-way-*/done/*"))
    prepare.prepare(config, workers=1)
