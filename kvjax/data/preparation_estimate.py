"""What preparing a corpus will take, from a sample of it: tokens, time, room.

A little text of several parts goes the whole way once, on one core; the rest is multiplication.
"""

from collections.abc import Iterator, Sequence
import concurrent.futures
import dataclasses
import lzma
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

_PADDING = 1 << 16  # bytes to which ArrayRecord fills a file up
SAMPLED_PARTS = 8
SAMPLED_CHARACTERS = 1 << 18  # of each
_COMPRESSED = 1 << 19  # bytes
_VOCABULARIES = (8192, 2048, 512)  # to try where a sample is too small for the one asked for


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a preparation takes.

    Attributes:
      parts, source_bytes: of the corpus, as it lies.
      text_bytes: UTF-8.
      tokens: with BOS, of both splits.
      row_bytes: of the files of rows.
      vocab_size: of the tokenizer that counted, which may have learned from the sample alone.
      reading, encoding, writing: seconds per byte of text, on one core.
      training: seconds per byte of text for learning a tokenizer, on all cores; 0: it is there.
    """

    parts: int
    source_bytes: int
    text_bytes: float
    tokens: float
    row_bytes: float
    vocab_size: int
    reading: float
    encoding: float
    writing: float
    training: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes of text a second, on one core."""
        return 1 / (self.reading + self.encoding + self.writing)

    def seconds(self, workers: int) -> float:
        """How long the whole preparation takes with so many processes, each on a core."""
        learned = min(self.text_bytes, vocabulary.TOKENIZER_CHARACTERS)
        # The last parts leave some processes without work.
        rounds = -(-self.parts // workers) / self.parts
        return self.training * learned + self.text_bytes / self.rate * rounds


def estimate(corpus: Corpus, workers: int) -> Estimate:
    """What a corpus takes, from some of its parts; a few seconds.

    Args:
      workers: that would work side by side here.
    """
    side_by_side = min(workers, runtime.cores())
    config, parts = corpus.config, corpus.parts
    step = max(1, len(parts) // SAMPLED_PARTS)
    sampled = parts[step // 2 :: step][:SAMPLED_PARTS]
    begun = time.perf_counter()
    texts = [text for part in sampled for text in _texts(corpus, part)]
    reading = time.perf_counter() - begun
    if not any(texts):
        raise DataError(
            f"{_named(corpus)}: has no text that can be read in the {len(sampled)} parts that were "
            "sampled. Is config.data.text_key right?"
        )
    tokenizer, training = _tokenizer(corpus, texts)
    with concurrent.futures.ThreadPoolExecutor(side_by_side) as pool:  # cores share their memory
        encoding = float("inf")
        for _ in range(4):  # the first text of each thread takes longer, and others may work
            begun = time.perf_counter()
            encoded, *_ = pool.map(tokenizer.encode_batch, [texts] * side_by_side)
            encoding = min(encoding, time.perf_counter() - begun)
    with tempfile.TemporaryDirectory(prefix="kvjax-") as folder:
        path, dtype = pathlib.Path(folder) / "rows", tokenized_part.dtype_of(tokenizer)
        writer = packed_rows.ShardWriter(path, config.sequence_length, dtype)
        begun = time.perf_counter()
        for ids in encoded:
            writer.add(ids.astype(dtype))
        shard = writer.close(tokenizer.bos_id)
        writing = time.perf_counter() - begun
    content = "".join(texts).encode()
    text_bytes = len(content)
    writing += _measuring(content) * _held_out(corpus)
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


def _measuring(content: bytes) -> float:
    """Seconds for what is said of validation text: how well xz compresses it."""
    begun = time.perf_counter()
    lzma.compress(content[:_COMPRESSED], preset=tokenized_part.XZ_PRESET)
    return (time.perf_counter() - begun) * len(content) / min(_COMPRESSED, len(content))


def _held_out(corpus: Corpus) -> float:
    """Which share of the text is for validation."""
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
    """The corpus's tokenizer, or one like it; and seconds of learning, on so much text."""
    config, key = corpus.config, corpus.tokenizer_key
    if config.tokenizer != "bpe" or vocabulary.is_trained(config, key):
        made = vocabulary.tokenizer(config, key, corpus.parts, ErrorCollector(True), shown=False)
        return tokenizer_lib.from_json(made.to_json(), config.tokenizer, threads=1), 0.0
    for size in (config.vocab_size, *(s for s in _VOCABULARIES if s < config.vocab_size)):
        begun = time.perf_counter()
        try:
            made = tokenizer_lib.train(texts, size)
        except DataError:
            continue
        seconds = time.perf_counter() - begun
        return tokenizer_lib.from_json(made.to_json(), config.tokenizer, threads=1), seconds
    return tokenizer_lib.byte_tokenizer(), 0.0


def room(corpus: Corpus, found: Estimate, workers: int) -> list[tuple[str, float, float]]:
    """Where bytes are needed: (folder, needed, free there); a bucket's are not known."""
    target, needed = corpus.path.parent, found.row_bytes * _missing(corpus)
    if not in_bucket(target):
        return [(os.fspath(target), needed, _free(target))]
    a_part = found.row_bytes / found.parts
    temporary = epath.Path(tempfile.gettempdir())
    return [
        (os.fspath(target), needed, float("inf")),
        (os.fspath(temporary), a_part * workers, _free(temporary)),
    ]


def _missing(corpus: Corpus) -> float:
    """The share of the parts that is not made yet."""
    return len(corpus.partial_dataset().missing()) / len(corpus.parts)


def check(corpus: Corpus, workers: int, hours: float | None, *, shown: bool) -> None:
    """Says what a large corpus will take, before it does.

    Args:
      hours: that it may take; None: as many as it does.

    Raises:
      UserError: it takes longer, or more room than there is.
    """
    if corpus.bytes <= parts_lib.part_bytes(corpus.config):
        return  # a minute
    with progress.waiting("sampling the sources", shown=shown):
        found = estimate(corpus, workers)
    for folder, needed, free in room(corpus, found, workers):
        if needed > free:
            raise UserError(
                f"{folder} has {progress.size(free)} free, and preparing {_named(corpus)} needs "
                f"about {progress.size(needed)} there: make room, or give config.data.directory "
                "(or $KVJAX_CACHE) where there is some"
            )
    seconds = found.seconds(workers) * _missing(corpus)
    if hours is not None and seconds > 3600 * hours:
        raise UserError(
            f"preparing {_named(corpus)} takes about {progress.duration(seconds)} here, with "
            f"{workers} processes: {found.tokens / 1e9:,.1f}B tokens from "
            f"{progress.size(found.text_bytes)} of text. Prepare it beforehand, on more cores or a "
            f"cluster: `{corpus.config.command()}` (--plan says more), or let it take its time "
            f"here: --prepare_hours={seconds / 3600 * 1.5:.0f}"
        )


def _named(corpus: Corpus) -> str:
    return f"config.data.source = {corpus.config.source!r}"


def _free(folder: epath.Path) -> float:
    there = pathlib.Path(folder)
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
