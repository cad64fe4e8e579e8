"""Records which lines of the package run in which test, also in processes that tests start.

A copy of this file that is named sitecustomize.py runs in every process that finds it on its path.
Where the environment names a folder, it writes down there what the process runs, line by line:
what is killed has written all.
"""

import importlib.machinery
import os
import sys
import time
import types

FOLDER = "MUTANTS_LINES"  # of the environment
_TOOL = 4  # of sys.monitoring's six, one that nobody has by name


class Lines:
    """Collects the lines that run of the files of a package that are imported from now on.

    Args:
      package: its folder.
    """

    def __init__(self, package: str):
        self._package = package + os.sep
        self.found: set[tuple[str, int]] = set()
        sys.monitoring.use_tool_id(_TOOL, "mutants")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, self._see)
        get_code = importlib.machinery.SourceFileLoader.get_code

        def watched(loader, name):
            code = get_code(loader, name)
            if code is not None and code.co_filename.startswith(self._package):
                self._watch(code)
            return code

        importlib.machinery.SourceFileLoader.get_code = watched

    def take(self) -> set[tuple[str, int]]:
        """Files in the package, and lines in them, that ran since the last call."""
        found, self.found = self.found, set()
        sys.monitoring.restart_events()
        return found

    def _watch(self, code: types.CodeType) -> None:
        sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.LINE)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._watch(constant)

    def _see(self, code: types.CodeType, line: int):
        self.found.add((code.co_filename.removeprefix(self._package), line))
        return sys.monitoring.DISABLE


class _Written(set):
    """Lines of a process that a test started, in a file that opens with the name of the test."""

    def __init__(self, folder: str):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        name = f"{os.getpid()}-{time.monotonic_ns()}.txt"  # a process may become another program
        self._file = os.open(os.path.join(folder, name), flags)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        os.write(self._file, f"{test}\n".encode())

    def add(self, line):
        os.write(self._file, f"{line[0]}:{line[1]}\n".encode())


if __name__ == "sitecustomize" and FOLDER in os.environ:
    _lines = Lines(os.path.join(os.path.dirname(os.path.abspath(__file__)), "kvjax"))
    try:
        _lines.found = _Written(os.environ[FOLDER])
    except OSError:  # where the process may not write
        pass
