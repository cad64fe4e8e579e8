"""Shows an evaluation's results as a table, and saves them as summary.json."""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from etils import epath
import numpy as np

from kvjax.evaluate import core_tasks, ruler, ruler_tasks, scores
from kvjax.evaluate.core_tasks import CoreTask
from kvjax.evaluate.evaluation import TaskRows
from kvjax.evaluate.rows import SUMMARY
from kvjax.evaluate.scores import Score
from kvjax.evaluate.task import TASKS, is_conversation
from kvjax.foundation import json_text, provenance, target
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.output import Table

# Keys of rows that are counted, with the text of the note on each count.
_COUNTED = {
    "ties": "Questions where several letters have the largest logit",
    "unfinished": "Answers that reached the maximum number of tokens",
    "cut": "Prompts that lost their end",
    "specials": "Programs with the names of special tokens",
    "retried": "Programs that were judged twice",
}
_HUMANEVAL_KEYS = ("humaneval", "humaneval_helpers", "sandbox", "num_tokens")


def make(
    evaluated: Mapping[str, TaskRows],
    core: Sequence[CoreTask],
    about: Mapping[str, Any],
    earlier: Mapping[str, Any],
) -> dict:
    """Returns the contents of summary.json: `about` and all scores.

    Args:
      about: descriptions of model, data and options.
      earlier: an earlier summary. Tasks that are not evaluated now are copied from it if model,
        chat template and dtype of the cache are the same.
    """
    kept = (
        earlier
        if _without_folder(earlier.get("model", {})) == _without_folder(about["model"])
        else {}
    )
    chances = {core_tasks.label_of(task): task.chance for task in core}
    tasks = _with_template(kept.get("tasks", {}), about["options"]["template"])
    of_cache = about["options"].get("cache_dtype")
    tasks = {name: task for name, task in tasks.items() if task.get("cache_dtype") == of_cache}
    for name, task_rows in evaluated.items():
        if task_rows.rows:
            tasks[name] = _task(task_rows) | _options(name, about)
            if name in chances:
                tasks[name]["chance"] = chances[name]
    result = dict(about, data=kept.get("data", {}) | about["data"], tasks=tasks)
    complete = {
        name: (task["right"], task["rows"])
        for name, task in tasks.items()
        if task["rows"] == task["of"] and not task.get("limit")
    }
    if (mean := scores.combined(complete)) is not None:
        result |= dict(combined=mean._asdict(), chat_core=scores.chat_core(complete))
    core_chances = _chances(tasks)
    if core_chances and core_chances.keys() <= complete.keys():
        centred = []
        for name, chance in core_chances.items():
            right, count = complete[name]
            centred.append(scores.centred(right / count, chance))
        result |= dict(core=float(np.mean(centred)), core_tasks=len(centred))
    if groups := ruler.by_length(name for name in complete if name in tasks):
        result["ruler"] = {
            length: scores.mean([_score(tasks[name]) for name in names])._asdict()
            | dict(tasks=len(names))
            for length, names in groups.items()
        }
    return result


def _without_folder(model: Mapping[str, Any]) -> dict:
    """Returns a model's description without its workdir, which may have moved."""
    return {key: value for key, value in model.items() if key != "workdir"}


def _score(task: Mapping[str, Any]) -> Score:
    return Score(task["accuracy"], *task["interval"])


def _chances(tasks: Mapping[str, Mapping]) -> dict[str, float]:
    return {name: task["chance"] for name, task in tasks.items() if "chance" in task}


