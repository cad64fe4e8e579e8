"""Projection sharing's five tasks on synthetic sequences (section 3.1), beside its Table 2.

    python -m experiments.studies.sequence_tasks [--seeds=3] [--save]   # a sample of the grid
    python -m experiments.studies.sequence_tasks --tasks=sort --variants=kv_tied \\
        --lengths=16,64,128 --widths=32,64,256 --layers=2,4 --heads=2,4    # the whole grid of one

Encoders label every position of a row of numbers: reversed, sorted, subtracted from 9, halves
swapped, copied. 50,000 rows, two epochs. The recipe is that of UvA's course, which the paper's code
follows, but for initialisation, which is this project's and not Xavier's. A seed draws weights and
rows with their order, the rows equal for all variants. Prints the share of positions that are right
in 10,000 other rows, means over cells with 95 % intervals over seeds. The printed table, `asked` in
the result, covers the requested cells; `rows` in the result covers all cells that every variant was
trained on.
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
from experiments.studies.in_process import Cell
from experiments.studies.kept import Kept
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
SEEDS = 3  # of each cell
TRAINED_ON, EPOCHS, BATCH, TESTED_ON = 50_000, 2, 128, 10_000
RECIPE = learner.Recipe(
    steps=TRAINED_ON // BATCH * EPOCHS, learning_rate=1e-3, warm_up=5, decay="cosine", clip=5.0
)
_CURVE = 20  # steps averaged to a point of a run's loss curve
CURVES_OF = "d32_l2_h2_t32"  # end of the names of the cells whose curves are shown and judged
_TEST_SEED = 10**6  # of the test rows


def transformer(variant: str, width: int, layers: int, heads: int, **how) -> TransformerConfig:
    """Returns the course's model: LayerNorm after each block, an MLP of ReLU and twice the
    width."""
    how |= dict(norm_after=True, positions="sinusoidal", activation="relu", mlp_dim=2 * width)
    shape = (width, layers, heads)
    return encoders.transformer(variant, 10, *shape, labels=sequences.NUMBERS, **how)


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

    return Learner(make, RECIPE, *learner.of_labels(logits))


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
    rows, others = (
        dict(zip("xy", sequences.labelled(task, count, length, drawn_by), strict=True))
        for count, drawn_by in ((TRAINED_ON, seed), (TESTED_ON, _TEST_SEED))
    )
    batches = learner.in_order(rows, BATCH, EPOCHS, seed)
    if temperature is not None:
        batches = (
            batch | {"temperature": np.float32(temperature(step))}
            for step, batch in enumerate(batches)
        )
    found = model.train(seed, batches)
    right = model.accuracy(found, learner.split(others, 500))
    curve = dict(every=_CURVE, loss=found.curve(_CURVE))
    return dict(right=right, loss=found.loss, curve=curve)


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


def in_common(kept: Kept) -> list[Cell]:
    """Returns cells that all variants have, with SEEDS common seeds or the most that the task
    has."""
    by_place: dict[tuple, list[Cell]] = {}
    for one in map(cell_of, kept.runs):
        place = tuple(one.settings[key] for key in ("task", *_SIZES))
        by_place.setdefault(place, []).append(one)
    seeds, most = {}, collections.Counter()
    for where, cells in by_place.items():
        if len(cells) == len(encoders.VARIANTS):
            common = set.intersection(*(set(in_process.runs_of(one, kept)) for one in cells))
            seeds[where], task = len(common), where[0]
            most[task] = max(most[task], len(common))
    enough = {where for where, n in seeds.items() if n and n >= min(SEEDS, most[where[0]])}
    return [one for where in enough for one in by_place[where]]


def rows(cells: Sequence[Cell], kept: Kept) -> list[dict]:
    """Returns a row per variant: by task the mean over cells, and its interval over seeds."""
    found = []
    for variant, published in PUBLISHED.items():
        by_task = {}
        for task in sequences.TASKS:
            settings = dict(variant=variant, task=task)
            if runs := in_process.means(cells, kept, "right", **settings):
                now = estimated("right", estimate(list(runs.values())), "half_interval")
                over = [c.settings for c in cells if settings.items() <= c.settings.items()]
                sizes = {key: sorted({one[key] for one in over}) for key in _SIZES}
                by_task[task] = now | dict(seeds=len(runs), cells=len(over), **sizes)
        if by_task:
            means = dict(zip(sequences.TASKS, published, strict=True))
            found.append(dict(variant=variant, tasks=by_task, published=means))
    return found


def curves(kept: Kept) -> list[dict]:
    """Returns training losses by task and variant, over the seeds that all of a task's variants
    have."""
    found = []
    for task in sequences.TASKS:
        cells = {v: cell_of(f"{task}/{v}/{CURVES_OF}") for v in encoders.VARIANTS}
        runs = {
            variant: {
                seed: run["curve"]
                for seed, run in in_process.runs_of(one, kept).items()
                if "curve" in run
            }
            for variant, one in cells.items()
        }
        there = {variant: seeds for variant, seeds in runs.items() if seeds}
        common = sorted(set.intersection(*map(set, there.values()))) if there else []
        for variant in there if common else ():
            mine, one = [runs[variant][seed] for seed in common], cells[variant]
            loss = np.mean([curve["loss"] for curve in mine], axis=0).round(5).tolist()
            row = dict(task=task, variant=variant, seeds=len(common), loss=loss)
            sizes = {key: one.settings[key] for key in _SIZES}
            found.append(row | sizes | dict(every=mine[0]["every"]))
    return found


def _cells(row: Mapping) -> tuple:
    def one(task: str) -> str:
        now = row["tasks"].get(task)
        return f"{shown(now, 'right', '.3f')} ({row['published'][task]:.3f})" if now else "-"

    return encoders.CALLED[row["variant"]], *map(one, sequences.TASKS)


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

    def figures_of(kept: Kept) -> dict:
        found = dict(asked=rows(cells, kept), rows=rows(in_common(kept), kept))
        return found | dict(curves=curves(kept))

    header = ("variant", *sequences.TASKS)
    note = "The share of positions that are right; in brackets Table 2, a mean over its grid."
    how = dict(places=(__file__,), printed="asked", note=note)
    return in_process.study(NAME, cells, options, figures_of, header, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
