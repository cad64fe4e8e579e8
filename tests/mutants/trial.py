"""Runs the tests that may notice a mutant: those of its folder first, then all, then slow ones."""

from collections.abc import Iterable, Iterator
import pathlib

import pytest

from tests.mutants import sample
from tests.mutants.coverage import Tests
from tests.mutants.tree import Tree

STAGES = ("folder", "quick", "slow")
# Of quick tests, by the time that they take without a mutant; of slow ones, by the clock.
_SECONDS = dict(folder=120, quick=60, slow=600)
_READERS = "tests/test_overview.py"  # its tests read the package's text, and run none of it
_NO_TESTS = 5  # pytest's status: none of these names is there any more


def stage(mutant: dict, name: str, tests: dict[str, Tests]) -> tuple[list[str], float]:
    """Names of the tests of one stage, the promising first, and the seconds that they may take."""
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
    return names, 90 + 5 * seconds  # beside other work


def _is_near(test_file: str, file: str) -> bool:
    """Returns True if a file of tests belongs to a file's folder of the package."""
    folder = sample.folder(file)
    parts = test_file.split("/")
    return len(parts) == 2 if folder == sample.ROOT else parts[1] in (folder, f"test_{folder}.py")


def _quick(mutant: dict, files: list[str], tests: dict[str, Tests]) -> Iterator[tuple[str, str]]:
    """Files and tests in them, file by file: those that run the lines; then those beside them.

    A test may depend on lines that another one ran: of an import, or of a fixture that both have.
    """
    covering = {file: _covering(tests[file], mutant) for file in files}
    ran = [file for file in files if covering[file]]
    ran.sort(key=lambda file: sum(map(tests[file].seconds, covering[file])))
    for file in ran:
        for test in sorted(covering[file], key=tests[file].seconds):
            yield file, test
    beside = [file for file in files if _ran(tests[file].imported, mutant)] or ran
    if not any(_count(each, mutant) for each in tests.values()):
        beside = files  # it runs in processes of which nothing is recorded
    for file in sorted(beside, key=lambda file: _relevance(tests[file], mutant)):
        for test in tests[file].quick:
            if test not in covering[file]:
                yield file, test


def _covering(tests: Tests, mutant: dict) -> list[str]:
    return [name for name, found in tests.quick.items() if _ran(found["lines"], mutant)]


def _ran(lines: dict[str, list[int]], mutant: dict) -> bool:
    first, last = mutant["lines"]
    in_package = mutant["file"].partition("/")[2]
    return any(first <= line <= last for line in lines.get(in_package, ()))


def _relevance(tests: Tests, mutant: dict) -> float:
    """Less where more of a file's tests run something in the mutant's file, for less time."""
    return sum(map(tests.seconds, tests.quick)) / (_count(tests, mutant) + 0.1)


def _count(tests: Tests, mutant: dict) -> int:
    """Tests that run something in the mutant's file."""
    in_package = mutant["file"].partition("/")[2]
    return sum(in_package in found["lines"] for found in tests.quick.values())


class Trials:
    """Tries mutants in a copy of a tree.

    Args:
      tests: by file, as `coverage.load` has them.
    """

    def __init__(self, tree: Tree, tests: dict[str, Tests]):
        self._tree, self._tests = tree, tests
        self._passing: set[str] = set()  # without any mutant

    def attempt(self, mutant: dict, name: str) -> dict:
        """Returns the keys that a stage adds: `asked`; `noticed_by` and `test` if a test notices.

        Tests that fail without the mutant too, as on a busy machine, are `doubtful` and left out.
        """
        names, seconds = stage(mutant, name, self._tests)
        found = dict(asked=[*mutant.get("asked", ()), name])
        while names:
            status, test = self._run_with(mutant, names, seconds)
            if status in (0, _NO_TESTS):
                break
            if name == "slow" and status == "time":
                return found | dict(stopped=test)
            if self._passes(test if test in names else names[0]):
                return found | dict(noticed_by=name, test=test, status=status)
            found["doubtful"] = [*found.get("doubtful", ()), test]
            names = [other for other in names if other != test] if test in names else names[1:]
        return found

    def _run_with(self, mutant: dict, names: list[str], seconds: float) -> tuple[int | str, str]:
        """Runs tests as `_run` does, with the mutant in its place."""
        original = (self._tree.root / mutant["file"]).read_bytes()
        place = slice(mutant["start"], mutant["end"])
        if original[place].decode() != mutant["before"]:
            raise SystemExit(f"{mutant['file']} is not as it was when mutants were drawn")
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
        """Runs tests until one fails; returns the status, and the last test begun, or a file."""
        begun = self._tree.root.parent / "test.txt"
        begun.write_text("")
        files = list(dict.fromkeys(name.partition("::")[0] for name in names))

        def work() -> int:
            options = ["-q", "-x", "-p", "no:xdist", "--tb=short"]
            return int(pytest.main([*options, *files], plugins=[_Chosen(names, begun)]))

        return self._tree.run(work, seconds), begun.read_text() or files[0]


class _Chosen:
    """Runs tests of these names alone, in their order, and writes down which began last."""

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
