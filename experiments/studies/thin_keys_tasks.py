"""Trains thin keys' copy-back and retrieval tasks (sections 3.1 and 3.2) by width of the keys.

    python -m experiments.studies.thin_keys_tasks [--seeds=5] [--save]
    python -m experiments.studies.thin_keys_tasks --tasks=retrieval_8_keys,retrieval_64_keys

Causal Transformers of width 64 with 4 heads. Queries and keys have d_select channels over all
heads, values have 64. Copy-back is trained with random tokens, as in the paper, and with 8 repeated
tokens, as in the authors' code; with 2 layers (the paper) and 4 (the code). Retrieval is trained
with 16 keys and 4 layers as in the paper, and with 8, 32 and 64 keys, because the paper's bound of
log2 N channels rests on one N. Prints the final accuracy and the batches until a model has
converged, means over seeds with 95 % intervals.

The paper does not state its initialisation. With this project's (by fan-in) a matrix with fewer
outputs than inputs starts smaller, and so do logits of few channels. With --start=equal all
matrices have standard deviation 1/8, the fan-in value of a square matrix of 64 channels; the MLP's
second matrix then starts twice as large as by fan-in.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools

import numpy as np

from experiments.studies import in_process
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from experiments.tasks import learner, sequences
from experiments.tasks.learner import Learner
from kvjax.foundation import command_line, lists
from kvjax.foundation.intervals import estimate
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer

NAME = "thin_keys_tasks"
WIDTH, HEADS, MLP, EVERY = 64, 4, 128, 100
_TEST_SEED = 10**6


@dataclasses.dataclass(frozen=True)
class Task:
    """A task and how it is trained.

    Attributes:
      converged: accuracy at which a model counts as converged; training continues.
      published: accuracy and batches until convergence (None: never), by d_select.
    """

    layers: int
    words: int
    length: int
    batch: int
    steps: int
    tested_on: int
    converged: float
    periodic: bool = False
    keys: int = 0
    published: Mapping[int, tuple[float, int | None]] = dataclasses.field(default_factory=dict)

    def draw(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        if self.keys:
            return sequences.retrieval(rng, count, keys=self.keys)
        return sequences.copy_back(rng, count, self.length, periodic=self.periodic)


_COPY = dict(words=16, length=64, batch=32, steps=1500, tested_on=128, converged=0.99)
_COPIED = {4: (1.0, 300), **dict.fromkeys((8, 16, 32, 64), (1.0, 200))}
_FOUND = {4: (0.652, None), 8: (1.0, 1900), 16: (1.0, 1900), 32: (1.0, 1400), 64: (1.0, 1000)}


def _retrieval(keys: int, **more) -> Task:
    shape = dict(layers=4, words=2 * keys + 1, length=18, keys=keys)
    return Task(**shape, batch=64, steps=3000, tested_on=512, converged=0.95, **more)


TASKS = {
    "copy_back_l2": Task(layers=2, **_COPY, published=_COPIED),
    "copy_back_l4": Task(layers=4, **_COPY),
    "copy_back_periodic_l2": Task(layers=2, periodic=True, **_COPY),
    "copy_back_periodic_l4": Task(layers=4, periodic=True, **_COPY, published=_COPIED),
    "retrieval": _retrieval(16, published=_FOUND),
    "retrieval_8_keys": _retrieval(8),
    "retrieval_32_keys": _retrieval(32),
    "retrieval_64_keys": _retrieval(64),
}
CHANNELS = (4, 8, 16, 32, 64)
# Standard deviation of all matrices; 0: sqrt(min(1, out/in)/in).
STARTS = {"fan_in": 0.0, "equal": WIDTH**-0.5}


def transformer(task: Task, channels: int, start: str = "fan_in") -> TransformerConfig:
    attention = dict(key_dim=channels // HEADS, bias=True)
    shared = dict(positions="learned", activation="gelu_exact", max_positions=task.length)
    shared |= dict(matrix_std=STARTS[start], mlp_dim=MLP)
    return learner.classic(task.words, WIDTH, task.layers, HEADS, attention=attention, **shared)


@functools.cache
def _learner(name: str, channels: int, start: str) -> Learner:
    task = TASKS[name]
    config, compute = transformer(task, channels, start), Compute(unroll=True)

    def logits(model, batch, _):
        return model.logits(model(batch["x"], compute=compute))

    recipe = learner.Recipe(steps=task.steps, learning_rate=1e-3, decay="none")
    judged = learner.loss_and_accuracy(logits)
    return Learner(lambda key: Transformer(config, key), recipe, *judged, chunk=EVERY)


def train(name: str, channels: int, start: str, seed: int) -> dict:
    """Trains a model; returns its accuracy by batch and at the end, and when it converged."""
    task, model = TASKS[name], _learner(name, channels, start)
    held_out = [task.draw(np.random.default_rng(_TEST_SEED), task.tested_on)]

    def batches() -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        while True:
            yield task.draw(rng, task.batch)

    curve, trained = model.curve(seed, batches(), held_out, EVERY)
    converged = next((step for step, right in curve.items() if right >= task.converged), None)
    return dict(right=curve[task.steps], converged=converged, curve=curve, loss=trained.loss)


def cell(name: str, channels: int, start: str = "fan_in") -> Cell:
    task = TASKS[name]
    shape = dataclasses.asdict(task) | dict(published=None)
    usual, settings = start == "fan_in", dict(task=name, channels=channels, shape=shape)
    return Cell(
        name=f"{name}/d{channels}" + ("" if usual else f"/{start}"),
        settings=settings if usual else settings | dict(start=start),
        train=functools.partial(train, name, channels, start),
    )


def rows(cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns figures of each cell over its seeds."""
    table = []
    for cell in cells:
        runs = list(in_process.runs_of(cell, finished).values())
        if not runs:
            continue
        batches = [run["converged"] for run in runs if run["converged"]]
        name, channels = cell.settings["task"], cell.settings["channels"]
        published = TASKS[name].published.get(channels, (None, None))
        row = dict(task=name, channels=channels, start=cell.settings.get("start", "fan_in"))
        row |= dict(seeds=len(runs), converged_runs=len(batches))
        row |= dict(zip(("published_right", "published_converged"), published, strict=True))
        row |= estimated("right", estimate([run["right"] for run in runs]))
        table.append(row | estimated("converged", estimate(batches) if batches else None))
    return table


