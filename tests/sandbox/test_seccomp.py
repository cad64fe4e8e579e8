"""The filter of system calls, on a model of the kernel's BPF, for both processors."""

import errno
import os

import pytest

from kvjax.sandbox.inside import seccomp
from tests.sandbox import bpf

ALLOW, KILL = 0x7FFF0000, 0x80000000
DENIED, MISSING = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, OTHER = 0x40000003, 0xC00000F3
# As the kernel's headers number them on x86-64 and on aarch64.
ALLOWED = """
read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62,
mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, pread64 17 67, readv 19 65, writev 20 66, access 21 -, select 23 -,
sched_yield 24 124, mremap 25 216, madvise 28 233, nanosleep 35 101, getpid 39 172, exit 60 93,
uname 63 160, getcwd 79 17, readlink 89 -, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165,
sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177,
getppid 110 173, getpgrp 111 -, getgroups 115 158, getresuid 118 148, getresgid 120 150,
getpgid 121 155, getsid 124 156, sigaltstack 131 132, gettid 186 178, time 201 -, futex 202 98,
sched_getaffinity 204 123, getdents64 217 61, restart_syscall 219 128, clock_gettime 228 113,
clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, newfstatat 262 79,
readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, getcpu 309 168,
getrandom 318 278, statx 332 291, faccessat2 439 439
"""
ROWS = {
    name: tuple(None if number == "-" else int(number) for number in numbers)
    for name, *numbers in (row.split() for row in ALLOWED.split(","))
}
OPEN, OPENAT, FCNTL, IOCTL, PRLIMIT = (2, None), (257, 56), (72, 25), (16, 29), (302, 261)
CLONE3 = 435


@pytest.fixture(params=enumerate(ARCHITECTURES), ids=ARCHITECTURES.get)
def decide(request):
    """Returns a function from a call's numbers and arguments to the filter's verdict."""
    column, name = request.param
    program = seccomp.program(seccomp.PROCESSORS[name])

    def decide(row, *arguments, architecture=ARCHITECTURES[name]):
        return bpf.decide(program, architecture, row[column], arguments)

    decide.column = column
    return decide


def test_calls_are_those_of_the_list_and_no_others(decide):
    """Another architecture's numbers, and those of x32, kill."""
    assert seccomp.CALLS == ROWS
    assert [p.seccomp for p in seccomp.PROCESSORS.values()] == [317, 277]
    numbers = {row[decide.column] for row in ROWS.values()} - {None}
    conditional = {row[decide.column] for row in (OPEN, OPENAT, FCNTL, IOCTL, PRLIMIT)}
    for number in range(1000):
        if number not in conditional:
            expected = ALLOW if number in numbers else MISSING if number == CLONE3 else DENIED
            assert decide([number, number]) == expected, number
    for number, expected in {0x3FFFFFFF: DENIED, 0x40000000: KILL, 0x40000027: KILL}.items():
        assert decide([number, number]) == expected, number
    for architecture in (I386, OTHER):
        assert decide([0, 63], architecture=architecture) == KILL


def test_calls_that_depend_on_their_arguments(decide):
    """Files are opened for reading only; descriptors have no owner to be signalled; terminals are
    not typed on; limits are asked and not set. The kernel reads 32 bits of flags and commands."""
    reading = os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    cases = [(OPENAT, (-100, 2, reading), True)]
    cases += [(OPENAT, (-100, 2, 1 << i), bool(reading >> i & 1)) for i in range(32)]
    cases += [(OPENAT, (0, 0, reading | 1 << 32), True), (OPENAT, (-100, 2, os.O_TMPFILE), False)]
    cases += [(FCNTL, (0, command), command in (1, 2, 3)) for command in range(1100)]
    ours = (0x5401, 0x5450, 0x5451)
    commands = (*range(0x5400, 0x5460), 0x8901)
    cases += [(IOCTL, (0, command), command in ours) for command in commands]
    cases += [(PRLIMIT, (0, 7, 0, 0x7FFF0000), True)]
    for process, new in ((17, 0), (0, 0x7FFF0000), (0, 1 << 32), (1, 1)):
        cases.append((PRLIMIT, (process, 7, new, 0x7FFF0000), False))
    if decide.column == 0:
        cases += [(OPEN, arguments[1:], allowed) for row, arguments, allowed in cases[:35]]
    for row, arguments, allowed in cases:
        assert decide(row, *arguments) == (ALLOW if allowed else DENIED), (row, arguments)
