"""Records which quick tests run a line: once for a tree, in a file for each file of tests."""

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
    """Tests of one file.

    Attributes:
      imported: by file of the package, lines that run before its first test.
      quick: by test, how long it takes and by file the lines that run in it.
      slow: names.
    """

    imported: dict[str, list[int]]
    quick: dict[str, dict]
    slow: list[str]

    def seconds(self, test: str) -> float:
        return self.quick[test]["seconds"]


def test_files(root: pathlib.Path) -> list[str]:
    """Names of all files of tests in a tree."""
    return sorted(p.relative_to(root).as_posix() for p in (root / "tests").rglob("test_*.py"))


def record(tree: Tree, name: str, folder: pathlib.Path) -> str:
    """Runs the quick tests of a file and keeps which lines they run, unless it is kept already.

    Tests that fail are left out.

    Returns:
      How they ended, in words; "" if nothing was to be done.
    """
    kept = _kept(folder, tree.root, name)
    if kept.exists():
        return ""
    begun = time.monotonic()
    status = tree.run(lambda: _record(tree, name, kept), _SECONDS)
    return f"{name}: {status}, {time.monotonic() - begun:.0f} s"


def load(folder: pathlib.Path, root: pathlib.Path) -> dict[str, Tests]:
    """Returns the records of a tree's files of tests, by name; a file without one is left out."""
    kept = {name: _kept(folder, root, name) for name in test_files(root)}
    return {
        name: Tests(**json.loads(path.read_text("utf-8")))
        for name, path in kept.items()
        if path.exists()
    }


def _kept(folder: pathlib.Path, root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the place of a record: one for each text of a file of tests."""
    digest = hashlib.sha256((root / name).read_bytes()).hexdigest()[:12]
    return folder / f"{name.replace('/', '+')}.{digest}.json"


def _record(tree: Tree, name: str, kept: pathlib.Path) -> int:
    """Runs a file's quick tests in this process and writes what runs which lines."""
    processes = pathlib.Path(os.environ["TMPDIR"], "lines")
    processes.mkdir()
    os.environ[lines_lib.FOLDER] = str(processes)
    plugin = _Recorder(lines_lib.Lines(str(tree.root / "kvjax")))
    status = pytest.main(["-q", "-p", "no:xdist", name], plugins=[plugin])
    found = Tests(_by_file(plugin.imported), plugin.quick, plugin.slow)
    for path in processes.iterdir():
        test, *more = path.read_text("utf-8").split("\n")
        run = ((file, int(line)) for file, _, line in (m.rpartition(":") for m in more) if line)
        of = found.quick[test]["lines"] if test in found.quick else found.imported
        for file, numbers in _by_file(run).items():
            of[file] = sorted({*of.get(file, ()), *numbers})
    temporary = kept.with_suffix(".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(found)), "utf-8")
    temporary.replace(kept)
    return int(status)


class _Recorder:
    """Notes lines and seconds of each test that passes."""

    def __init__(self, lines: lines_lib.Lines):
        self._lines = lines
        self._failed = set()
        self.imported, self.quick, self.slow = set(), {}, []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        here = [i for i in items if not any(i.get_closest_marker(m) for m in _ELSEWHERE)]
        self.slow = [i.nodeid for i in here if i.get_closest_marker("slow")]
        items[:] = [i for i in here if not i.get_closest_marker("slow")]
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


def _by_file(found: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    by_file: dict[str, list[int]] = {}
    for file, line in sorted(found):
        by_file.setdefault(file, []).append(line)
    return by_file
