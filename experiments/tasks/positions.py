"""Loss of a trained run on held-out text, by position in the row."""

import functools
import itertools
import math
import pathlib

from etils import epath
import jax
import numpy as np

from experiments.tasks import text
from kvjax.data.tokenizer import Tokenizer
from kvjax.model.loss import token_losses
from kvjax.workdir import trained

LENGTH = 1024  # tokens per row
EDGES = (0, 64, 256, 512, 1024)
ROWS, BATCH = 96, 8


def rows_of(tokenizer: Tokenizer, count: int, length: int) -> tuple[np.ndarray, float]:
    """Returns rows [count, length + 1] evenly spaced in held-out text, and its bytes per token."""
    held_out = text.books("validation")
    ids = np.asarray(tokenizer.encode(held_out), np.int32)
    starts = np.linspace(0, len(ids) - length - 1, count).astype(np.int64)
    return ids[starts[:, None] + np.arange(length + 1)[None]], len(held_out.encode()) / len(ids)


def by_position(workdir: pathlib.Path) -> dict:
    """Returns the bits per byte of a run in each interval between `EDGES`."""
    loaded = trained.load(epath.Path(workdir))
    rows, bytes_per_token = rows_of(loaded.tokenizer, ROWS, LENGTH)
    losses = jax.jit(functools.partial(token_losses, compute=loaded.compute))
    parts = [rows[i : i + BATCH] for i in range(0, ROWS, BATCH)]
    nats_T = np.mean([losses(loaded.model, x[:, :-1], x[:, 1:]) for x in parts], axis=(0, 1))
    between = itertools.pairwise(EDGES)
    bits = [float(nats_T[a:b].mean()) / math.log(2) / bytes_per_token for a, b in between]
    return dict(by_position=bits)
