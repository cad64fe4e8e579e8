"""The filter of system calls, on a model of the kernel's BPF, for both processors."""

import errno
import os

import pytest

from kvjax.sandbox.inside import seccomp
from tests.sandbox import bpf

DENIED = seccomp.ERROR | errno.EPERM
I386, OTHER = 0x40000003, 0xC00000F3


@pytest.fixture(params=seccomp.PROCESSORS)
def decide(request):
    """A function of a call's row of numbers and its arguments."""
    processor = seccomp.PROCESSORS[request.param]
    program = seccomp.program(processor)

    def decide(row, *arguments):
        return bpf.decide(program, processor.architecture, row[processor.column], arguments)

    decide.program, decide.processor = program, processor
    return decide


def test_calls_that_are_not_listed_are_denied(decide):
    column = decide.processor.column
    conditional = {
        row[column]
        for row in (
            seccomp.OPEN,
            seccomp.OPENAT,
            seccomp.FCNTL,
            seccomp.IOCTL,
            seccomp.PRLIMIT,
            seccomp.CLONE3,
        )
    }
    allowed = {row[column] for row in seccomp.CALLS.values()} - {None}
    for number in range(1000):
        if number not in conditional:
            expected = seccomp.ALLOW if number in allowed else DENIED
            assert decide([number, number]) == expected, number


@pytest.mark.parametrize(
    "name, numbers",
    {
        "socket": (41, 198),
        "clone": (56, 220),
        "execve": (59, 221),
        "kill": (62, 129),
        "tgkill": (234, 131),
        "ptrace": (101, 117),
        "mount": (165, 40),
        "unshare": (272, 97),
        "setrlimit": (160, 164),
        "prctl": (157, 167),
        "memfd_create": (319, 279),
        "io_uring_setup": (425, 425),
        "bpf": (321, 280),
        "pidfd_open": (434, 434),
        "openat2": (437, 437),
        "unlinkat": (263, 35),
        "shmget": (29, 194),
        "seccomp": (317, 277),
        "landlock_create_ruleset": (444, 444),
    }.items(),
)
def test_dangerous_calls_are_denied(decide, name, numbers):
    assert decide(numbers) == DENIED


def test_no_number_stands_twice(decide):
    numbers = [row[decide.processor.column] for row in seccomp.CALLS.values()]
    numbers = [number for number in numbers if number is not None]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("architecture", [I386, OTHER])
def test_another_architecture_is_killed(decide, architecture):
    assert bpf.decide(decide.program, architecture, 0) == seccomp.KILL


def test_x32_numbers_are_killed(decide):
    assert decide([0x40000000 + 39] * 2) == seccomp.KILL


def test_clone3_is_as_if_missing(decide):
    assert decide(seccomp.CLONE3) == seccomp.ERROR | errno.ENOSYS


@pytest.mark.parametrize(
    "flags, allowed",
    [
        (os.O_RDONLY | os.O_CLOEXEC, True),
        (os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK, True),
        (os.O_WRONLY, False),
        (os.O_RDWR | os.O_CLOEXEC, False),
        (os.O_CREAT, False),
        (os.O_TRUNC, False),
        (os.O_APPEND, False),
        (os.O_TMPFILE, False),
    ],
)
def test_files_are_opened_for_reading_only(decide, flags, allowed):
    expected = seccomp.ALLOW if allowed else DENIED
    assert decide(seccomp.OPENAT, -100, 0, flags) == expected
    if decide.processor.column == 0:
        assert decide(seccomp.OPEN, 0, flags) == expected


@pytest.mark.parametrize("command, allowed", [(1, True), (3, True), (0, False), (8, False)])
def test_descriptors_have_no_owner_to_be_signalled(decide, command, allowed):
    assert decide(seccomp.FCNTL, 0, command) == (seccomp.ALLOW if allowed else DENIED)


@pytest.mark.parametrize("command, allowed", [(0x5401, True), (0x5412, False), (0x8901, False)])
def test_terminals_are_not_typed_on(decide, command, allowed):
    assert decide(seccomp.IOCTL, 0, command) == (seccomp.ALLOW if allowed else DENIED)


@pytest.mark.parametrize(
    "process, new, allowed",
    [(0, 0, True), (0, 0x7FFF0000, False), (0, 1 << 32, False), (17, 0, False)],
)
def test_limits_are_asked_and_not_set(decide, process, new, allowed):
    expected = seccomp.ALLOW if allowed else DENIED
    assert decide(seccomp.PRLIMIT, process, 7, new, 0x7FFF0000) == expected
