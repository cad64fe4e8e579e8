"""Trains image classifiers for a row of projection sharing's Table 3, from local files.

    python -m experiments.studies.images --set=fashion_mnist --folder=FOLDER [--seeds=3] [--save]
    python -m experiments.studies.images --set=mnist --folder=FOLDER --patches=4,7 \\
        --widths=64,256,512 --layers=2,4 --heads=2,4 --rates=0.001,0.0001   # its whole grid

Vision Transformers trained from scratch on square patches of pixels, with a learned class vector in
front. The paper uses Adam, and divides the learning rate by ten twice, at epochs that it does not
state (here: after half and three quarters of all epochs). It trains 20 epochs of MNIST and
Fashion-MNIST, 40 of CIFAR-10, 50 of CIFAR-100. Weights and data order depend on the seed alone.
Prints test accuracy after the last epoch, means over cells with 95 % intervals over seeds.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.labeller import Labeller
from experiments.studies import in_process
from experiments.studies.finished_runs import FinishedRuns
from experiments.studies.in_process import Cell
from experiments.studies.options import Parser, estimated, shown
from experiments.tasks import encoders, images as images_lib, learner
from experiments.tasks.images import Images
from experiments.tasks.learner import Learner
from kvjax.foundation import command_line, errors, lists
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import difference, estimate
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute

FOLDER = "images"  # folder in experiments/results
BATCH = 128
CHANNELS = 50  # channels of the position map that "+" adds
# Projection sharing, Table 3, in the order of `encoders.VARIANTS`.
PUBLISHED = {
    "mnist": (0.981, 0.981, 0.982, 0.976, 0.978, 0.977),
    "fashion_mnist": (0.887, 0.885, 0.884, 0.883, 0.877, 0.875),
    "cifar10": (0.663, 0.666, 0.662, 0.659, 0.672, 0.669),
    "cifar100": (0.363, 0.369, 0.366, 0.358, 0.376, 0.364),
    "tiny_imagenet": (0.229, 0.236, None, 0.234, 0.266, None),
}
EPOCHS = dict(mnist=20, fashion_mnist=20, cifar10=40, cifar100=50, tiny_imagenet=100)
# TinyImageNet has one model: images of 64 are enlarged to 224 pixels. The paper omits its epochs.
_GRID = dict(patches="7", widths="64", layers="2", heads="2", rates="0.001")
_VIT = dict(patches="16", widths="768", layers="12", heads="12", rates="0.001")
_DEFAULTS = dict.fromkeys(EPOCHS, _GRID) | dict(tiny_imagenet=_VIT)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Settings shared by all models of a data set.

    Attributes:
      mlp_times: MLP width over model width. The paper gives it for TinyImageNet alone.
      side: pixels that images are enlarged to; 0: not enlarged.
    """

    mlp_times: int = 2
    side: int = 0
    dropout: float = 0.0


_FIXED = dict.fromkeys(EPOCHS, Fixed()) | dict(tiny_imagenet=Fixed(4, 224, 0.1))


def squares(x_BYXC: jax.Array, size: int) -> jax.Array:
    """Splits images into patches [B, T, size² C], row by row; crops edges to whole patches."""
    B, Y, X, C = x_BYXC.shape
    rows, columns = Y // size, X // size
    top, left = (Y - rows * size) // 2, (X - columns * size) // 2
    x_BYXC = x_BYXC[:, top : top + rows * size, left : left + columns * size]
    x = x_BYXC.reshape(B, rows, size, columns, size, C)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * columns, size * size * C)


def transformer(
    variant: str, shape: Sequence[int], squares: int, classes: int, fixed: Fixed
) -> TransformerConfig:
    """Returns a Vision Transformer's config.

    Args:
      shape: width, layers, heads.
      squares: patches per image; the class vector is in front of them.
    """
    width, layers, heads = shape
    sizes = dict(positions="learned", activation="gelu_exact", max_positions=squares + 1)
    sizes |= dict(mlp_dim=fixed.mlp_times * width, dropout=fixed.dropout)
    return encoders.transformer(variant, CHANNELS, width, layers, heads, labels=classes, **sizes)


