"""Ctrl-C from the first import on: it ends a process with status 130, no traceback, never unheard.

Python raises KeyboardInterrupt wherever it happens to be. In a destructor or in a callback from C
that is printed and forgotten, and a library may take it for an error of its own.
"""

import contextlib
import os
import signal
import sys

STATUS = 130
_received = False


def received() -> bool:
    """Whether there was a Ctrl-C, whatever became of the KeyboardInterrupt."""
    return _received


def quietly() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt once and ends the process; a second, at once.

    A process that ignores Ctrl-C (in the background of a script) goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGINT, _raise)
    usual, unraisable = sys.excepthook, sys.unraisablehook
    sys.excepthook = lambda *args: _leave() if _received else usual(*args)
    # Not for every error that a destructor meets while the process goes to its end.
    is_ours = lambda args: issubclass(args.exc_type, KeyboardInterrupt)
    sys.unraisablehook = lambda args: _leave() if is_ours(args) else unraisable(args)


def _raise(number, frame):
    global _received
    _received = True
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _leave():
    with contextlib.suppress(OSError):
        os.write(2, b"kvjax: interrupted\n")
    os._exit(STATUS)
