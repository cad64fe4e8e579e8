"""A copy of a tree, where tests run in forks of a process that has imported the large libraries."""

from collections.abc import Callable
import contextlib
import importlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback

import psutil

from tests.mutants import lines

_HEAVY = "jax flax.nnx optax orbax.checkpoint scipy.special pyarrow.parquet tokenizers".split()
_HEAVY += "jinja2 ml_collections fsspec filelock pytest".split()
_OWN = ("kvjax", "tests", "experiments", "configs")  # imported again, from the copy
_MEMORY = 6 * 2**30  # byte limit of a process and its children


class Tree:
    """A copy of a tree, and processes in it.

    Attributes:
      root: folder of the copy.
    """

    def __init__(self, source: pathlib.Path, folder: pathlib.Path):
        self.root = folder / "tree"
        ignore = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "*.egg-info")
        folder.mkdir(exist_ok=True)
        shutil.copytree(source, self.root, ignore=ignore)
        shutil.copy(lines.__file__, self.root / "sitecustomize.py")
        self._compiled = folder / "compiled"
        self._compiled.mkdir()
        self._now = int(time.time())
        for name in _HEAVY:
            importlib.import_module(name)

    def write(self, file: str, text: bytes) -> None:
        """Writes a file with a new modification time, so that Python compiles it again."""
        path = self.root / file
        path.write_bytes(text)
        self._now += 2
        os.utime(path, (self._now, self._now))

    def run(self, work: Callable[[], int], seconds: float) -> int | str:
        """Runs work in a fork; returns its status, or the limit exceeded, "time" or "memory"."""
        with tempfile.TemporaryDirectory(dir=self.root.parent) as scratch:
            pid = os.fork()
            if not pid:
                self._be_child(work, pathlib.Path(scratch))
            return _wait(pid, seconds)

    def _be_child(self, work: Callable[[], int], scratch: pathlib.Path) -> None:
        """Runs work in the copy, with its own caches and temporary files, and exits."""
        status = 70
        try:
            os.setsid()
            log = os.open(self.root.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            (scratch / "cache").mkdir()
            (scratch / "cache" / "compiled").symlink_to(self._compiled)  # shared: keys are digests
            (scratch / "tmp").mkdir()
            os.environ.update(
                PYTHONPATH=str(self.root),
                KVJAX_CACHE=str(scratch / "cache"),
                TMPDIR=str(scratch / "tmp"),
            )
            tempfile.tempdir = None
            os.chdir(self.root)
            sys.argv[:] = ["pytest"]  # commands print this name
            sys.path[:] = [str(self.root), *(p for p in sys.path if not _is_own_path(p))]
            for name in [n for n in sys.modules if n.partition(".")[0] in _OWN]:
                del sys.modules[name]
            importlib.invalidate_caches()
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(status)


def _is_own_path(path: str) -> bool:
    return not path or os.path.exists(os.path.join(path, "kvjax"))


def _wait(pid: int, seconds: float) -> int | str:
    """Waits for a child; kills it and its children if they exceed a limit."""
    deadline, process = time.monotonic() + seconds, psutil.Process(pid)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        family = _family(process)
        too_much = "time" if time.monotonic() > deadline else None
        if too_much or sum(_bytes(p) for p in family) > _MEMORY:
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            os.waitpid(pid, 0)
            return too_much or "memory"
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # processes that it left running
    return os.waitstatus_to_exitcode(ended[1])


def _family(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return [process]


def _bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0
