"""Projection sharing's five tasks on made-up sequences (section 3.1), beside its Table 2.

    python -m experiments.studies.sequence_tasks [--seeds=3] [--save]   # a sample of the grid
    python -m experiments.studies.sequence_tasks --tasks=sort --variants=kv --lengths=16,64,128 \\
        --widths=32,64,256 --layers=2,4 --heads=2,4                     # a cell of the table, whole

Encoders label every position of a row of numbers: reversed, sorted, 9 less each, halves swapped,
the same. 50,000 rows, two epochs; how the paper's code trains is that of UvA's course. A seed draws
rows, initial weights and order, the same for all variants. Prints the share of positions that are
right in 10,000 other rows, means over cells with 95 % intervals over seeds.
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import pathlib

import jax
import jax.numpy as jnp

from experiments.studies import in_process
from experiments.studies.in_process import Cell
from experiments.studies.kept import Kept
from experiments.tasks import encoders
from experiments.tasks import learner
from experiments.tasks import sequences
from experiments.tasks.learner import Learner
from kvjax.foundation import command_line
from kvjax.foundation import lists
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.estimate import Estimate
from kvjax.foundation.estimate import estimate
from kvjax.foundation.output import Output
from kvjax.model.config import TransformerConfig
from kvjax.model.labeller import Labeller
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
TRAINED_ON, EPOCHS, BATCH, TESTED_ON = 50_000, 2, 128, 10_000
RECIPE = learner.Recipe(
    steps=TRAINED_ON // BATCH * EPOCHS, learning_rate=1e-3, warm_up=5, decay="cosine", clip=5.0
)
_TEST_SEED = 10**6  # of rows that are never trained on


def transformer(variant: str, width: int, layers: int, heads: int) -> TransformerConfig:
    """As the course has it: blocks end in a LayerNorm, and an MLP of ReLU is twice as wide."""
    how = dict(norm_after=True, positions="sinusoidal", activation="relu", mlp_dim=2 * width)
    shape = (width, layers, heads)
    return encoders.transformer(variant, 10, *shape, labels=sequences.NUMBERS, **how)


@functools.cache
def _learner(variant: str, width: int, layers: int, heads: int) -> Learner:
    """Compiled once for each length, and shared by tasks and seeds."""
    config = transformer(variant, width, layers, heads)
    compute = Compute(unroll=True)

    def logits(model, batch):
        return model(jax.nn.one_hot(batch["x"], sequences.NUMBERS), compute=compute)

    loss = lambda model, batch, _: jnp.mean(learner.nats(logits(model, batch), batch["y"]))
    right = lambda model, batch: (
        jnp.argmax(logits(model, batch), axis=-1) == batch["y"],
        jnp.ones(batch["y"].shape),
    )
    make = lambda key: Labeller(config, key, features=sequences.NUMBERS)
    return Learner(make, RECIPE, loss, right)


def train(task: str, variant: str, shape: Sequence[int], length: int, seed: int) -> dict:
    """The share of positions that a model labels as it should.

    Args:
      shape: width, layers, heads.
    """
    model = _learner(variant, *shape)
    rows = sequences.labelled(task, TRAINED_ON, length, seed)
    others = sequences.labelled(task, TESTED_ON, length, _TEST_SEED)
    pack = lambda pair: dict(zip("xy", pair, strict=True))
    found = model.train(seed, learner.in_order(pack(rows), BATCH, EPOCHS, seed))
    return dict(right=model.accuracy(found, learner.split(pack(others), 500)), loss=found.loss)


def cell(task: str, variant: str, width: int, layers: int, heads: int, length: int) -> Cell:
    asked = dict(task=task, variant=variant, width=width, layers=layers, heads=heads, length=length)
    shape = (width, layers, heads)
    tokens = RECIPE.steps * BATCH * length
    return Cell(
        name=f"{task}/{variant}/d{width}_l{layers}_h{heads}_t{length}",
        asked=asked,
        train=functools.partial(train, task, variant, shape, length),
        flops=encoders.flops(tokens, length, width, layers, 2 * width),
    )


def rows(cells: Sequence[Cell], kept: Kept) -> list[dict]:
    """A row of each variant: by task the mean over cells, and its interval over seeds."""
    found = []
    for variant, published in PUBLISHED.items():
        by_task = {}
        for task in sequences.TASKS:
            if runs := in_process.means(cells, kept, "right", variant=variant, task=task):
                now = estimate(list(runs.values()))
                by_task[task] = dict(right=now.mean, half_interval=now.half, seeds=len(runs))
        if by_task:
            means = dict(zip(sequences.TASKS, published, strict=True))
            found.append(dict(variant=variant, tasks=by_task, published=means))
    return found


def _cells(row: Mapping) -> tuple:
    def shown(task: str) -> str:
        now = row["tasks"].get(task)
        if now is None:
            return "-"
        ours = Estimate(now["right"], now["half_interval"]).shown(".3f")
        return f"{ours} ({row['published'][task]:.3f})"

    return encoders.CALLED[row["variant"]], *map(shown, sequences.TASKS)


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
    in_process.add_options(parser, NAME, seeds=3)
    options = parser.parse(arguments)
    options.tasks = lists.names("--tasks", options.tasks, sequences.TASKS)
    options.variants = lists.names("--variants", options.variants, encoders.VARIANTS)
    for key in ("widths", "layers", "heads", "lengths"):
        setattr(options, key, lists.integers(f"--{key}", getattr(options, key)))
    encoders.check_heads(options.widths, options.heads)
    if "swap" in options.tasks and any(length % 2 for length in options.lengths):
        raise UserError("--lengths: must be even for swap, which exchanges halves")
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
        asked = {key: getattr(options, key) for key in ("widths", "layers", "heads", "lengths")}
        return dict(grid=asked, rows=rows(cells, kept))

    places = [pathlib.Path(__file__), *map(pathlib.Path, (encoders.__file__, sequences.__file__))]
    found, out = in_process.study(NAME, cells, options, told, places), Output(options)
    out.table(("variant", *sequences.TASKS), map(_cells, found["rows"]))
    out.say("\nThe share of positions that are right; in brackets Table 2, a mean over its grid.")
    return in_process.end(NAME, found, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
