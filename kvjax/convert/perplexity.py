"""Reads the rows of a text, and measures a model's perplexity on them."""

import math
import re
import tempfile

from etils import epath
import numpy as np

from kvjax.convert.layerwise import LayerwisePass
from kvjax.convert.model import LazyModel
from kvjax.data import config as config_lib, loader, manifest, prepare, readers
from kvjax.data.config import DataConfig
from kvjax.foundation import progress
from kvjax.foundation.errors import UserError, warn

_MAX_NATS = 700  # exp overflows float64 beyond
_DECODED_ROWS = 8
_FRAGMENTS = 1.1  # tokens per character; English has about 0.25, a tokenizer of bytes 1


class TooShortError(UserError):
    """A text has no row of the length asked for."""


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
    """Returns [B, T + 1] int32 rows of a text: about `tokens` targets, or all if it has fewer.

    Args:
      source: as config.data.source; prepared once and cached.
      tokenizer: path of a tokenizer.json.
      split: "train": rows spread evenly over the text; "validation": its first rows.
      key: option that names the source, for messages.
      text_key: as config.data.text_key.

    Raises:
      TooShortError: it has no row.
      UserError: there is no such source, or it has too few documents.
    """
    try:
        config = DataConfig(
            source=source, text_key=text_key, tokenizer=str(tokenizer), sequence_length=length
        )
        if config_lib.is_prepared(source):
            raise UserError("prepared rows may have other tokens: give the text itself")
        dataset = loader.open_dataset(prepare.prepare(config))
    except readers.EmptySplitError as error:
        raise UserError(
            f"--{key}={source}: has too few documents or lines to hold some out: give a longer "
            "text, or one of more documents"
        ) from error
    except UserError as error:
        raised = TooShortError if isinstance(error, readers.NoRowError) else UserError
        raise raised(f"--{key}={source}: {name_options(str(error), key)}") from error
    count = dataset.num_rows(split)
    if not count:
        raise TooShortError(f"--{key}={source}: is too short for a row of {length:,} tokens")
    num_rows = min(count, -(-tokens // length))
    chosen = np.arange(num_rows)
    if split != "validation":
        chosen = chosen * count // num_rows
    rows = dataset.rows(split).__getitems__(chosen.tolist())
    rows_BT = np.stack([row["tokens"] for row in rows]).astype(np.int32)
    _warn_of_fragments(dataset, rows_BT[:_DECODED_ROWS], f"--{key}={source}")
    return _without_padding(rows_BT, dataset.tokenizer.bos_id)


def _without_padding(rows_BT: np.ndarray, bos_id: int) -> np.ndarray:
    """Leaves out the last row of a split if BOS tokens pad it; shortens it if there is no other.

    One BOS at the end may be the start of a document.
    """
    padded = int(np.argmax(rows_BT[-1, ::-1] != bos_id))
    if padded <= 1:
        return rows_BT
    return rows_BT[:-1] if len(rows_BT) > 1 else rows_BT[:, :-padded]


def _warn_of_fragments(dataset: loader.PackedDataset, rows_BT: np.ndarray, text: str) -> None:
    """Warns if a text has more tokens than characters, as in a language without merges."""
    ids = rows_BT[dataset.token_bytes[rows_BT] > 0]
    share = len(ids) / max(1, len(dataset.tokenizer.decode(ids.tolist())))
    if share > _FRAGMENTS:
        warn(
            f"{text}: {share:.1f} tokens per character: the tokenizer has no words of this "
            "language, and statistics on fragments of characters say little about other texts"
        )


def model_rows(model: LazyModel, source: str, **options) -> np.ndarray:
    """Returns `rows` in the model's own tokens."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = epath.Path(folder) / manifest.TOKENIZER
        tokenizer.write_text(model.tokenizer_json)
        return rows(source, tokenizer, **options)


def calibration_rows(
    model: LazyModel,
    texts: str,
    *,
    length: int,
    tokens: int,
    text_key: str = DataConfig.text_key,
    all_texts: bool = True,
) -> np.ndarray:
    """Returns [B, T + 1] rows in the model's tokens, an equal share of each text, alternating.

    Args:
      texts: sources, separated by commas, see `rows`.
      tokens: in all, about.
      all_texts: False: texts without a row of this length are left out, with a warning.

    Raises:
      TooShortError: a text has no row; with `all_texts=False`, none has.
      UserError: see `rows`.
    """
    items, parts, short = config_lib.split_source(texts) or [texts], [], []
    share = dict(split="train", length=length, tokens=-(-tokens // len(items)))
    for item in items:
        try:
            parts.append(model_rows(model, item, key="calibrate", text_key=text_key, **share))
        except TooShortError as error:
            if all_texts:
                raise
            short.append(error)
    if not parts:
        raise short[0]
    for error in short:
        warn(f"{error}: attention is measured without it")
    place = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
    return np.concatenate(parts)[np.argsort(place, kind="stable")]


def name_options(message: str, key: str) -> str:
    """Replaces config keys in a message by the options of convert's command line.

    Args:
      key: the option that names the text.
    """
    names = {
        "source": f"--{key}",
        "sequence_length": "--row_length",
        "text_key": "--text_key",
        "tokenizer": "the source's tokenizer",
    }
    return re.sub(r"config\.data\.(\w+)", lambda match: names.get(match[1], match[1]), message)


def perplexity(model: LazyModel, rows_BT: np.ndarray) -> float:
    """Returns exp of the mean loss in nats over all tokens but each row's first.

    Computes in float32, with one layer's weights in memory at a time.

    Raises:
      UserError: the mean loss is not finite, or its exponential overflows.
    """
    run, num_layers = LayerwisePass(model, rows_BT[:, :-1]), model.transformer.block.num_layers
    with progress.waiting("measuring perplexity") as doing:
        for i, _ in enumerate(run.layers()):
            doing.at(f"{i + 1} of {num_layers} layers")
        total = sum(nats.sum(dtype=np.float64) for nats in run.losses(rows_BT[:, 1:]))
    mean = total / rows_BT[:, 1:].size
    if not mean < _MAX_NATS:
        raise UserError(
            f"perplexity of {model.name} on this text overflows: its mean loss is {mean} nats. "
            "--evaluate_tokens=0 skips it"
        )
    return math.exp(mean)
