"""What is said while somebody waits."""

import io
import time
import types

import pytest

from kvjax.foundation import progress


class _Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self._terminal = terminal

    def isatty(self):
        return self._terminal


@pytest.fixture
def wait(monkeypatch):
    """A function of how often it must be said, and of whether it is a terminal: what was written.

    Where nothing must be said, what is waited for is over at once.
    """

    def run(times, terminal):
        stream = _Stream(terminal)
        monkeypatch.setattr(progress, "_TERMINAL_EVERY", 0.01 if terminal else 1e6)
        monkeypatch.setattr(progress, "_LOG_EVERY", 1e6 if terminal else 0.01)
        monkeypatch.setattr(progress, "FIRST_SECONDS", 0.01 if times else 1e6)
        monkeypatch.setattr(progress.sys, "stderr", stream)
        with progress.waiting("compiling"):
            deadline = time.monotonic() + 60
            while stream.getvalue().count("compiling") < times and time.monotonic() < deadline:
                time.sleep(0.001)
        return stream.getvalue()

    return run


def test_figures_for_a_reader():
    numbers = 12_340_000, 999_949_999, 1e9, 1.2345e12
    for made, of, said in (
        (
            progress.size,
            numbers,
            "12.3 MB,999.9 MB,1.00 GB,1,234.50 GB",
        ),
        (progress.count, numbers, "12.3M,999.9M,1.00B,1,234.50B"),
        (progress.duration, (99.4, 100, 5999, 6000, 3.7e7), "99 s,2 min,100 min,1.7 h,10,277.8 h"),
        (
            progress.bar,
            (-0.1, 0.5, 0.73, 1.2),
            f"{'─' * 20} -10 %,{'━' * 10}{'─' * 10} 50 %,{'━' * 15}{'─' * 5} 73 %,{'━' * 20} 120 %",
        ),
    ):
        assert ",".join(map(made, of)) == said


def test_what_is_quick_says_nothing(wait):
    assert wait(0, terminal=True) == wait(0, terminal=False) == ""


def test_a_log_gets_lines(wait):
    *during, end = wait(3, terminal=False).splitlines()
    assert len(during) >= 3 and all(" s so far)" in line for line in during)
    assert end.startswith("kvjax: compiling: 0.")


def test_a_terminal_gets_one_line_that_is_gone_in_the_end(wait):
    text = wait(3, terminal=True)
    assert text.count("compiling") >= 3 and "\n" not in text
    assert text.endswith("\r\x1b[K")


@pytest.mark.parametrize("shown", [True, False])
def test_its_end_is_said_once_if_it_is_shown(monkeypatch, shown):
    stream = _Stream(False)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with progress.waiting("compiling", shown=shown) as doing:
        time.sleep(0.1)
        doing.end()
    assert stream.getvalue().count("kvjax: compiling: ") == int(shown)
    assert bool(stream.getvalue()) == shown


def test_where_the_work_is(monkeypatch):
    stream = _Stream(False)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.001)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    deadline = time.monotonic() + 60
    with progress.waiting("compiling") as doing:
        for change, said in (
            (lambda: doing.at("2 of 14"), "kvjax: compiling: 2 of 14 ("),
            (lambda: doing.now("validating"), "kvjax: validating ("),
        ):
            change()
            while said not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.001)
            assert said in stream.getvalue()


def test_steps_in_a_log_are_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_STEPS_EVERY", -1.0)
    with progress.Steps(12, 10) as steps:
        steps.step("loss 3.1")
        steps.write("validated")
        steps.step("loss 3.0")
    out, err = capsys.readouterr()
    assert out == "validated\n"
    assert err == "step 11 of 12: loss 3.1\nstep 12 of 12: loss 3.0\n"


def test_steps_in_a_log_are_said_every_ten_seconds(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now))
    with progress.Steps(100, 0) as steps:
        for _ in range(9):
            now += 4
            steps.step("loss 3.1")
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert said == ["3", "6", "9"]


def test_steps_on_a_terminal_are_a_bar(monkeypatch):
    stream = _Stream(True)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.setattr(progress, "_STEPS_EVERY", -1.0)
    with progress.Steps(12, 10) as steps:
        steps.step("loss 3.1")
        steps.step("loss 3.0")
    assert "12/12" in stream.getvalue() and "step 12 of 12" not in stream.getvalue()


def test_steps_are_shown_by_one_process_and_not_too_often(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_STEPS_EVERY", 1e6)
    for shown in (True, False):
        with progress.Steps(3, 0, shown=shown) as steps:
            for _ in range(3):
                steps.step("loss 3.1")
            steps.write("end" if shown else "never")
    assert capsys.readouterr() == ("end\n", "step 3 of 3: loss 3.1\n")


def test_a_stream_that_is_closed_stops_nothing(monkeypatch):
    stream = _Stream(False)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    done = False
    with progress.waiting("compiling"):
        stream.close()
        time.sleep(0.3)
        done = True
    assert done
