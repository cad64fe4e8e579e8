"""Judging programs: right ones pass, and nothing else does."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import pytest

from kvjax import sandbox
from kvjax.foundation.checkout import ROOT
from kvjax.sandbox import box as box_lib, namespaces
from tests import quick
from tests.sandbox import attacks, outside

TEST = """
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(2, 3) == 5
"""
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
# One breach per promise of the sandbox; test_attacks.py tries all.
SOME_BREACHES = (
    "write a file",
    "read a secret",
    "connect",
    "fork",
    "signal the process that judges",
    "have its pipe signal the process that judges",
    "read the environment of the process that judges",
    "raise its limits",
    "map page zero",
    "take 1 GB",
    "unshare",
    "a call in machine code",
    "a call through int 0x80",
)
SOME_FORGERIES = (
    "leave in the call at once",
    "equal to everything",
    "replies in advance of the next call",
    "replies twice",
    "reads the expected value from its caller",
    "redefines check in all frames",
)
SOME_SIEGES = ("an answer nested deep", "an answer over the limit", "crashes")


@pytest.fixture(scope="module")
def box():
    """A box without namespaces, which would hide the failure of another layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(namespaces, "_installed", list)
        return sandbox.open("auto", sandbox.Limits(seconds=2.0, retries=0))


def judged(box, program, test=TEST, entry_point="add"):
    return box.judge(program=program, test=test, entry_point=entry_point)


def test_a_right_program_passes(box):
    verdict = judged(box, RIGHT)
    assert verdict == sandbox.Verdict(True, "", verdict.seconds, False)
    assert 0 < verdict.seconds < 60


@pytest.mark.parametrize(
    "program, reason",
    [
        (WRONG, "AssertionError in line 3 of the test"),
        ("", "NameError: the candidate raised it in line 3 of the test"),
        ("def add(a, b): raise KeyError(a)", "KeyError: 'the candidate raised it' in line 3"),
        ("def add(a, b): return add", "AssertionError in line 3 of the test"),
        ("def add(a, b:", "the program raised SyntaxError"),
        ("x = 1\0", "the program raised SyntaxError"),
        ("import no_such_module", "the program raised ModuleNotFoundError"),
        ("import sys; sys.exit(0)", "the candidate ended with status 0"),
        ("x = '\ud800'", "the program is not UTF-8"),
        ("(" * 5000, "the program raised"),
    ],
)
def test_a_wrong_program_fails_and_says_how(box, program, reason):
    verdict = judged(box, program)
    assert not verdict.passed and reason in verdict.reason


def test_arguments_keywords_and_values_arrive(box):
    program = "def f(*args, **keywords):\n    print(args)\n    return [args, keywords]\n"
    test = """
def check(candidate):
    values = (None, True, 3, 2.5, "é\\n", b"x", [1], (2,), {3}, {(4,): [5]}, 10 ** 50)
    assert candidate(*values, key=values) == [values, {"key": values}]
    given = [1]
    assert candidate(given)[0][0] is not given
"""
    assert judged(box, program, test, "f").passed


def test_what_a_test_does_not_define_is_asked_of_the_program(box):
    program = "def encode(x): return x[::-1]\ndef decode(x): return x[::-1]\n"
    test = "def check(candidate):\n    assert candidate(encode('abc')) == 'abc'\n"
    assert judged(box, program, test, "decode").passed


def test_exceptions_arrive_by_name(box):
    program = "class Own(Exception): pass\ndef f(x): raise eval(x)\n"
    test = """
def check(candidate):
    for name in ("ValueError", "KeyError", "ZeroDivisionError"):
        try:
            candidate(name)
        except eval(name):
            continue
        assert False
    try:
        candidate("Own")
    except Exception as error:
        assert "Own" in str(error)
"""
    assert judged(box, program, test, "f").passed


def test_what_is_imported_is_the_standard_library(box):
    program = """
import bisect, collections, copy, datetime, decimal, fractions, functools, hashlib, heapq
import itertools, math, operator, random, re, statistics, string, typing, zlib
def f(): return hashlib.md5(b"x").hexdigest()[:4], str(decimal.Decimal(1) / 3)[:4]
"""
    test = "def check(candidate):\n    assert candidate() == ('9dd4', '0.33')\n"
    assert judged(box, program, test, "f").reason == ""


def test_chance_and_order_are_the_same_each_time(box):
    program = "import random\ndef f(): return random.random(), list(set('abcdefgh'))\n"
    test = "def check(candidate):\n    raise ValueError(repr(candidate()))\n"
    assert judged(box, program, test, "f").reason == judged(box, program, test, "f").reason


def test_a_test_that_fails_before_it_asks_is_an_error(box):
    for test in (
        "def check(candidate):\n    1 / 0\n",
        "import no_such_module\ndef check(candidate): candidate(1, 2)\n",
        "check = 3\n",
        "def check(candidate): pass\n",
    ):
        with pytest.raises(sandbox.SandboxError, match="test of add never calls the program: "):
            judged(box, RIGHT, test)


@pytest.fixture
def around(tmp_path):
    with outside.Outside(tmp_path) as around_box:
        yield around_box


