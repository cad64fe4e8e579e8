"""Odd command lines end with 0 or with one message and status 2, and lose nothing.

What fails is printed as a command line; `python -m tests.fuzz "files"` runs a group by itself.
"""

import zlib

import pytest

from tests.fuzz.case import FORKED, INSIDE, Case, Outcome, faults
from tests.fuzz.cases import GROUPS, cases_of
from tests.fuzz.runner import ROOT, Worker

SAMPLE = {INSIDE: 550, FORKED: 300}  # one case of so many


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A warm process for all command lines of this file."""
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
    drawn = [
        c for c in quick if zlib.crc32(repr(c).replace(str(ROOT), "").encode()) % SAMPLE[c.how] == 0
    ]
    assert len(drawn) > 10
    _check(worker, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_command_line(worker, group):
    _check(worker, cases_of(group))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, fault",
    {
        "hoards": "1.2 GB more memory",
        "raises": "a traceback",
        "accepts": "status 0, not 2",
        "empties": "lost: case/notes.txt",
        "moves": "lost: case/notes.txt",
        "two messages": "2 messages",
        "noise": "something above the message",
        "talks": "standard output beside a message",
        "dies": "status -6, not 2",
        "unnamed": "does not name way",
        "writes to shared": "lost: shared/a_file",
        "none of these": None,
    }.items(),
)
def test_the_oracle_sees(worker, way, fault):
    case = Case(
        command="tests.fuzz.faulty", arguments=(f"--way={way}",), says=("way",), status=(2,)
    )
    found = faults(case, worker.run(case))
    assert (fault in found) if fault else not found, found


@pytest.mark.slow
@pytest.mark.parametrize("way, status", {"raises": 1, "accepts": 0, "dies": -6}.items())
def test_the_oracle_sees_a_process_of_its_own(worker, way, status):
    case = Case(command="tests.fuzz.faulty", arguments=(f"--way={way}",), how=FORKED, status=(2,))
    assert f"status {status}, not 2" in faults(case, worker.run(case))


def test_the_oracle_sees_what_takes_too_long():
    ended = Outcome(status=0, stdout="", stderr="", seconds=30.2, grown=0, lost=())
    assert faults(Case(command="kvjax"), ended) == ["30.2 s of CPU"]


def test_the_report_is_a_command_line():
    case = Case(
        command="kvjax.costs",
        arguments=("--dtype=a b", "--device=\udcff"),
        environment=dict(LC_ALL="C"),
        stdout="head",
    )
    assert case.line() == r"LC_ALL=C python -m kvjax.costs '--dtype=a b' $'--device=\xff' | head -1"
