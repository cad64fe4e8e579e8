"""Records the lines that each quick test runs: once per tree, one record per test file."""

from collections.abc import Iterable
import dataclasses
import hashlib
import json
import os
import pathlib
import time

import pytest

from tests.mutants import lines as lines_lib
from tests.mutants.tree import Tree

_ELSEWHERE = ("aot", "beam", "lm_eval")  # markers of tests that need other environments
_SECONDS = 1200  # for the quick tests of one file


@dataclasses.dataclass
class Tests:
    """The tests of one file.

    Attributes:
      imported: by file of the package, the lines that run before the first test.
      quick: by test, its seconds, and by file the lines that it runs.
      slow: names of slow tests.
    """

    imported: dict[str, list[int]]
    quick: dict[str, dict]
    slow: list[str]

    def seconds(self, test: str) -> float:
        return self.quick[test]["seconds"]


def test_files(root: pathlib.Path) -> list[str]:
    """Returns the names of all test files of a tree."""
    return sorted(p.relative_to(root).as_posix() for p in (root / "tests").rglob("test_*.py"))


def record(tree: Tree, name: str, folder: pathlib.Path) -> str:
    """Runs the quick tests of a file and records the lines that they run, unless recorded before.

    Tests that fail are left out.

    Returns:
      A text with the exit status; "" if there was a record.
    """
    file = _record_file(folder, tree.root, name)
    if file.exists():
        return ""
    begun = time.monotonic()
    status = tree.run(lambda: _record(tree, name, file), _SECONDS)
    return f"{name}: {status}, {time.monotonic() - begun:.0f} s"


def load(folder: pathlib.Path, root: pathlib.Path) -> dict[str, Tests]:
    """Returns the records of a tree's test files by name; files without a record are left out."""
    files = {name: _record_file(folder, root, name) for name in test_files(root)}
    return {
        name: Tests(**json.loads(path.read_text("utf-8")))
        for name, path in files.items()
        if path.exists()
    }


def _record_file(folder: pathlib.Path, root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a test file's record; another content of the file has another path."""
    digest = hashlib.sha256((root / name).read_bytes()).hexdigest()[:12]
    return folder / f"{name.replace('/', '+')}.{digest}.json"


def _record(tree: Tree, name: str, record_file: pathlib.Path) -> int:
    """Runs a file's quick tests in this process and writes their `Tests`."""
    processes = pathlib.Path(os.environ["TMPDIR"], "lines")
    processes.mkdir()
    os.environ[lines_lib.FOLDER] = str(processes)
    plugin = _Recorder(lines_lib.Lines(str(tree.root / "kvjax")))
    status = pytest.main(["-q", "-p", "no:xdist", name], plugins=[plugin])
    tests = Tests(_by_file(plugin.imported), plugin.quick, plugin.slow)
    for path in processes.iterdir():
        test, *lines = path.read_text("utf-8").split("\n")
        pairs = (line.rpartition(":") for line in lines)
        executed = ((file, int(number)) for file, _, number in pairs if number)
        by_file = tests.quick[test]["lines"] if test in tests.quick else tests.imported
        for file, numbers in _by_file(executed).items():
            by_file[file] = sorted({*by_file.get(file, ()), *numbers})
    temporary = record_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(tests)), "utf-8")
    temporary.replace(record_file)
    return int(status)


class _Recorder:
    """Collects lines and seconds of each test that passes."""

    def __init__(self, lines: lines_lib.Lines):
        self._lines = lines
        self._failed = set()
        self.imported, self.quick, self.slow = set(), {}, []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        runnable = [i for i in items if not any(i.get_closest_marker(m) for m in _ELSEWHERE)]
        self.slow = [i.nodeid for i in runnable if i.get_closest_marker("slow")]
        items[:] = [i for i in runnable if not i.get_closest_marker("slow")]
        self.imported = self._lines.take()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        begun = time.monotonic()
        result = yield
        seconds = round(time.monotonic() - begun, 3)
        lines = _by_file(self._lines.take())
        if item.nodeid not in self._failed:
            self.quick[item.nodeid] = dict(seconds=seconds, lines=lines)
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed.add(report.nodeid)


def _by_file(lines: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    by_file: dict[str, list[int]] = {}
    for file, line in sorted(lines):
        by_file.setdefault(file, []).append(line)
    return by_file
