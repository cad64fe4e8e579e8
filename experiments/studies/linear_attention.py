"""Trains linear attention with tied and separate projections (projection sharing, section A.1).

    python -m experiments.studies.linear_attention [--seeds=3] [--save]

With queries, keys and values tied, linear attention is a recurrence with a state of constant size.
The paper says that this recurrence integrates over time, and expects it to fail where information
must be routed sharply; it trains no such model. Here linear attention learns to copy the token 8
positions before, to look up a value by its key (thin keys' sections 3.1 and 3.2), and to model
bytes of text, with and without decay. It is compared with untied linear attention, and with tied
and untied softmax attention. Width 64, 4 heads, 4 layers, sinusoidal positions. Weights and data
depend on the seed; the data are equal for all models. Prints accuracies and held-out bits per byte,
means over seeds with 95 % intervals, and cache bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

from experiments.models.linear import LinearConfig
from experiments.models.recurrent import RecurrentConfig, RecurrentTransformer
from experiments.studies import in_process
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from experiments.tasks import learner, sequences, text
from experiments.tasks.learner import Learner
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation.intervals import estimate
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer

NAME = "linear_attention"
WIDTH, HEADS, LAYERS, MLP, EVERY = 64, 4, 4, 128, 100
_TEST_SEED = 10**6


@dataclasses.dataclass(frozen=True)
class Kind:
    """A form of attention.

    Attributes:
      linear: linear attention, not softmax.
      tied: queries, keys and values share one projection.
    """

    linear: bool
    tied: bool
    decay: float = 1.0


KINDS = {
    "softmax": Kind(linear=False, tied=False),
    "softmax_tied": Kind(linear=False, tied=True),
    "linear": Kind(linear=True, tied=False),
    "linear_tied": Kind(linear=True, tied=True),
    "linear_tied_decay": Kind(linear=True, tied=True, decay=0.9),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """A task, and the sizes of its training; `words` is the size of its vocabulary."""

    words: int
    length: int
    batch: int
    steps: int
    tested_on: int

    def batches(self, rng: np.random.Generator) -> Iterator[dict[str, np.ndarray]]:
        if self.words == 256:
            yield from text.random_rows(rng, self.batch, self.length)
        while True:
            yield self.draw(rng, self.batch)

    def draw(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        """Draws rows, labels and loss masks."""
        if self.words == 256:
            return text.held_out(count, self.length)
        if self.words == sequences.COPY_WORDS:
            return sequences.copy_back(rng, count, self.length)
        return sequences.retrieval(rng, count)


TASKS = {
    "copy_back": Task(sequences.COPY_WORDS, length=64, batch=32, steps=1500, tested_on=128),
    "retrieval": Task(2 * sequences.KEYS + 1, length=18, batch=64, steps=3000, tested_on=512),
    "language": Task(256, length=256, batch=16, steps=500, tested_on=256),
}


def model_config(kind: Kind, task: Task) -> TransformerConfig | RecurrentConfig:
    shared = dict(positions="sinusoidal", activation="gelu_exact", mlp_dim=MLP)
    tie = "qkv" if kind.tied else "none"
    if not kind.linear:
        return learner.classic(task.words, WIDTH, LAYERS, HEADS, attention=dict(tie=tie), **shared)
    dims = dict(num_heads=HEADS, key_dim=WIDTH // HEADS, value_dim=WIDTH // HEADS)
    attention = LinearConfig(**dims, tie=tie, decay=kind.decay)
    block = learner.classic_block(LAYERS, WIDTH, **shared)
    return RecurrentConfig(block=block, attention=attention, vocab_size=task.words)


def cached_bytes(kind: Kind, task: Task, tokens: int) -> int:
    """Returns cache bytes of a text of `tokens` tokens, in float32."""
    config = model_config(kind, task)
    if isinstance(config, RecurrentConfig):
        state = config.attention.start(1)
        return LAYERS * sum(x.nbytes for x in state)
    return tokens * formulas.cache_bytes_per_token(config, jnp.dtype(jnp.float32))


@functools.cache
def _learner(name: str, kind_name: str) -> Learner:
    task, kind = TASKS[name], KINDS[kind_name]
    config, compute = model_config(kind, task), Compute(unroll=True)

    def logits(model, batch, _=None):
        if kind.linear:
            return model(batch["x"])[0]
        return model.logits(model(batch["x"], compute=compute))

    def bits(model, batch):
        return learner.nats(logits(model, batch), batch["y"]) / math.log(2), batch["counts"]

    loss, right = learner.loss_and_accuracy(logits)
    recipe = learner.Recipe(steps=task.steps, learning_rate=1e-3, warm_up=50, decay="cosine")
    make = RecurrentTransformer if kind.linear else Transformer
    judged = bits if name == "language" else right
    return Learner(lambda key: make(config, key), recipe, loss, judged, chunk=EVERY)


def train(name: str, kind: str, seed: int) -> dict:
    """Trains a model; returns its held-out accuracy or bits per byte, by step and at the end."""
    task, model = TASKS[name], _learner(name, kind)
    held_out = learner.split(task.draw(np.random.default_rng(_TEST_SEED), task.tested_on), 64)
    batches = task.batches(np.random.default_rng(seed))
    curve, trained = model.curve(seed, batches, held_out, EVERY)
    return dict(figure=curve[task.steps], curve=curve, loss=trained.loss)


def cell(name: str, kind: str) -> Cell:
    task = TASKS[name]
    settings = dict(task=name, kind=dataclasses.asdict(KINDS[kind]), shape=dataclasses.asdict(task))
    return Cell(
        name=f"{name}/{kind}",
        settings=settings,
        train=functools.partial(train, name, kind),
    )


def rows(finished: FinishedRuns) -> list[dict]:
    """Returns a row per kind: its figure and interval by task, and cache bytes of a text."""
    table = []
    for kind_name, kind in KINDS.items():
        by_task = {}
        for name in TASKS:
            if runs := list(in_process.figure(cell(name, kind_name), finished, "figure").values()):
                accuracy = estimated("figure", estimate(runs), "half_interval")
                by_task[name] = accuracy | dict(seeds=len(runs))
        if by_task:
            sizes = {n: cached_bytes(kind, TASKS["language"], n) for n in (1024, 65_536)}
            table.append(dict(kind=kind_name, tasks=by_task, cached_bytes=sizes))
    return table


_HEADER = ("attention", "copy_back, %", "retrieval, %", "bits per byte", "bytes of 1K tokens")
_HEADER += ("of 64K",)


def _cells(row: Mapping) -> tuple:
    by_task = row["tasks"].get
    percents = (shown(by_task(task), "figure", ".1f", 100) for task in ("copy_back", "retrieval"))
    sizes = (f"{size:,}" for size in row["cached_bytes"].values())
    return row["kind"], *percents, shown(by_task("language"), "figure", ".3f"), *sizes


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    parser = Parser(__doc__, NAME)
    parser.names("tasks", TASKS)
    parser.names("kinds", KINDS)
    options = parser.parse(arguments)
    cells = [cell(name, kind) for name in options.tasks for kind in options.kinds]

    def figures_of(finished: FinishedRuns) -> dict:
        return dict(rows=rows(finished))

    return in_process.study(
        NAME, cells, options, figures_of, _HEADER, _cells, code_files=(__file__,)
    )


if __name__ == "__main__":
    command_line.run(main)
