"""Locks the process that calls it, for good: limits, Landlock, system calls."""

import os
import signal
import sys

from kvjax.sandbox.inside import landlock, limits, seccomp
from kvjax.sandbox.inside.kernel import drop_capabilities, prctl

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


def lock(
    *, use_landlock: bool, use_seccomp: bool, parent: int | None, **budgets
) -> dict[str, int | str]:
    """What holds from now on: the version of Landlock, 1 for seccomp, or minus an errno.

    Args:
      use_landlock: reads only what the interpreter imports from, and writes nowhere.
      use_seccomp: only the system calls of a running interpreter.
      parent: without it this process ends; None if it cannot be seen from here.
      budgets: of `limits.limit`.
    """
    held = {}
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            raise SystemExit
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        prctl(_PR_SET_DUMPABLE, 0)  # no core file, nor a program that would be given one
    limits.limit(**budgets)
    if use_landlock:
        readable = [path for path in sys.path if os.path.exists(path)]
        held["landlock"] = _tried(landlock.restrict, readable)
    if use_seccomp:
        drop_capabilities()  # with them madvise takes memory from the machine, mmap page zero
        held["seccomp"] = _tried(seccomp.restrict)
    return held


def _tried(restrict, *args) -> int:
    try:
        return restrict(*args)
    except OSError as error:
        return -error.errno