SOME = (*SOME_BREACHES, *SOME_FORGERIES, *SOME_SIEGES)


# `test_the_judge_is_locked_too` has all breaches.
QUICK = (*SOME_BREACHES[::2], *SOME_FORGERIES, *SOME_SIEGES)


@pytest.mark.parametrize("name", quick.only(QUICK, SOME))
def test_attacks_are_held(box, around, name):
    every = attacks.BREACHES | attacks.FORGERIES | attacks.SIEGES
    verdict = judged(box, attacks.filled(every[name], around.names))
    assert not verdict.passed
    assert not around.changes()


def test_the_judge_is_locked_too(box, around):
    ask = "\ndef check(candidate): assert candidate(1, 2) == add(1, 2)\n"
    problems = [
        sandbox.Problem(RIGHT, attacks.filled(attacks.BREACHES[name], around.names) + ask, "add")
        for name in SOME_BREACHES
    ]
    assert not any(verdict.passed for verdict in box.judge_all(problems))
    assert not around.changes()
    assert judged(box, RIGHT, RIGHT + ask).passed


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(99)"])
def test_time_ends(box, program):
    quick = box.with_limits(dataclasses.replace(box.limits, seconds=0.3))
    verdict = judged(quick, program)
    assert (verdict.passed, verdict.reason) == (False, "out of time after 0.3 s")


def test_a_sleep_is_tried_again_and_counted(box):
    again = box.with_limits(dataclasses.replace(box.limits, seconds=0.3, retries=1))
    verdict = judged(again, "import time; time.sleep(99)")
    assert not verdict.passed and verdict.retried


def test_what_had_a_core_is_not_tried_again(box, monkeypatch):
    monkeypatch.setattr(box_lib, "_CPU_SHARE", 0.0)  # whatever it used
    again = box.with_limits(dataclasses.replace(box.limits, seconds=0.3, retries=1))
    verdict = judged(again, "while True: pass")
    assert not verdict.passed and not verdict.retried


@pytest.mark.slow
def test_cpu_time_ends(box):
    long = box.with_limits(dataclasses.replace(box.limits, cpu_seconds=1, seconds=60, retries=1))
    verdict = judged(long, "while True: pass")
    assert not verdict.passed and not verdict.retried
    assert verdict.reason == "the candidate used up its CPU time"


@pytest.mark.slow
def test_verdicts_do_not_depend_on_how_many_are_judged_at_once(box):
    programs = (RIGHT, WRONG, "", "import os; os._exit(0)", RIGHT, "x = '\ud800'")
    problems = [sandbox.Problem(program, TEST, "add") for program in programs]
    reported = []
    sequential = box.judge_all(problems, workers=1)
    parallel = box.judge_all(problems, workers=4, on_verdict=lambda i, v: reported.append((i, v)))

    def outcomes(verdicts):
        return [(v.passed, v.reason) for v in verdicts]

    assert outcomes(sequential) == outcomes(parallel)
    assert [v.passed for v in sequential] == [True, False, False, False, True, False]
    assert sorted(reported, key=lambda pair: pair[0]) == list(enumerate(parallel))
    assert box.judge_all([]) == []


def test_all_are_checked_before_one_is_run(box):
    problems = [sandbox.Problem(RIGHT, TEST, "add"), sandbox.Problem(RIGHT, "x = 1", "add")]
    with pytest.raises(sandbox.SandboxError, match="defines no check"):
        box.judge_all(problems, on_verdict=lambda *args: pytest.fail("one was run"))


def test_an_interruption_ends_what_is_judged(box):
    long = box.with_limits(dataclasses.replace(box.limits, seconds=300, cpu_seconds=300))
    sleep = sandbox.Problem("import time; time.sleep(300)", TEST, "add")

    def interrupt(index, verdict):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        long.judge_all([sandbox.Problem(RIGHT, TEST, "add"), sleep], 2, interrupt)
    assert time.monotonic() - start < 200
    assert not long._running


@pytest.mark.slow
def test_interpreters_end_with_the_process_that_judges(tmp_path):
    code = """
from kvjax import sandbox
from kvjax.sandbox.box import Box
from kvjax.sandbox.layers import Layers
from kvjax.sandbox.process import Process
box = Box(Layers(seccomp=True, landlock=True), sandbox.Limits(seconds=100))
send = Process.send
def told(self, text, deadline):
    send(self, text, deadline)
    if "sleep" in text:
        print("sent", flush=True)
Process.send = told
sleep = "import time; time.sleep(100)"
box.judge(program=sleep, test="def check(candidate): candidate()", entry_point="f")
"""
    mark = {"TMPDIR": str(tmp_path)}  # where their folders are
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | mark) as process:
        assert process.stdout.readline() == b"sent\n"
        assert len(inside(tmp_path)) == 2
        process.kill()
    until = time.monotonic() + 60
    while inside(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert not inside(tmp_path)


def inside(folder):
    """Processes whose current folder is in this one."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder) in os.readlink(process / "cwd"):
                found.append(process.name)
    return found


def test_it_imports_the_standard_library_only():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kvjax import sandbox"
    subprocess.run([sys.executable, "-I", "-S", "-B", "-c", code], check=True)
