"""Results of the conversion studies: a record for each curve or run in results/conversion.jsonl.

A record has `settings`, figures, `seconds` and `made_by`. After a failure it has `error` instead of
figures; the next call tries again.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
import statistics
import time

from experiments import record
from kvjax.foundation import provenance, record_lines
from kvjax.foundation.errors import UserError, first_line


@dataclasses.dataclass(frozen=True)
class Task:
    """One record to make.

    Attributes:
      name: name of the record.
      settings: everything except code that determines the figures, JSON-able.
      make: returns the figures, JSON-able.
      seconds: expected time on two CPU cores, for plans.
    """

    name: str
    settings: dict
    make: Callable[[], dict]
    seconds: float


def file() -> pathlib.Path:
    return record.RESULTS / "conversion.jsonl"


def read(name: str) -> dict | None:
    """Returns a result; None for a missing one or a failure."""
    result = record_lines.find(file(), name)
    return None if result is None or "error" in result else result


def in_folder(folder: str) -> dict[str, dict]:
    """Returns the results whose names begin with `folder`/, in alphabetical order."""
    results = record_lines.read(file()).items()
    return {
        name: result
        for name, result in results
        if name.startswith(f"{folder}/") and "error" not in result
    }


def failed() -> dict[str, str]:
    """Returns the message of each failure by name."""
    results = record_lines.read(file()).items()
    return {name: result["error"] for name, result in results if "error" in result}


def missing(tasks: Sequence[Task]) -> list[Task]:
    """Returns the tasks without a result.

    Raises:
      UserError: a result has other settings.
    """
    without_result = []
    for task in tasks:
        result = read(task.name)
        if result is None:
            without_result.append(task)
        elif result["settings"] != json.loads(json.dumps(task.settings)):
            raise UserError(
                f"{task.name} in {file()}: was made with "
                f"{_differing(result['settings'], task.settings)}; give the same, or remove its "
                "line"
            )
    return without_result


def _differing(stored: dict, wanted: dict) -> str:
    keys = [key for key in {**stored, **wanted} if stored.get(key) != wanted.get(key)]
    return ", ".join(f"{key} = {stored.get(key)} (now {wanted.get(key)})" for key in keys)


def seconds_left(tasks: Sequence[Task], remaining: Sequence[Task]) -> float:
    """Returns the expected seconds of the remaining tasks, scaled by the speed of finished ones."""
    done = [(t, read(t.name)["seconds"]) for t in tasks if t not in remaining]
    speed = statistics.median(took / task.seconds for task, took in done) if done else 1.0
    return speed * sum(task.seconds for task in remaining)


def make(tasks: Sequence[Task]) -> int:
    """Runs each task and writes its record; returns the number of failures."""
    failures = 0
    for task in tasks:
        start = time.monotonic()
        try:
            result = task.make()
        except Exception as error:  # recorded, so that the other tasks go on
            result = {"error": f"{type(error).__name__}: {first_line(error)}"}
            failures += 1
        seconds = round(time.monotonic() - start, 1)
        whole = {"settings": task.settings, **result, "seconds": seconds}
        provenance.save(file(), whole, name=task.name)
    return failures
