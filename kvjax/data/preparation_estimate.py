"""Estimates how many tokens, how much time and disk space the preparation of a corpus needs.

Reads, tokenizes and writes some text of up to 8 parts, and extrapolates.
"""

from collections.abc import Iterator, Sequence
import concurrent.futures
import dataclasses
import lzma
import math
import os
import pathlib
import shutil
import tempfile
import time

from etils import epath

from kvjax.data import (
    packed_rows,
    parts as parts_lib,
    sources,
    tokenized_part,
    tokenizer as tokenizer_lib,
    vocabulary,
)
from kvjax.data.manifest import SPLITS
from kvjax.data.preparation import Corpus
from kvjax.data.tokenized_part import ErrorCollector
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation import progress, runtime
from kvjax.foundation.errors import DataError, UserError
from kvjax.foundation.files import in_bucket

_PADDING = 1 << 16  # ArrayRecord pads files to a multiple of this many bytes
SAMPLED_PARTS = 8
SAMPLED_CHARACTERS = 1 << 18  # per part
_TIMED_BYTES = 1 << 19  # bytes of text that xz is timed on
_VOCABULARIES = (8192, 2048, 512)  # sizes to try if the sample is too small for the config's


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated cost of a preparation; times are in seconds per byte of text."""

    parts: int
    source_bytes: int  # stored size of the sources
    text_bytes: float  # size of the text in UTF-8
    tokens: float  # tokens of both splits, with BOS
    row_bytes: float  # size of the files of rows
    vocab_size: int  # size of the sample's tokenizer, which may be trained on the sample alone
    reading: float  # time on one core
    encoding: float  # time on one core
    writing: float  # time on one core
    training: float = 0.0  # time to train a tokenizer on all cores; 0 if it exists

    @property
    def rate(self) -> float:
        """Bytes of text per second, on one core."""
        return 1 / (self.reading + self.encoding + self.writing)

    def seconds(self, workers: int) -> float:
        """Returns the time of the whole preparation, with one core for each worker."""
        training_bytes = min(self.text_bytes, vocabulary.TOKENIZER_CHARACTERS)
        # Parts are made in rounds of `workers`; in the last one some workers are idle.
        rounds = -(-self.parts // workers) / self.parts
        return self.training * training_bytes + self.text_bytes / self.rate * rounds


def estimate(corpus: Corpus, workers: int) -> Estimate:
    """Estimates a corpus from some of its parts; takes a few seconds.

    Args:
      workers: number of processes, which share this machine's cores and memory bandwidth.
    """
    threads = min(workers, runtime.cores())
    config, parts = corpus.config, corpus.parts
    step = max(1, len(parts) // SAMPLED_PARTS)
    sampled = parts[step // 2 :: step][:SAMPLED_PARTS]
    start = time.perf_counter()
    texts = [text for part in sampled for text in _texts(corpus, part)]
    reading = time.perf_counter() - start
    if not any(texts):
        raise DataError(
            f"{_source_text(corpus)}: the {len(sampled)} sampled parts have no readable text. Is "
            "config.data.text_key right?"
        )
    tokenizer, training = _tokenizer(corpus, texts)
    # Uses as many threads as workers, since cores compete for memory bandwidth. Takes the fastest
    # of four rounds, since the first warms up.
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        encoding = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            encoded, *_ = pool.map(tokenizer.encode_batch, [texts] * threads)
            encoding = min(encoding, time.perf_counter() - start)
    with tempfile.TemporaryDirectory(prefix="kvjax-") as folder:
        path, dtype = pathlib.Path(folder) / "rows", tokenized_part.dtype_of(tokenizer)
        writer = packed_rows.ShardWriter(path, config.sequence_length, dtype)
        start = time.perf_counter()
        for ids in encoded:
            writer.add(ids.astype(dtype))
        shard = writer.close(tokenizer.bos_id)
        writing = time.perf_counter() - start
    content = "".join(texts).encode()
    text_bytes = len(content)
    writing += _xz_seconds(content) * _held_out(corpus)
    tokens = sum(len(ids) for ids in encoded) + len(texts)
    density = sources.density(config, [piece for part in sampled for piece in part.slices])
    whole = corpus.bytes * density
    return Estimate(
        parts=len(parts),
        source_bytes=corpus.bytes,
        text_bytes=whole,
        tokens=whole * tokens / text_bytes,
        row_bytes=whole * shard.bytes / text_bytes + len(parts) * len(SPLITS) * _PADDING,
        vocab_size=tokenizer.vocab_size,
        reading=reading / text_bytes,
        encoding=encoding / text_bytes,
        writing=writing / text_bytes,
        training=training / text_bytes,
    )


def _xz_seconds(content: bytes) -> float:
    """Returns the seconds that xz takes to compress a text, as it does with validation text."""
    start = time.perf_counter()
    lzma.compress(content[:_TIMED_BYTES], preset=tokenized_part.XZ_PRESET)
    return (time.perf_counter() - start) * len(content) / min(_TIMED_BYTES, len(content))


def _held_out(corpus: Corpus) -> float:
    """Returns the share of the text that is for validation."""
    if not corpus.config.validation_source:
        return corpus.config.validation_fraction
    pieces = [piece for part in corpus.parts for piece in part.slices]
    held_out = sum(piece.bytes for piece in pieces if piece.key == "validation_source")
    return held_out / max(1, corpus.bytes)


def _texts(corpus: Corpus, part: parts_lib.Part) -> Iterator[str]:
    characters = 0
    for _, piece in parts_lib.split_pieces(corpus.config, part, ErrorCollector(True)):
        yield piece.text
        characters += len(piece.text)
        if characters >= SAMPLED_CHARACTERS:
            return


def _tokenizer(corpus: Corpus, texts: Sequence[str]) -> tuple[Tokenizer, float]:
    """Returns the corpus's tokenizer and 0; or one trained on `texts` and the seconds that took.

    The vocabulary of the latter may be smaller than the config's.
    """
    config, key = corpus.config, corpus.tokenizer_key
    if config.tokenizer != "bpe" or vocabulary.is_trained(config, key):
        trained = vocabulary.tokenizer(config, key, corpus.parts, ErrorCollector(True), shown=False)
        return tokenizer_lib.from_json(trained.to_json(), config.tokenizer, threads=1), 0.0
    for size in (config.vocab_size, *(s for s in _VOCABULARIES if s < config.vocab_size)):
        start = time.perf_counter()
        try:
            trained = tokenizer_lib.train(texts, size)
        except DataError:
            continue
        seconds = time.perf_counter() - start
        return tokenizer_lib.from_json(trained.to_json(), config.tokenizer, threads=1), seconds
    return tokenizer_lib.byte_tokenizer(), 0.0


def room(corpus: Corpus, cost: Estimate, workers: int) -> list[tuple[str, float, float]]:
    """Returns (folder, bytes needed, bytes free) for every folder; a bucket has infinite space."""
    target, needed = corpus.path.parent, cost.row_bytes * _missing(corpus)
    if not in_bucket(target):
        return [(os.fspath(target), needed, _free(target))]
    part_bytes = cost.row_bytes / cost.parts
    temporary = epath.Path(tempfile.gettempdir())
    return [
        (os.fspath(target), needed, float("inf")),
        (os.fspath(temporary), part_bytes * workers, _free(temporary)),
    ]


def _missing(corpus: Corpus) -> float:
    """Returns the share of parts that are not finished yet."""
    return len(corpus.partial_dataset().missing()) / len(corpus.parts)


def check(corpus: Corpus, workers: int, hours: float | None, *, shown: bool) -> None:
    """Raises a UserError if a large corpus needs too much time or disk space.

    Args:
      hours: most hours that the preparation may take; None: no limit.
    """
    if corpus.bytes <= parts_lib.part_bytes(corpus.config):
        return  # one part: about a minute
    with progress.waiting("sampling the sources", shown=shown):
        cost = estimate(corpus, workers)
    for folder, needed, free in room(corpus, cost, workers):
        if needed > free:
            raise UserError(
                f"{folder} has {progress.size(free)} free, and preparing {_source_text(corpus)} "
                f"needs about {progress.size(needed)} there: free some space, or set "
                "config.data.directory (or $KVJAX_CACHE) to another disk"
            )
    seconds = cost.seconds(workers) * _missing(corpus)
    if hours is not None and seconds > 3600 * hours:
        raise UserError(
            f"preparing {_source_text(corpus)} takes about {progress.duration(seconds)} here, with "
            f"{workers} processes: {cost.tokens / 1e9:,.1f}B tokens from "
            f"{progress.size(cost.text_bytes)} of text. Prepare it beforehand, on more cores or a "
            f"cluster: `{corpus.config.command()}` (--plan prints details), or raise the limit "
            f"here: --prepare_hours={math.ceil(seconds / 3600 * 1.5)}"
        )


def _source_text(corpus: Corpus) -> str:
    return f"config.data.source = {corpus.config.source!r}"


def _free(folder: epath.Path) -> float:
    existing = pathlib.Path(folder)
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free
