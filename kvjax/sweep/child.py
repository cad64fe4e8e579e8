"""Replaces itself by a command that runs on given cores and ends with the parent process.

    python -I -S child.py PARENT CORES COMMAND...    # CORES: 0,2,4; empty: all

On Linux the kernel sends SIGTERM to the command when the thread that started it is gone, even if it
was killed. Standard library only: this runs before each command.
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
