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

FOLDER = "~/data"  # the default of mid-training's configs, too


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions of a task.

    Attributes:
      items: parsed questions, in file order.
      places: file and row number of each item, for messages.
      digest: SHA-256 of the files.
    """

    task: Task
    items: Sequence[Any]
    places: Sequence[str]
    files: tuple[str, ...]
    digest: str


def read(task: Task, folder: str, override: str = "") -> Questions:
    """Reads the questions of a task.

    Args:
      folder: holds the data of all tasks, see `Task.patterns`.
      override: a file, folder or glob to read instead.

    Raises:
      MissingDataError: there is no file; the message names the download.
      DataError: a row has another form; the message names file and row.
    """
    files = _override_files(task, override) if override else _default_files(task, folder)
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


def other_counts(questions: Iterable[Questions]) -> list[str]:
    """Returns warnings for sets whose number of rows differs from the published one."""
    return [
        f"{q.task.name}: {', '.join(q.files[:3])} has {len(q.items):,} rows, the published set has "
        f"{q.task.rows:,}: scores are not comparable with published ones"
        for q in questions
        if len(q.items) != q.task.rows
    ]


def file_options(texts: Sequence[str]) -> dict[str, str]:
    """Parses `--file=TASK=PATH` options to paths by task.

    Raises:
      DataError: another form.
    """
    paths = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise DataError(f"--file={text}: give TASK=PATH, as mmlu=~/data/mmlu.jsonl")
        paths[name] = path
    return paths


def _override_files(task: Task, override: str) -> list[epath.Path]:
    where = f"--file={task.name} = {override!r}"
    return matching.files(override, records.SUFFIXES, where, "; give a file, a folder or a pattern")


def _default_files(task: Task, folder: str) -> list[epath.Path]:
    root = runtime.folder("--data", folder)
    for pattern in task.patterns:
        if files := _matching(root / pattern):
            return files
    repository, name = task.fetch
    raise MissingDataError(
        f"{task.name}: no file in {os.fspath(root)} (looked for {', '.join(task.patterns)}). "
        f"Download it: hf download {repository} --repo-type=dataset "
        f"--local-dir={os.fspath(root / name)}; or give a file: --file={task.name}=PATH"
    )


def _matching(pattern: epath.Path) -> list[epath.Path]:
    try:
        paths = matching.find(pattern, records.SUFFIXES)
    except OSError:
        return []
    return [path for path in paths if formats.suffix(path.name, records.SUFFIXES)]


def data_info(all_questions: Mapping[str, Questions]) -> dict[str, dict]:
    """Returns a description of each task's data, to be saved with results."""
    return {
        name: dict(files=list(q.files), sha256=q.digest, rows=len(q.items), published=q.task.rows)
        for name, q in all_questions.items()
    }
