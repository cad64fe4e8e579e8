"""Scores of a model and its conversions on RULER, from the rows that evaluations stored.

    python -m kvjax.evaluate --workdir=runs/smollm2 --tasks=ruler --ruler_lengths=1024  # and others
    python -m experiments.evaluation.ruler --workdirs=runs/smollm2,runs/smollm2_half [--save]

Runs no model. Differences are from the first model on the same questions, as in `kvjax.evaluate
--compare`.
"""

from collections.abc import Iterator, Sequence

from experiments import record
from experiments.evaluation.scores import described, parse, percent
from kvjax.evaluate import compare, rows as rows_lib, ruler, scores, summary
from kvjax.evaluate.compare import Evaluated
from kvjax.evaluate.scores import Score
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.workdir import trained


def rows_of(name: str, evaluated: Evaluated, first: Evaluated | None) -> Iterator[dict]:
    """Yields a model's score on each task and their mean by length, and the first's distance."""
    saved = trained.find(name)
    kept = summary.read(saved.workdir / rows_lib.FOLDER / str(saved.step))
    against = {} if first is None else compare.compare([evaluated], [first])
    model = described(name)
    for length, tasks in ruler.by_length(evaluated.verdicts).items():
        found = {task: _score(evaluated, task) for task in tasks}
        minutes = {task: kept.get("tasks", {}).get(task, {}).get("minutes_now") for task in tasks}
        found[length] = scores.mean(list(found.values()))
        minutes[length] = sum(minutes.values()) if None not in minutes.values() else None
        for task, score in found.items():
            row = model | dict(task=task, score=score._asdict(), minutes=minutes[task])
            if task in evaluated.verdicts:
                row["rows"] = len(evaluated.verdicts[task])
            if task in against:
                row["against_first"] = against[task]["difference"]
                row["p"] = against[task].get("p")
            yield row


def _score(evaluated: Evaluated, task: str) -> Score:
    credits = evaluated.verdicts[task].values()
    return scores.accuracy(sum(credits), len(credits))


_HEADER = ("task", "model", "cache bytes per token (bfloat16)", "questions", "%", "interval")
_HEADER += ("minutes", "against the first", "interval", "p")


def _cells(row: dict) -> tuple:
    value, low, high = percent(row["score"])
    against = ("", "", "")
    if "against_first" in row:
        difference, *ends = percent(row["against_first"], "+")
        p = "" if row["p"] is None else f"{row['p']:.2g}"
        against = (difference, " to ".join(ends), p)
    minutes = "" if row["minutes"] is None else f"{row['minutes']:.1f}"
    of_model = (row["workdir"], f"{row['cache_bytes']:,}", row.get("rows", ""))
    return (row["task"], *of_model, value, f"{low} to {high}", minutes, *against)


def main(arguments: Sequence[str]) -> None:
    """Prints the table, ordered by task."""
    options = parse(arguments, __doc__, "ruler")
    evaluations = {name: compare.open(name, "--workdirs") for name in options.workdirs}
    first, rows = evaluations[options.workdirs[0]], []
    for name, evaluated in evaluations.items():
        rows += rows_of(name, evaluated, None if evaluated is first else first)
    if not rows:
        raise UserError("--workdirs: none has rows of RULER: run kvjax.evaluate --tasks=ruler")
    rows.sort(key=lambda row: row["task"])  # stable: models stay in order
    out = Output(options)
    out.table(_HEADER, map(_cells, rows))
    record.record(options.name, dict(rows=rows), out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
