"""Saved rows of an evaluation: JSON lines, flushed at once.

Rows are in WORKDIR/evaluations/STEP/TASK.jsonl (STEP_int8 with --cache_dtype=int8), or in
TASK.I-of-N.jsonl if several processes share them; each ends with its checksum
(`json_text.with_checksum`; old rows have none). TASK.json beside them identifies model, data and
options. Saved rows are refused if one of these, or the digest of a row's prompt, has changed since.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import datetime
import fcntl
import json
import os
import re
from typing import IO, Any

from etils import epath

from kvjax.cache import quantized
from kvjax.evaluate.task import RULER, TASKS
from kvjax.foundation import json_text
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import in_bucket, matching_entries, write_atomically

FOLDER = "evaluations"
SUMMARY = "summary.json"  # scores of all tasks in a folder
_START_OVER = "remove the folder to start over"


def folder_of(step: int, cache_dtype: str) -> str:
    """Returns the name of an evaluation's folder; a quantised cache has one of its own."""
    return f"{step}_{cache_dtype}" if cache_dtype else str(step)


def is_folder(name: str) -> bool:
    """Returns True for a name that `folder_of` returns."""
    step = name.partition("_")[0]
    return step.isdecimal() and name in {folder_of(int(step), d) for d in ("", *quantized.BITS)}


