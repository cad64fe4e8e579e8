"""Perplexity of a model on rows of tokens, and the rows of a text."""

import math
import re

from etils import epath
import numpy as np

from kvjax.convert.layerwise import LayerwisePass
from kvjax.convert.model import LazyModel
from kvjax.data import loader, prepare, readers
from kvjax.data.config import DataConfig
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError

_MOST_NATS = 700  # exp of more is no float64


def rows(
    source: str,
    tokenizer: epath.Path,
    *,
    split: str,
    length: int,
    tokens: int,
    key: str,
    text_key: str = DataConfig.text_key,
) -> np.ndarray:
    """[B, T + 1] tokens of a text, int32: about as many targets as asked, or all there are.

    Args:
      source: as config.data.source; it is prepared once and kept.
      tokenizer: a file.
      split: "train", of rows spread over it; or "validation", of its first ones.
      key: for messages: the option that names the source.
      text_key: as config.data.text_key.

    Raises:
      UserError: no such source, or a text too short for one row.
    """
    try:
        text = dict(source=source, text_key=text_key)
        config = DataConfig(**text, tokenizer=str(tokenizer), sequence_length=length)
        dataset = loader.open_dataset(prepare.prepare(config))
    except UserError as error:
        said = name_options(str(error), key)
        if isinstance(error, readers.EmptySplitError):
            said = (
                "whole documents or lines of a text are held out for perplexity, and there are too "
                "few for that: give a longer text, or one of more documents"
            )
        raise UserError(f"--{key}={source}: {said}") from error
    count = dataset.num_rows(split)
    if not count:
        raise UserError(f"--{key} = {source!r}: has no row of {length} tokens for {split}")
    asked = min(count, -(-tokens // length))
    chosen = np.arange(asked) if split == "validation" else np.arange(asked) * count // asked
    found = dataset.rows(split).__getitems__(chosen.tolist())
    return np.stack([row["tokens"] for row in found]).astype(np.int32)


def name_options(message: str, key: str) -> str:
    """A message with the names that keys have on convert's command line.

    Args:
      key: the option that names the text.
    """
    names = dict(source=f"--{key}", sequence_length="--row_length", text_key="--text_key")
    names["tokenizer"] = "the source's tokenizer"
    return re.sub(r"config\.data\.(\w+)", lambda found: names.get(found[1], found[1]), message)


def perplexity(model: LazyModel, rows_BT: np.ndarray) -> float:
    """exp of the mean nats of every token after the first of a row, in float32.

    One layer's weights are in memory at a time.

    Raises:
      UserError: it is no number, or too large for one.
    """
    run, num_layers = LayerwisePass(model, rows_BT[:, :-1]), model.transformer.block.num_layers
    with progress.waiting("measuring perplexity") as doing:
        for i, _ in enumerate(run.layers()):
            doing.at(f"{i + 1} of {num_layers} layers")
        total = sum(nats.sum(dtype=np.float64) for nats in run.losses(rows_BT[:, 1:]))
    mean = total / rows_BT[:, 1:].size
    if not mean < _MOST_NATS:
        raise UserError(
            f"perplexity of {model.name} on this text is no number: its mean loss is {mean} nats. "
            "--evaluate_tokens=0 converts without"
        )
    return math.exp(mean)
