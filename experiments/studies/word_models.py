"""Trains thin keys' language models of words (sections 3.3 and 3.4) by width of the keys.

    python -m experiments.studies.word_models --set=wikitext2 --folder=FOLDER [--seeds=3] [--save]
    python -m experiments.studies.word_models --set=embedded --epochs=1      # the embedded books

The paper's model (width 256, 8 heads, 6 layers, learned positions, rows of 256 words) by its
recipe: AdamW at 3e-4, warmup, cosine to 0, dropout 0.1, 30 epochs of WikiText-2 or 10 of
WikiText-103. d_select is the number of channels of queries and keys over all heads; values have
256. Initial weights and the order of rows depend on the seed alone. Prints the test perplexity per
word at the epoch of the best validation perplexity, means over seeds with 95 % intervals.
WikiText-2 takes days on two CPU cores; use an accelerator.
"""

import argparse
from collections.abc import Mapping, Sequence
import functools
import math

import jax.numpy as jnp

from experiments.studies import in_process
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from experiments.tasks import learner, words
from experiments.tasks.learner import Learner
from experiments.tasks.words import Corpus
from kvjax.foundation import command_line, lists
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import estimate
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer

FOLDER = "word_models"  # folder in experiments/results
WIDTH, HEADS, LAYERS, MLP, LENGTH, DROPOUT = 256, 8, 6, 1024, 256, 0.1
CHANNELS = (8, 16, 32, 64, 128, 256)
# By data set: rows per step, epochs, warmup steps, minimum occurrences of a word, and the paper's
# test perplexity by d_select (WikiText-103: validation perplexity).
SETS = {
    "wikitext2": (32, 30, 500, 2, (126.48, 125.49, 123.78, 122.24, 120.76, 122.22)),
    "wikitext103": (64, 10, 2_000, 200, (None, None, 38.38, 37.22, 36.42, 35.67)),
    "embedded": (32, 30, 500, 2, (None,) * 6),
}


