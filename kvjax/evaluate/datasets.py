"""Finds and reads the files of a benchmark; never downloads."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import os
from typing import Any

from etils import epath

from kvjax.data import formats, matching, records
from kvjax.evaluate.task import Task
from kvjax.foundation import runtime
from kvjax.foundation.errors import DataError, MissingDataError

FOLDER = "~/data"  # as in the configs of mid-training


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions of a task.

    Attributes:
      items: parsed, in file order.
      places: file and row number of each, for messages.
      digest: SHA-256 of the files.
    """

    task: Task
    items: Sequence[Any]
    places: Sequence[str]
    files: tuple[str, ...]
    digest: str


def read(task: Task, folder: str, given: str = "") -> Questions:
    """Reads the questions of a task.

    Args:
      folder: of all tasks' data, see `Task.patterns`.
      given: a file, folder or glob to read instead.

    Raises:
      MissingDataError: no file; the message names the download.
      DataError: a row of another form, with file and row.
    """
    files = _given(task, given) if given else _found(task, folder)
    items, places = [], []
    for file in files:
        for place, row in records.read(file):
            is_cells = isinstance(row, list)
            if is_cells and task.parse_cells is None:
                raise DataError(
                    f"{place}: {task.name} is not read from CSV: give JSON lines or Parquet"
                )
            items.append((task.parse_cells if is_cells else task.parse)(row, place))
            places.append(place)
    names = tuple(os.fspath(file) for file in files)
    if not items:
        raise DataError(f"{task.name}: {', '.join(names)} has no rows")
    return Questions(task, items, places, names, records.digest(files))


def other_counts(found: Iterable[Questions]) -> list[str]:
    """Returns warnings for sets whose number of rows differs from the published one."""
    return [
        f"{q.task.name}: {', '.join(q.files[:3])} has {len(q.items):,} rows, the published set has "
        f"{q.task.rows:,}: scores are not comparable with published ones"
        for q in found
        if len(q.items) != q.task.rows
    ]


def file_options(texts: Sequence[str]) -> dict[str, str]:
    """Parses `--file=TASK=PATH` options to paths by task.

    Raises:
      DataError: another form.
    """
    found = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise DataError(f"--file={text}: give TASK=PATH, as mmlu=~/data/mmlu.jsonl")
        found[name] = path
    return found


def _given(task: Task, given: str) -> list[epath.Path]:
    where = f"--file={task.name} = {given!r}"
    return matching.files(given, records.SUFFIXES, where, "; give a file, a folder or a pattern")


def _found(task: Task, folder: str) -> list[epath.Path]:
    root = runtime.folder("--data", folder)
    for pattern in task.patterns:
        if files := _matching(root / pattern):
            return files
    repository, name = task.fetch
    looked = ", ".join(task.patterns)
    raise MissingDataError(
        f"{task.name}: no file in {os.fspath(root)} (looked for {looked}). Download it: "
        f"hf download {repository} --repo-type=dataset --local-dir={os.fspath(root / name)}; or "
        f"give a file: --file={task.name}=PATH"
    )


def _matching(pattern: epath.Path) -> list[epath.Path]:
    try:
        found = matching.find(pattern, records.SUFFIXES)
    except OSError:
        return []
    return [path for path in found if formats.suffix(path.name, records.SUFFIXES)]


def data_info(all_questions: Mapping[str, Questions]) -> dict[str, dict]:
    """Returns the description of the data for results."""
    return {
        name: dict(files=list(q.files), sha256=q.digest, rows=len(q.items), published=q.task.rows)
        for name, q in all_questions.items()
    }
