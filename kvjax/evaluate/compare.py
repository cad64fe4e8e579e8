"""Compares two models on the same questions, from saved rows: `--compare=runs/a,runs/b`.

A side may be several seeds of a model, joined by +: `--compare=a0+a1+a2,b0+b1+b2`.
"""

from collections.abc import Mapping, Sequence
import dataclasses

from etils import epath
import numpy as np

from kvjax.conversation import calculator
from kvjax.evaluate import paired, rows as rows_lib, ruler, scores, summary
from kvjax.evaluate.paired import Difference
from kvjax.evaluate.scores import Score
from kvjax.evaluate.task import TASKS, is_ruler
from kvjax.foundation import intervals, json_text, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import matching_entries
from kvjax.foundation.output import Table

# Identity keys that may differ between two models.
_MODEL_KEYS = ("checkpoint", "tokenizer", "template", "day", "ends", "letters", "cache_dtype")
_PROMPT_KEYS = ("tokenizer", "template", "day")  # that determine prompts, beside the data
_DEFAULTS = dict(calculator=calculator.MODES[0])  # keys that earlier versions did not write


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The saved rows of one checkpoint.

    Attributes:
      identities: everything that determines a task's verdicts, by task.
      verdicts: verdicts (credits of RULER), by task and row.
      prompts: digests of the prompts, by task and row; old rows have none.
      chances: accuracy of guessing by CORE task; empty unless all of CORE was evaluated.
    """

    name: str
    identities: Mapping[str, dict]
    verdicts: Mapping[str, Mapping[int, float]]
    prompts: Mapping[str, Mapping[int, str]]
    chances: Mapping[str, float]


def groups(option: str) -> tuple[list[str], list[str]]:
    """Returns the workdirs of both sides.

    Raises:
      UserError: the option does not have two sides.
    """
    sides = [[name.strip() for name in side.split("+")] for side in option.split(",")]
    if len(sides) != 2 or not all(name for side in sides for name in side):
        raise UserError(
            f"--compare={option}: give two workdirs, as runs/a,runs/b; join seeds of one model by "
            "+, as a0+a1,b0+b1; WORKDIR@STEP is the evaluation of that step, WORKDIR@STEP_int8 "
            "that with --cache_dtype=int8"
        )
    return sides[0], sides[1]


def open(name: str, option: str = "--compare") -> Evaluated:
    """Reads the evaluation of a workdir's latest evaluated step, or of WORKDIR@STEP.

    WORKDIR@STEP_int8 is the evaluation with --cache_dtype=int8.

    Args:
      name: a workdir, or a folder of rows written by --out.
      option: the option that has the name, for messages.

    Raises:
      UserError: there is no such evaluation.
    """
    folder = runtime.path(option, name)
    # A folder of --out has rows; a workdir has other .jsonl files.
    if matching_entries(folder, "*.jsonl") and (evaluated := _read(name, folder)).verdicts:
        return evaluated
    path, separator, step = name.rpartition("@")
    by_step = bool(separator) and rows_lib.is_folder(step)
    root = runtime.path(option, path if by_step else name) / rows_lib.FOLDER
    folders = [path.name for path in root.iterdir() if path.is_dir()] if root.exists() else []
    steps = sorted(filter(rows_lib.is_folder, folders), key=_order)
    latest = [step for step in steps if step.isdecimal()][-1:]
    chosen = [step] if by_step else latest
    if not chosen or chosen[0] not in steps:
        others = f"; there are evaluations of steps [{', '.join(steps)}]" if steps else ""
        raise UserError(
            f"{option}: {name} has no evaluation{' of that step' if by_step else ''}{others}: "
            f"python -m kvjax.evaluate --workdir={path if by_step else name}"
        )
    return _read(name, root / chosen[0])


def _order(folder: str) -> tuple[int, str]:
    step, _, cache_dtype = folder.partition("_")
    return int(step), cache_dtype


def _read(name: str, folder: epath.Path) -> Evaluated:
    identities, verdicts, prompts = {}, {}, {}
    for file in matching_entries(folder, "*.json"):
        task = file.name.removesuffix(".json")
        if not (parts := rows_lib.files_of(folder, task)):
            continue  # the summary, or an unrelated file
        identities[task] = json_text.read_object(file, "evaluate again")
        rows = {row["index"]: row for part in parts for row in rows_lib.of_file(part)}
        verdicts[task] = {i: scores.credit(row) for i, row in rows.items()}
        prompts[task] = {i: row["prompt"] for i, row in rows.items() if "prompt" in row}
    chances = summary.chances_of_core(summary.read(folder))
    return Evaluated(name, identities, verdicts, prompts, chances)


def compare(one: Sequence[Evaluated], other: Sequence[Evaluated]) -> dict[str, dict]:
    """Compares verdicts on the questions that all models answered, by task and as means over tasks.

    Each entry has both sides' scores and their difference with its interval. A task's entry also
    has the number of questions and, if each side is a single model, the numbers of questions that
    only one of them got right and the p-value of McNemar's exact test. `combined` is the mean of
    the five tasks, `core` CORE's mean of centred accuracies; both need all of their tasks.
    `ruler_LENGTH` is the mean of RULER's tasks at that length.

    Raises:
      UserError: the models have no questions in common, or were evaluated with different data or
        options.
    """
    models = [*one, *other]
    shared = [task for task in models[0].verdicts if all(task in m.verdicts for m in models)]
    results, differences = {}, {}
    for task in shared:
        _check_alike(task, models)
        rows = sorted(set.intersection(*(set(model.verdicts[task]) for model in models)))
        if not rows:
            continue
        sides = [
            np.array([[model.verdicts[task][i] for i in rows] for model in side])
            for side in (one, other)
        ]
        differences[task] = paired.difference(*sides)
        results[task] = _entry(differences[task]) | {"rows": len(rows)}
        if len(one) == len(other) == 1:
            results[task] |= _mcnemar(*(side[0] for side in sides))
    if not results:
        raise UserError("--compare: the two sides have no questions in common")
    if results.keys() >= TASKS.keys():
        results["combined"] = _entry(paired.mean([differences[task] for task in TASKS]))
    chances = models[0].chances
    if chances and results.keys() >= chances.keys() and all(m.chances == chances for m in models):
        centred = [differences[task].centred(chance) for task, chance in chances.items()]
        results["core"] = _entry(paired.mean(centred))
    for length, tasks in ruler.by_length(differences).items():
        results[length] = _entry(paired.mean([differences[task] for task in tasks]))
        results[length]["tasks"] = len(tasks)
    return results


def _entry(difference: Difference) -> dict:
    return {
        "one": float(np.mean(difference.first_S)),
        "other": float(np.mean(difference.second_S)),
        "difference": difference.score._asdict(),
    }


def _mcnemar(first_Q: np.ndarray, second_Q: np.ndarray) -> dict:
    counts = paired.advantages(first_Q, second_Q)
    if first_Q.dtype == second_Q.dtype == bool:
        counts = tuple(map(int, counts))
    return {"only_one": counts[0], "only_other": counts[1], "p": paired.p_value(*counts)}


def _check_alike(task: str, models: Sequence[Evaluated]) -> None:
    """Raises a UserError if models were evaluated on a task with different data or options."""
    first = models[0]
    for other in models[1:]:
        a, b = _DEFAULTS | first.identities[task], _DEFAULTS | other.identities[task]
        for key in sorted(a.keys() | b.keys()):
            if key not in _MODEL_KEYS and a.get(key) != b.get(key):
                raise UserError(
                    f"--compare: {task} was evaluated with {key} = {a.get(key)!r} for {first.name} "
                    f"and with {b.get(key)!r} for {other.name}: evaluate both with the same"
                )
        depends_on_positions = task not in TASKS and not is_ruler(task)  # prompts of CORE
        if depends_on_positions or any(a.get(key) != b.get(key) for key in _PROMPT_KEYS):
            continue
        one, two = first.prompts[task], other.prompts[task]
        changed = any(one[i] != two[i] for i in one.keys() & two.keys())
        if changed or a.get("letters") != b.get("letters"):
            what = "prompts" if changed else "tokens as letters"
            raise UserError(
                f"--compare: {task} has other {what} for {first.name} than for {other.name}, "
                "though tokenizer and template are the same: evaluate the older again"
            )


def table(results: Mapping[str, dict], one: Sequence[str], other: Sequence[str]) -> Table:
    """Returns the differences as a table."""
    rows = []
    for task, entry in results.items():
        score = Score(**entry["difference"])
        rows.append(
            (
                task,
                f"{100 * entry['one']:.1f}",
                f"{100 * entry['other']:.1f}",
                f"{100 * score.value:+.1f}",
                f"{100 * score.low:+.1f} to {100 * score.high:+.1f}",
                f"{entry['p']:.2g}" if "p" in entry else "-",
                f"{entry['rows']:,}" if "rows" in entry else "-",
            )
        )
    header = ("task", "first, %", "second, %", "difference", "interval", "p", "questions")
    notes = ["95 % intervals; for means over tasks, distances to the bounds add in quadrature."]
    notes += _test_notes(results)
    if min(len(one), len(other)) < 3:
        notes.append("A claim between mechanisms needs three seeds of each.")
    return Table(f"{'+'.join(one)} and {'+'.join(other)}", header, rows, notes)


def _test_notes(results: Mapping[str, dict]) -> list[str]:
    """Returns a note on the tasks whose test rejects equality after Holm's correction."""
    p_values = {task: entry["p"] for task, entry in results.items() if "p" in entry}
    if not p_values:
        return ["Intervals cover questions and seeds (Welch's t)."]
    adjusted = intervals.holm(list(p_values.values()))
    differing = [task for task, p in zip(p_values, adjusted, strict=True) if p <= intervals.LEVEL]
    text = f"p: McNemar's exact test. {', '.join(differing) or 'No task'} differs at 5 %"
    return [text + (f" after Holm's correction for {len(p_values)}." if len(p_values) > 1 else ".")]
