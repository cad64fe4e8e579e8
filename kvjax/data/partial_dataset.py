"""A preparation under way: what is done stays, so that a killed one goes on.

    .under-way-KEY/             on a disk, renamed to KEY in the end; in a bucket KEY itself
        plan.json               what is being made, and by which code
        packed_rows/1.0.0/      shards; each appears when it is whole
        done/00007.json         what part 7 has, written after its shards
        work-HOST-PID-.../      what a process is writing (in a bucket: in the temporary folder)

In a bucket the manifest, written last, tells others that all are there. Several processes, on one
machine or on several that share the folder, may work on it at once: a part made twice is the same.
"""

from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import socket
import tempfile
from typing import Any

from etils import epath

from kvjax.data import folders, packed_rows
from kvjax.data.manifest import MANIFEST, ROWS, ROWS_VERSION, SPLITS, digest_of
from kvjax.data.tokenized_part import Counts, PartResult, Skipped
from kvjax.foundation import files, json_text, progress
from kvjax.foundation.errors import DataError, warn
from kvjax.foundation.files import forget_listings, in_bucket, named

PREFIX = ".under-way-"
PLAN = "plan.json"
# What of a plan says how it was asked for; the folder's name covers what that names.
AS_ASKED = ("config", "sources", "left_out")
DONE = "done"
_FAILED = "failed"
_WORK = "work-"
_AT_ONCE = 32  # files of a bucket that are asked for at a time


