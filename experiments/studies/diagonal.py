"""Two remedies of projection sharing for tied queries and keys (section 2.5).

    python -m experiments.studies.diagonal [--tasks=sort,reverse] [--length=64] [--save]

With tied queries and keys, a token's score with itself is its squared norm. The paper reports that
neither dividing this diagonal by its mean (figure 5) nor annealing the softmax's temperature helped
consistently, and gives no schedule. Here the diagonal of K Kᵀ is divided by its mean over the row,
and the temperature falls linearly from 4 to 1 in the first half of training. Encoders, rows and
recipe are as in `sequence_tasks`; equal seeds share rows and weights. Prints the share of positions
that are right, and the change by each remedy, seed by seed.
"""

import argparse
from collections.abc import Mapping, Sequence
import functools
import pathlib

from experiments.studies import in_process, sequence_tasks
from experiments.studies.in_process import Cell
from experiments.studies.kept import Kept
from experiments.tasks import encoders, sequences
from kvjax.foundation import command_line, runtime
from kvjax.foundation.configuration import between
from kvjax.foundation.intervals import Estimate, difference, estimate
from kvjax.foundation.output import Output

NAME = "diagonal"
VARIANTS = ("qk_tied", "qkv_tied")
REMEDIES = ("none", "normalised", "annealed")
_SHAPE = dict(width=32, layers=2, heads=2)
HOTTEST = 4.0


def temperature(step: int) -> float:
    """Returns the attention temperature in a step: logits are divided by it."""
    share = min(1.0, step / (sequence_tasks.RECIPE.steps / 2))
    return HOTTEST + (1 - HOTTEST) * share


def cell(task: str, variant: str, remedy: str, length: int) -> Cell:
    config = sequence_tasks.transformer(
        variant, *_SHAPE.values(), diagonal_norm=remedy == "normalised"
    )
    falling = temperature if remedy == "annealed" else None
    asked = dict(task=task, variant=variant, remedy=remedy, length=length, **_SHAPE)
    if falling is not None:
        asked |= dict(hottest=HOTTEST)
    return Cell(
        name=f"{task}/{variant}/{remedy}/t{length}",
        asked=asked,
        train=functools.partial(sequence_tasks.train, task, config, length, temperature=falling),
        flops=sequence_tasks.flops(length, _SHAPE["width"], _SHAPE["layers"]),
    )


def rows(kept: Kept) -> list[dict]:
    """Returns a row per task, length, variant and remedy, with the remedy's change."""
    found = []
    for name in sorted(kept.runs):
        task, variant, remedy, length = name.split("/")
        runs, plain = (
            {
                seed: run["right"]
                for seed, run in in_process.runs_of(
                    cell(task, variant, one, int(length[1:])), kept
                ).items()
            }
            for one in (remedy, "none")
        )
        if runs:
            row = dict(task=task, length=int(length[1:]), variant=variant, remedy=remedy)
            row |= dict(seeds=len(runs), **_estimated("right", estimate(list(runs.values()))))
            plain = {} if remedy == "none" else plain
            row |= dict(seeds_in_common=len(runs.keys() & plain.keys()))
            found.append(row | _estimated("change", difference(runs, plain)))
    return found


def _estimated(name: str, value: Estimate | None) -> dict:
    if value is None:
        return {name: None, f"{name}_half_interval": None}
    return {name: value.mean, f"{name}_half_interval": value.half}


def _shown(row: Mapping) -> tuple:
    change = "-"
    if row["change"] is not None:
        change = Estimate(row["change"], row["change_half_interval"]).shown("+.3f")
    right = Estimate(row["right"], row["right_half_interval"]).shown(".3f")
    asked = (row["task"], row["length"], encoders.CALLED[row["variant"]], row["remedy"])
    return *asked, right, row["seeds"], change, row["seeds_in_common"] or "-"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--tasks", default="sort,reverse", help=f"of {', '.join(sequences.TASKS)} (sort,reverse)")
    add("--length", type=int, default=64, help="numbers in a row (64)")
    in_process.add_options(parser, NAME, seeds=sequence_tasks.SEEDS)
    options = parser.parse(arguments)
    between("--length", options.length, 1, 4096)
    sequence_tasks.read_tasks(options, "length", [options.length])
    in_process.check(options)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    runtime.start()
    cells = [
        cell(task, variant, remedy, options.length)
        for task in options.tasks
        for variant in VARIANTS
        for remedy in REMEDIES
    ]

    def figures_of(kept: Kept) -> dict:
        return dict(hottest=HOTTEST, rows=rows(kept))

    of_tasks = (sequence_tasks, encoders, sequences)
    places = [pathlib.Path(__file__), *(pathlib.Path(module.__file__) for module in of_tasks)]
    found, out = in_process.study(NAME, cells, options, figures_of, places), Output(options)
    headings = ("task", "length", "variant", "remedy", "right", "seeds", "change", "of seeds")
    out.table(headings, map(_shown, found["rows"]))
    return in_process.end(NAME, found, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
