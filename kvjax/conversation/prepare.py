"""The rows of a mixture, prepared once: a function of files, seed and tokenizer.

What is written is a data set like that of texts, which `kvjax.data.loader` opens; where some
targets do not count, its rows have a second feature, a byte a token. The manifest lists what of
every set was read, cut and rejected, with the SHA-256 of its files.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
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
from kvjax.data.tokenized_part import dtype_of
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation import progress
from kvjax.foundation.errors import DataError, warn

# Part of every key: raise it when the same conversations would be written as other rows.
VERSION = 1
_LETTERS = "ABCDE"


class _Split(NamedTuple):
    """What is in one, for the manifest."""

    shard: packed_rows.Shard
    counts: list[SetCounts]
    bytes: int  # of text, as its tokens have it
    filled: int  # tokens of filling
    yardstick: float  # bits per byte


def prepare(
    mixture: MixtureConfig, data: DataConfig, tokenizer: Tokenizer, *, shown: bool = True
) -> epath.Path:
    """The folder of a mixture's rows, written if it is not there yet.

    Args:
      data: its row length and its folder.
      tokenizer: with all special tokens.
      shown: say on standard error how far it is.

    Raises:
      MissingDataError: a set that is not there, or not whole; with what to fetch.
      DataError: a row that is no conversation, too few of them for one row; with file and row.
    """
    with progress.waiting("looking at the conversations", shown=shown):
        opened = {split: [sets.OpenedSet(p) for p in mixture.specs(split)] for split in SPLITS}
        _check_apart(opened)
        marks = {split: [one.fingerprint() for one in found] for split, found in opened.items()}
    asked = dataclasses.asdict(mixture)
    rows = [[(p.kind, p.start, p.stop) for p in mixture.specs(split)] for split in SPLITS]
    options = [asked[key] for key in ("seed", "limit", "loss", "pack", "skip_broken")]
    text = tokenizer.to_json()
    key = digest_of(FORMAT_VERSION, VERSION, marks, rows, options, text, data.sequence_length)
    path = data.root / "datasets" / key
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
    found = {}
    with progress.waiting("rendering conversations", shown=shown) as doing, folders.writing(folder):
        for split in SPLITS:
            say = lambda text, split=split: doing.now(f"rendering conversations, {split}, {text}")
            found[split] = _write_split(rows, split, opened[split], mixture, data, renderer, say)
        if not found["train"].shard.rows:
            tokens = sum(one.tokens for one in found["train"].counts)
            raise DataError(
                f"config.data.sequence_length = {data.sequence_length}: the conversations for "
                f"train have {tokens} tokens, and a row needs {data.sequence_length + 1}: lower "
                "it, or give more conversations"
            )
        shards = {split: [one.shard] for split, one in found.items()}
        length = data.sequence_length + 1
        packed_rows.describe(rows, shards, length, dtype, masked=mixture.is_masked)
        tokenizer.save(folder / TOKENIZER)
        info = _info(found, mixture, data, tokenizer)
        manifest.write(folder, info, manifest.digests(folder))


def _write_split(
    folder: pathlib.Path,
    split: str,
    opened: Sequence[sets.OpenedSet],
    mixture: MixtureConfig,
    data: DataConfig,
    renderer: Renderer,
    say,
) -> _Split:
    tokenizer, row = renderer.tokenizer, data.sequence_length + 1
    dtype = dtype_of(tokenizer)
    limit = mixture.limit if mixture.pack == "stream" else min(mixture.limit, row)
    compressor = Compressor() if split == "validation" else None
    rendered = []
    for one in opened:
        spec, count = one.spec, one.count()
        counts = SetCounts(spec.key, spec.source, one.digest(), count)
        order = mixture_lib.shuffled(count, mixture.seed)[spec.start : spec.stop]
        told = lambda read, spec=spec, order=order: say(f"{spec.kind} {read:,} of {len(order):,}")
        common = (mixture, renderer, limit, dtype, compressor, told)
        rendered.append(RenderedSet(one, order, counts, *common))
        if counts.rejected:
            warn(f"{spec.where}: {counts.rejected:,} of {count:,} rows were left out")
    say("writing rows")
    token_bytes_V, num_bytes = tokenizer.token_bytes(), 0

    def conversations():
        nonlocal num_bytes
        for i, place in mixture_lib.mixed([len(one) for one in rendered], mixture.seed):
            if (one := rendered[i][place]) is not None:
                ids, mask = one
                num_bytes += int(token_bytes_V[ids].sum())
                yield ids, (mask if mixture.loss == "assistant" else np.ones_like(mask))

    path = folder / packed_rows.shard_name(split, 0, 1)
    masked = mixture.is_masked
    writer = packed_rows.ShardWriter(path, data.sequence_length, dtype, masked=masked)
    filled = 0
    try:
        if mixture.pack == "stream":
            packing.write_stream(writer, conversations())
        else:
            pack = packing.write_whole if mixture.pack == "whole" else packing.write_single
            filled = pack(writer, conversations(), row, tokenizer.bos_id)
        stays = split == "validation" and mixture.pack == "stream"
        shard = writer.close(tokenizer.bos_id if stays else None)
    finally:
        writer.abandon()
    yardstick = compressor.bits_per_byte() if compressor else 0.0
    return _Split(shard, [one.counts for one in rendered], num_bytes, filled, yardstick)


def _info(
    found: dict[str, _Split], mixture: MixtureConfig, data: DataConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(data),
        "mixture": dataclasses.asdict(mixture),
        "masked": mixture.is_masked,
        "tokenizer": {
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "sha256": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        },
        "dtype": dtype_of(tokenizer).name,
        "xz_bits_per_byte": found["validation"].yardstick,
        "splits": {
            split: {
                "documents": sum(c.read - c.rejected for c in one.counts),
                "bytes": one.bytes,
                "tokens": sum(c.tokens for c in one.counts),
                "rows": one.shard.rows,
                "filling": one.filled,
                "sets": [dataclasses.asdict(c) for c in one.counts],
            }
            for split, one in found.items()
        },
    }


def _check_apart(opened: dict[str, list[sets.OpenedSet]]) -> None:
    """Raises a DataError if a row is trained on and validated with."""
    for one in opened["train"]:
        for other in opened["validation"]:
            a, b = one.spec, other.spec
            same = a.source == b.source or {*map(os.fspath, one.files)} & {
                *map(os.fspath, other.files)
            }
            end = lambda spec: np.inf if spec.stop is None else spec.stop
            apart = a.source == b.source and (end(a) <= b.start or end(b) <= a.start)
            if same and not apart:
                raise DataError(
                    f"{b.where}: shares rows with {a.where}, which are trained on. Give other "
                    "files, or of the same ones other rows: SOURCE#0:900 and SOURCE#900:1000"
                )


def _check_letters(tokenizer: Tokenizer) -> None:
    """Warns if an answer's letter is another token than the same letter in its question."""
    odd = []
    for letter in _LETTERS:
        alone = tokenizer.encode(letter)
        if len(alone) != 1 or alone[0] not in tokenizer.encode(f"- a choice={letter}\n"):
            odd.append(letter)
    if odd:
        warn(
            f"the tokenizer reads {', '.join(odd)} otherwise in a question (- choice={odd[0]}) "
            "than as its answer: multiple choice is harder to learn"
        )
