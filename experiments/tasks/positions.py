"""Held-out text in rows, and what a trained run makes of it by position."""

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

JUDGED = 1024  # tokens of a row that is judged
EDGES = (0, 64, 256, 512, 1024)
ROWS, BATCH = 96, 8


def rows_of(tokenizer: Tokenizer, count: int, length: int) -> tuple[np.ndarray, float]:
    """Rows [count, length + 1] spread evenly over held-out text, and bytes per token of it."""
    held_out = text.books("validation")
    ids = np.asarray(tokenizer.encode(held_out), np.int32)
    starts = np.linspace(0, len(ids) - length - 1, count).astype(np.int64)
    return ids[starts[:, None] + np.arange(length + 1)[None]], len(held_out.encode()) / len(ids)


def by_position(workdir: pathlib.Path) -> dict:
    """Bits per byte between `EDGES`, of a trained run."""
    loaded = trained.load(epath.Path(workdir))
    rows, bytes_per_token = rows_of(loaded.tokenizer, ROWS, JUDGED)
    judge = jax.jit(lambda model, x, y: token_losses(model, x, y, compute=loaded.compute))
    parts = [rows[i : i + BATCH] for i in range(0, ROWS, BATCH)]
    nats_T = np.mean([judge(loaded.model, x[:, :-1], x[:, 1:]) for x in parts], axis=(0, 1))
    between = itertools.pairwise(EDGES)
    bits = [float(nats_T[a:b].mean()) / math.log(2) / bytes_per_token for a, b in between]
    return dict(by_position=bits)
