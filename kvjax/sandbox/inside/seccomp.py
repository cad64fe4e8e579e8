"""Seccomp: allows the system calls of a running interpreter, and no others.

Other calls fail with EPERM, which Python reports as an exception. Files can only be opened for
reading. A process cannot use sockets, processes, threads, programs, signals to other processes,
mounts, namespaces, tracing, keyrings, memory files or io_uring, or raise its limits. System calls
of another architecture kill the process.
"""

import collections
import ctypes
import errno
import os
import struct

from kvjax.sandbox.inside.system_calls import system_call

# Number on x86-64 and on aarch64; None if the architecture lacks the call.
CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "faccessat2": (439, 439),
}
# Allowed for some arguments: see `_conditions`.
OPEN, OPENAT = (2, None), (257, 56)
FCNTL, IOCTL, PRLIMIT = (72, 25), (16, 29), (302, 261)
# A filter cannot read clone3's flags, behind a pointer: ENOSYS makes libraries try `clone`.
CLONE3 = (435, 435)

_FCNTL = (1, 2, 3)  # F_GETFD, F_SETFD, F_GETFL; F_SETOWN would have a signal sent to anyone
_IOCTL = (0x5401, 0x5450, 0x5451)  # TCGETS, FIONCLEX, FIOCLEX; TIOCSTI would inject terminal input
READING = os.O_RDONLY | os.O_CLOEXEC
for _name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY"):
    READING |= getattr(os, _name, 0)

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_*
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF opcodes
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data
_X32 = 0x40000000  # first number of the x32 ABI


# Column of the tables above, AUDIT_ARCH_*, number of seccomp(2).
Processor = collections.namedtuple("Processor", "column architecture seccomp")
PROCESSORS = {
    "x86_64": Processor(0, 0xC000003E, 317),
    "aarch64": Processor(1, 0xC00000B7, 277),
}


def restrict() -> int:
    """Restricts this process to the calls above; returns 1. Needs no_new_privs.

    Raises:
      OSError: the kernel has no seccomp (ENOSYS, EINVAL), or there is no table for the processor.
    """
    processor = PROCESSORS.get(os.uname().machine)
    if processor is None:
        raise OSError(errno.ENOSYS, f"no table of system calls for {os.uname().machine}")
    code = program(processor)
    buffer = ctypes.create_string_buffer(code, len(code))
    pointer = ctypes.c_void_p(ctypes.addressof(buffer))
    sock_fprog = struct.pack("HxxxxxxP", len(code) // 8, pointer.value)
    argument = ctypes.create_string_buffer(sock_fprog, len(sock_fprog))
    system_call(processor.seccomp, 1, 0, argument)
    return 1


def program(processor: Processor) -> bytes:
    """Returns the filter as BPF code."""
    column = processor.column
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, processor.architecture),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, KILL),
    ]
    for row in CALLS.values():
        if row[column] is not None:
            code += [(_EQUAL, 0, 1, row[column]), (_RETURN, 0, 0, ALLOW)]
    code += [(_EQUAL, 0, 1, CLONE3[column]), (_RETURN, 0, 0, ERROR | errno.ENOSYS)]
    for row, checks in _conditions():
        if row[column] is not None:
            code += [(_EQUAL, 0, len(checks), row[column]), *checks]
    code.append((_RETURN, 0, 0, ERROR | errno.EPERM))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _conditions() -> list[tuple]:
    """Returns calls with the code that checks their arguments."""
    allow, refuse = (_RETURN, 0, 0, ALLOW), (_RETURN, 0, 0, ERROR | errno.EPERM)
    zero = [(_EQUAL, 1, 0, 0), refuse]

    # Flags and commands are 32 bits, the low half; pointers have two halves.
    def low(argument):
        return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)

    def high(argument):
        return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4)

    def reading(argument):
        return [low(argument), (_AND, 0, 0, ~READING & 0xFFFFFFFF), *zero, allow]

    def one_of(argument, commands):
        compared = [step for c in commands for step in ((_EQUAL, 0, 1, c), allow)]
        return [low(argument), *compared, refuse]

    # prlimit of this process, without new values.
    own_limits = [low(0), *zero, low(2), *zero, high(2), *zero, allow]
    return [
        (OPEN, reading(1)),
        (OPENAT, reading(2)),
        (FCNTL, one_of(1, _FCNTL)),
        (IOCTL, one_of(1, _IOCTL)),
        (PRLIMIT, own_limits),
    ]
