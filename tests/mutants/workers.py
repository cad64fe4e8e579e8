"""Processes that try mutants, each in a copy of the tree."""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import functools
import multiprocessing
import pathlib
import tempfile

from tests.mutants import coverage
from tests.mutants.tree import Tree
from tests.mutants.trial import Trials

_tree: Tree  # of this worker
_lines: pathlib.Path


class Pool:
    """Workers with a copy of a tree each, as a context.

    Args:
      lines: a folder; what `record` keeps, and `attempt` reads.
    """

    def __init__(self, count: int, root: pathlib.Path, lines: pathlib.Path):
        self._scratch = tempfile.TemporaryDirectory(prefix="mutants")
        self._pool = futures.ProcessPoolExecutor(
            count,
            multiprocessing.get_context("spawn"),  # they fork: no threads of this process
            _start,
            (root, pathlib.Path(self._scratch.name), lines),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown(cancel_futures=True)
        self._scratch.cleanup()

    def each(self, work: Callable, items: Iterable) -> Iterator:
        """Results as they come."""
        for done in futures.as_completed([self._pool.submit(work, item) for item in items]):
            yield done.result()


def _start(root: pathlib.Path, scratch: pathlib.Path, lines: pathlib.Path) -> None:
    global _tree, _lines
    _tree = Tree(root, pathlib.Path(tempfile.mkdtemp(dir=scratch)))
    _lines = lines


def record(name: str) -> str:
    """Calls `coverage.record` in this worker."""
    return coverage.record(_tree, name, _lines)


@functools.cache
def _trials() -> Trials:
    return Trials(_tree, coverage.load(_lines, _tree.root))


def attempt(item: tuple[int, dict, tuple[str, ...]]) -> tuple[int, dict]:
    """Tries the mutant of an index until a stage notices; what is to be added to it."""
    index, mutant, stages = item
    found: dict = {}
    for name in left(mutant, stages):
        found |= _trials().attempt(mutant | found, name)
        if found.get("noticed_by"):
            break
    return index, found


def left(mutant: dict, stages: tuple[str, ...]) -> list[str]:
    """Returns the stages, of those named, that are still to be asked."""
    if mutant.get("equivalent") or mutant.get("noticed_by"):
        return []
    return [name for name in stages if name not in mutant.get("asked", ())]
