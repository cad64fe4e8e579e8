"""Rows that are done, on disk: one line of JSON each, flushed at once, never lost.

A row ends with a checksum of itself (`json_text.with_checksum`), which older ones lack.
WORKDIR/evaluations/STEP/TASK.jsonl, or TASK.I-of-N.jsonl where several processes share the rows.
Beside them TASK.json says what was asked of which model: rows of another are refused, and so is a
row whose prompt, by its digest, is another than it would be now.
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

from kvjax.evaluate.task import TASKS
from kvjax.foundation import json_text
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import in_bucket, named, write_atomically

FOLDER = "evaluations"
SUMMARY = "summary.json"  # of all tasks of a folder
_ANEW = "remove the folder to begin anew"


class RowStore:
    """The rows of one task.

    Args:
      folder: of the evaluations of one checkpoint.
      identity: what decides the verdicts: model, data, options.
      share: (i, n): the rows i mod n are this process's.
      defaults: what keys stand for that earlier versions did not write.
      prompts: digests of the rows' prompts as they are now, of the first rows or of none.
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
            raise UserError(f"{task}: must hold no '/', for its rows are in files of that name")
        self._folder, self._task, self._share, self._prompts = folder, task, share, prompts
        i, n = share
        name = task if n == 1 else f"{task}.{i}-of-{n}"
        self.path = folder / f"{name}.jsonl"
        self._check(identity, defaults or {})
        self._lock = None if in_bucket(folder) else _locked(folder / f".{name}.lock", self.path)
        self.done = self._read()

    def reload(self) -> None:
        """Reads what others have written since."""
        self.done = self._read()

    def close(self) -> None:
        """Lets another process write these rows."""
        if self._lock is not None:
            self._lock.close()

    def missing(self, count: int) -> list[int]:
        """The rows of this process, of `count` in all, that are not done."""
        i, n = self._share
        return [row for row in range(i, count, n) if row not in self.done]

    def add(self, found: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows; each has its `index`.

        Raises:
          UserError: they cannot be written; what was written before stays.
        """
        found = list(found)
        text = "".join(json.dumps(json_text.with_checksum(row)) + "\n" for row in found)
        try:
            if in_bucket(self.path):  # where nothing can be added to a file
                before = self.path.read_text() if self.path.exists() else ""
                self.path.write_text(before + text)
            else:
                with open(os.fspath(self.path), "a", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror or error}. Rows before are kept; "
                "mend that and run the same command again"
            ) from error
        self.done |= {row["index"]: row for row in found}

    def _check(self, identity: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raises a UserError where rows of something else are there."""
        path, *files = self._files()
        if files and not path.exists():
            raise UserError(
                f"{path} is missing, and does not say which model {_listed(files)} are of: "
                "restore it, or remove those to begin anew"
            )
        if path.exists():
            there = {key: value for key, value in defaults.items() if key in identity}
            there |= json_text.read_object(path, _ANEW)
            for key in sorted(there.keys() | identity.keys()):
                if there.get(key) != identity.get(key):
                    raise UserError(
                        f"{self._folder}: rows of {self._task} are there with {key} = "
                        f"{there.get(key)!r}, and now it is {identity.get(key)!r}. "
                        f"{self._advice()}"
                    )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(dict(identity), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error

    def _read(self) -> dict[int, dict]:
        found = {}
        for path in self._files()[1:]:
            if path == self.path and not in_bucket(path):
                _mend(path)
            found |= {row["index"]: row for row in of_file(path)}
        self._check_prompts(found)
        return dict(sorted(found.items()))

    def _check_prompts(self, found: Mapping[int, Mapping[str, Any]]) -> None:
        """Raises a UserError for a row that was asked otherwise than it would be now."""
        for i, prompt in enumerate(self._prompts):
            there = found.get(i, {}).get("prompt", prompt)
            if there != prompt:
                raise UserError(
                    f"{self._folder}: row {i} of {self._task} was asked with a prompt of digest "
                    f"{there}, and now it is {prompt}: by another chat template, or another kvjax. "
                    f"{self._advice()}"
                )

    def _files(self) -> list[epath.Path]:
        """Returns the file that says what was asked, which may be missing, and files of rows."""
        return [self._folder / f"{self._task}.json", *files_of(self._folder, self._task)]

    def _advice(self) -> str:
        return f"Give another --out, or remove {_listed(self._files())} to begin anew"


def _listed(files: Iterable[epath.Path]) -> str:
    return ", ".join(map(os.fspath, files))


def day(folder: epath.Path) -> str:
    """Returns the day that the prompts of a folder's rows have, as 2026-11-27; "" without one."""
    for path in (folder / f"{task}.json" for task in TASKS):
        said = json_text.read_object(path, _ANEW).get("day") if path.exists() else None
        try:
            if said:
                return str(datetime.date.fromisoformat(said))
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: day = {said!r} is no date: {_ANEW}") from error
    return ""


def files_of(folder: epath.Path, task: str) -> list[epath.Path]:
    """Returns the files with a task's rows, of all shares."""
    name = re.compile(rf"{re.escape(task)}(\.\d+-of-\d+)?\.jsonl")
    return [path for path in named(folder, "*.jsonl") if name.fullmatch(path.name)]


def of_file(path: epath.Path) -> list[dict]:
    """The rows of a file, but for a last line that is half-written.

    Raises:
      UserError: another line that is no row, or not the row that was written.
    """
    *lines, last = path.read_bytes().split(b"\n")
    with contextlib.suppress(ValueError):
        _row(last[:-1])
        lines.append(last)  # a whole row, with a damaged end of line
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(line))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is no row ({first_line(error)}): remove that line, and its "
                "question is asked again"
            ) from error
    return rows


def _row(line: bytes) -> dict:
    """Returns the row of a line; raises a ValueError if there is none."""
    row = json_text.parse(line)
    if not isinstance(row, dict) or type(row.get("index")) is not int:
        raise ValueError("no object with an index")
    if type(row.get("right")) is not bool:
        raise ValueError("it has no verdict")
    return json_text.without_checksum(row)


def _locked(lock: epath.Path, path: epath.Path) -> IO:
    """A file that this process alone has locked while it lives.

    Raises:
      UserError: another process writes the same rows, or the folder cannot be written.
    """
    try:
        file = open(os.fspath(lock), "w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{path}: another process writes these rows: wait for it, or give each its --share=I/N"
        ) from error
    except OSError as error:
        raise UserError(f"{lock} cannot be written: {error.strerror or error}") from error
    return file


def _mend(path: epath.Path) -> None:
    """Cuts off a line that a killed process left half-written: that row is asked again."""
    content = path.read_bytes()
    rest = content.rpartition(b"\n")[2]
    if rest:
        with open(os.fspath(path), "r+b") as file:
            file.truncate(len(content) - len(rest))