def chances_of_core(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the accuracy of guessing by CORE task; {} unless the summary scores CORE."""
    return _chances(result.get("tasks", {})) if "core" in result else {}


def _with_template(tasks: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Drops tasks that were evaluated with another chat template; none if `template` is ""."""
    return {
        name: task
        for name, task in tasks.items()
        if not template or task.get("template", "") in ("", template)
    }


def _task(done: TaskRows) -> dict[str, Any]:
    count, right = len(done.rows), done.right
    rows = done.rows.values()
    value, low, high = scores.accuracy(done.credit, count)
    entry = dict(rows=count, of=done.total, right=right, accuracy=value, interval=[low, high])
    for key in _COUNTED:
        if number := sum(bool(row.get(key)) for row in rows):
            entry[key] = number
    if done.num_new:
        entry |= dict(asked_now=done.num_new, minutes_now=round(done.seconds / 60, 2))
    return entry


def _options(name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a task's score depends on."""
    options = about["options"]
    keys = dict(gsm8k=("calculator", "num_tokens"), humaneval=_HUMANEVAL_KEYS).get(name, ())
    if options["template"] and is_conversation(name, options["humaneval"]):
        keys = ("template", *keys)
    keys = ("dialogue", "dtype", "cache_dtype", *keys)
    values = {key: options[key] for key in keys if key in options}
    return values | (dict(limit=options["limit"]) if options["limit"] else {})


def read(folder: epath.Path) -> dict:
    """Returns the folder's summary; {} if there is none; {} and a warning if it is damaged."""
    if not (folder / SUMMARY).exists():
        return {}
    try:
        advice = "scores of tasks that are not evaluated now are lost"
        return json_text.read_record(folder / SUMMARY, advice)
    except UserError as error:
        warn(str(error))
    return {}


def table(result: Mapping[str, Any]) -> Table:
    """Returns the scores as a table."""
    rows = []
    for name, task in result["tasks"].items():
        low, high = task["interval"]
        right = f"{task['right']:,} of {task['rows']:,}"
        minutes = f"{task['minutes_now']:.1f}" if "minutes_now" in task else "-"
        rows.append(
            (
                name,
                f"{100 * task['accuracy']:.1f}",
                f"{100 * low:.1f} to {100 * high:.1f}",
                right,
                minutes,
            )
        )
    means = dict(combined=result["combined"]) if "combined" in result else {}
    for name, mean in (means | result.get("ruler", {})).items():
        interval = f"{100 * mean['low']:.1f} to {100 * mean['high']:.1f}"
        rows.append((name, f"{100 * mean['value']:.1f}", interval, "-", "-"))
    notes = _ruler_notes(result.get("ruler", {}))
    if "chat_core" in result:
        notes.append(f"ChatCORE {result['chat_core']:.3f} (0 is guessing).")
    if "core" in result:
        count = result["core_tasks"]
        notes.append(f"CORE {result['core']:.4f}, over {count} tasks.")
        if count != core_tasks.COUNT:
            notes.append(f"The published CORE has {core_tasks.COUNT} tasks: not comparable.")
    partial = [n for n, task in result["tasks"].items() if task["rows"] < task["of"]]
    if partial:
        notes.append(f"Incomplete: {', '.join(partial)}.")
    other = [
        name
        for name, data in result["data"].items()
        if name in TASKS and result["tasks"].get(name, {}).get("rows") != data["published"]
    ]
    if other:
        notes.append(f"Not the whole published set: {', '.join(other)}.")
    for key, text in _COUNTED.items():
        if counted := {n: task[key] for n, task in result["tasks"].items() if key in task}:
            counts = ", ".join(f"{name} {count}" for name, count in counted.items())
            notes.append(f"{text}: {counts}.")
    notes.append(conditions(result))
    header = ("task", "%", "95 % interval", "right", "minutes")
    return Table(
        f"{result['model']['workdir']}, step {result['model']['step']:,}", header, rows, notes
    )


def _ruler_notes(means: Mapping[str, Mapping]) -> list[str]:
    if not means:
        return []
    of = len(ruler_tasks.TASKS)
    counts = ", ".join(f"{name} {mean['tasks']} of {of}" for name, mean in means.items())
    return [f"RULER: % of the expected answers that were found; tasks of the means: {counts}."]


def conditions(result: Mapping[str, Any]) -> str:
    """Returns the options that scores depend on, as a sentence."""
    tasks = result["tasks"]
    parts = [f"Prompts: {result['options']['dialogue'] or 'plain text'}"]
    if cache_dtype := result["options"].get("cache_dtype"):
        parts.append(f"cache in {cache_dtype}")
    if "gsm8k" in tasks:
        parts.append(f"calculator: {tasks['gsm8k']['calculator']}")
    if "humaneval" in tasks:
        task = tasks["humaneval"]
        parts.append(f"HumanEval as {task['humaneval']}, sandbox: {task['sandbox']}")
        if "humaneval_helpers" in task:
            parts[-1] += f", helpers from the {task['humaneval_helpers']}"
    return "; ".join(parts) + "."


def write(folder: epath.Path, result: Mapping[str, Any]) -> epath.Path:
    """Writes summary.json, with machine, versions and command."""
    record = json_text.with_checksum(dict(result, made_by=provenance.provenance()))
    target.write(folder, {SUMMARY: f"{json.dumps(record, indent=1)}\n".encode()})
    return folder / SUMMARY
