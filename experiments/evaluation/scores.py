"""Scores of a model and its conversions, from the rows that evaluations stored.

    python -m kvjax.evaluate --workdir=runs/smollm2 --tasks=mmlu --data=FOLDER  # for each workdir
    python -m experiments.evaluation.scores --workdirs=runs/smollm2,runs/smollm2_half
        [--save] [--name=scores]

Runs no model. Differences from the first model are paired by question, with the interval and the
exact test of `kvjax.evaluate --compare`.
"""

import argparse
from collections.abc import Sequence
import re

import jax.numpy as jnp

from experiments import record
from kvjax.analysis.words import mechanism_names
from kvjax.costs import formulas
from kvjax.evaluate import compare, scores
from kvjax.evaluate.compare import Evaluated
from kvjax.evaluate.task import TASKS
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.workdir import trained


def rows_of(name: str, evaluated: Evaluated, first: Evaluated | None) -> list[dict]:
    """Returns a model's score on each task, and its difference from the first model."""
    of_model = described(name)
    against = {} if first is None else compare.compare([evaluated], [first])
    rows = []
    for task in (task for task in TASKS if evaluated.verdicts.get(task)):
        verdicts = evaluated.verdicts[task]
        right = sum(verdicts.values())
        score = scores.accuracy(right, len(verdicts))
        row = of_model | dict(task=task, rows=len(verdicts), right=right, score=score._asdict())
        row |= dict(options=evaluated.identities[task])
        if task in against:
            entry = against[task]
            row |= dict(against_first=entry["difference"], paired=entry["rows"], p=entry["p"])
            row |= dict(only_here=entry["only_one"], only_first=entry["only_other"])
        rows.append(row)
    return rows


def described(name: str) -> dict:
    """Returns the name, mechanism and cache of a workdir's model."""
    model = trained.find(name).experiment.model
    return dict(
        workdir=name.rstrip("/").rpartition("/")[2],
        mechanism=_mechanism(mechanism_names(model.mechanisms)),
        cache_bytes=formulas.cache_bytes_per_token(model, jnp.dtype(jnp.bfloat16)),
    )


def _mechanism(names: str) -> str:
    """Shortens the mechanisms' names if they differ between layers."""
    first, *others = names.split("; ")
    return f"{first.partition(',')[0]}, by layer" if len(others) > 1 else names


_HEADER = ("model", "mechanism", "cache bytes per token (bfloat16)", "task", "right", "%")
_HEADER += ("interval", "against the first", "interval", "p")


def _cells(r: dict) -> tuple:
    value, low, high = percent(r["score"])
    against = ("", "", "")
    if "against_first" in r:
        difference, *ends = percent(r["against_first"], "+")
        against = (difference, " to ".join(ends), f"{r['p']:.2g}")
    right = f"{r['right']:,} of {r['rows']:,}"
    of_model = (r["workdir"], r["mechanism"], f"{r['cache_bytes']:,}", r["task"])
    return (*of_model, right, value, f"{low} to {high}", *against)


def percent(score: dict, sign: str = "") -> tuple[str, ...]:
    return tuple(f"{100 * score[key]:{sign}.1f}" for key in ("value", "low", "high"))


def parse(arguments: Sequence[str], description: str, result: str) -> argparse.Namespace:
    """Returns the options of a table of evaluated models.

    Args:
      result: default name of the file that --save writes.
    """
    parser = command_line.Parser(description)
    add = parser.add_argument
    add("--workdirs", default="", help="workdirs of models; the first is the reference")
    add("--save", action="store_true", help="write experiments/results/NAME.json")
    add("--name", default=result, help=f"file name for --save ({result})")
    parser.add_output()
    options = parser.parse(arguments)
    options.workdirs = [name.strip() for name in options.workdirs.split(",") if name.strip()]
    if not re.fullmatch(r"\w{1,64}", options.name, re.ASCII):
        raise UserError(f"--name={options.name!r}: must be 1 to 64 letters, digits or _")
    if not options.workdirs:
        raise UserError("--workdirs is missing: give workdirs that kvjax.evaluate was run on")
    record.check(options.save)
    return options


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    options = parse(arguments, __doc__, "scores")
    evaluations = [compare.open(name, "--workdirs") for name in options.workdirs]
    rows = []
    for name, evaluated in zip(options.workdirs, evaluations, strict=True):
        rows += rows_of(name, evaluated, None if evaluated is evaluations[0] else evaluations[0])
    out = Output(options)
    out.table(_HEADER, map(_cells, rows))
    record.record(options.name, dict(rows=rows), out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
