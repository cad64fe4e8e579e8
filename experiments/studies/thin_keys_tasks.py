"""Thin keys' copy-back and retrieval (sections 3.1 and 3.2), by channels of queries and keys.

    python -m experiments.studies.thin_keys_tasks [--seeds=5] [--save]
    python -m experiments.studies.thin_keys_tasks --tasks=retrieval_8_keys,retrieval_64_keys

Causal Transformers of width 64 with 4 heads, whose queries and keys have d_select channels over all
heads, values 64. Copy-back with random tokens, as in the paper, and with 8 repeated tokens, as in
the authors' code; 2 layers (the paper) and 4 (the code). Retrieval with 16 keys, 4 layers, and with
8, 32 and 64: the paper's bound of log2 N channels rests on one N. Prints the final accuracy and the
batches until a model "converged", means over seeds with 95 % intervals.

The paper does not give its initialisation. By fan-in, this project's recipe, a matrix narrower than
its input starts smaller, and so do logits of few channels. With --start=equal all matrices have
standard deviation 1/8, as attention's of 64 channels have by fan-in; the MLP's second matrix then
starts twice as large.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import pathlib

import jax.numpy as jnp
import numpy as np

from experiments.studies import in_process
from experiments.studies.in_process import Cell
from experiments.studies.kept import Kept
from experiments.tasks import learner, sequences
from experiments.tasks.learner import Learner
from kvjax.attention import GroupedConfig
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate, estimate
from kvjax.foundation.output import Output
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
            found = sequences.retrieval(rng, count, keys=self.keys)
        else:
            found = sequences.copy_back(rng, count, self.length, periodic=self.periodic)
        return dict(zip(("x", "y", "counts"), found, strict=True))


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
    counts = dict(num_heads=HEADS, num_kv_heads=HEADS, num_bases=HEADS, rank=0)
    dims = dict(key_dim=channels // HEADS, value_dim=WIDTH // HEADS)
    mechanism = GroupedConfig(**counts, **dims, qk_norm="none", bias=True)
    how = dict(positions="learned", activation="gelu_exact", max_positions=task.length)
    how |= dict(matrix_std=STARTS[start])
    block = learner.classic_block(task.layers, WIDTH, mlp_dim=MLP, **how)
    mechanisms = (mechanism,) * task.layers
    return TransformerConfig(block=block, mechanisms=mechanisms, vocab_size=task.words)


@functools.cache
def _learner(name: str, channels: int, start: str) -> Learner:
    task = TASKS[name]
    config, compute = transformer(task, channels, start), Compute(unroll=True)

    def logits(model, batch):
        return model.logits(model(batch["x"], compute=compute))

    def loss(model, batch, _):
        counts = batch["counts"]
        nats = learner.nats(logits(model, batch), batch["y"])
        return jnp.sum(nats * counts) / jnp.sum(counts)

    def right(model, batch):
        return jnp.argmax(logits(model, batch), axis=-1) == batch["y"], batch["counts"]

    recipe = learner.Recipe(steps=task.steps, learning_rate=1e-3, decay="none")
    return Learner(lambda key: Transformer(config, key), recipe, loss, right, chunk=EVERY)


def train(name: str, channels: int, start: str, seed: int) -> dict:
    """Trains a model; returns its accuracy by batch and at the end, and the batch of
    convergence."""
    task, model = TASKS[name], _learner(name, channels, start)
    held_out = [task.draw(np.random.default_rng(_TEST_SEED), task.tested_on)]
    curve = {}

    def batches() -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        while True:
            yield task.draw(rng, task.batch)

    def evaluate(now: learner.Trained) -> None:
        curve[now.steps] = model.accuracy(now, held_out)

    found = model.train(seed, batches(), evaluate, EVERY)
    converged = next((step for step, right in curve.items() if right >= task.converged), None)
    return dict(right=curve[task.steps], converged=converged, curve=curve, loss=found.loss)


def cell(name: str, channels: int, start: str = "fan_in") -> Cell:
    task = TASKS[name]
    shape = dataclasses.asdict(task) | dict(published=None)
    usual, asked = start == "fan_in", dict(task=name, channels=channels, shape=shape)
    weights = task.layers * (2 * WIDTH * channels + 2 * WIDTH**2 + 2 * WIDTH * MLP)
    products = task.layers * task.length * (channels + WIDTH)
    return Cell(
        name=f"{name}/d{channels}" + ("" if usual else f"/{start}"),
        asked=asked if usual else asked | dict(start=start),
        train=functools.partial(train, name, channels, start),
        flops=6 * task.steps * task.batch * task.length * (weights + products),
    )


def rows(cells: Sequence[Cell], kept: Kept) -> list[dict]:
    """Returns figures of each cell over its seeds."""
    found = []
    for cell in cells:
        runs = list(in_process.runs_of(cell, kept).values())
        if not runs:
            continue
        right = estimate([run["right"] for run in runs])
        there = [run["converged"] for run in runs if run["converged"]]
        when = estimate(there) if there else None
        name, channels = cell.asked["task"], cell.asked["channels"]
        published = TASKS[name].published.get(channels)
        found.append(
            dict(
                task=name,
                channels=channels,
                start=cell.asked.get("start", "fan_in"),
                seeds=len(runs),
                right=right.mean,
                right_half_interval=right.half,
                converged_runs=len(there),
                converged=when and when.mean,
                converged_half_interval=when and when.half,
                published_right=published and published[0],
                published_converged=published and published[1],
            )
        )
    return found


_HEADER = ("task", "start", "d_select", "right, %", "published")
_HEADER += ("converged", "after batches", "published")


def _cells(r: Mapping) -> tuple:
    right = Estimate(r["right"], r["right_half_interval"]).times(100).shown(".1f")
    when, published, published_when = "-", "", ""
    if r["converged"]:
        when = Estimate(r["converged"], r["converged_half_interval"]).shown(",.0f")
    if r["published_right"] is not None:
        published = f"{100 * r['published_right']:.1f}"
        known = r["published_converged"]
        published_when = f"{known:,}" if known else "never"
    of = f"{r['converged_runs']} of {r['seeds']}"
    return r["task"], r["start"], r["channels"], right, published, of, when, published_when


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)} (all)")
    add("--channels", default=",".join(map(str, CHANNELS)), help="d_select (4,8,16,32,64)")
    add("--start", default="fan_in", help=f"initialisation: {' or '.join(STARTS)} (fan_in)")
    in_process.add_options(parser, NAME, seeds=5)
    options = parser.parse(arguments)
    lists.one("--start", options.start, STARTS)
    options.tasks = lists.names("--tasks", options.tasks, TASKS)
    options.channels = lists.integers("--channels", options.channels)
    for channels in options.channels:
        if channels % HEADS or channels > WIDTH:
            raise UserError(
                f"--channels: {channels} must be a multiple of the {HEADS} heads, up to {WIDTH}"
            )
    in_process.check(options)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    runtime.start()
    start = options.start
    cells = [cell(name, n, start) for name in options.tasks for n in options.channels]

    def figures_of(kept: Kept) -> dict:
        every = sorted({*CHANNELS, *options.channels})
        grid = itertools.product(STARTS, TASKS, every)
        return dict(rows=rows([cell(name, n, start) for start, name, n in grid], kept))

    places = [pathlib.Path(__file__), pathlib.Path(sequences.__file__)]
    found, out = in_process.study(NAME, cells, options, figures_of, places), Output(options)
    shown = [
        row
        for row in found["rows"]
        if row["start"] == options.start
        and row["task"] in options.tasks
        and row["channels"] in options.channels
    ]
    out.table(_HEADER, map(_cells, shown))
    return in_process.end(NAME, found, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
