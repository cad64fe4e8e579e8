"""The result files of the conversion studies: a curve or a run each, made once and then kept.

A file holds its `settings`, the figures, the `seconds` they took, and who made them; a failure
holds its `error`, and is tried again by the next call.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
import statistics
import time

from experiments import record
from kvjax.foundation import provenance
from kvjax.foundation.errors import UserError, first_line

FOLDER = "conversion"  # of experiments/results


@dataclasses.dataclass(frozen=True)
class Task:
    """One file that is to be there.

    Attributes:
      name: of the file, below results/conversion and without ".json".
      settings: JSON-able: what its figures depend on beside the code.
      make: gives the figures, JSON-able.
      seconds: about what that takes on two CPU cores, for plans.
    """

    name: str
    settings: dict
    make: Callable[[], dict]
    seconds: float


def file(name: str) -> pathlib.Path:
    return record.RESULTS / FOLDER / f"{name}.json"


def read(name: str) -> dict | None:
    """A result; None where there is none, or a failure."""
    path = file(name)
    found = json.loads(path.read_text()) if path.exists() else dict(error="")
    return None if "error" in found else found


def named(folder: str) -> dict[str, dict]:
    """The results below a folder by name, in alphabetical order."""
    root = record.RESULTS / FOLDER
    names = (path.relative_to(root).with_suffix("") for path in (root / folder).rglob("*.json"))
    found = {str(name): read(str(name)) for name in sorted(names)}
    return {name: result for name, result in found.items() if result is not None}


def failed(folder: str) -> dict[str, str]:
    """What failures below a folder say, by name."""
    root = record.RESULTS / FOLDER
    found = {}
    for path in sorted((root / folder).rglob("*.json")):
        if (error := json.loads(path.read_text()).get("error")) is not None:
            found[str(path.relative_to(root).with_suffix(""))] = error
    return found


def missing(tasks: Sequence[Task]) -> list[Task]:
    """Those that have no result yet.

    Raises:
      UserError: a result that was made with other settings.
    """
    left = []
    for task in tasks:
        found = read(task.name)
        if found is None:
            left.append(task)
        elif found["settings"] != json.loads(json.dumps(task.settings)):
            raise UserError(
                f"{file(task.name)}: was made with {_differing(found['settings'], task.settings)}; "
                "give the same, or move the file away"
            )
    return left


def _differing(there: dict, wanted: dict) -> str:
    keys = [key for key in {**there, **wanted} if there.get(key) != wanted.get(key)]
    return ", ".join(f"{key} = {there.get(key)} (now {wanted.get(key)})" for key in keys)


def seconds_left(tasks: Sequence[Task], left: Sequence[Task]) -> float:
    """What is left takes about so long, going by what was made already, if anything was."""
    known = [(t, read(t.name)["seconds"]) for t in tasks if t not in left]
    speed = statistics.median(took / task.seconds for task, took in known) if known else 1.0
    return speed * sum(task.seconds for task in left)


def make(tasks: Sequence[Task]) -> int:
    """Makes and writes each of them; how many failed, which is written too."""
    failures = 0
    for task in tasks:
        start = time.monotonic()
        try:
            result = task.make()
        except Exception as error:  # the others are still worth having
            result = dict(error=f"{type(error).__name__}: {first_line(error)}")
            failures += 1
        took = dict(seconds=round(time.monotonic() - start, 1))
        provenance.save(file(task.name), dict(settings=task.settings) | result | took)
    return failures
