"""Odd command lines end with 0 or with one message and status 2, and lose nothing.

Failing cases are printed as command lines; `python -m tests.fuzz "files"` runs one group.
"""

import zlib

import pytest

from tests.fuzz import worker as worker_lib
from tests.fuzz.case import FORKED, INSIDE, Case, Outcome, faults
from tests.fuzz.cases import GROUPS, cases_of
from tests.fuzz.runner import ROOT, Worker

SAMPLE = {INSIDE: 550, FORKED: 300}  # one of this number of cases is drawn


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """Starts one process for all command lines of this file."""
    with Worker(tmp_path_factory.mktemp("fuzz") / "home") as started:
        yield started


def _check(worker: Worker, cases: list[Case]) -> None:
    failures = worker.failures(cases)
    assert not failures, f"{len(failures)} of {len(cases)} cases:\n\n" + "\n\n".join(failures)


@pytest.mark.slow
@pytest.mark.whole
def test_a_sample_of_all_command_lines(worker):
    cases = [case for group in GROUPS for case in cases_of(group)]
    assert len(cases) > 1000
    quick = [case for case in cases if case.how in SAMPLE and case.interrupt is None]
    sample = [
        c for c in quick if zlib.crc32(repr(c).replace(str(ROOT), "").encode()) % SAMPLE[c.how] == 0
    ]
    assert len(sample) > 10
    _check(worker, sample)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_command_line(worker, group):
    _check(worker, cases_of(group))


SAID = "kvjax: --way=x: is none\n"


@pytest.mark.parametrize(
    "outcome, fault",
    [
        (dict(), None),
        (dict(grown=1_200_000_000), "1.2 GB more memory"),
        (dict(seconds=30.2), "30.2 s of CPU"),
        (dict(status=0), "status 0, not 2"),
        (dict(stderr="Traceback (most recent call last)"), "a traceback"),
        (dict(lost=("case/notes.txt",)), "lost: case/notes.txt"),
        (dict(stderr=2 * SAID), "2 messages"),
        (dict(stderr=f"E0000 library.cc]\n{SAID}"), "something above the message"),
        (dict(stderr=f"{SAID}more\n"), "something below the message"),
        (dict(stdout="on my way"), "standard output beside a message"),
        (dict(stderr="kvjax: no\n"), "does not name way"),
    ],
)
def test_faults(outcome, fault):
    case = Case(command="kvjax", message=("way",), status=(2,))
    ended = dict(status=2, stdout="", stderr=SAID, seconds=0.1, grown=0, lost=()) | outcome
    found_faults = faults(case, Outcome(**ended))
    assert (fault in found_faults) if fault else not found_faults, found_faults


def test_what_is_lost():
    before = {"notes.txt": b"mine"}
    for after, moved, lost in (
        (before, False, []),
        ({}, True, ["notes.txt"]),
        ({"notes.txt": b""}, True, ["notes.txt"]),
        ({"elsewhere.txt": b"mine"}, False, ["notes.txt"]),
        ({"elsewhere.txt": b"mine"}, True, []),
    ):
        assert worker_lib._lost(before, after, moved=moved) == lost


def test_the_report_is_a_command_line():
    case = Case(
        command="kvjax.costs",
        arguments=("--dtype=a b", "--device=\udcff"),
        environment=dict(LC_ALL="C"),
        stdout="head",
    )
    assert case.line() == r"LC_ALL=C python -m kvjax.costs '--dtype=a b' $'--device=\xff' | head -1"
