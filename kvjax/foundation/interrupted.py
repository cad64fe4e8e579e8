"""Ctrl-C ends a process with status 130 and no traceback, from the first import on.

Python raises KeyboardInterrupt wherever it happens to be. In a destructor or in a callback from C
that is printed and forgotten, and a library may take it for an error of its own, or go on.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time

STATUS = 130
_PATIENCE = 1.0  # seconds between a Ctrl-C and the first look at what became of it
_received = _taken = False


def received() -> bool:
    """Whether there was a Ctrl-C, whatever became of the KeyboardInterrupt."""
    return _received


def taken() -> bool:
    """Whether there was a Ctrl-C; from here on it is the caller who ends the process for it."""
    global _taken
    _taken = _received
    return _taken


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

    def is_ours(args):
        return issubclass(args.exc_type, KeyboardInterrupt)

    sys.unraisablehook = lambda args: _leave() if is_ours(args) else unraisable(args)


def _raise(number, frame):
    global _received
    _received = True
    signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(RuntimeError):  # no more threads: the interpreter is at its end
        _thread.start_new_thread(_insist, ())  # takes no lock, which this thread may hold
    raise KeyboardInterrupt


def _insist():
    """Ends the process if something swallowed the KeyboardInterrupt and went on."""
    while not _taken:
        time.sleep(_PATIENCE)
        if not _taken and not _is_handled():
            _leave()


def _is_handled() -> bool:
    """Whether the main thread handles a KeyboardInterrupt now, or cleans up for one."""
    error = sys._current_exceptions().get(threading.main_thread().ident)
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _leave():
    with contextlib.suppress(OSError):
        os.write(2, b"kvjax: interrupted\n")
    os._exit(STATUS)