class RowStore:
    """The saved rows of one task.

    Args:
      folder: holds the evaluations of one checkpoint.
      identity: everything that determines the verdicts: model, data, options.
      share: (i, n): this process evaluates rows i, i + n, i + 2 n, ...
      defaults: values of identity keys that earlier versions did not write.
      prompts: digests of the prompts of rows 0, 1, ...; saved rows must have the same.
    """

    def __init__(
        self,
        folder: epath.Path,
        task: str,
        identity: Mapping[str, Any],
        share: tuple[int, int],
        defaults: Mapping[str, Any] | None = None,
        prompts: Sequence[str] = (),
    ):
        if "/" in task:
            raise UserError(f"{task}: must not contain '/', since its rows are files of that name")
        self._folder, self._task, self._share, self._prompts = folder, task, share, prompts
        i, n = share
        name = task if n == 1 else f"{task}.{i}-of-{n}"
        self.path = folder / f"{name}.jsonl"
        self._check(identity, defaults or {})
        self._lock = None if in_bucket(folder) else _locked(folder / f".{name}.lock", self.path)
        self.done = self._read()

    def reload(self) -> None:
        """Reads the files again, with rows that other processes have added."""
        self.done = self._read()

    def first(self, count: int) -> dict[int, dict]:
        """Returns the finished rows among the first `count`."""
        return {i: row for i, row in self.done.items() if i < count}

    def close(self) -> None:
        """Releases the lock on these rows."""
        if self._lock is not None:
            self._lock.close()

    def missing(self, count: int) -> list[int]:
        """Returns this process's unfinished rows among the first `count`."""
        i, n = self._share
        return [row for row in range(i, count, n) if row not in self.done]

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows, each with its `index`.

        Raises:
          UserError: the rows cannot be written; earlier rows stay.
        """
        rows = list(rows)
        text = "".join(json.dumps(json_text.with_checksum(row)) + "\n" for row in rows)
        try:
            if in_bucket(self.path):  # buckets cannot append
                earlier = self.path.read_text() if self.path.exists() else ""
                self.path.write_text(earlier + text)
            else:
                with open(os.fspath(self.path), "a", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror or error}. Earlier rows are kept; "
                "once the cause is removed, run the same command again"
            ) from error
        self.done |= {row["index"]: row for row in rows}

    def _check(self, identity: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Writes the identity; raises a UserError if existing rows have another one."""
        path, *files = self._files()
        if files and not path.exists():
            raise UserError(
                f"{path} is missing; it identifies the model of the rows in {_listed(files)}. "
                "Restore it, or remove these files to start over"
            )
        if path.exists():
            saved = {key: value for key, value in defaults.items() if key in identity}
            saved |= json_text.read_object(path, _START_OVER)
            for key in sorted(saved.keys() | identity.keys()):
                if saved.get(key) != identity.get(key):
                    raise UserError(
                        f"{self._folder}: saved rows of {self._task} have {key} = "
                        f"{saved.get(key)!r}, but this command has {identity.get(key)!r}. "
                        f"{self._advice()}"
                    )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(dict(identity), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error

    def _read(self) -> dict[int, dict]:
        rows = {}
        for path in self._files()[1:]:
            if path == self.path and not in_bucket(path):
                _truncate(path)
            rows |= {row["index"]: row for row in of_file(path)}
        self._check_prompts(rows)
        return dict(sorted(rows.items()))

    def _check_prompts(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Raises a UserError for a row whose prompt differs from the present one."""
        for i, prompt in enumerate(self._prompts):
            saved = rows.get(i, {}).get("prompt", prompt)
            if saved != prompt:
                raise UserError(
                    f"{self._folder}: saved row {i} of {self._task} has prompt digest {saved}, but "
                    f"this command's prompt has {prompt}: the chat template or the version of "
                    f"kvjax has changed. {self._advice()}"
                )

    def _files(self) -> list[epath.Path]:
        """Returns the file of the identity, which may not exist, and the files of rows."""
        return [self._folder / f"{self._task}.json", *files_of(self._folder, self._task)]

    def _advice(self) -> str:
        return f"Give another --out, or remove {_listed(self._files())} to start over"


def _listed(files: Iterable[epath.Path]) -> str:
    return ", ".join(map(os.fspath, files))


def day(folder: epath.Path) -> str:
    """Returns the date in the prompts of a folder's rows, such as 2026-11-27; "" without one."""
    paths = [folder / f"{task}.json" for task in TASKS]
    for path in (*paths, *matching_entries(folder, f"{RULER}_*.json")):
        date = json_text.read_object(path, _START_OVER).get("day") if path.exists() else None
        try:
            if date:
                return str(datetime.date.fromisoformat(date))
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: day = {date!r} is not a date: {_START_OVER}") from error
    return ""


def files_of(folder: epath.Path, task: str) -> list[epath.Path]:
    """Returns the files with a task's rows, those of all shares."""
    name = re.compile(rf"{re.escape(task)}(\.\d+-of-\d+)?\.jsonl")
    return [path for path in matching_entries(folder, "*.jsonl") if name.fullmatch(path.name)]


def of_file(path: epath.Path) -> list[dict]:
    """Reads the rows of a file; ignores the last line if it is incomplete.

    Raises:
      UserError: another line is damaged.
    """
    *lines, last = path.read_bytes().split(b"\n")
    with contextlib.suppress(ValueError):
        _row(last[:-1])
        lines.append(last)  # complete, except that its newline is damaged
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(line))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is damaged ({first_line(error)}): remove that line, and "
                "its question is evaluated again"
            ) from error
    return rows


def _row(line: bytes) -> dict:
    """Parses the row of a line; raises a ValueError if it is not one."""
    row = json_text.parse(line)
    if not isinstance(row, dict) or type(row.get("index")) is not int:
        raise ValueError("not an object with an index")
    if type(row.get("right")) is not bool:
        raise ValueError("no verdict")
    return json_text.without_checksum(row)


def _locked(lock: epath.Path, path: epath.Path) -> IO:
    """Opens and locks a file for the lifetime of this process.

    Raises:
      UserError: another process writes the same rows, or the folder cannot be written.
    """
    try:
        file = open(os.fspath(lock), "w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{path}: another process writes these rows: wait for it, or give each a --share=I/N"
        ) from error
    except OSError as error:
        raise UserError(f"{lock} cannot be written: {error.strerror or error}") from error
    return file


def _truncate(path: epath.Path) -> None:
    """Removes an incomplete last line, left by a killed process; its row is evaluated again."""
    content = path.read_bytes()
    rest = content.rpartition(b"\n")[2]
    if rest:
        with open(os.fspath(path), "r+b") as file:
            file.truncate(len(content) - len(rest))