def transformer(channels: int, vocab_size: int) -> TransformerConfig:
    attention = dict(key_dim=channels // HEADS, bias=True)
    shared = dict(positions="learned", activation="gelu_exact", max_positions=LENGTH, mlp_dim=MLP)
    shared |= dict(dropout=DROPOUT, tied_head=True, embedding_std=0.02, matrix_std=0.02)
    return learner.classic(vocab_size, WIDTH, LAYERS, HEADS, attention=attention, **shared)


class Trainer:
    """Trains and tests on one corpus."""

    def __init__(self, name: str, corpus: Corpus, epochs: int):
        self.name, self.corpus, self.epochs = name, corpus, epochs
        self.batch, _, self.warm_up, *_ = SETS[name]
        self.rows = {split: words.rows(getattr(corpus, split), LENGTH) for split in words.SPLITS}
        self.steps_per_epoch = len(self.rows["train"]["x"]) // self.batch
        self._learner = functools.cache(self._learner_of)  # seeds share the compiled step

    def _learner_of(self, channels: int) -> Learner:
        config, compute = transformer(channels, self.corpus.vocab_size), Compute(unroll=True)

        def nats(model, batch, key=None):
            x_BTD = model(batch["x"], compute=compute, dropout=key)
            return learner.nats(model.logits(x_BTD), batch["y"])

        steps = self.steps_per_epoch * self.epochs
        optimizer = dict(learning_rate=3e-4, decay="cosine", clip=1.0, weight_decay=0.01)
        recipe = learner.Recipe(steps=steps, warm_up=min(self.warm_up, steps // 2), **optimizer)
        return Learner(
            lambda key: Transformer(config, key),
            recipe,
            lambda model, batch, key: jnp.mean(nats(model, batch, key)),
            lambda model, batch: (nats(model, batch), jnp.ones(batch["y"].shape)),
            has_dropout=True,
        )

    def train(self, channels: int, seed: int) -> dict:
        """Trains a model; returns its test perplexity at the best validation epoch."""
        judged = (learner.split(self.rows[split], 16) for split in ("valid", "test"))
        order = learner.in_order(self.rows["train"], self.batch, self.epochs, seed)
        nats, step, curve, loss = self._learner(channels).best(
            seed, order, *judged, self.steps_per_epoch, lower=True
        )
        validation = {step: math.exp(x) for step, x in curve.items()}
        return dict(perplexity=math.exp(nats), step=step, validation=validation, loss=loss)


def cell(trainer: Trainer, channels: int) -> Cell:
    settings = dict(set=trainer.name, corpus=trainer.corpus.digest, channels=channels)
    return Cell(
        name=f"d{channels}_e{trainer.epochs}",
        settings=settings | dict(epochs=trainer.epochs, rows=trainer.batch),
        train=functools.partial(trainer.train, channels),
    )


def rows(name: str, cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns one row per d_select."""
    table = []
    for cell in cells:
        runs = list(in_process.runs_of(cell, finished).values())
        if runs:
            channels = cell.settings["channels"]
            weights = 2 * LAYERS * (WIDTH + 1) * channels
            row = dict(channels=channels, query_and_key_parameters=weights, seeds=len(runs))
            row |= estimated("perplexity", estimate([run["perplexity"] for run in runs]))
            best = [min(run["validation"].values()) for run in runs]
            row |= estimated("validation", estimate(best))
            row |= dict(published=dict(zip(CHANNELS, SETS[name][4], strict=True)).get(channels))
            table.append(row | dict(published_split=_PUBLISHED.get(name, "test")))
    return table


_PUBLISHED = {"wikitext103": "validation"}  # split of the paper's figures, if not test
_HEADER = ("d_select", "parameters of queries and keys", "seeds")
_HEADER += ("test perplexity", "validation", "published")


def _cells(r: Mapping) -> tuple:
    published = "-" if r["published"] is None else f"{r['published']:.2f} ({r['published_split']})"
    perplexities = (shown(r, name, ".2f") for name in ("perplexity", "validation"))
    return r["channels"], f"{r['query_and_key_parameters']:,}", r["seeds"], *perplexities, published


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, f"{FOLDER}/SET")
    parser.add_argument("--set", default="", help=f"one of {', '.join(SETS)}")
    parser.add_argument("--folder", default="", help="folder of WikiText's files")
    parser.integers("channels", CHANNELS, "d_select")
    parser.count("epochs", 0, "passes over the text (the paper's)", least=0)
    options = parser.parse(arguments)
    command_line.require(options, set=f"one of {', '.join(SETS)}")
    lists.one("--set", options.set, SETS)
    if options.set != "embedded":
        command_line.require(options, folder="the folder of WikiText's files")
    elif options.folder:
        raise UserError("--folder: applies to WikiText; --set=embedded has its own text")
    learner.check_channels(options.channels, WIDTH, HEADS)
    options.epochs = options.epochs or SETS[options.set][1]
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    min_count = SETS[options.set][3]
    if options.set == "embedded":
        corpus = words.embedded(min_count)
    else:
        load = functools.partial(words.load, min_count=min_count)
        corpus = in_process.load(load, "--folder", options.folder)
    trainer = Trainer(options.set, corpus, options.epochs)
    for split, rows_of_split in trainer.rows.items():
        needed = trainer.batch if split == "train" else 1
        if len(rows_of_split["x"]) < needed:
            raise UserError(
                f"--folder={options.folder}: {len(getattr(corpus, split)):,} words of {split}: "
                f"give at least {needed * LENGTH + 1:,}"
            )
    all_cells = [cell(trainer, n) for n in sorted({*CHANNELS, *options.channels})]
    cells = [c for c in all_cells if c.settings["channels"] in options.channels]

    def figures_of(finished: FinishedRuns) -> dict:
        about = dict(set=options.set, words=len(corpus.train), vocabulary=corpus.vocab_size)
        return about | dict(epochs=options.epochs, rows=rows(options.set, all_cells, finished))

    how = dict(code_files=(__file__,), only=dict(channels=options.channels))
    name = f"{FOLDER}/{options.set}"
    return in_process.study(name, cells, options, figures_of, _HEADER, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
