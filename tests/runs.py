"""A run small enough to start many times: bytes of a synthetic text, 2 layers of width 32."""

import pathlib
import random

from etils import epath
import ml_collections

from kvjax import config as config_lib, recipes
from kvjax.data import prepare
from kvjax.workdir import metrics

CONFIG_FILE = """
from tests import runs
def get_config():
    return runs.small_config({source!r}, {directory!r})
"""


def write_text(path: pathlib.Path) -> str:
    """Writes 60 KB of random words from a small vocabulary, which a model can learn."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshr", k=rng.randint(2, 7))) for _ in range(50)]
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(1500)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def small_config(source: str, directory: str, **train) -> ml_collections.ConfigDict:
    """Returns LRKV's config: 40 steps of 8 x 32 bytes, a checkpoint every 10, quick to compile.

    Args:
      source: a text file.
      directory: where the prepared rows go.
      train: overrides of config.train.
    """
    config = recipes.pretrain(
        "lrkv_small", scale="tiny", attention=recipes.lrkv(2, rank=4, head_dim=16)
    )
    config.model.update(num_layers=2, d_model=32, mlp_dim=64)
    config.data.update(
        source=source,
        directory=directory,
        tokenizer="byte",
        vocab_size=257,
        sequence_length=32,
        validation_fraction=0.02,
    )
    config.train.update(
        num_steps=40,
        batch_size=8,
        log_every=1,
        eval_every=20,
        checkpoint_every=10,
        sample_tokens=0,
    )
    config.compute.update(unroll="off", query_chunk=0, loss_chunks=1)
    config.optimizer.newton_schulz_steps = 2
    config.train.update(train)
    return config


def prepare_text(source: str, folder: pathlib.Path, name: str) -> pathlib.Path:
    """Prepares rows of a variant of a text, different for each name; returns their folder.

    The vocabulary has 272 tokens.
    """
    text = folder / f"{name}.txt"
    lines = pathlib.Path(source).read_text().splitlines()
    random.Random(name).shuffle(lines)
    text.write_text("\n".join(lines).replace("t", name[0]) + "\n")
    config = small_config(str(text), str(folder / "data"))
    config.data.update(tokenizer="bpe", vocab_size=272)
    return pathlib.Path(prepare.prepare(config_lib.resolve(config).data))


def records(workdir) -> list[dict]:
    """Returns the records of a run's steps."""
    return metrics.read_records(epath.Path(workdir) / metrics.METRICS)
