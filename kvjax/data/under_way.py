"""A preparation under way: what is done stays, so that a killed one goes on.

    .under-way-KEY/             on a disk, renamed to KEY in the end; in a bucket KEY itself
        plan.json               what is being made, and by which code
        packed_rows/1.0.0/      shards; each appears when it is whole
        done/00007.json         what part 7 has, written after its shards
        work-HOST-PID-.../      what a process is writing (in a bucket: in the temporary folder)

In a bucket the manifest, written last, tells others that all are there. Several processes, on one
machine or on several that share the folder, may work on it at once: a part made twice is the same.
"""

from collections.abc import Iterator
import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import socket
import tempfile
import time
from typing import Any

from etils import epath

from kvjax.data import folders
from kvjax.data import packed_rows
from kvjax.data.manifest import MANIFEST
from kvjax.data.manifest import ROWS
from kvjax.data.manifest import ROWS_VERSION
from kvjax.data.manifest import SPLITS
from kvjax.data.tokenized_part import Counts
from kvjax.data.tokenized_part import Made
from kvjax.foundation import json_text
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import warn
from kvjax.foundation.files import forget_listings
from kvjax.foundation.files import in_bucket

PREFIX = ".under-way-"
PLAN = "plan.json"
# What of a plan says how it was asked for; the folder's name covers what that names.
AS_ASKED = ("config", "sources")
DONE = "done"
_FAILED = "failed"
_WORK = "work-"
_AT_ONCE = 32  # files of a bucket that are asked for at a time
# A folder in which nothing was written for so long is what a killed process left.
ABANDONED_SECONDS = 24 * 3600


