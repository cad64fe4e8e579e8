"""Runs commands side by side, each on its own cores. No command outlives this process."""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

from kvjax import distributed
from kvjax.foundation import command_line
from kvjax.sweep import child

_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Job:
    """A command, and the file that its output is appended to."""

    name: str
    command: Sequence[str]
    log: pathlib.Path


def run(jobs: Iterable[Job], parallel: int) -> Iterator[tuple[Job, str]]:
    """Runs up to `parallel` jobs at a time; must be called in the main thread.

    Ctrl-C, SIGTERM and SIGHUP are passed on to the jobs as SIGTERM. When the jobs have ended, this
    process exits with `distributed.STATUS`. A second signal ends this process and its jobs at once.

    Args:
      jobs: an iterator is advanced only when a job can start.

    Yields:
      Each job when it has ended, with one line on its failure, or "" if it succeeded.
    """
    free, waiting, running = shares(parallel), iter(jobs), {}
    interruption = distributed.Interruption()
    with interruption.handling_signals():
        try:
            while not interruption.should_stop(step=0):
                while free and (job := next(waiting, None)):
                    cores = free.pop(0)
                    running[job.name] = job, _start(job, cores), cores
                if not running:
                    break
                for job, process, cores in list(running.values()):
                    if process.poll() is not None:
                        del running[job.name]
                        free.append(cores)
                        yield job, _failure(process.returncode, job.log)
                time.sleep(_POLL_SECONDS)
        finally:
            _stop([process for _, process, _ in running.values()])
    if interruption.should_stop(step=0):
        names = ", ".join(running) or "nothing was running"
        command_line.say(f"stopped ({names}); run the same command to continue")
        sys.exit(distributed.STATUS[interruption.signal])


def shares(count: int) -> list[set[int]]:
    """Divides this process's cores into `count` sets; empty sets if the system reports no cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[i::count]) or set(cores) for i in range(count)]


def _start(job: Job, cores: set[int]) -> subprocess.Popen:
    """Starts a job in its own process group, so that a terminal's Ctrl-C does not reach it."""
    command_line.say(f"{job.name}: begins")
    launcher = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
    with job.log.open("a") as log:
        return subprocess.Popen(
            [*launcher, ",".join(map(str, cores)), *job.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )


def _stop(processes: Sequence[subprocess.Popen]) -> None:
    """Sends SIGTERM to processes and their children, and waits for them."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        process.wait()


def _failure(status: int, log: pathlib.Path) -> str:
    """Returns one line on a job's failure, or "" if it succeeded."""
    if not status:
        return ""
    cause = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"{cause}: {_last_line(log)}"


def _last_line(file: pathlib.Path) -> str:
    text = file.read_text(errors="replace").replace("\r", "\n")  # progress bars end in \r
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
