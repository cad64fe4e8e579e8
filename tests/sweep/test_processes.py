"""Commands side by side: cores, failures, and what stops them."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvjax import distributed
from kvjax.foundation.checkout import ROOT
from kvjax.sweep import processes
from kvjax.sweep.processes import Job

# A job that saves its state when it is told to end, as training does.
_WAITS = 'trap "echo saved; exit 75" TERM; echo begun; while true; do sleep 0.05; done'
_SECONDS = 20.0


def _job(folder: pathlib.Path, name: str, script: str) -> Job:
    return Job(name, ["/bin/sh", "-c", script], folder / f"{name}.log")


def _until(done) -> None:
    deadline = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _has(log: pathlib.Path, word: str) -> bool:
    return log.exists() and word in log.read_text()


def test_jobs_run_side_by_side_each_on_cores_of_its_own(tmp_path, monkeypatch):
    every = sorted(os.sched_getaffinity(0))
    shares = [{every[0]}, {every[-1]}]
    monkeypatch.setattr(processes, "shares", lambda count: shares[:count])
    meets = "touch {0}; for i in $(seq 400); do test -e {1} && break; sleep 0.05; done; test -e {1}"
    cores = "; grep Cpus_allowed_list /proc/$$/status"
    a, b = tmp_path / "a", tmp_path / "b"
    jobs = [
        _job(tmp_path, "one", meets.format(a, b) + cores),
        _job(tmp_path, "two", meets.format(b, a) + cores),
        _job(tmp_path, "three", f"exit 3{cores}"),
        _job(tmp_path, "four", "printf 'step 1\\rkvjax: no room\\n\\n'; exit 2"),
        _job(tmp_path, "five", "kill -KILL $$"),
    ]
    ended = {job.name: why for job, why in processes.run(jobs, 2)}
    assert ended == dict(
        one="",
        two="",
        three="status 3: no output",
        four="status 2: kvjax: no room",
        five="SIGKILL: no output",
    )
    found = [(tmp_path / f"{name}.log").read_text().split()[-1] for name in ("one", "two")]
    assert found == [str(every[0]), str(every[-1])]


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 0, 2}, raising=False)
    assert processes.shares(2) == [{0, 4}, {2}]
    assert processes.shares(4) == [{0}, {2}, {4}, {0, 2, 4}]


@pytest.mark.parametrize("number", distributed.STATUS)
def test_a_signal_stops_jobs_and_starts_no_other(tmp_path, capfd, number):
    """Jobs save once, their own children end too, and other jobs are not started."""
    grandchild = f"sleep 60 & echo $! >{tmp_path / 'pid'}; {_WAITS}"
    jobs = [_job(tmp_path, "one", grandchild), _job(tmp_path, "two", _WAITS)]
    log, before = tmp_path / "one.log", signal.getsignal(number)

    def end():
        _until(lambda: _has(log, "begun"))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(SystemExit) as stopped:
        list(processes.run(jobs, 1))
    thread.join()
    assert stopped.value.code == distributed.STATUS[number]
    assert log.read_text().count("saved") == 1 and not (tmp_path / "two.log").exists()
    assert signal.getsignal(number) == before
    assert "stopped (one); run the same command to continue" in capfd.readouterr().err
    _until(lambda: not _lives(int((tmp_path / "pid").read_text())))


def _lives(pid: int) -> bool:
    """Returns True for a process that has not ended; one that nobody waits for has."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def test_a_consumer_that_fails_stops_jobs(tmp_path):
    jobs = [_job(tmp_path, "one", "true"), _job(tmp_path, "two", _WAITS)]
    ended = processes.run(jobs, 2)
    job, why = next(ended)
    assert (job.name, why) == ("one", "")
    _until(lambda: _has(tmp_path / "two.log", "begun"))
    ended.close()
    assert _has(tmp_path / "two.log", "saved")


def test_jobs_end_when_their_parent_is_killed(tmp_path):
    """Linux tells them: nobody else could."""
    text = f"""
import pathlib
from kvjax.sweep.processes import Job, run
list(run([Job("one", ["/bin/sh", "-c", {_WAITS!r}], pathlib.Path("one.log"))], 1))
"""
    environment = os.environ | dict(PYTHONPATH=str(ROOT))
    parent = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, env=environment)
    _until(lambda: _has(tmp_path / "one.log", "begun"))
    parent.kill()
    parent.wait()
    _until(lambda: _has(tmp_path / "one.log", "saved"))
