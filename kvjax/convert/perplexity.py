"""Perplexity of a model on rows of tokens, and the rows of a text."""

import math

from etils import epath
from flax import nnx
import jax
import numpy as np

from kvjax.data import loader
from kvjax.data import prepare
from kvjax.data.config import DataConfig
from kvjax.data.config import as_options
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError
from kvjax.model.loss import token_losses
from kvjax.model.transformer import Compute
from kvjax.model.transformer import Transformer

ROWS_AT_ONCE = 4


def rows(
    source: str, tokenizer: epath.Path, *, split: str, length: int, tokens: int, key: str
) -> np.ndarray:
    """[B, T + 1] tokens of a text, int32: about as many targets as asked, or all there are.

    Args:
      source: as config.data.source; it is prepared once and kept.
      tokenizer: a file.
      split: "train", of rows spread over it; or "validation", of its first ones.
      key: for messages: the option that names the source.

    Raises:
      UserError: no such source, or a text too short for one row.
    """
    try:
        config = DataConfig(source=source, tokenizer=str(tokenizer), sequence_length=length)
        dataset = loader.open_dataset(prepare.prepare(config))
    except UserError as error:
        raise UserError(f"--{key}={source}: {as_options(str(error))}") from error
    count = dataset.num_rows(split)
    if not count:
        raise UserError(f"--{key} = {source!r}: has no row of {length} tokens for {split}")
    asked = min(count, -(-tokens // length))
    chosen = np.arange(asked) if split == "validation" else np.arange(asked) * count // asked
    found = dataset.rows(split).__getitems__(chosen.tolist())
    return np.stack([row["tokens"] for row in found]).astype(np.int32)


def perplexity(model: Transformer, compute: Compute, rows_BT: np.ndarray) -> float:
    """exp of the mean nats of every token after the first of a row."""
    graph, params = nnx.split(model)

    @jax.jit
    def nats(params, rows_BT):
        model = nnx.merge(graph, params)
        return token_losses(model, rows_BT[:, :-1], rows_BT[:, 1:], compute=compute)

    total, count = 0.0, 0
    with progress.waiting("measuring perplexity") as doing:
        for start in range(0, len(rows_BT), ROWS_AT_ONCE):
            doing.at(f"{start} of {len(rows_BT)} rows")
            part = np.asarray(nats(params, rows_BT[start : start + ROWS_AT_ONCE]), np.float64)
            total, count = total + part.sum(), count + part.size
    return math.exp(total / count)
