"""A data set that is being prepared, with finished parts from which a killed preparation resumes.

    .under-way-KEY/             local; renamed to KEY at the end. In a bucket, KEY itself
        plan.json               tokenizer, code and number of parts of this preparation
        packed_rows/1.0.0/      shards; each appears once it is complete
        done/00007.json         counts of part 7, written after its shards
        work-HOST-PID-.../      a process's temporary files (for a bucket: in the temporary folder)

In a bucket, the manifest is written last and marks the data set as complete. Processes on several
machines that share the folder may write at once, since a part that is made twice has the same
bytes.
"""

from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import shutil
import socket
import tempfile
from typing import Any

from etils import epath

from kvjax.data import folders, packed_rows
from kvjax.data.manifest import ROWS, ROWS_VERSION, SPLITS, digest_of
from kvjax.data.tokenized_part import Counts, PartResult, Skipped
from kvjax.foundation import files, json_text
from kvjax.foundation.errors import DataError, warn
from kvjax.foundation.files import forget_listings, in_bucket, matching_entries

PREFIX = ".under-way-"
PLAN = "plan.json"
DONE = "done"
_FAILED = "failed"
_WORK = "work-"
_CONCURRENT_READS = 32  # files of a bucket read at once


class PartialDataset:
    """The folder of a data set while its parts are being made.

    Args:
      target: the folder of the finished data set.
      digests: one per part, in order; a finished part counts only if its digest matches.
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
        """The number of parts."""
        return len(self.digests)

    def open(self, plan: dict[str, Any]) -> None:
        """Creates the folder, and removes temporary files of processes that were killed.

        Args:
          plan: JSON-able description of the preparation.

        Raises:
          DataError: some parts were made with another plan.
        """
        saved = read_plan(self.folder)
        if saved is None and self.any_done():
            warn(f"{os.fspath(self.folder)} has no readable {PLAN}: starting over")
            self.remove()
        elif saved is not None and saved != plan:
            if self.any_done():
                keys = sorted(k for k in saved.keys() | plan.keys() if saved.get(k) != plan.get(k))
                raise DataError(
                    f"{os.fspath(self.folder)} was begun with another {', '.join(keys)}. Resume it "
                    "with the code and options that began it, or remove that folder"
                )
            self.remove()
        self.rows.mkdir(parents=True, exist_ok=True)
        (self.folder / DONE).mkdir(parents=True, exist_ok=True)
        if saved != plan:
            text = json.dumps(plan)
            if self.remote:
                (self.folder / PLAN).write_text(text)
            else:
                with self.work() as work:
                    (work / PLAN).write_text(text)
                    os.replace(work / PLAN, self.folder / PLAN)
        for work in self._work_folders(self.folder):
            if _is_abandoned(work):
                shutil.rmtree(work, ignore_errors=True)

    def fail(self, part: int, why: str) -> None:
        """Records why a worker cannot make a part; its launcher reads that by `failures`."""
        folder = self.folder / _FAILED
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part:05}.json").write_text(json.dumps({"why": why}))

    def forget(self, part: int) -> None:
        """Removes the mark of a finished part, so that it is made again."""
        (self.folder / DONE / f"{part:05}.json").unlink(missing_ok=True)

    def failures(self) -> list[str]:
        """Returns the messages of `fail` by part, except for parts that succeeded later."""
        files = matching_entries(self.folder / _FAILED, "*.json")
        return [failure["why"] for file in files if (failure := _read_json(file))]

    def any_done(self) -> bool:
        """Returns True if a part is finished."""
        return bool(matching_entries(self.folder / DONE, "*.json"))

    def missing(self) -> list[int]:
        """Returns the indices of parts that are not finished, in order."""
        return [i for i, result in enumerate(self.results()) if result is None]

    def results(self) -> list[PartResult | None]:
        """Returns each part's result, in order; None for an unfinished or damaged part."""
        done = self.folder / DONE
        forget_listings(done)  # a bucket's cached listing lacks the new marks of other workers
        names = {path.name for path in done.iterdir()} if done.exists() else set()

        def read(part: int) -> PartResult | None:
            return self._result(part) if f"{part:05}.json" in names else None

        if not self.remote:
            return [read(part) for part in range(self.num_parts)]
        with concurrent.futures.ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            return list(pool.map(read, range(self.num_parts)))

    def _result(self, part: int) -> PartResult | None:
        mark = self.folder / DONE / f"{part:05}.json"
        try:
            content = mark.read_bytes()
        except FileNotFoundError:
            return None
        content = _parsed(content) or {}
        if (result := _result_from(content)) is None:
            warn(f"{os.fspath(self.folder)}: {mark.name} is damaged: making part {part} again")
            return None
        if content.get("digest") != self.digests[part]:
            return None  # made from another text
        if self.remote:  # an object in a bucket is never incomplete
            return result
        for split, counts in result.counts.items():
            shard = self._shard(split, part)
            size = files.size(shard) or 0
            if size != counts.file_bytes:
                warn(
                    f"{os.fspath(shard)} has {size:,} bytes, not {counts.file_bytes:,}: making its "
                    "part again"
                )
                return None
        return result

    def _shard(self, split: str, part: int) -> epath.Path:
        return self.rows / packed_rows.shard_name(split, part, self.num_parts)

    @contextlib.contextmanager
    def work(self) -> Iterator[pathlib.Path]:
        """Yields a local temporary folder for one part; its name identifies the process."""
        folder = pathlib.Path(tempfile.gettempdir()) if self.remote else self.folder
        with folders.writing(folder):
            temporary = tempfile.TemporaryDirectory(
                prefix=f"{self._prefix}{_machine()}-{os.getpid()}-",
                dir=folder,
                ignore_cleanup_errors=True,  # another process may have finished
            )
        with temporary as folder:
            yield pathlib.Path(folder)

    def publish(self, part: int, work: pathlib.Path, result: PartResult) -> None:
        """Moves a part's shards into place, then marks the part as finished."""
        if self.remote and self._result(part) is not None:
            return  # another process was first
        with folders.writing(self.folder):
            for split, counts in result.counts.items():
                shard = self._shard(split, part)
                if counts.file_bytes:
                    self._put(work / shard.name, shard)
                else:
                    shard.unlink(missing_ok=True)  # left from the source's earlier text
            mark = {
                "digest": self.digests[part],
                "counts": {split: vars(counts) for split, counts in result.counts.items()},
                "left_out": result.skipped,
            }
            (work / DONE).write_text(json.dumps(mark))
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
            except BaseException:  # closing would publish an incomplete object
                getattr(sink, "discard", lambda: None)()
                raise
            sink.close()
        file.unlink()

    def finish(self, work: pathlib.Path, last: str) -> None:
        """Moves further files into the data set's folder, and gives that its final name.

        Args:
          work: folder of these files, yielded by `work`.
          last: name of the file that marks the data set as complete.
        """
        written = [file for file in work.rglob("*") if file.is_file()]
        for file in sorted(written, key=lambda file: (file == work / last, file)):
            target = self.folder / file.relative_to(work).as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            self._put(file, target)
        if not self.remote:
            folders.rename(self.folder, self.target / last)
            self.folder.rmtree(missing_ok=True)  # another process was first, with the same content
        self._remove_own()

    def _remove_own(self) -> None:
        """Removes the files of the preparation from the finished data set."""
        for work in [] if self.remote else self._work_folders(self.target):
            shutil.rmtree(work, ignore_errors=True)
        for folder in (self.target / DONE, self.target / _FAILED):
            if folder.exists():
                folder.rmtree()
        (self.target / PLAN).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder; raises a DataError if another process writes to it."""
        if not self.remote and not all(map(_is_abandoned, self._work_folders(self.folder))):
            raise DataError(
                f"{os.fspath(self.folder)}: another process is preparing there, with another plan "
                "or other code. Wait for it or stop it, then run the same command again"
            )
        self.folder.rmtree(missing_ok=True)

    @property
    def _prefix(self) -> str:
        return f"kvjax-{_WORK}" if self.remote else _WORK

    def _work_folders(self, folder: epath.Path) -> list[pathlib.Path]:
        where = tempfile.gettempdir() if self.remote else folder
        return list(pathlib.Path(where).glob(f"{self._prefix}*"))


def read_plan(folder: epath.Path) -> dict[str, Any] | None:
    """Returns the plan of a partial data set; None if there is none, or it cannot be read."""
    return _read_json(folder / PLAN)


def _result_from(mark: dict[str, Any]) -> PartResult | None:
    """Returns a part's result from its mark; None if the mark is damaged."""
    try:
        counts = {split: Counts(**mark["counts"][split]) for split in SPLITS}
        count, messages, nulls = mark["left_out"]
        return PartResult(counts, Skipped(count, tuple(messages), nulls))
    except (ValueError, TypeError, KeyError):
        return None


def _read_json(path: epath.Path) -> dict[str, Any] | None:
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return None


def _parsed(content: bytes) -> dict[str, Any] | None:
    """Returns a JSON object; None if the bytes are not one."""
    try:
        value = json_text.parse(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


@functools.cache
def _machine() -> str:
    """Returns an id of machine, boot and container, within which process ids are unique."""
    ids = [socket.gethostname()]
    with contextlib.suppress(OSError):
        ids.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        ids.append(os.readlink("/proc/self/ns/pid"))
    return digest_of(ids)


def _is_abandoned(work: pathlib.Path) -> bool:
    """Returns True if the process that wrote a temporary folder is gone."""
    machine_and_process = work.name.partition(_WORK)[2].rpartition("-")[0]  # before a random suffix
    machine, _, process = machine_and_process.rpartition("-")
    if machine == _machine() and process.isdigit() and os.path.exists("/proc"):
        return not pathlib.Path(f"/proc/{process}").exists()
    return folders.is_abandoned(work)
