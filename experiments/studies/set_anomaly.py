"""Trains projection sharing's set anomaly task (section A.3): find the image of another class.

    python -m experiments.studies.set_anomaly [--seeds=3] [--save]        # synthetic features
    python -m experiments.studies.set_anomaly --features=FILE.npz --widths=256,512 --layers=2,4 \\
        --heads=2,4 --epochs=20                                           # the paper's grid

A set has ten images; an encoder without positions scores each. This study follows the code of a
course, in which the anomaly is always last. Encoders without positions cannot use this, but the "+"
variants, which add a map that depends on positions, might. Every variant is therefore trained and
tested twice: with the anomaly at random positions, and with the anomaly last. Features of CIFAR-100
come from a file (`tasks.anomalies.load`); synthetic features are class means plus noise. Prints
test accuracy at the epoch of the best validation accuracy, means over cells with 95 % intervals
over seeds.

Differences from the course: weights are initialised by fan-in, not by Xavier; dropout is on inputs
and block outputs, not inside the MLP or before the answer; and the map of "+" has 10 channels, as
in the small tasks, where the paper's vision models have 50.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import functools
import itertools

import numpy as np

from experiments.models.labeller import Labeller
from experiments.studies import in_process
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from experiments.tasks import anomalies, encoders, learner
from experiments.tasks.anomalies import Features
from experiments.tasks.learner import Learner
from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import difference, estimate
from kvjax.model.transformer import Compute

NAME = "set_anomaly"
BATCH, CHANNELS, DROPOUT = 64, 10, 0.1
NOISE = 2.2  # noise of synthetic features; at this level QKV reaches 98 %, and variants differ
# Projection sharing, Table 3, in the order of `encoders.VARIANTS`.
PUBLISHED = dict(zip(encoders.VARIANTS, (0.942, 0.954, 0.966, 0.949, 0.933, 0.961), strict=True))


class Trainer:
    """Trains and tests on one data set of features."""

    def __init__(self, features: Features, epochs: int):
        self.features, self.epochs = features, epochs
        self.steps_per_epoch = len(features.train[1]) // BATCH
        self._learner = functools.cache(self._learner_of)  # seeds share the compiled step

    def _learner_of(self, variant: str, shape: tuple[int, ...]) -> Learner:
        block = dict(norm_after=True, positions="none", activation="relu", mlp_dim=2 * shape[0])
        block |= dict(labels=1, dropout=DROPOUT)
        config = encoders.transformer(variant, CHANNELS, *shape, **block)
        compute = Compute(unroll=True)
        size = self.features.train[0].shape[1]

        def logits(model, batch, key):
            return model(batch["x"], compute=compute, dropout=key)[..., 0]

        steps = self.steps_per_epoch * self.epochs
        schedule = dict(learning_rate=5e-4, warm_up=100, decay="cosine", clip=2.0)
        return Learner(
            lambda key: Labeller(config, key, features=size, input_dropout=DROPOUT),
            learner.Recipe(steps=steps, **schedule),
            *learner.loss_and_accuracy(logits),
            has_dropout=True,
        )

    def train(self, variant: str, shape: tuple[int, ...], place: str, seed: int) -> dict:
        """Trains a model; returns its test accuracy, and validation accuracy by step."""
        features = self.features

        def test_batches(arrays) -> list[dict[str, np.ndarray]]:
            rng = np.random.default_rng(42)
            return list(anomalies.batches(arrays, rng, place, size=500, whole=True))

        def training_batches() -> Iterator[dict[str, np.ndarray]]:
            rng = np.random.default_rng(seed)
            while True:
                yield from anomalies.batches(features.train, rng, place, BATCH)

        model = self._learner(variant, shape)
        test_sets = test_batches(features.validation), test_batches(features.test)
        right, step, curve, loss = model.best(
            seed, training_batches(), *test_sets, self.steps_per_epoch
        )
        return dict(right=right, step=step, validation=curve, loss=loss)


def cell(trainer: Trainer, variant: str, shape: tuple[int, ...], place: str) -> Cell:
    width, layers, heads = shape
    settings = dict(features=trainer.features.digest, variant=variant, place=place, width=width)
    settings |= dict(layers=layers, heads=heads, epochs=trainer.epochs, dropout=DROPOUT)
    return Cell(
        name=f"{place}/{variant}/d{width}_l{layers}_h{heads}_e{trainer.epochs}",
        settings=settings,
        train=functools.partial(trainer.train, variant, shape, place),
    )


def rows(cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns a row per variant: by place the mean over cells and seeds, and their difference."""
    table = []
    for variant in encoders.VARIANTS:
        by_place = {
            place: in_process.means(cells, finished, "right", variant=variant, place=place)
            for place in anomalies.PLACES
        }
        places = {
            place: estimated("right", estimate(list(runs.values())), "half_interval")
            | dict(seeds=len(runs))
            for place, runs in by_place.items()
            if runs
        }
        if places:
            change = difference(by_place["drawn"], by_place["last"])
            gap = change and estimated("points", change, "half_interval")
            row = dict(variant=variant, places=places, drawn_less_last=gap)
            table.append(row | dict(published=PUBLISHED[variant]))
    return table


_HEADER = ("variant", "place drawn, %", "always last, %", "points", "table 3")


def _cells(r: Mapping) -> tuple:
    right = (shown(r["places"].get(place), "right", ".2f", 100) for place in anomalies.PLACES)
    gap = shown(r["drawn_less_last"], "points", "+.2f", 100)
    return encoders.CALLED[r["variant"]], *right, gap, f"{100 * r['published']:.1f}"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, NAME)
    add = parser.add_argument
    add("--features", default="", help="npz file (default: synthetic)")
    text = f"standard deviation of synthetic features ({NOISE})"
    add("--noise", type=float, default=NOISE, help=text)
    parser.names("variants", encoders.VARIANTS)
    parser.names("places", anomalies.PLACES)
    encoders.add_sizes(parser, widths="64", layers="2", heads="2")
    parser.count("epochs", 4, "passes, each with every image as the anomaly (4)")
    options = parser.parse(arguments)
    encoders.read_sizes(options)
    if not 0 < options.noise < 1000:
        raise UserError(f"--noise = {options.noise}: must lie between 0 and 1000")
    if options.features and options.noise != NOISE:
        raise UserError("--noise: applies to synthetic features; leave out --noise or --features")
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    if options.features:
        features = in_process.load(anomalies.load, "--features", options.features)
    else:
        features = anomalies.synthetic(options.noise)
    trainer = Trainer(features, options.epochs)
    if not trainer.steps_per_epoch:
        raise UserError(
            f"--features={options.features}: {len(features.train[1])} images to train on, beside "
            f"those held out, are no batch of {BATCH}"
        )
    sizes = (options.widths, options.layers, options.heads)
    grid = itertools.product(*sizes, anomalies.PLACES, encoders.VARIANTS)
    all_cells = [cell(trainer, variant, tuple(shape), place) for *shape, place, variant in grid]
    only = dict(place=options.places, variant=options.variants)
    cells = [c for c in all_cells if all(c.settings[key] in only[key] for key in only)]

    def figures_of(finished: FinishedRuns) -> dict:
        grid = {key: getattr(options, key) for key in ("widths", "layers", "heads", "epochs")}
        return dict(features=features.digest, grid=grid, rows=rows(all_cells, finished))

    note = "Of the test sets. Table 3's features are ResNet34's; the course's anomaly is last."
    how = dict(code_files=(__file__,), only=dict(variant=options.variants), note=note)
    return in_process.study(NAME, cells, options, figures_of, _HEADER, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