class Trainer:
    """Trains and tests on one data set."""

    def __init__(self, name: str, images: Images, epochs: int):
        self.images, self.epochs, self.fixed = images, epochs, _FIXED[name]
        known, side = images_lib.SETS[name], self.fixed.side
        self.classes, self.channels = known.classes, known.channels
        self.side, self._enlarged = side or known.side, bool(side)
        x = images.train[0]
        axes = (0, 1, 2)
        self._mean, self._std = (f(x, axis=axes, keepdims=True) / 255 for f in (np.mean, np.std))
        self.steps = len(x) // BATCH * epochs
        self._learner = functools.cache(self._learner_of)  # seeds share the compiled step

    def _features(self, x_BYXC: jax.Array, size: int) -> jax.Array:
        x = (x_BYXC.astype(jnp.float32) / 255 - self._mean) / self._std
        if self._enlarged:
            x = jax.image.resize(x, (len(x), self.side, self.side, x.shape[-1]), "bilinear")
        return squares(x, size)

    def _learner_of(self, variant: str, shape: tuple[int, ...], size: int, rate: float) -> Learner:
        count = (self.side // size) ** 2
        config = transformer(variant, shape, count, self.classes, self.fixed)
        features = size * size * self.channels
        compute = Compute(unroll=True)

        def logits(model, batch, key):
            return model(self._features(batch["x"], size), compute=compute, dropout=key)

        return Learner(
            lambda key: Labeller(config, key, features=features, hidden=False, whole=True),
            learner.Recipe(steps=self.steps, learning_rate=rate, decay="steps"),
            *learner.loss_and_accuracy(logits),
            has_dropout=self.fixed.dropout > 0,
        )

    def train(
        self, variant: str, shape: tuple[int, ...], size: int, rate: float, seed: int
    ) -> dict:
        """Trains a model; returns its test accuracy."""
        model = self._learner(variant, shape, size, rate)
        train, test = (
            dict(zip("xy", arrays, strict=True)) for arrays in (self.images.train, self.images.test)
        )
        trained = model.train(seed, learner.in_order(train, BATCH, self.epochs, seed))
        right = model.accuracy(trained, learner.split(test, 500))
        return dict(right=right, loss=trained.loss)


def cell(
    name: str, trainer: Trainer, variant: str, shape: tuple[int, ...], size: int, rate: float
) -> Cell:
    width, layers, heads = shape
    settings = dict(set=name, files=dict(trainer.images.files), variant=variant, width=width)
    settings |= dict(layers=layers, heads=heads, patch=size, rate=rate, epochs=trainer.epochs)
    settings |= dataclasses.asdict(trainer.fixed)
    return Cell(
        name=f"{variant}/d{width}_l{layers}_h{heads}_p{size}_lr{rate:g}_e{trainer.epochs}",
        settings=settings,
        train=functools.partial(trainer.train, variant, shape, size, rate),
    )


def rows(name: str, cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns a row per variant: mean over cells, interval over seeds, and difference from QKV."""
    qkv = in_process.means(cells, finished, "right", variant="qkv")
    table = []
    for variant, published in zip(encoders.VARIANTS, PUBLISHED[name], strict=True):
        if means := in_process.means(cells, finished, "right", variant=variant):
            row = dict(variant=variant, seeds=len(means), published=published)
            row |= estimated("right", estimate(list(means.values())))
            gap = difference(means, qkv) if variant != "qkv" else None
            table.append(row | estimated("from_qkv", gap))
    return table


_HEADER = ("variant", "right, %", "table 3", "points from QKV")


def _cells(r: Mapping) -> tuple:
    published = "-" if r["published"] is None else f"{100 * r['published']:.1f}"
    right, gap = shown(r, "right", ".2f", 100), shown(r, "from_qkv", "+.2f", 100)
    return encoders.CALLED[r["variant"]], right, published, gap


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(map(float, text.split(","))))
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate < 1 for rate in rates):
        raise UserError(f"--rates={text}: must be numbers between 0 and 1, as in 0.001,0.0001")
    return rates


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, f"{FOLDER}/SET")
    add = parser.add_argument
    add("--set", default="", help=f"one of {', '.join(EPOCHS)}")
    add("--folder", default="", help="folder of its files")
    parser.names("variants", encoders.VARIANTS)
    encoders.add_sizes(parser, **dict.fromkeys(("patches", "widths", "layers", "heads"), ""))
    add("--rates", default="", help="learning rates (0.001)")
    parser.count("epochs", 0, "passes over the data (the paper's)", least=0)
    options = parser.parse(arguments)
    command_line.require(options, set=f"one of {', '.join(EPOCHS)}", folder="its files' folder")
    lists.one("--set", options.set, EPOCHS)
    for key, value in _DEFAULTS[options.set].items():
        setattr(options, key, getattr(options, key) or value)
    side = _FIXED[options.set].side or images_lib.SETS[options.set].side
    encoders.read_sizes(options, "patches")
    for size in options.patches:
        if size > side:
            raise UserError(f"--patches: {size} must be at most {side}, an image's side")
    options.rates = _rates(options.rates)
    options.epochs = options.epochs or EPOCHS[options.set]
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    load = functools.partial(images_lib.load, options.set)
    images = in_process.load(load, "--folder", options.folder)
    if difference := images_lib.other_counts(options.set, images):
        errors.warn(difference)
    if len(images.train[1]) < BATCH:
        raise UserError(
            f"--folder={options.folder}: {len(images.train[1])} images to train on are no batch "
            f"of {BATCH}"
        )
    trainer = Trainer(options.set, images, options.epochs)
    sizes = (options.widths, options.layers, options.heads, options.patches, options.rates)
    all_cells = [
        cell(options.set, trainer, variant, (width, layers, heads), size, rate)
        for width, layers, heads, size, rate, variant in itertools.product(
            *sizes, encoders.VARIANTS
        )
    ]
    cells = [c for c in all_cells if c.settings["variant"] in options.variants]

    def figures_of(finished: FinishedRuns) -> dict:
        keys = ("widths", "layers", "heads", "patches", "rates", "epochs")
        grid = {key: getattr(options, key) for key in keys}
        return dict(set=options.set, grid=grid, rows=rows(options.set, all_cells, finished))

    note = "Of the test images; Table 3's figures are means over its grid of sizes and rates."
    how = dict(code_files=(__file__,), only=dict(variant=options.variants), note=note)
    name = f"{FOLDER}/{options.set}"
    return in_process.study(name, cells, options, figures_of, _HEADER, _cells, **how)


if __name__ == "__main__":
    command_line.run(main)
