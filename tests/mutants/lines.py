"""Records the lines of the package that each test runs, also in processes that tests start.

A copy of this file named sitecustomize.py runs at the start of every Python process. If the
environment names a folder, it writes the lines that the process runs there, one by one, so that a
killed process loses none.
"""

import importlib.machinery
import os
import sys
import time
import types

FOLDER = "MUTANTS_LINES"  # environment variable
_TOOL = 4  # a tool id of sys.monitoring that has no reserved use


class Lines:
    """Collects the lines that run in files of a package that are imported from now on.

    Args:
      package: the package's folder.
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
        """Returns (file in the package, line) of all lines that ran since the last call."""
        lines, self.found = self.found, set()
        sys.monitoring.restart_events()
        return lines

    def _watch(self, code: types.CodeType) -> None:
        sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.LINE)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._watch(constant)

    def _see(self, code: types.CodeType, line: int):
        self.found.add((code.co_filename.removeprefix(self._package), line))
        return sys.monitoring.DISABLE


class _Written(set):
    """Writes the lines of a process that a test started to a file, after the test's name."""

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
    except OSError:  # the process may not write there
        pass
