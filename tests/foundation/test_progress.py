"""Progress on terminals and in logs."""

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
    """Returns (times, terminal) -> output of a wait that ends after `times` reports."""

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


def test_formats():
    numbers = 12_340_000, 999_949_999, 1e9, 1.2345e12
    for function, values, expected in (
        (progress.size, numbers, "12.3 MB,999.9 MB,1.00 GB,1,234.50 GB"),
        (progress.count, numbers, "12.3M,999.9M,1.00B,1,234.50B"),
        (progress.duration, (99.4, 100, 5999, 6000, 3.7e7), "99 s,2 min,100 min,1.7 h,10,277.8 h"),
        (
            progress.bar,
            (-0.1, 0.5, 0.73, 1.2),
            f"{'─' * 20} -10 %,{'━' * 10}{'─' * 10} 50 %,{'━' * 15}{'─' * 5} 73 %,{'━' * 20} 120 %",
        ),
    ):
        assert ",".join(map(function, values)) == expected


def test_short_work_prints_nothing(wait):
    assert wait(0, terminal=True) == wait(0, terminal=False) == ""


def test_a_log_gets_lines(wait):
    *during, end = wait(3, terminal=False).splitlines()
    assert len(during) >= 3 and all(" s so far)" in line for line in during)
    assert end.startswith("kvjax: compiling: 0.")


def test_a_terminal_gets_one_line_that_disappears(wait):
    text = wait(3, terminal=True)
    assert text.count("compiling") >= 3 and "\n" not in text
    assert text.endswith("\r\x1b[K")


@pytest.mark.parametrize("shown", [True, False])
def test_the_end_is_reported_once_if_shown(monkeypatch, shown):
    stream = _Stream(False)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with progress.waiting("compiling", shown=shown) as doing:
        time.sleep(0.1)
        doing.end()
    assert stream.getvalue().count("kvjax: compiling: ") == int(shown)
    assert bool(stream.getvalue()) == shown


def test_position_and_description(monkeypatch):
    stream = _Stream(False)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.001)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    deadline = time.monotonic() + 60
    with progress.waiting("compiling") as doing:
        for change, line in (
            (lambda: doing.at("2 of 14"), "kvjax: compiling: 2 of 14 ("),
            (lambda: doing.now("validating"), "kvjax: validating ("),
        ):
            change()
            while line not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.001)
            assert line in stream.getvalue()


def test_steps_in_a_log_are_lines_every_ten_seconds(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now))
    for shown in (True, False):
        with progress.Steps(20, 10, shown=shown) as steps:
            for _ in range(10):
                now += 4
                steps.step("loss 3.1")
            steps.write("validated")
    lines = [f"step {step} of 20: loss 3.1\n" for step in (13, 16, 19, 20)]
    assert capsys.readouterr() == ("validated\n", "".join(lines))


def test_steps_on_a_terminal_are_a_bar(monkeypatch):
    stream = _Stream(True)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.setattr(progress, "_STEPS_EVERY", -1.0)
    with progress.Steps(12, 10) as steps:
        steps.step("loss 3.1")
        steps.step("loss 3.0")
    assert "12/12" in stream.getvalue() and "step 12 of 12" not in stream.getvalue()


def test_a_closed_stream_is_ignored(monkeypatch):
    stream = _Stream(False)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with progress.waiting("compiling"):
        stream.close()
        time.sleep(0.3)
