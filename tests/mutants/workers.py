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
      lines: folder of the records that `record` writes and `attempt` reads.
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
        """Yields results as they complete."""
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
    """Tries a mutant until a stage detects it; returns its index, and the keys to add to it."""
    index, mutant, stages = item
    outcome: dict = {}
    for name in left(mutant, stages):
        outcome |= _trials().attempt(mutant | outcome, name)
        if outcome.get("noticed_by"):
            break
    return index, outcome


def left(mutant: dict, stages: tuple[str, ...]) -> list[str]:
    """Returns those of `stages` in which the mutant has not been tried."""
    if mutant.get("equivalent") or mutant.get("noticed_by"):
        return []
    return [name for name in stages if name not in mutant.get("asked", ())]
