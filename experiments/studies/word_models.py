"""Thin keys' language models of words (3.3, 3.4): perplexity by channels of queries and keys.

    python -m experiments.studies.word_models --set=wikitext2 --folder=FOLDER [--seeds=3] [--save]
    python -m experiments.studies.word_models --set=embedded --epochs=1      # the embedded books

The paper's model (width 256, 8 heads, 6 layers, learned positions, rows of 256 words) by its
recipe: AdamW at 3e-4, warmup, cosine to 0, dropout 0.1, 30 epochs of WikiText-2 or 10 of
WikiText-103. d_select is the channels of queries and keys over all heads; values have 256. A seed
draws initial weights and the order of rows, equal for every d_select. Prints the test perplexity
per word at the epoch of the best validation perplexity, means over seeds with 95 % intervals.
WikiText-2 takes days on two CPU cores; use an accelerator.
"""

import argparse
from collections.abc import Mapping, Sequence
import functools
import math
import pathlib

import jax.numpy as jnp

from experiments.studies import in_process
from experiments.studies.in_process import Cell
from experiments.studies.kept import Kept
from experiments.tasks import learner, words
from experiments.tasks.learner import Learner
from experiments.tasks.words import Corpus
from kvjax.attention import GroupedConfig
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate, estimate
from kvjax.foundation.output import Output
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer

