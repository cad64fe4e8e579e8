"""Trains projection sharing's five tasks on synthetic sequences (section 3.1, Table 2).

    python -m experiments.studies.sequence_tasks [--seeds=3] [--save]   # a sample of the grid
    python -m experiments.studies.sequence_tasks --tasks=sort --variants=kv_tied \\
        --lengths=16,64,128 --widths=32,64,256 --layers=2,4 --heads=2,4    # the whole grid of one

An encoder labels every position of a row of numbers. The five tasks: reverse the row, sort it,
subtract it from 9, swap its halves, copy it. 50,000 rows, two epochs. The recipe is from UvA's
course, whose code the paper's code follows, except that weights are initialised as in this project
instead of by Xavier. Weights, rows and their order depend on the seed; rows are equal for all
variants. Prints the share of positions that are right in 10,000 other rows, means over cells with
95 % intervals over seeds. The printed table (`asked` in the result) covers the requested cells;
`rows` in the result covers all cells that every variant was trained on.
"""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
import functools
import itertools
import re

import jax
import numpy as np

from experiments.models.labeller import Labeller
from experiments.studies import in_process
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from experiments.tasks import encoders, learner, sequences
from experiments.tasks.learner import Learner
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import estimate
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute

NAME = "sequence_tasks"
# Projection sharing, Table 2, by variant in the order of `sequences.TASKS`. Sub and copy are 1.
PUBLISHED = {
    "qkv": (0.698, 0.971, 1.0, 0.588, 1.0),
    "qk_tied": (0.705, 0.967, 1.0, 0.597, 1.0),
    "qk_tied_plus": (0.718, 0.963, 1.0, 0.671, 1.0),
    "kv_tied": (0.701, 0.958, 1.0, 0.590, 1.0),
    "qkv_tied": (0.514, 0.939, 1.0, 0.446, 1.0),
    "qkv_tied_plus": (0.581, 0.957, 1.0, 0.576, 1.0),
}
SEEDS = 3  # per cell
TRAINED_ON, EPOCHS, BATCH, TESTED_ON = 50_000, 2, 128, 10_000
RECIPE = learner.Recipe(
    steps=TRAINED_ON // BATCH * EPOCHS, learning_rate=1e-3, warm_up=5, decay="cosine", clip=5.0
)
_CURVE = 20  # steps averaged to a point of a run's loss curve
CURVES_OF = "d32_l2_h2_t32"  # end of the names of the cells whose curves are shown and judged
_TEST_SEED = 10**6  # seed of the test rows


def transformer(
    variant: str, width: int, layers: int, heads: int, **overrides
) -> TransformerConfig:
    """Returns the course's model: LayerNorm after each block, a ReLU MLP of twice the width."""
    overrides |= dict(norm_after=True, positions="sinusoidal", activation="relu", mlp_dim=2 * width)
    shape = (width, layers, heads)
    return encoders.transformer(variant, 10, *shape, labels=sequences.NUMBERS, **overrides)


@functools.cache
def learner_of(config: TransformerConfig) -> Learner:
    """Returns a learner, compiled once per row length and shared by tasks and seeds.

    Batches have "x" and "y", and optionally the attention's "temperature".
    """
    compute = Compute(unroll=True)

    def logits(model, batch, _):
        x_BTF = jax.nn.one_hot(batch["x"], sequences.NUMBERS)
        return model(x_BTF, compute=compute, temperature=batch.get("temperature"))

    def make(key):
        return Labeller(config, key, features=sequences.NUMBERS)

    return Learner(make, RECIPE, *learner.loss_and_accuracy(logits))


def train(
    task: str,
    config: TransformerConfig,
    length: int,
    seed: int,
    temperature: Callable[[int], float] | None = None,
) -> dict:
    """Trains a model; returns its test accuracy and its training loss.

    Args:
      temperature: attention temperature by step; 1 in evaluation.
    """
    model = learner_of(config)
    rows, test_rows = (
        dict(zip("xy", sequences.labelled(task, count, length, drawn_by), strict=True))
        for count, drawn_by in ((TRAINED_ON, seed), (TESTED_ON, _TEST_SEED))
    )
    batches = learner.in_order(rows, BATCH, EPOCHS, seed)
    if temperature is not None:
        batches = (
            batch | {"temperature": np.float32(temperature(step))}
            for step, batch in enumerate(batches)
        )
    trained = model.train(seed, batches)
    right = model.accuracy(trained, learner.split(test_rows, 500))
    curve = dict(every=_CURVE, loss=trained.curve(_CURVE))
    return dict(right=right, loss=trained.loss, curve=curve)


def cell(task: str, variant: str, width: int, layers: int, heads: int, length: int) -> Cell:
    settings = dict(
        task=task, variant=variant, width=width, layers=layers, heads=heads, length=length
    )
    config = transformer(variant, width, layers, heads)
    return Cell(
        name=f"{task}/{variant}/d{width}_l{layers}_h{heads}_t{length}",
        settings=settings,
        train=functools.partial(train, task, config, length),
    )


