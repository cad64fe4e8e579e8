"""Projection sharing's five tasks on made-up sequences (section 3.1), beside its Table 2.

    python -m experiments.studies.sequence_tasks [--seeds=3] [--save]   # a sample of the grid
    python -m experiments.studies.sequence_tasks --tasks=sort --variants=kv_tied \\
        --lengths=16,64,128 --widths=32,64,256 --layers=2,4 --heads=2,4    # a cell, whole

Encoders label every position of a row of numbers: reversed, sorted, 9 less each, halves swapped,
the same. 50,000 rows, two epochs; how the paper's code trains is that of UvA's course, but for the
start of weights, which is this project's and not Xavier's. A seed draws rows and their order, the
same for all variants, and weights; those behind a projection that a variant lacks are others.
Prints the share of positions that are right in 10,000 other rows, means over cells with 95 %
intervals over seeds. The table is of what was asked, `asked` in the result; `rows` there are over
all cells that every variant was trained on.
"""

import argparse
import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.labeller import Labeller
from experiments.studies import in_process
from experiments.studies.in_process import Cell
from experiments.studies.kept import Kept
from experiments.tasks import encoders, learner, sequences
from experiments.tasks.learner import Learner
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate, estimate
from kvjax.foundation.output import Output
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
_CURVE = 20  # steps whose mean loss is a point of a run's curve
# The cell whose curves are shown and judged, as it ends a name.
CURVES_OF = "d32_l2_h2_t32"
_TEST_SEED = 10**6  # of rows that are never trained on


def transformer(variant: str, width: int, layers: int, heads: int, **how) -> TransformerConfig:
    """The course's model: blocks end in a LayerNorm, and an MLP of ReLU is twice as wide."""
    how |= dict(norm_after=True, positions="sinusoidal", activation="relu", mlp_dim=2 * width)
    shape = (width, layers, heads)
    return encoders.transformer(variant, 10, *shape, labels=sequences.NUMBERS, **how)


@functools.cache
def learner_of(config: TransformerConfig) -> Learner:
    """Compiled once for each length, and shared by tasks and seeds.

    Batches have "x" and "y", and may have a "temperature" of attention.
    """
    compute = Compute(unroll=True)

    def logits(model, batch):
        x_BTF = jax.nn.one_hot(batch["x"], sequences.NUMBERS)
        return model(x_BTF, compute=compute, temperature=batch.get("temperature"))

    loss = lambda model, batch, _: jnp.mean(learner.nats(logits(model, batch), batch["y"]))
    right = lambda model, batch: (
        jnp.argmax(logits(model, batch), axis=-1) == batch["y"],
        jnp.ones(batch["y"].shape),
    )
    make = lambda key: Labeller(config, key, features=sequences.NUMBERS)
    return Learner(make, RECIPE, loss, right)


def train(
    task: str,
    config: TransformerConfig,
    length: int,
    seed: int,
    temperature: Callable[[int], float] | None = None,
) -> dict:
    """The share of positions that a model labels as it should, and its loss while it learned.

    Args:
      temperature: of attention in a step; 1 once it is trained.
    """
    model = learner_of(config)
    rows = sequences.labelled(task, TRAINED_ON, length, seed)
    others = sequences.labelled(task, TESTED_ON, length, _TEST_SEED)
    pack = lambda pair: dict(zip("xy", pair, strict=True))
    batches = learner.in_order(pack(rows), BATCH, EPOCHS, seed)
    if temperature is not None:
        of = lambda step: dict(temperature=np.float32(temperature(step)))
        batches = (batch | of(step) for step, batch in enumerate(batches))
    found = model.train(seed, batches)
    right = model.accuracy(found, learner.split(pack(others), 500))
    curve = dict(every=_CURVE, loss=found.curve(_CURVE))
    return dict(right=right, loss=found.loss, curve=curve)


def cell(task: str, variant: str, width: int, layers: int, heads: int, length: int) -> Cell:
    asked = dict(task=task, variant=variant, width=width, layers=layers, heads=heads, length=length)
    config = transformer(variant, width, layers, heads)
    return Cell(
        name=f"{task}/{variant}/d{width}_l{layers}_h{heads}_t{length}",
        asked=asked,
        train=functools.partial(train, task, config, length),
        flops=flops(length, width, layers),
    )


_NAME = re.compile(r"(\w+)/(\w+)/d(\d+)_l(\d+)_h(\d+)_t(\d+)")


def cell_of(name: str) -> Cell:
    """The cell of a name."""
    task, variant, *sizes = _NAME.fullmatch(name).groups()
    return cell(task, variant, *map(int, sizes))


def flops(length: int, width: int, layers: int) -> float:
    """Approximate FLOPs of training one model."""
    return encoders.flops(RECIPE.steps * BATCH * length, length, width, layers, 2 * width)


