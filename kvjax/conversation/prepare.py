"""Renders a mixture of conversations to packed rows, and stores them as a data set.

`kvjax.data.loader` opens the data set like one of texts; rows have a loss mask if some targets do
not count. The rows are a function of files, seed and tokenizer, so they are prepared only once. For
each set the manifest lists rows read, truncated and rejected, and the SHA-256 of the files.
"""

from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
from typing import Any, NamedTuple

from etils import epath
import numpy as np

from kvjax.conversation import mixture as mixture_lib, packing, sets
from kvjax.conversation.mixture import MixtureConfig
from kvjax.conversation.render import Renderer
from kvjax.conversation.rendered import Compressor, RenderedSet, SetCounts
from kvjax.data import folders, manifest, packed_rows
from kvjax.data.config import DataConfig
from kvjax.data.manifest import FORMAT_VERSION, MANIFEST, SPLITS, TOKENIZER, digest_of
from kvjax.data.tokenized_part import dtype_of, tokenizer_info
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation import progress
from kvjax.foundation.errors import DataError, warn

# Part of the folder's name: raise it when the code writes other rows for the same conversations.
VERSION = 1
_LETTERS = "ABCDE"


class _Split(NamedTuple):
    """Content of a split, for the manifest."""

    shard: packed_rows.Shard
    counts: list[SetCounts]
    bytes: int  # bytes of the text that the tokens decode to
    padding: int  # tokens of padding
    xz_bits_per_byte: float


def prepare(
    mixture: MixtureConfig, data: DataConfig, tokenizer: Tokenizer, *, shown: bool = True
) -> epath.Path:
    """Returns the folder of a mixture's rows; writes it if it does not exist yet.

    Args:
      data: row length and folder.
      tokenizer: must have all special tokens.
      shown: print progress to stderr.

    Raises:
      MissingDataError: a set is missing or incomplete; the message says what to download.
      DataError: a row of a set that is not a conversation (the message has file and row); too few
        tokens for one packed row.
    """
    with progress.waiting("inspecting the conversations", shown=shown):
        opened = {split: [sets.OpenedSet(p) for p in mixture.specs(split)] for split in SPLITS}
        _check_disjoint(opened)
        fingerprints = {split: [s.fingerprint() for s in opened[split]] for split in SPLITS}
    values = dataclasses.asdict(mixture)
    ranges = [[(p.kind, p.start, p.stop) for p in mixture.specs(split)] for split in SPLITS]
    options = [values[key] for key in ("seed", "limit", "loss", "pack", "skip_broken")]
    content = (fingerprints, ranges, options, tokenizer.to_json(), data.sequence_length)
    path = data.root / "datasets" / digest_of(FORMAT_VERSION, VERSION, *content)
    if folders.is_whole(path / MANIFEST, manifest.read):
        return path
    _check_letters(tokenizer)
    with folders.published(path / MANIFEST, shown) as staging:
        _write(pathlib.Path(staging), opened, mixture, data, Renderer(tokenizer), shown)
    return path


def _write(
    folder: pathlib.Path,
    opened: dict[str, list[sets.OpenedSet]],
    mixture: MixtureConfig,
    data: DataConfig,
    renderer: Renderer,
    shown: bool,
) -> None:
    tokenizer, dtype = renderer.tokenizer, dtype_of(renderer.tokenizer)
    rows = folder / manifest.ROWS / manifest.ROWS_VERSION
    rows.mkdir(parents=True)
    splits = {}
    with progress.waiting("rendering conversations", shown=shown) as doing, folders.writing(folder):
        for split in SPLITS:
            say = functools.partial(_say, doing, split)
            splits[split] = _write_split(rows, split, opened[split], mixture, data, renderer, say)
        if not splits["train"].shard.rows:
            tokens = sum(counts.tokens for counts in splits["train"].counts)
            raise DataError(
                f"config.data.sequence_length = {data.sequence_length}: the train split has "
                f"{tokens} tokens, and a row needs {data.sequence_length + 1}: lower it, or add "
                "conversations"
            )
        shards = {split: [content.shard] for split, content in splits.items()}
        length = data.sequence_length + 1
        packed_rows.describe(rows, shards, length, dtype, masked=mixture.is_masked)
        tokenizer.save(folder / TOKENIZER)
        info = _info(splits, mixture, data, tokenizer)
        manifest.write(folder, info, manifest.digests(folder))


def _say(doing: progress.waiting, split: str, text: str) -> None:
    doing.now(f"rendering conversations, {split}, {text}")