class PartialDataset:
    """The making of one data set.

    Args:
      target: the folder that it will be.
      digests: of its parts, in order: what is done is known by them.
    """

    def __init__(self, target: epath.Path, digests: Sequence[str]):
        self.target, self.digests = epath.Path(target), tuple(digests)
        self.remote = in_bucket(target)
        self.folder = self.target
        if not self.remote:
            self.folder = self.target.parent / f"{PREFIX}{self.target.name}"
        self.rows = self.folder / ROWS / ROWS_VERSION

    @property
    def num_parts(self) -> int:
        """How many there are."""
        return len(self.digests)

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

    def adopt(self, other: epath.Path, *, left_out: bool, shown: bool = True) -> int:
        """Takes over what another preparation made of the same text; how many parts.

        Args:
          other: its folder, which is removed with what is not taken over. On a disk not where
            somebody writes in it; who is between two parts, or in a bucket, is not seen, and fails.
          left_out: take over as well where something was left out.
        """
        plan = read_plan(other)
        if plan is None or self._is_used(other):
            return 0  # another process was first, or somebody is at work there
        missing = {self.digests[part]: part for part in reversed(self.missing())}
        marks = named(other / DONE, "*.json")

        def take(mark: epath.Path) -> bool:
            content = _read_json(mark) or {}
            part = missing.get(content.get("digest"))
            if part is None or (made := _made_of(content)) is None:
                return False
            if made.left_out.count and not left_out:
                return False
            index, moves = int(mark.name.removesuffix(".json")), []
            for split, found in made.counts.items():
                theirs = packed_rows.shard_name(split, index, plan["parts"])
                theirs, own = other / ROWS / ROWS_VERSION / theirs, self._shard(split, part)
                if not found.file_bytes:
                    own.unlink(missing_ok=True)
                elif files.size(theirs) == found.file_bytes:
                    moves.append((theirs, own))
                elif files.size(own) != found.file_bytes:  # else an earlier attempt had moved it
                    return False
            with contextlib.suppress(FileNotFoundError):  # another process was first
                for pair in [*moves, (mark, self.folder / DONE / f"{part:05}.json")]:
                    files.move(*pair)
                return True
            return False

        with (
            progress.waiting(f"taking over parts of {other}", shown=shown),
            concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool,
        ):
            taken = sum(pool.map(take, marks))
        other.rmtree(missing_ok=True)
        return taken

    def discard(self, other: epath.Path) -> None:
        """Removes another preparation's folder, unless somebody writes in it."""
        if not self._is_used(other):
            other.rmtree(missing_ok=True)

    def fail(self, part: int, why: str, *, broken: bool = False) -> None:
        """Says why a part cannot be made: for who made others make it, and the next attempt.

        Args:
          broken: it names a source that cannot be read, and may be mended.
        """
        folder = self.folder / _FAILED
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part:05}.json").write_text(json.dumps(dict(why=why, broken=broken)))

    def forget(self, part: int) -> None:
        """Takes back that a part is done."""
        (self.folder / DONE / f"{part:05}.json").unlink(missing_ok=True)

    def failures(self) -> list[str]:
        """What `fail` was told of parts that were not done since, in order."""
        return [note["why"] for note in _notes(self.folder)]

    def any_done(self) -> bool:
        """Whether a part is done."""
        return bool(named(self.folder / DONE, "*.json"))

    def missing(self) -> list[int]:
        """The parts that are not done, in order."""
        return [i for i, made in enumerate(self.all_made()) if made is None]

    def all_made(self) -> list[PartResult | None]:
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

    def _made(self, part: int) -> PartResult | None:
        mark = self.folder / DONE / f"{part:05}.json"
        try:
            content = mark.read_bytes()
        except FileNotFoundError:
            return None
        content = _parsed(content) or {}
        if (made := _made_of(content)) is None:
            warn(f"{os.fspath(self.folder)}: part {part} is made again: {mark.name} is damaged")
            return None
        if content["digest"] != self.digests[part]:
            return None  # of other text
        if self.remote:  # a bucket shows no file before it is whole
            return made
        for split, found in made.counts.items():
            shard = self._shard(split, part)
            size = files.size(shard) or 0
            if size != found.file_bytes:
                warn(f"{os.fspath(shard)} has {size:,} bytes, not {found.file_bytes:,}: made again")
                return None
        return made

    def _shard(self, split: str, part: int) -> epath.Path:
        return self.rows / packed_rows.shard_name(split, part, self.num_parts)

    @contextlib.contextmanager
    def work(self) -> Iterator[pathlib.Path]:
        """A local folder for one part's shards; its name says whose it is."""
        folder = pathlib.Path(tempfile.gettempdir()) if self.remote else self.folder
        with folders.writing(folder):
            made = tempfile.TemporaryDirectory(
                prefix=f"{self._prefix}{_here()}-{os.getpid()}-",
                dir=folder,
                ignore_cleanup_errors=True,  # another process may have finished
            )
        with made as folder:
            yield pathlib.Path(folder)

    def publish(self, part: int, work: pathlib.Path, made: PartResult) -> None:
        """Takes over the shards that were written for a part, and says that it is done."""
        if self.remote and self._made(part) is not None:
            return  # another process was first: what it wrote is not touched
        with folders.writing(self.folder):
            for split, found in made.counts.items():
                shard = self._shard(split, part)
                if found.file_bytes:
                    self._put(work / shard.name, shard)
                else:
                    shard.unlink(missing_ok=True)  # of other text that was taken back
            counts = {split: vars(found) for split, found in made.counts.items()}
            done = dict(digest=self.digests[part], counts=counts, left_out=made.left_out)
            (work / DONE).write_text(json.dumps(done))
            self._put(work / DONE, self.folder / DONE / f"{part:05}.json")
            (self.folder / _FAILED / f"{part:05}.json").unlink(missing_ok=True)

    def _put(self, file: pathlib.Path, target: epath.Path) -> None:
        if not self.remote:
            os.replace(file, target)
            return
        with open(file, "rb") as source:
            sink = target.open("wb")
            try:
                shutil.copyfileobj(source, sink, 1 << 22)
            except BaseException:  # closed, half of it would be there
                getattr(sink, "discard", lambda: None)()
                raise
            sink.close()
        file.unlink()

    def finish(self, work: pathlib.Path, last: str) -> None:
        """Adds a folder's files to the shards, and makes all of it the target.

        Args:
          work: from `work`.
          last: the file by which others know that all are there.
        """
        made = [file for file in work.rglob("*") if file.is_file()]
        for file in sorted(made, key=lambda file: (file == work / last, file)):
            target = self.folder / file.relative_to(work).as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            self._put(file, target)
        if not self.remote:
            folders.rename(self.folder, self.target / last)
            self.folder.rmtree(missing_ok=True)  # another process was first, with the same content
        self._remove_own()

    def _remove_own(self) -> None:
        """Removes from the target what is not the data set's."""
        for work in [] if self.remote else self._works(self.target):
            shutil.rmtree(work, ignore_errors=True)
        for own in (self.target / DONE, self.target / _FAILED):
            if own.exists():
                own.rmtree()
        (self.target / PLAN).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes all of it; a DataError where another process writes in it."""
        if self._is_used(self.folder):
            raise DataError(
                f"{os.fspath(self.folder)}: another process is preparing there, with another plan "
                "or other code. Let it end, or end it, and run the same command again"
            )
        self.folder.rmtree(missing_ok=True)

    def _is_used(self, folder: epath.Path) -> bool:
        """Whether somebody writes in a folder; of a bucket's nobody knows."""
        return not self.remote and not all(map(_is_abandoned, self._works(folder)))

    @property
    def _prefix(self) -> str:
        return f"kvjax-{_WORK}" if self.remote else _WORK

    def _works(self, folder: epath.Path) -> list[pathlib.Path]:
        where = tempfile.gettempdir() if self.remote else folder
        return list(pathlib.Path(where).glob(f"{self._prefix}*"))


