"""What is said while somebody waits."""

import io
import time

import pytest

from kvjax import progress


class _Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self._terminal = terminal

    def isatty(self):
        return self._terminal


@pytest.fixture
def wait(monkeypatch):
    """A function of seconds and of whether it is a terminal: what was written."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(progress, "_TERMINAL_EVERY", 0.05)
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.05)

    def run(seconds, terminal):
        stream = _Stream(terminal)
        monkeypatch.setattr(progress.sys, "stderr", stream)
        with progress.waiting("compiling"):
            time.sleep(seconds)
        return stream.getvalue()

    return run


def test_what_is_quick_says_nothing(wait):
    assert wait(0.0, terminal=True) == wait(0.0, terminal=False) == ""


def test_a_log_gets_lines(wait):
    *during, end = wait(0.5, terminal=False).splitlines()
    assert len(during) >= 2 and all(" s so far)" in line for line in during)
    assert end.startswith("kvjax: compiling: 0.")


def test_a_terminal_gets_one_line_that_is_gone_in_the_end(wait):
    text = wait(0.5, terminal=True)
    assert text.count("compiling") >= 2 and "\n" not in text
    assert text.endswith("\r\x1b[K")


def test_a_stream_that_is_closed_stops_nothing(wait, monkeypatch):
    stream = _Stream(False)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    done = False
    with progress.waiting("compiling"):
        stream.close()
        time.sleep(0.3)
        done = True
    assert done