class UnderWay:
    """The making of one data set of so many parts.

    Args:
      target: the folder that it will be.
    """

    def __init__(self, target: epath.Path, num_parts: int):
        self.target, self.num_parts = epath.Path(target), num_parts
        self.remote = in_bucket(target)
        self.folder = self.target
        if not self.remote:
            self.folder = self.target.parent / f"{PREFIX}{self.target.name}"
        self.rows = self.folder / ROWS / ROWS_VERSION

    def open(self, plan: dict[str, Any]) -> None:
        """Makes the folder, and removes what killed processes were writing in it.

        Args:
          plan: what is being made, of JSON's types.

        Raises:
          DataError: some of it was made by another plan.
        """
        there = read_plan(self.folder)
        if there is None and self.any_done():
            warn(f"{os.fspath(self.folder)} does not say what is made there: made anew")
            self.remove()
        elif there is not None and there != plan:
            if self._differ(there, plan):
                self.remove()
        self.rows.mkdir(parents=True, exist_ok=True)
        (self.folder / DONE).mkdir(parents=True, exist_ok=True)
        if there != plan:
            text = json.dumps(plan)
            if self.remote:
                (self.folder / PLAN).write_text(text)
            else:
                with self.work() as work:
                    (work / PLAN).write_text(text)
                    os.replace(work / PLAN, self.folder / PLAN)
        if (failed := self.folder / _FAILED).exists():
            failed.rmtree()
        for work in self._works(self.folder):
            if _is_abandoned(work):
                shutil.rmtree(work, ignore_errors=True)

    def _differ(self, there: dict[str, Any], plan: dict[str, Any]) -> bool:
        """Whether another plan would write other rows; a DataError if some are written."""
        keys = sorted(k for k in there.keys() | plan.keys() if there.get(k) != plan.get(k))
        keys = [key for key in keys if key not in AS_ASKED]
        if not keys or not self.any_done():
            return bool(keys)
        parts = "; ".join(f"{k}: {_short(there.get(k))}, now {_short(plan.get(k))}" for k in keys)
        raise DataError(
            f"{os.fspath(self.folder)} was begun by other code or with another plan ({parts}). Go "
            "on with what it was begun with, or remove that folder to begin anew"
        )

    def fail(self, part: int, why: str) -> None:
        """Says why a part cannot be made, for who made others make it."""
        folder = self.folder / _FAILED
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part:05}.txt").write_text(why)

    def forget(self, part: int) -> None:
        """Takes back that a part is done."""
        (self.folder / DONE / f"{part:05}.json").unlink(missing_ok=True)

    def failures(self) -> list[str]:
        """What `fail` was told since `open`, by part."""
        folder = self.folder / _FAILED
        files = sorted(folder.iterdir(), key=lambda file: file.name) if folder.exists() else []
        return [file.read_text() for file in files]

    def any_done(self) -> bool:
        """Whether a part is done."""
        done = self.folder / DONE
        return done.exists() and next(iter(done.glob("*.json")), None) is not None

    def missing(self) -> list[int]:
        """The parts that are not done, in order."""
        return [i for i, made in enumerate(self.all_made()) if made is None]

    def all_made(self) -> list[Made | None]:
        """What each part has, in order; None for one that is not done, or not whole any more."""
        done = self.folder / DONE
        forget_listings(done)
        names = {path.name for path in done.iterdir()} if done.exists() else set()
        there = [f"{i:05}.json" in names for i in range(self.num_parts)]
        if not self.remote:
            return [self._made(i) if is_there else None for i, is_there in enumerate(there)]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(
                pool.map(lambda i: self._made(i) if there[i] else None, range(self.num_parts))
            )

    def _made(self, part: int) -> Made | None:
        try:
            content = json_text.parse((self.folder / DONE / f"{part:05}.json").read_bytes())
            counts = {split: Counts(**content["counts"][split]) for split in SPLITS}
            made = Made(counts, tuple(content["left_out"]))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            warn(f"{os.fspath(self.folder)}: part {part} is made again: {error}")
            return None
        if self.remote:  # a bucket shows no file before it is whole
            return made
        for split, found in counts.items():
            shard = self.rows / packed_rows.shard_name(split, part, self.num_parts)
            size = shard.stat().length if shard.exists() else 0
            if size != found.file_bytes:
                warn(f"{os.fspath(shard)} has {size:,} bytes, not {found.file_bytes:,}: made again")
                return None
        return made

    @contextlib.contextmanager
    def work(self) -> Iterator[pathlib.Path]:
        """A local folder for one part's shards; its name says whose it is."""
        whose = f"{_WORK}{socket.gethostname()}-{os.getpid()}-"
        with folders.writing(self.folder):
            made = tempfile.TemporaryDirectory(
                prefix=whose if not self.remote else f"kvjax-{whose}",
                dir=None if self.remote else self.folder,
                ignore_cleanup_errors=True,  # another process may have finished
            )
        with made as folder:
            yield pathlib.Path(folder)

    def publish(self, part: int, work: pathlib.Path, made: Made) -> None:
        """Takes over the shards that were written for a part, and says that it is done."""
        with folders.writing(self.folder):
            for split, found in made.counts.items():
                name = packed_rows.shard_name(split, part, self.num_parts)
                if found.file_bytes:
                    self._put(work / name, self.rows / name)
                else:
                    (self.rows / name).unlink(missing_ok=True)  # of other text that was taken back
            counts = {split: vars(found) for split, found in made.counts.items()}
            (work / DONE).write_text(json.dumps(dict(counts=counts, left_out=made.left_out)))
            self._put(work / DONE, self.folder / DONE / f"{part:05}.json")

    def _put(self, file: pathlib.Path, target: epath.Path) -> None:
        if not self.remote:
            os.replace(file, target)
            return
        with open(file, "rb") as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
        file.unlink()

    def finish(self, work: pathlib.Path, last: str) -> None:
        """Adds a folder's files to the shards, and makes all of it the target.

        Args:
          work: from `work`.
          last: the file by which others know that all are there.
        """
        files = [file for file in work.rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: (file == work / last, file)):
            target = self.folder / file.relative_to(work).as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            self._put(file, target)
        if not self.remote:
            folders.rename(self.folder, self.target / last)
            if self.folder.exists():
                self.remove()  # another process was first, with the same content
        self._remove_own()

    def _remove_own(self) -> None:
        """Removes from the target what is not the data set's."""
        for work in self._works(self.target):
            shutil.rmtree(work, ignore_errors=True)
        for own in (self.target / DONE, self.target / _FAILED):
            if own.exists():
                own.rmtree()
        (self.target / PLAN).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes all of it."""
        self.folder.rmtree(missing_ok=True)

    def _works(self, folder: epath.Path) -> list[pathlib.Path]:
        return [] if self.remote else list(pathlib.Path(folder).glob(f"{_WORK}*"))


def read_plan(folder: epath.Path) -> dict[str, Any] | None:
    """The plan of a preparation under way; None if there is none, or it cannot be read."""
    try:
        found = json_text.parse((folder / PLAN).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def plans(datasets: epath.Path) -> Iterator[tuple[epath.Path, dict[str, Any]]]:
    """The folders under way among data sets of which parts are done, with their plans."""
    if not datasets.exists():
        return
    for folder in datasets.iterdir():
        if in_bucket(datasets) or folder.name.startswith(PREFIX):
            done = folder / DONE
            some = done.exists() and next(iter(done.glob("*.json")), None) is not None
            if some and not (folder / MANIFEST).exists() and (plan := read_plan(folder)):
                yield folder, plan


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _is_abandoned(work: pathlib.Path) -> bool:
    """Whether the process that wrote there is gone."""
    host, _, rest = work.name.removeprefix(_WORK).rpartition("-")[0].rpartition("-")
    if host == socket.gethostname() and rest.isdigit() and os.path.exists("/proc"):
        return not pathlib.Path(f"/proc/{rest}").exists()
    with contextlib.suppress(FileNotFoundError):
        newest = max(file.stat().st_mtime for file in (work, *work.rglob("*")))
        return time.time() - newest > ABANDONED_SECONDS
    return False
