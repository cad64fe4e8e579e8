"""What an evaluation found, as a table and as summary.json."""

from collections.abc import Mapping
import json
from typing import Any

from etils import epath
import numpy as np

from kvjax.evaluate import core_tasks
from kvjax.evaluate import scores
from kvjax.evaluate.core_tasks import CoreTask
from kvjax.evaluate.evaluation import Done
from kvjax.evaluate.task import TASKS
from kvjax.foundation import provenance
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import write_atomically
from kvjax.foundation.output import Table

FILE = "summary.json"


def of(found: Mapping[str, Done], core: list[CoreTask], about: Mapping[str, Any]) -> dict:
    """All scores, with what they depend on.

    Args:
      about: model, data, sandbox, calculator, options.
    """
    tasks = {name: _task(done) for name, done in found.items() if done.rows}
    whole = {
        name: (done.right, done.total)
        for name, done in found.items()
        if len(done.rows) == done.total
    }
    result = dict(about, tasks=tasks)
    if (mean := scores.combined(whole)) is not None:
        result |= dict(combined=mean._asdict(), chat_core=scores.chat_core(whole))
    labels = {core_tasks.label_of(task): task for task in core}
    if labels and labels.keys() <= whole.keys():
        each = [
            scores.centred(whole[name][0] / whole[name][1], task.chance)
            for name, task in labels.items()
        ]
        result |= dict(core=float(np.mean(each)), core_tasks=len(each))
    return result


def _task(done: Done) -> dict[str, Any]:
    count, right = len(done.rows), done.right
    rows = done.rows.values()
    value, low, high = scores.accuracy(right, count)
    found = dict(rows=count, of=done.total, right=right, accuracy=value, interval=[low, high])
    for key in ("ties", "unfinished", "cut"):
        if number := sum(bool(row.get(key)) for row in rows):
            found[key] = number
    if done.asked:
        found |= dict(asked_now=done.asked, minutes_now=round(done.seconds / 60, 2))
    return found


def table(result: Mapping[str, Any]) -> Table:
    """For a terminal."""
    rows = []
    for name, task in result["tasks"].items():
        low, high = task["interval"]
        done = f"{task['right']:,} of {task['rows']:,}"
        minutes = f"{task['minutes_now']:.1f}" if "minutes_now" in task else "-"
        rows.append(
            (
                name,
                f"{100 * task['accuracy']:.1f}",
                f"{100 * low:.1f} to {100 * high:.1f}",
                done,
                minutes,
            )
        )
    if "combined" in result:
        mean = result["combined"]
        interval = f"{100 * mean['low']:.1f} to {100 * mean['high']:.1f}"
        rows.append(("combined", f"{100 * mean['value']:.1f}", interval, "-", "-"))
    notes = []
    if "chat_core" in result:
        notes.append(f"ChatCORE {result['chat_core']:.3f}: guessing counts as 0.")
    if "core" in result:
        notes.append(f"CORE {result['core']:.4f}, of {result['core_tasks']} tasks.")
    partial = [n for n, task in result["tasks"].items() if task["rows"] < task["of"]]
    if partial:
        notes.append(f"Not all rows are done of {', '.join(partial)}.")
    other = [
        name
        for name, data in result["data"].items()
        if name in TASKS and result["tasks"].get(name, {}).get("rows") != data["published"]
    ]
    if other:
        notes.append(f"Not the published set, or not all of it: {', '.join(other)}.")
    notes.append(said(result))
    header = ("task", "%", "95 % interval", "right", "minutes")
    return Table(
        f"{result['model']['workdir']}, step {result['model']['step']:,}", header, rows, notes
    )


def said(result: Mapping[str, Any]) -> str:
    """What scores depend on, in a sentence."""
    options = result["options"]
    parts = [f"Prompts: {options['dialogue'] or 'plain text'}"]
    if "gsm8k" in result["data"]:
        parts.append(f"calculator: {options['calculator']}")
    if "humaneval" in result["data"]:
        parts.append(f"HumanEval as {options['humaneval']}, sandbox: {options['sandbox']}")
    return "; ".join(parts) + "."


def write(folder: epath.Path, result: Mapping[str, Any]) -> epath.Path:
    """Writes summary.json with the machine, versions and command."""
    path = folder / FILE
    made = dict(result, made_by=provenance.provenance())
    try:
        write_atomically(path, json.dumps(made, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    return path