FOLDER = "word_models"  # of results
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
    counts = dict(num_heads=HEADS, num_kv_heads=HEADS, num_bases=HEADS, rank=0)
    dims = dict(key_dim=channels // HEADS, value_dim=WIDTH // HEADS)
    mechanism = GroupedConfig(**counts, **dims, qk_norm="none", bias=True)
    how = dict(positions="learned", activation="gelu_exact", max_positions=LENGTH)
    how |= dict(dropout=DROPOUT, tied_head=True, embedding_std=0.02, matrix_std=0.02)
    block = learner.classic_block(LAYERS, WIDTH, mlp_dim=MLP, **how)
    mechanisms = (mechanism,) * LAYERS
    return TransformerConfig(block=block, mechanisms=mechanisms, vocab_size=vocab_size)


class Trainer:
    """Trains and tests on one corpus."""

    def __init__(self, name: str, corpus: Corpus, epochs: int):
        self.name, self.corpus, self.epochs = name, corpus, epochs
        self.batch, _, self.warm_up, *_ = SETS[name]
        self.rows = {split: words.rows(getattr(corpus, split), LENGTH) for split in words.SPLITS}
        self.steps_per_epoch = len(self.rows["train"]["x"]) // self.batch
        self._learner = functools.cache(self._learner_of)  # seeds share the compiled step

    def _learner_of(self, channels: int) -> Learner:
        config, compute = transformer(channels, self.corpus.size), Compute(unroll=True)

        def nats(model, batch, key=None):
            x_BTD = model(batch["x"], compute=compute, dropout=key)
            return learner.nats(model.logits(x_BTD), batch["y"])

        steps = self.steps_per_epoch * self.epochs
        recipe = learner.Recipe(
            steps=steps,
            learning_rate=3e-4,
            warm_up=min(self.warm_up, steps // 2),
            decay="cosine",
            clip=1.0,
            weight_decay=0.01,
        )
        return Learner(
            lambda key: Transformer(config, key),
            recipe,
            lambda model, batch, key: jnp.mean(nats(model, batch, key)),
            lambda model, batch: (nats(model, batch), jnp.ones(batch["y"].shape)),
            drops=True,
        )

    def train(self, channels: int, seed: int) -> dict:
        """Trains a model; returns test perplexity at the best validation epoch, and validation by
        step."""
        model = self._learner(channels)
        judged = {split: learner.split(self.rows[split], 16) for split in ("valid", "test")}
        curve: dict[int, float] = {}
        best = dict(perplexity=math.inf, step=0)

        def evaluate(now: learner.Trained) -> None:
            found = math.exp(model.accuracy(now, judged["valid"]))
            if found < min(curve.values(), default=math.inf):
                test = math.exp(model.accuracy(now, judged["test"]))
                best.update(perplexity=test, step=now.steps)
            curve[now.steps] = found

        order = learner.in_order(self.rows["train"], self.batch, self.epochs, seed)
        found = model.train(seed, order, evaluate, self.steps_per_epoch)
        return best | dict(validation=curve, loss=found.loss)


def cell(trainer: Trainer, channels: int) -> Cell:
    size = trainer.corpus.size
    weights = LAYERS * (2 * WIDTH * channels + 2 * WIDTH**2 + 2 * WIDTH * MLP) + WIDTH * size
    products = LAYERS * LENGTH * (channels + WIDTH)
    tokens = trainer.steps_per_epoch * trainer.epochs * trainer.batch * LENGTH
    asked = dict(set=trainer.name, corpus=trainer.corpus.digest, channels=channels)
    return Cell(
        name=f"d{channels}_e{trainer.epochs}",
        asked=asked | dict(epochs=trainer.epochs, rows=trainer.batch),
        train=functools.partial(trainer.train, channels),
        flops=6.0 * tokens * (weights + products),
    )


def rows(name: str, cells: Sequence[Cell], kept: Kept) -> list[dict]:
    """Returns one row per d_select."""
    found = []
    for one in cells:
        runs = list(in_process.runs_of(one, kept).values())
        if runs:
            now = estimate([run["perplexity"] for run in runs])
            held_out = estimate([min(run["validation"].values()) for run in runs])
            channels = one.asked["channels"]
            found.append(
                dict(
                    channels=channels,
                    query_and_key_parameters=2 * LAYERS * (WIDTH + 1) * channels,
                    seeds=len(runs),
                    perplexity=now.mean,
                    perplexity_half_interval=now.half,
                    validation=held_out.mean,
                    validation_half_interval=held_out.half,
                    published=dict(zip(CHANNELS, SETS[name][4], strict=True)).get(channels),
                    published_split=_PUBLISHED.get(name, "test"),
                )
            )
    return found


_PUBLISHED = {"wikitext103": "validation"}  # split of the paper's figures, if not test
_HEADER = ("d_select", "parameters of queries and keys", "seeds")
_HEADER += ("test perplexity", "validation", "published")


def _cells(r: Mapping) -> tuple:
    published = "-" if r["published"] is None else f"{r['published']:.2f} ({r['published_split']})"
    both = (
        Estimate(r[name], r[f"{name}_half_interval"]).shown(".2f")
        for name in ("perplexity", "validation")
    )
    return r["channels"], f"{r['query_and_key_parameters']:,}", r["seeds"], *both, published


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--set", default="", help=f"one of {', '.join(SETS)}")
    add("--folder", default="", help="folder of WikiText's files")
    add("--channels", default=",".join(map(str, CHANNELS)), help="d_select (8,16,32,64,128,256)")
    add("--epochs", type=int, default=0, help="passes over the text (the paper's)")
    in_process.add_options(parser, f"{FOLDER}/SET", seeds=3)
    options = parser.parse(arguments)
    command_line.require(options, set=f"one of {', '.join(SETS)}")
    lists.one("--set", options.set, SETS)
    if options.set == "embedded":
        if options.folder:
            raise UserError("--folder: applies to WikiText; --set=embedded has its own text")
    else:
        command_line.require(options, folder="the folder of WikiText's files")
    options.channels = lists.integers("--channels", options.channels)
    for channels in options.channels:
        if channels % HEADS or channels > WIDTH:
            raise UserError(
                f"--channels: {channels} must be a multiple of the {HEADS} heads, up to {WIDTH}"
            )
    at_least("--epochs", options.epochs, 0)
    options.epochs = options.epochs or SETS[options.set][1]
    in_process.check(options)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    runtime.start()
    least = SETS[options.set][3]
    if options.set == "embedded":
        corpus = words.embedded(least)
    else:
        load = functools.partial(words.load, least=least)
        corpus = in_process.load(load, "--folder", options.folder)
    trainer = Trainer(options.set, corpus, options.epochs)
    where = f"--folder={options.folder}" if options.folder else f"--set={options.set}"
    if not trainer.steps_per_epoch:
        raise UserError(
            f"{where}: {len(corpus.train):,} words to train on are no batch of "
            f"{trainer.batch} rows of {LENGTH}"
        )
    for split in words.SPLITS[1:]:
        if not len(trainer.rows[split]["x"]):
            count = len(getattr(corpus, split))
            raise UserError(
                f"{where}: {count:,} words of {split} are no row of {LENGTH} and what follows: "
                f"give {LENGTH + 1} or more"
            )
    cells = [cell(trainer, channels) for channels in options.channels]
    name = f"{FOLDER}/{options.set}"

    def figures_of(kept: Kept) -> dict:
        every = [cell(trainer, n) for n in sorted({*CHANNELS, *options.channels})]
        about = dict(set=options.set, words=len(corpus.train), vocabulary=corpus.size)
        return about | dict(epochs=options.epochs, rows=rows(options.set, every, kept))

    places = [pathlib.Path(__file__), pathlib.Path(words.__file__)]
    found, out = in_process.study(name, cells, options, figures_of, places), Output(options)
    asked = [row for row in found["rows"] if row["channels"] in options.channels]
    out.table(_HEADER, map(_cells, asked))
    return in_process.end(name, found, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