_SIZES = ("width", "layers", "heads", "length")


def in_common(kept: Kept) -> list[Cell]:
    """Cells that all variants have: those with enough seeds in common, or with most of them."""
    place = lambda one: tuple(one.asked[key] for key in ("task", *_SIZES))
    by_place: dict[tuple, list[Cell]] = {}
    for one in map(cell_of, kept.runs):
        by_place.setdefault(place(one), []).append(one)
    seeds, most = {}, collections.Counter()
    for where, cells in by_place.items():
        if len(cells) == len(encoders.VARIANTS):
            common = set.intersection(*(set(in_process.runs_of(one, kept)) for one in cells))
            seeds[where], task = len(common), where[0]
            most[task] = max(most[task], len(common))
    enough = {where for where, n in seeds.items() if n and n >= min(SEEDS, most[where[0]])}
    return [one for where in enough for one in by_place[where]]


def rows(cells: Sequence[Cell], kept: Kept) -> list[dict]:
    """A row of each variant: by task the mean over cells, and its interval over seeds."""
    found = []
    for variant, published in PUBLISHED.items():
        by_task = {}
        for task in sequences.TASKS:
            asked = dict(variant=variant, task=task)
            if runs := in_process.means(cells, kept, "right", **asked):
                now = estimate(list(runs.values()))
                over = [c.asked for c in cells if asked.items() <= c.asked.items()]
                sizes = {key: sorted({one[key] for one in over}) for key in _SIZES}
                means = dict(right=now.mean, half_interval=now.half, seeds=len(runs))
                by_task[task] = means | dict(cells=len(over), **sizes)
        if by_task:
            means = dict(zip(sequences.TASKS, published, strict=True))
            found.append(dict(variant=variant, tasks=by_task, published=means))
    return found


def curves(kept: Kept) -> list[dict]:
    """The loss while models learn, by task and variant: of seeds that all of the task's have."""
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
            sizes = {key: one.asked[key] for key in _SIZES}
            found.append(row | sizes | dict(every=mine[0]["every"]))
    return found


def _cells(row: Mapping) -> tuple:
    def shown(task: str) -> str:
        now = row["tasks"].get(task)
        if now is None:
            return "-"
        ours = Estimate(now["right"], now["half_interval"]).shown(".3f")
        return f"{ours} ({row['published'][task]:.3f})"

    return encoders.CALLED[row["variant"]], *map(shown, sequences.TASKS)


def read_tasks(options: argparse.Namespace, key: str, lengths: Sequence[int]) -> None:
    """Makes names of --tasks; a UserError for one that is none, or that rows do not fit.

    Args:
      key: the option that gives rows these lengths.
    """
    options.tasks = lists.names("--tasks", options.tasks, sequences.TASKS)
    odd = [length for length in lengths if length % 2]
    if "swap" in options.tasks and odd:
        raise UserError(f"--{key}: {odd[0]} must be even for swap, which exchanges halves")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add, every = parser.add_argument, ",".join
    add("--tasks", default=every(sequences.TASKS), help=f"of {', '.join(sequences.TASKS)} (all)")
    known = ", ".join(encoders.VARIANTS)
    add("--variants", default=every(encoders.VARIANTS), help=f"of {known} (all)")
    add("--widths", default="32,64", help="d of the models (32,64)")
    add("--layers", default="2", help="blocks (2)")
    add("--heads", default="2", help="heads (2)")
    add("--lengths", default="16,64", help="numbers in a row (16,64)")
    in_process.add_options(parser, NAME, seeds=SEEDS)
    options = parser.parse(arguments)
    options.variants = lists.names("--variants", options.variants, encoders.VARIANTS)
    encoders.read_sizes(options, "lengths")
    read_tasks(options, "lengths", options.lengths)
    in_process.check(options)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains what is not trained yet, and prints; the exit status: 1 if a run failed."""
    options = _options(arguments)
    runtime.start()
    cells = [
        cell(task, variant, width, layers, heads, length)
        for width in options.widths
        for layers in options.layers
        for heads in options.heads
        for length in options.lengths
        for task in options.tasks
        for variant in options.variants
    ]

    def told(kept: Kept) -> dict:
        shown = dict(asked=rows(cells, kept), rows=rows(in_common(kept), kept))
        return shown | dict(curves=curves(kept))

    places = [pathlib.Path(__file__), *map(pathlib.Path, (encoders.__file__, sequences.__file__))]
    found, out = in_process.study(NAME, cells, options, told, places), Output(options)
    out.table(("variant", *sequences.TASKS), map(_cells, found["asked"]))
    out.say("\nThe share of positions that are right; in brackets Table 2, a mean over its grid.")
    return in_process.end(NAME, found, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
