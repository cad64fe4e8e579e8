"""Ctrl-C before a command has begun, while its imports take seconds: no traceback, status 130."""

import os
import sys

STATUS = 130


def quietly() -> None:
    """From here on an interrupt that nothing catches ends the process with one line."""
    usual = sys.excepthook

    def hook(kind, error, traceback):
        if not issubclass(kind, KeyboardInterrupt):
            return usual(kind, error, traceback)
        os.write(2, b"kvjax: interrupted\n")
        os._exit(STATUS)

    sys.excepthook = hook
