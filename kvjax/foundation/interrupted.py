"""Makes Ctrl-C end a process with status 130 and no traceback, from the first import on.

Python raises KeyboardInterrupt at an arbitrary point. In a destructor or a C callback it is printed
and dropped, and a library may turn it into its own exception, or continue.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time

STATUS = 130
_PATIENCE = 1.0  # seconds after a Ctrl-C before checking that it is being handled
_received = _taken = False


def received() -> bool:
    """Returns True if there was a Ctrl-C, even if its KeyboardInterrupt was swallowed."""
    return _received


def taken() -> bool:
    """Returns True if there was a Ctrl-C; from then on the caller has to end the process."""
    global _taken
    _taken = _received
    return _taken


def quietly() -> None:
    """Installs the handler: Ctrl-C raises KeyboardInterrupt once; a second one kills the process.

    A process that ignores Ctrl-C (a script's background job) keeps ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGINT, _raise)
    usual, unraisable = sys.excepthook, sys.unraisablehook
    sys.excepthook = lambda *args: _leave() if _received else usual(*args)

    def on_unraisable(args):  # other errors in destructors keep their report
        if issubclass(args.exc_type, KeyboardInterrupt):
            _leave()
        unraisable(args)

    sys.unraisablehook = on_unraisable


def _raise(number, frame):
    global _received
    _received = True
    signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(RuntimeError):  # no threads at interpreter shutdown
        # threading.Thread takes locks that the interrupted thread may hold.
        _thread.start_new_thread(_insist, ())
    raise KeyboardInterrupt


def _insist():
    """Ends the process if the KeyboardInterrupt was swallowed."""
    while not _taken:
        time.sleep(_PATIENCE)
        if not _taken and not _is_handled():
            _leave()


def _is_handled() -> bool:
    """Returns True while the main thread handles a KeyboardInterrupt or cleans up after one."""
    error = sys._current_exceptions().get(threading.main_thread().ident)
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _leave():
    with contextlib.suppress(OSError):
        os.write(2, b"kvjax: interrupted\n")
    os._exit(STATUS)