_NAME = re.compile(r"(\w+)/(\w+)/d(\d+)_l(\d+)_h(\d+)_t(\d+)")


def cell_of(name: str) -> Cell:
    """Returns the cell of a name."""
    task, variant, *sizes = _NAME.fullmatch(name).groups()
    return cell(task, variant, *map(int, sizes))


_SIZES = ("width", "layers", "heads", "length")


def in_common(finished: FinishedRuns) -> list[Cell]:
    """Returns the cells that all variants were trained on with enough common seeds.

    Enough are SEEDS, or the largest number of common seeds in the task if that is less.
    """
    by_place: dict[tuple, list[Cell]] = {}
    for cell in map(cell_of, finished.runs):
        place = tuple(cell.settings[key] for key in ("task", *_SIZES))
        by_place.setdefault(place, []).append(cell)
    common_seeds, most = {}, collections.Counter()
    for where, cells in by_place.items():
        if len(cells) == len(encoders.VARIANTS):
            common = set.intersection(*(set(in_process.runs_of(cell, finished)) for cell in cells))
            common_seeds[where], task = len(common), where[0]
            most[task] = max(most[task], len(common))
    enough = {where for where, n in common_seeds.items() if n and n >= min(SEEDS, most[where[0]])}
    return [cell for where in enough for cell in by_place[where]]


def rows(cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns a row per variant: by task the mean over cells, and its interval over seeds."""
    table = []
    for variant, published in PUBLISHED.items():
        by_task = {}
        for task in sequences.TASKS:
            settings = dict(variant=variant, task=task)
            if runs := in_process.means(cells, finished, "right", **settings):
                accuracy = estimated("right", estimate(list(runs.values())), "half_interval")
                averaged = [c.settings for c in cells if settings.items() <= c.settings.items()]
                sizes = {key: sorted({s[key] for s in averaged}) for key in _SIZES}
                by_task[task] = accuracy | dict(seeds=len(runs), cells=len(averaged), **sizes)
        if by_task:
            means = dict(zip(sequences.TASKS, published, strict=True))
            table.append(dict(variant=variant, tasks=by_task, published=means))
    return table


def curves(finished: FinishedRuns) -> list[dict]:
    """Returns training losses by task and variant, over the seeds that a task's variants share."""
    table = []
    for task in sequences.TASKS:
        cells = {v: cell_of(f"{task}/{v}/{CURVES_OF}") for v in encoders.VARIANTS}
        runs = {
            variant: {
                seed: run["curve"]
                for seed, run in in_process.runs_of(cell, finished).items()
                if "curve" in run
            }
            for variant, cell in cells.items()
        }
        trained = {variant: seeds for variant, seeds in runs.items() if seeds}
        common = sorted(set.intersection(*map(set, trained.values()))) if trained else []
        for variant in trained if common else ():
            by_seed, cell = [runs[variant][seed] for seed in common], cells[variant]
            loss = np.mean([curve["loss"] for curve in by_seed], axis=0).round(5).tolist()
            row = dict(task=task, variant=variant, seeds=len(common), loss=loss)
            sizes = {key: cell.settings[key] for key in _SIZES}
            table.append(row | sizes | dict(every=by_seed[0]["every"]))
    return table


def _cells(row: Mapping) -> tuple:
    def text(task: str) -> str:
        accuracy, published = row["tasks"].get(task), row["published"][task]
        return f"{shown(accuracy, 'right', '.3f')} ({published:.3f})" if accuracy else "-"

    return encoders.CALLED[row["variant"]], *map(text, sequences.TASKS)


def check_lengths(tasks: Collection[str], option: str, lengths: Sequence[int]) -> None:
    """Raises a UserError for a row length that does not fit a task.

    Args:
      option: the option with the row lengths.
    """
    odd = [length for length in lengths if length % 2]
    if "swap" in tasks and odd:
        raise UserError(f"--{option}: {odd[0]} must be even for swap, which exchanges halves")


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME, seeds=SEEDS)
    parser.names("tasks", sequences.TASKS)
    parser.names("variants", encoders.VARIANTS)
    encoders.add_sizes(parser, widths="32,64", layers="2", heads="2", lengths="16,64")
    options = parser.parse(arguments)
    encoders.read_sizes(options, "lengths")
    check_lengths(options.tasks, "lengths", options.lengths)
    sizes = (options.widths, options.layers, options.heads, options.lengths)
    grid = itertools.product(*sizes, options.tasks, options.variants)
    cells = [cell(task, variant, *shape) for *shape, task, variant in grid]

    def figures_of(finished: FinishedRuns) -> dict:
        tables = dict(asked=rows(cells, finished), rows=rows(in_common(finished), finished))
        return tables | dict(curves=curves(finished))

    header = ("variant", *sequences.TASKS)
    note = "The share of positions that are right; in brackets Table 2, a mean over its grid."
    how = dict(code_files=(__file__,), printed="asked", note=note)
    return in_process.study(NAME, cells, options, figures_of, header, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