_HEADER = ("task", "start", "d_select", "right, %", "published")
_HEADER += ("converged", "after batches", "published")


def _cells(r: Mapping) -> tuple:
    published, published_when = "", ""
    if r["published_right"] is not None:
        published = f"{100 * r['published_right']:.1f}"
        known = r["published_converged"]
        published_when = f"{known:,}" if known else "never"
    converged, when = f"{r['converged_runs']} of {r['seeds']}", shown(r, "converged", ",.0f")
    right = shown(r, "right", ".1f", 100)
    return r["task"], r["start"], r["channels"], right, published, converged, when, published_when


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME, seeds=5)
    parser.names("tasks", TASKS)
    parser.integers("channels", CHANNELS, "d_select")
    text = f"initialisation: {' or '.join(STARTS)} (fan_in)"
    parser.add_argument("--start", default="fan_in", help=text)
    options = parser.parse(arguments)
    lists.one("--start", options.start, STARTS)
    learner.check_channels(options.channels, WIDTH, HEADS)
    cells = [cell(name, n, options.start) for name in options.tasks for n in options.channels]

    def figures_of(finished: FinishedRuns) -> dict:
        grid = itertools.product(STARTS, TASKS, sorted({*CHANNELS, *options.channels}))
        return dict(rows=rows([cell(name, n, start) for start, name, n in grid], finished))

    only = dict(start=[options.start], task=options.tasks, channels=options.channels)
    how = dict(code_files=(__file__,), only=only)
    return in_process.study(NAME, cells, options, figures_of, _HEADER, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
