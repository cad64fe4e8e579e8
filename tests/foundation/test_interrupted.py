"""Ctrl-C at any moment, and a terminal that closes, end a process."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from kvjax.foundation.checkout import ROOT
from tests import quick
from tests.training import test_resume

CTRL_C = "signal.raise_signal(signal.SIGINT)"
QUIETLY = "import signal, time\nfrom kvjax.foundation import interrupted\ninterrupted.quietly()\n"
LONG = "--config.train.num_steps=100000"
no_child_left, config = test_resume.no_child_left, test_resume.config  # fixtures


def run(code: str) -> subprocess.CompletedProcess:
    """Runs Python code in a process of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    "code",
    [
        CTRL_C,
        f"class A:\n def __del__(self): {CTRL_C}\nA()\nprint('went on')",  # Python drops it
        f"try: {CTRL_C}\nexcept KeyboardInterrupt: raise ImportError('of an array library')",
        f"try: {CTRL_C}\nexcept KeyboardInterrupt: {CTRL_C}",
    ],
    ids=["plain", "in a destructor", "as another error", "twice"],
)
def test_ctrl_c_ends_a_process(code):
    code = (
        f"import signal\nfrom kvjax.foundation import interrupted\ninterrupted.quietly()\n{code}\n"
    )
    process = run(code)
    twice = code.count(CTRL_C) == 2
    assert process.returncode == (-signal.SIGINT if twice else 130), process
    assert process.stderr == ("" if twice else "kvjax: interrupted\n") and not process.stdout


SWALLOWED = f"{QUIETLY}try: {CTRL_C}\n"


def test_a_ctrl_c_that_a_library_swallowed_ends_the_process():
    code = SWALLOWED + "except BaseException: pass\nwhile True: time.sleep(0.1)"
    process = run(code)
    assert (process.returncode, process.stderr) == (130, "kvjax: interrupted\n")


HANDLERS = {
    "in its handler": "except BaseException: CLEAN",
    "in another's in it": "except BaseException:\n try: raise OSError\n except OSError: CLEAN",
    "taken": "except BaseException:\n time.sleep(0.2)\n interrupted.taken()\nCLEAN",
    "a destructor fails": "except BaseException:\n class A:\n  def __del__(self): raise OSError\n"
    " A()\n CLEAN",
}


@pytest.mark.parametrize(
    "handler",
    quick.only(
        ["in its handler"], ["in its handler", "in another's in it", "taken", "a destructor fails"]
    ),
)
def test_cleaning_up_after_ctrl_c_takes_its_time(handler):
    code = SWALLOWED + HANDLERS[handler].replace("CLEAN", "time.sleep(2.5); print('clean')")
    process = run(code)
    assert (process.returncode, process.stdout) == (0, "clean\n")


def test_a_command_of_another_package_handles_ctrl_c():
    code = f"import signal\nclass A:\n def __del__(self): {CTRL_C}\n"
    code += "from kvjax.foundation import command_line\ncommand_line.run(lambda _: A() and None)\n"
    process = run(code)
    assert (process.returncode, process.stderr) == (130, "kvjax: interrupted\n")


def test_a_bug_without_a_ctrl_c_keeps_its_traceback():
    process = run(f"{QUIETLY}raise KeyError('a bug')\n")
    assert process.returncode == 1 and process.stderr.endswith("\nKeyError: 'a bug'\n")


def test_an_ignored_ctrl_c_stays_ignored():
    """Scripts ignore it for background jobs."""
    code = QUIETLY + CTRL_C
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    assert subprocess.run([*ignoring, sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_ctrl_c_at_any_moment(config, tmp_path):
    """Moments range from the first imports to shortly after the first step."""
    process = test_resume.launch(config, tmp_path / "whole", "--config.train.stop_after=1")
    (seconds,) = re.findall(r"first step ([\d.]+) s after", test_resume.finish(process))
    for moment in (2, 5, 9):
        workdir = tmp_path / f"run-{moment}"
        process = test_resume.launch(config, workdir, LONG)
        time.sleep(0.11 * moment * float(seconds))
        process.send_signal(signal.SIGINT)
        output = test_resume.finish(process, status=130)
        assert "Traceback" not in output
        assert "interrupted" in output or "Stopped on SIGINT" in output
        print(f"{0.11 * moment:.0%}: {output.strip().splitlines()[-1]}")


# Makes standard input the controlling terminal of the session, and runs a command.
IN_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)


@pytest.mark.slow
def test_a_terminal_that_closes_ends_a_run_that_is_saved(config, tmp_path):
    """The run is saved although its output fails."""
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "kvjax.main", f"--config={config}", f"--workdir={workdir}"]
    command += [LONG, "--config.train.checkpoint_every=100000"]
    terminal, child_end = os.openpty()
    os.set_blocking(terminal, False)
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *command],
        **dict(stdin=child_end, stdout=child_end, stderr=child_end),
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": quick.XLA_FLAGS},
        cwd=ROOT,
        start_new_session=True,
    )
    os.close(child_end)
    metrics, deadline = workdir / "metrics.jsonl", time.monotonic() + 240
    try:
        while not (metrics.exists() and metrics.read_text().count("\n") > 100):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 1 << 16)  # else the terminal's buffer is full
        os.close(terminal)
        assert process.wait(60) == 129
    finally:
        process.kill()
    (step,) = (int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert 50 < step < 100_000