def read_plan(folder: epath.Path) -> dict[str, Any] | None:
    """The plan of a preparation under way; None if there is none, or it cannot be read."""
    return _read_json(folder / PLAN)


def were_broken(folder: epath.Path, names: Sequence[str]) -> bool:
    """Whether a preparation under way could not read any of these sources, or not all of it."""
    if not names:
        return True
    failed = [note["why"] for note in _notes(folder) if note["broken"]]
    marks = [_made_of(_read_json(mark) or {}) for mark in named(folder / DONE, "*.json")]
    left_out = [text for made in marks if made for text in made.left_out.first]
    said = "\n".join([*failed, *left_out, *(read_plan(folder) or {}).get("left_out", ())])
    quoted = lambda name: re.search(rf"(?<![^\s'\"]){re.escape(name)}[,: ]", said)
    return all(map(quoted, names))


def _notes(folder: epath.Path) -> list[dict[str, Any]]:
    """What `fail` wrote, by part."""
    found = named(folder / _FAILED, "*.json")
    return [note for file in found if (note := _read_json(file))]


def _made_of(mark: dict[str, Any]) -> PartResult | None:
    """What a mark says of its part; None if it is not as it was written."""
    try:
        counts = {split: Counts(**mark["counts"][split]) for split in SPLITS}
        count, first, *nulls = mark["left_out"]  # which older marks do not count
        left_out = Skipped(int(count), tuple(first), *map(int, nulls))
        return PartResult(counts, left_out) if mark["digest"] else None
    except (ValueError, TypeError, KeyError):
        return None


def _read_json(path: epath.Path) -> dict[str, Any] | None:
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return None


def _parsed(content: bytes) -> dict[str, Any] | None:
    """A JSON object; None if the bytes are none."""
    try:
        found = json_text.parse(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def plans(datasets: epath.Path) -> Iterator[tuple[epath.Path, dict[str, Any]]]:
    """The folders under way among data sets of which parts are done, with their plans."""
    if not datasets.exists():
        return
    for folder in datasets.iterdir():
        if in_bucket(datasets) or folder.name.startswith(PREFIX):
            done = folder / DONE
            some = done.exists() and named(done, "*.json")
            if some and not (folder / MANIFEST).exists() and (plan := read_plan(folder)):
                yield folder, plan


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


@functools.cache
def _here() -> str:
    """Where a process's number means it: this machine since it was started, and container."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/pid"))
    return digest_of(found)


def _is_abandoned(work: pathlib.Path) -> bool:
    """Whether the process that wrote there is gone."""
    here, _, process = work.name.partition(_WORK)[2].rpartition("-")[0].rpartition("-")
    if here == _here() and process.isdigit() and os.path.exists("/proc"):
        return not pathlib.Path(f"/proc/{process}").exists()
    return folders.is_abandoned(work)
