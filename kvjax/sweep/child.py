"""Runs a command on given cores; the command ends if its parent process does.

    python -I -S child.py PARENT CORES COMMAND...    # CORES: 0,2,4; empty: all

This process becomes the command. On Linux, the kernel sends SIGTERM to the command when the thread
that started it ends, even if that thread was killed. Imports only the standard library, to start
fast.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, cores: str, *command: str) -> None:
    """Replaces this process by the command."""
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent ended before prctl
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
