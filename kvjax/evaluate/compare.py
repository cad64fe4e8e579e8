"""Two models on the same questions: `--compare=runs/a,runs/b`, from the rows that they have.

Several seeds of a model are joined by +: `--compare=a0+a1+a2,b0+b1+b2`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

from etils import epath
import numpy as np

from kvjax.evaluate import rows as rows_lib
from kvjax.evaluate import scores
from kvjax.evaluate.scores import Score
from kvjax.evaluate.task import TASKS
from kvjax.foundation import json_text
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Table

# What may differ between two models that are compared.
_OF_MODEL = ("checkpoint", "tokenizer")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The rows of one checkpoint: by task its identity and verdicts by row."""

    name: str
    identities: Mapping[str, dict]
    verdicts: Mapping[str, Mapping[int, bool]]


def groups(option: str) -> tuple[list[str], list[str]]:
    """The workdirs of both sides.

    Raises:
      UserError: not two sides.
    """
    sides = [[name.strip() for name in side.split("+")] for side in option.split(",")]
    if len(sides) != 2 or not all(name for side in sides for name in side):
        raise UserError(
            f"--compare={option}: give two workdirs, as runs/a,runs/b; seeds of one model are "
            "joined by +, as a0+a1,b0+b1; WORKDIR@STEP is the evaluation of that step"
        )
    return sides[0], sides[1]


def open(name: str, option: str = "--compare") -> Evaluated:
    """The evaluation of a workdir, of its latest step that has one, or of WORKDIR@STEP.

    Args:
      name: of a workdir; or a folder of rows that --out named.
      option: that the name is of, for messages.

    Raises:
      UserError: there is none.
    """
    given = runtime.path(option, name)
    if list(given.glob("*.jsonl")) if given.is_dir() else ():
        return _read(name, given)
    path, at, step = name.rpartition("@")
    by_step = bool(at) and step.isdecimal()
    root = runtime.path(option, path if by_step else name) / rows_lib.FOLDER
    steps = sorted(int(p.name) for p in _folders(root) if p.name.isdecimal())
    if not steps or (by_step and int(step) not in steps):
        there = f"; there are evaluations of steps {steps}" if steps else ""
        raise UserError(
            f"{option}: {name} has no evaluation{' of that step' if by_step else ''}{there}: "
            f"python -m kvjax.evaluate --workdir={path if by_step else name}"
        )
    return _read(name, root / (step if by_step else str(steps[-1])))


def _read(name: str, folder: epath.Path) -> Evaluated:
    identities, verdicts = {}, {}
    for file in sorted(folder.glob("*.json")):
        task = file.name.removesuffix(".json")
        if task == "summary":
            continue
        identities[task] = json_text.read_object(file, "evaluate again")
        found = {}
        for part in sorted(folder.glob(f"{task}.*jsonl")):
            found |= {row["index"]: bool(row["right"]) for row in rows_lib.of_file(part)}
        verdicts[task] = found
    return Evaluated(name, identities, verdicts)


def _folders(root: epath.Path) -> list[epath.Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.exists() else []


def compare(one: Sequence[Evaluated], other: Sequence[Evaluated]) -> dict[str, dict]:
    """By task what both have of it: each side's share, the difference, its interval.

    Raises:
      UserError: nothing in common, or other data or options.
    """
    everyone = [*one, *other]
    shared = [t for t in everyone[0].verdicts if all(t in e.verdicts for e in everyone)]
    found, samples, bootstrap = {}, {}, scores.Bootstrap(len(one), len(other))
    for task in shared:
        _check_alike(task, everyone)
        rows = sorted(set.intersection(*(set(e.verdicts[task]) for e in everyone)))
        if not rows:
            continue
        sides = [
            [np.array([e.verdicts[task][i] for i in rows]) for e in side] for side in (one, other)
        ]
        samples[task] = bootstrap.differences(*sides)
        found[task] = _entry(*(float(np.mean(side)) for side in sides), samples[task])
        found[task] |= dict(rows=len(rows))
    if not found:
        raise UserError("--compare: the two sides have no question of a task in common")
    if found.keys() >= TASKS.keys():
        means = [float(np.mean([found[t][key] for t in TASKS])) for key in ("one", "other")]
        found["combined"] = _entry(*means, np.mean([samples[t] for t in TASKS], axis=0))
    return found


def _entry(one: float, other: float, samples: np.ndarray) -> dict:
    return dict(one=one, other=other, difference=scores.interval(one - other, samples)._asdict())


def _check_alike(task: str, everyone: Sequence[Evaluated]) -> None:
    first = everyone[0]
    for e in everyone[1:]:
        a, b = first.identities[task], e.identities[task]
        for key in sorted(a.keys() | b.keys()):
            if key not in _OF_MODEL and a.get(key) != b.get(key):
                raise UserError(
                    f"--compare: {task} was asked with {key} = {a.get(key)!r} of {first.name} and "
                    f"with {b.get(key)!r} of {e.name}: evaluate both alike"
                )


def table(found: Mapping[str, dict], one: Sequence[str], other: Sequence[str]) -> Table:
    """The differences as a table for a terminal."""
    percent = lambda share: f"{100 * share:.1f}"
    rows = []
    for task, entry in found.items():
        score = Score(**entry["difference"])
        interval = f"{100 * score.low:+.1f} to {100 * score.high:+.1f}"
        count = f"{entry['rows']:,}" if "rows" in entry else "-"
        rows.append(
            (
                task,
                percent(entry["one"]),
                percent(entry["other"]),
                f"{100 * score.value:+.1f}",
                interval,
                count,
            )
        )
    seeds = min(len(one), len(other))
    notes = ["The same questions are drawn for both (10,000 times); intervals hold 95 %."]
    if seeds < 3:
        notes.append("A claim between mechanisms needs three seeds of each.")
    header = ("task", "first, %", "second, %", "difference", "interval", "questions")
    return Table(f"{'+'.join(one)} beside {'+'.join(other)}", header, rows, notes)
