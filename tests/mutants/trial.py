"""Runs the tests that may detect a mutant: its folder's first, then all others, then slow ones."""

from collections.abc import Iterable, Iterator
import pathlib

import pytest

from tests.mutants import sample
from tests.mutants.coverage import Tests
from tests.mutants.tree import Tree

STAGES = ("folder", "quick", "slow")
# Limits: for quick tests, of the sum of their seconds without a mutant; for slow ones, of the time.
_SECONDS = dict(folder=120, quick=60, slow=600)
_READERS = "tests/test_overview.py"  # its tests read the package's source and run no line of it
_NO_TESTS = 5  # pytest's status if no test has one of these names


def stage(mutant: dict, name: str, tests: dict[str, Tests]) -> tuple[list[str], float]:
    """Returns the tests of a stage, most promising first, and their time limit in seconds."""
    near = [file for file in tests if _is_near(file, mutant["file"])]
    if name == "slow":
        ran = [file for file in near if _covering(tests[file], mutant)] or near
        return [test for file in ran for test in tests[file].slow], _SECONDS["slow"]
    files = near if name == "folder" else [file for file in tests if file not in near]
    names, seconds = [], 0.0
    if name == "quick" and _READERS in tests:
        names += tests[_READERS].quick
        seconds += sum(map(tests[_READERS].seconds, names))
    for file, test in _quick(mutant, files, tests):
        if file == _READERS and name == "quick":
            continue
        if seconds > _SECONDS[name]:
            break
        names.append(test)
        seconds += tests[file].seconds(test)
    return names, 90 + 5 * seconds  # the machine may be busy


def _is_near(test_file: str, file: str) -> bool:
    """Returns True if a test file belongs to the folder of a file of the package."""
    folder = sample.folder(file)
    parts = test_file.split("/")
    return len(parts) == 2 if folder == sample.ROOT else parts[1] in (folder, f"test_{folder}.py")


def _quick(mutant: dict, files: list[str], tests: dict[str, Tests]) -> Iterator[tuple[str, str]]:
    """Yields (file, test), file by file: tests that run the mutant's lines, then others nearby.

    A test may depend on lines that run once, before another test: in an import or a shared fixture.
    """
    covering = {file: _covering(tests[file], mutant) for file in files}
    ran = [file for file in files if covering[file]]
    ran.sort(key=lambda file: sum(map(tests[file].seconds, covering[file])))
    for file in ran:
        for test in sorted(covering[file], key=tests[file].seconds):
            yield file, test
    beside = [file for file in files if _ran(tests[file].imported, mutant)] or ran
    if not any(_count(each, mutant) for each in tests.values()):
        beside = files  # the file runs only in processes that record nothing
    for file in sorted(beside, key=lambda file: _relevance(tests[file], mutant)):
        for test in tests[file].quick:
            if test not in covering[file]:
                yield file, test


def _covering(tests: Tests, mutant: dict) -> list[str]:
    return [name for name, figures in tests.quick.items() if _ran(figures["lines"], mutant)]


def _ran(lines: dict[str, list[int]], mutant: dict) -> bool:
    first, last = mutant["lines"]
    in_package = mutant["file"].partition("/")[2]
    return any(first <= line <= last for line in lines.get(in_package, ()))


def _relevance(tests: Tests, mutant: dict) -> float:
    """Returns a sort key: small if many of a file's tests run the mutant's file, in little time."""
    return sum(map(tests.seconds, tests.quick)) / (_count(tests, mutant) + 0.1)


def _count(tests: Tests, mutant: dict) -> int:
    """Returns the number of tests that run a line of the mutant's file."""
    in_package = mutant["file"].partition("/")[2]
    return sum(in_package in figures["lines"] for figures in tests.quick.values())


class Trials:
    """Tries mutants in a copy of a tree.

    Args:
      tests: by file, from `coverage.load`.
    """

    def __init__(self, tree: Tree, tests: dict[str, Tests]):
        self._tree, self._tests = tree, tests
        self._passing: set[str] = set()  # without any mutant

    def attempt(self, mutant: dict, name: str) -> dict:
        """Returns the keys that a stage adds: `asked`; `noticed_by` and `test` if a test fails.

        Tests that also fail without the mutant, as on a busy machine, are `doubtful` and skipped.
        """
        names, seconds = stage(mutant, name, self._tests)
        outcome = dict(asked=[*mutant.get("asked", ()), name])
        while names:
            status, test = self._run_with(mutant, names, seconds)
            if status in (0, _NO_TESTS):
                break
            if name == "slow" and status == "time":
                return outcome | dict(stopped=test)
            if self._passes(test if test in names else names[0]):
                return outcome | dict(noticed_by=name, test=test, status=status)
            outcome["doubtful"] = [*outcome.get("doubtful", ()), test]
            names = [other for other in names if other != test] if test in names else names[1:]
        return outcome

    def _run_with(self, mutant: dict, names: list[str], seconds: float) -> tuple[int | str, str]:
        """Runs tests as `_run` does, with the mutant in the file."""
        original = (self._tree.root / mutant["file"]).read_bytes()
        place = slice(mutant["start"], mutant["end"])
        if original[place].decode() != mutant["before"]:
            raise SystemExit(f"{mutant['file']} has changed since mutants were drawn")
        changed = original[: place.start] + mutant["after"].encode() + original[place.stop :]
        self._tree.write(mutant["file"], changed)
        try:
            return self._run(names, seconds)
        finally:
            self._tree.write(mutant["file"], original)

    def _passes(self, test: str) -> bool:
        if test not in self._passing and self._run([test], 600)[0] == 0:
            self._passing.add(test)
        return test in self._passing

    def _run(self, names: list[str], seconds: float) -> tuple[int | str, str]:
        """Runs tests until one fails; returns the status, and the last test begun (or its file)."""
        begun = self._tree.root.parent / "test.txt"
        begun.write_text("")
        files = list(dict.fromkeys(name.partition("::")[0] for name in names))

        def work() -> int:
            options = ["-q", "-x", "-p", "no:xdist", "--tb=short"]
            return int(pytest.main([*options, *files], plugins=[_Chosen(names, begun)]))

        return self._tree.run(work, seconds), begun.read_text() or files[0]


class _Chosen:
    """Runs only tests of these names, in their order, and records the last one begun."""

    def __init__(self, names: Iterable[str], begun: pathlib.Path):
        self._rank = {name: i for i, name in enumerate(names)}
        self._begun = begun

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self._rank]
        items.sort(key=lambda item: self._rank[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        self._begun.write_text(nodeid)
