"""Two remedies of projection sharing for tied queries and keys (section 2.5).

    python -m experiments.studies.diagonal [--tasks=sort,reverse] [--length=64] [--save]

If queries and keys are tied, a token's score with itself is its squared norm. The paper tries two
remedies, dividing this diagonal by its mean (figure 5) and annealing the softmax's temperature, and
reports that neither helped consistently; it gives no schedule. Here the diagonal of K Kᵀ is divided
by its mean over the row, and the temperature falls linearly from 4 to 1 in the first half of
training. Encoders, rows and recipe are as in `sequence_tasks`. Prints the share of positions that
are right, and its change by each remedy, between runs of the same seed (same rows and weights).
"""

from collections.abc import Mapping, Sequence
import functools
import itertools

from experiments.studies import in_process, sequence_tasks
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from experiments.tasks import encoders, sequences
from kvjax.foundation import command_line
from kvjax.foundation.configuration import between
from kvjax.foundation.intervals import difference, estimate

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
    settings = dict(task=task, variant=variant, remedy=remedy, length=length, **_SHAPE)
    if falling is not None:
        settings |= dict(hottest=HOTTEST)
    return Cell(
        name=f"{task}/{variant}/{remedy}/t{length}",
        settings=settings,
        train=functools.partial(sequence_tasks.train, task, config, length, temperature=falling),
    )


def rows(finished: FinishedRuns) -> list[dict]:
    """Returns a row per task, length, variant and remedy, with the remedy's change."""
    table = []
    for name in sorted(finished.runs):
        task, variant, remedy, length = name.split("/")
        tokens = int(length[1:])
        runs = in_process.figure(cell(task, variant, remedy, tokens), finished, "right")
        without = in_process.figure(cell(task, variant, "none", tokens), finished, "right")
        if runs:
            row = dict(task=task, length=tokens, variant=variant, remedy=remedy, seeds=len(runs))
            row |= estimated("right", estimate(list(runs.values())))
            without = {} if remedy == "none" else without
            row |= dict(seeds_in_common=len(runs.keys() & without.keys()))
            table.append(row | estimated("change", difference(runs, without)))
    return table


_HEADER = ("task", "length", "variant", "remedy", "right", "seeds", "change", "of seeds")


def _cells(row: Mapping) -> tuple:
    names = (row["task"], row["length"], encoders.CALLED[row["variant"]], row["remedy"])
    right, change = shown(row, "right", ".3f"), shown(row, "change", "+.3f")
    return *names, right, row["seeds"], change, row["seeds_in_common"] or "-"


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME, seeds=sequence_tasks.SEEDS)
    parser.names("tasks", sequences.TASKS, ("sort", "reverse"))
    parser.count("length", 64, "numbers in a row (64)")
    options = parser.parse(arguments)
    between("--length", options.length, 1, 4096)
    sequence_tasks.check_lengths(options.tasks, "length", [options.length])
    grid = itertools.product(options.tasks, VARIANTS, REMEDIES)
    cells = [cell(*settings, options.length) for settings in grid]

    def figures_of(finished: FinishedRuns) -> dict:
        return dict(hottest=HOTTEST, rows=rows(finished))

    code_files = (__file__, sequence_tasks.__file__)
    return in_process.study(
        NAME, cells, options, figures_of, _HEADER, _cells, code_files=code_files
    )


if __name__ == "__main__":
    command_line.run(main)