def _write_split(
    folder: pathlib.Path,
    split: str,
    opened: Sequence[sets.OpenedSet],
    mixture: MixtureConfig,
    data: DataConfig,
    renderer: Renderer,
    say,
) -> _Split:
    tokenizer, row_length = renderer.tokenizer, data.sequence_length + 1
    dtype = dtype_of(tokenizer)
    limit = mixture.limit if mixture.pack == "stream" else min(mixture.limit, row_length)
    compressor = Compressor() if split == "validation" else None
    rendered = []
    for opened_set in opened:
        spec, count = opened_set.spec, opened_set.count()
        counts = SetCounts(spec.key, spec.source, opened_set.digest(), count)
        order = mixture_lib.shuffled(count, mixture.seed)[spec.start : spec.stop]
        options = (mixture, renderer, limit, dtype, compressor, say)
        rendered.append(RenderedSet(opened_set, order, counts, *options))
        if counts.rejected:
            warn(f"{spec.where}: {counts.rejected:,} of {count:,} rows were skipped")
    say("writing rows")
    token_bytes_V, num_bytes = tokenizer.token_bytes(), 0

    def conversations():
        nonlocal num_bytes
        for i, index in mixture_lib.mixed([len(s) for s in rendered], mixture.seed):
            if (conversation := rendered[i][index]) is not None:
                ids, mask = conversation
                num_bytes += int(token_bytes_V[ids].sum())
                yield ids, (mask if mixture.loss == "assistant" else np.ones_like(mask))

    path = folder / packed_rows.shard_name(split, 0, 1)
    masked = mixture.is_masked
    writer = packed_rows.ShardWriter(path, data.sequence_length, dtype, masked=masked)
    padding = 0
    try:
        if mixture.pack == "stream":
            for ids, mask in conversations():  # cut into rows every T tokens, like texts
                writer.add(ids, mask)
        else:
            pack = packing.write_whole if mixture.pack == "whole" else packing.write_single
            padding = pack(writer, conversations(), row_length, tokenizer.bos_id)
        # As for texts: validation pads a stream's last row, training drops its tokens.
        padded = split == "validation" and mixture.pack == "stream"
        shard = writer.close(tokenizer.bos_id if padded else None)
    finally:
        writer.abandon()
    xz = compressor.bits_per_byte() if compressor else 0.0
    return _Split(shard, [s.counts for s in rendered], num_bytes, padding, xz)


def _info(
    splits: dict[str, _Split], mixture: MixtureConfig, data: DataConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(data),
        "mixture": dataclasses.asdict(mixture),
        "masked": mixture.is_masked,
        **tokenizer_info(tokenizer),
        "xz_bits_per_byte": splits["validation"].xz_bits_per_byte,
        "splits": {
            split: {
                "documents": sum(c.read - c.rejected for c in content.counts),
                "bytes": content.bytes,
                "tokens": sum(c.tokens for c in content.counts),
                "rows": content.shard.rows,
                "filling": content.padding,
                "sets": [dataclasses.asdict(c) for c in content.counts],
            }
            for split, content in splits.items()
        },
    }


def _check_disjoint(opened: dict[str, list[sets.OpenedSet]]) -> None:
    """Raises a DataError if training and validation share rows."""
    for train_set in opened["train"]:
        for validation_set in opened["validation"]:
            a, b = train_set.spec, validation_set.spec
            same_source = train_set.identity == validation_set.identity
            common = {*map(os.fspath, train_set.files)} & {*map(os.fspath, validation_set.files)}
            a_stop, b_stop = (np.inf if x.stop is None else x.stop for x in (a, b))
            disjoint = same_source and (a_stop <= b.start or b_stop <= a.start)
            if (same_source or common) and not disjoint:
                raise DataError(
                    f"{b.where}: shares rows with {a.where}, which are for training. Give other "
                    "files, or disjoint ranges of rows: SOURCE#0:900 and SOURCE#900:1000"
                )


def _check_letters(tokenizer: Tokenizer) -> None:
    """Warns if an answer's letter is another token than the same letter in its question."""
    unlike = []
    for letter in _LETTERS:
        alone = tokenizer.encode(letter)
        if len(alone) != 1 or alone[0] not in tokenizer.encode(f"- a choice={letter}\n"):
            unlike.append(letter)
    if unlike:
        warn(
            f"{', '.join(unlike)}: another token in a question (- choice={unlike[0]}) than as its "
            "answer, by this tokenizer: multiple choice is harder to learn"
        )
