"""Locks the calling process, irrevocably: limits, Landlock, seccomp."""

import os
import signal
import sys

from kvjax.sandbox.inside import landlock, limits, seccomp
from kvjax.sandbox.inside.system_calls import drop_capabilities, prctl

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


def lock(
    *, use_landlock: bool, use_seccomp: bool, parent: int | None, **budgets
) -> dict[str, int | str]:
    """Applies the layers; returns the version of Landlock and 1 for seccomp, or minus an errno.

    Args:
      use_landlock: allow reading only the interpreter's imports, and no writing.
      use_seccomp: allow only the system calls of a running interpreter.
      parent: id of the process to end with; None if it is invisible, in another namespace.
      budgets: arguments of `limits.limit`.
    """
    held = {}
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            raise SystemExit
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        prctl(_PR_SET_DUMPABLE, 0)  # no core files, and no core_pattern program
    limits.limit(**budgets)
    if use_landlock:
        readable = [path for path in sys.path if os.path.exists(path)]
        held["landlock"] = _version(landlock.restrict, readable)
    if use_seccomp:
        # With capabilities, madvise could offline memory and mmap could map page zero.
        drop_capabilities()
        held["seccomp"] = _version(seccomp.restrict)
    return held


def _version(restrict, *args) -> int:
    """Applies a layer; returns its version, or minus an errno."""
    try:
        return restrict(*args)
    except OSError as error:
        return -error.errno
