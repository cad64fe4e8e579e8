"""Prepares a data set in three steps, the second of which any number of machines can share.

    preparation = begin(config)         # one process
    preparation.make(...)               # any number of processes, machines, Beam workers
    path = preparation.finish()         # one process, once all parts are made

The folder's name is a hash of everything that determines the rows. The folder (in a bucket: its
manifest) appears only once the data set is complete.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import time
from typing import Any

from etils import epath

from kvjax.data import (
    config as config_lib,
    folders,
    manifest,
    packed_rows,
    parts as parts_lib,
    pool,
    readers,
    sources,
    tokenized_part,
    vocabulary,
)
from kvjax.data.manifest import FORMAT_VERSION, MANIFEST, SPLITS, TOKENIZER, digest_of
from kvjax.data.partial_dataset import PartialDataset
from kvjax.data.parts import Part
from kvjax.data.tokenized_part import MAX_MESSAGES, Counts, ErrorCollector, Skipped
from kvjax.data.tokenizer import Tokenizer
from kvjax.foundation import json_text, progress, runtime
from kvjax.foundation.errors import DataError, warn

# Libraries whose versions determine the rows, besides this package's code.
_LIBRARIES = ("tokenizers", "tiktoken", "regex", "pyarrow", "array_record")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The inspected sources of a config, and the folder and the parts of the data set."""

    config: config_lib.DataConfig
    skip_broken: bool
    path: epath.Path
    sources: dict[str, list[tuple[str, str]]]  # config key: (name, hash) of each source
    parts: tuple[Part, ...] = ()  # empty if the data set is already prepared
    tokenizer_key: str = ""  # see `vocabulary.key`
    skipped: Skipped = Skipped()  # sources that cannot be opened

    @property
    def bytes(self) -> int:
        """Approximate stored size of all sources, in bytes."""
        return sum(part.bytes for part in self.parts)

    def partial_dataset(self) -> PartialDataset:
        """Returns the partial data set that the preparation writes to."""
        return PartialDataset(self.path, [part.digest for part in self.parts])


def inspect_sources(
    config: config_lib.DataConfig, *, skip_broken: bool = False, shown: bool = True
) -> Corpus:
    """Reads the first document of every source, and splits the sources into parts.

    Args:
      skip_broken: skip sources that cannot be read.
      shown: print progress to stderr if it takes seconds.

    Raises:
      FileNotFoundError: a source or tokenizer does not exist.
      ValueError: a source cannot be read, or a split is empty.
    """
    with progress.waiting("inspecting the sources", shown=shown) as doing:
        fingerprints = sources.fingerprints(config, doing.now)
        source = sources.fingerprint(config, fingerprints)
    extra = ("skip_broken",) if skip_broken else ()

    def path(key: str, *parts) -> epath.Path:
        name = digest_of(FORMAT_VERSION, source, key, config.sequence_length, *parts, *extra)
        return config.root / "datasets" / name

    key = vocabulary.key(config, source, 1)
    if folders.is_whole(path(key) / MANIFEST, manifest.read):
        # One part, or prepared by a version without parts.
        return Corpus(config, skip_broken, path(key), fingerprints)
    key = vocabulary.key(config, source, 2)  # the same for every number of parts above one
    target = path(key, parts_lib.part_bytes(config))
    if folders.is_whole(target / MANIFEST, manifest.read):
        return Corpus(config, skip_broken, target, fingerprints)
    errors = ErrorCollector(skip_broken)
    with progress.waiting("opening the sources", shown=shown):
        sources.check(config, ErrorCollector(skip_broken))
        if not skip_broken:
            for split in SPLITS:  # raises for an empty split before a tokenizer is trained
                next(sources.pieces(config, split))
        parts = tuple(parts_lib.parts(config, fingerprints, errors))
    if len(parts) == 1:
        key = vocabulary.key(config, source, 1)
        target = path(key)
    return Corpus(config, skip_broken, target, fingerprints, parts, key, errors.skipped())


class Preparation:
    """Makes the parts of a corpus, and completes the data set."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer):
        self.corpus, self.tokenizer = corpus, tokenizer
        self.partial = corpus.partial_dataset()

    def make(
        self, *, workers: int = 0, share: tuple[int, int] = (0, 1), shown: bool = True
    ) -> None:
        """Makes the parts that are not finished yet.

        Args:
          workers: number of processes; 0: one per core.
          share: (i, n) makes every n-th part from i on, as the i-th of n cooperating processes.
          shown: print progress to stderr.
        """
        corpus, (i, n) = self.corpus, share
        missing = [corpus.parts[part] for part in self.partial.missing() if part % n == i]
        progress_text = _ProgressText(
            sum(p.bytes for p in corpus.parts[i::n]), sum(p.bytes for p in missing)
        )
        with progress.waiting("tokenizing", shown=shown) as doing:
            pool.make(
                corpus.config,
                self.tokenizer,
                missing,
                self.partial,
                workers=workers or runtime.cores(),
                skip_broken=corpus.skip_broken,
                made=lambda part: doing.now(progress_text.text(part)),
            )

    def finish(self) -> epath.Path:
        """Writes the manifest and renames the folder, once all parts are made.

        Raises:
          DataError: a source has changed, there is too little text for one row, or a split is
            empty.
        """
        self._check_sources()
        config, results = self.corpus.config, self.partial.results()
        if missing := [i for i, result in enumerate(results) if result is None]:
            raise DataError(
                f"{os.fspath(self.partial.folder)}: {len(missing):,} of {len(results):,} parts are "
                f"missing (the first is {missing[0]}). Check that all workers see that folder, and "
                "run the same command again"
            )
        total = {split: sum((r.counts[split] for r in results), Counts()) for split in SPLITS}
        skipped = [self.corpus.skipped, *(result.skipped for result in results)]
        try:
            _check(config, total, [text for s in skipped for text in s.messages])
        except DataError:
            with contextlib.suppress(DataError):  # another process writes there
                self.partial.remove()  # resuming would fail in the same way
            raise
        shards = {
            split: [
                packed_rows.Shard(r.counts[split].rows, r.counts[split].file_bytes) for r in results
            ]
            for split in SPLITS
        }
        info = self._info(total) | (_skipped_info(skipped) if self.corpus.skip_broken else {})
        if nulls := sum(s.nulls for s in skipped):
            warn(f"{nulls:,} records have no text ({config.text_key!r} is null): skipped")
            info["nulls"] = nulls
        dtype = tokenized_part.dtype_of(self.tokenizer)
        with self.partial.work() as work, folders.writing(self.partial.folder):
            rows = work / manifest.ROWS / manifest.ROWS_VERSION
            rows.mkdir(parents=True)
            packed_rows.describe(rows, shards, config.sequence_length + 1, dtype)
            self.tokenizer.save(work / TOKENIZER)
            files = manifest.digests(work)
            for split, split_shards in shards.items():
                for i, shard in enumerate(split_shards):
                    if shard.rows:
                        name = packed_rows.shard_name(split, i, len(split_shards))
                        name = f"{manifest.ROWS}/{manifest.ROWS_VERSION}/{name}"
                        files[name] = {"bytes": shard.bytes}
            manifest.write(work, info, dict(sorted(files.items())))
            self.partial.finish(work, MANIFEST)
        return self.corpus.path

    def _check_sources(self) -> None:
        """Raises a DataError if sources have changed since they were inspected.

        First marks their parts as not made, since these may hold either version of the text.
        """
        before, now = self.corpus.sources, sources.fingerprints(self.corpus.config)
        if now == before:
            return
        changed = set()
        for key in now:
            changed |= {name for name, _ in set(before[key]) ^ set(now[key])}
        for part in self.corpus.parts:
            if any(piece.name in changed for piece in part.slices):
                self.partial.forget(part.index)
        key = next(key for key in now if now[key] != before[key])
        raise DataError(
            f"config.data.{key} = {getattr(self.corpus.config, key)!r}: changed since its "
            f"preparation began ({min(changed, default='their order')}), and some parts are "
            f"finished. Restore the sources, or remove {os.fspath(self.partial.folder)} to start "
            "over"
        )

    def _info(self, total: dict[str, Counts]) -> dict[str, Any]:
        held_out = total["validation"]
        return {
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(self.corpus.config),
            **tokenized_part.tokenizer_info(self.tokenizer),
            "xz_bits_per_byte": 8 * held_out.xz_bytes / held_out.bytes,
            "splits": {
                split: {
                    key: getattr(counts, key) for key in ("documents", "bytes", "tokens", "rows")
                }
                for split, counts in total.items()
            },
        }


def begin(corpus: Corpus, *, shown: bool = True) -> Preparation:
    """Trains or loads the tokenizer, and creates the folder that parts are written to.

    Raises:
      UserError: another version of the code began the preparation, the folder cannot be written, or
        there is too little text for the vocabulary.
    """
    on_error = ErrorCollector(corpus.skip_broken)
    tokenizer = vocabulary.tokenizer(
        corpus.config, corpus.tokenizer_key, corpus.parts, on_error, shown=shown
    )
    preparation = Preparation(corpus, tokenizer)
    plan = {
        "parts": len(corpus.parts),
        "tokenizer": digest_of(tokenizer.to_json()),
        "code": code(),
    }
    with folders.writing(corpus.path.parent):
        preparation.partial.open(plan)
    return preparation


@functools.cache
def code() -> str:
    """Returns a hash of the code that determines the rows: this package and its libraries."""
    files = [*sorted(pathlib.Path(__file__).parent.glob("*.py")), pathlib.Path(json_text.__file__)]
    content = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    versions = [(name, importlib.metadata.version(name)) for name in _LIBRARIES]
    return digest_of(content, versions)


def _check(config: config_lib.DataConfig, total: dict[str, Counts], skipped: Sequence[str]) -> None:
    for split, counts in total.items():
        if not counts.documents and not counts.bytes:
            raise DataError(
                f"config.data.source = {config.source!r}: the {split} split is empty once "
                f"unreadable records are skipped{': ' + skipped[0] if skipped else ''}"
            )
    if not total["train"].rows:
        raise readers.NoRowError(
            f"config.data.sequence_length = {config.sequence_length}: "
            f"the train split has {total['train'].tokens} tokens, and a row needs"
            f" sequence_length + 1 = {config.sequence_length + 1}: lower sequence_length, or"
            f" add text to source={config.source!r}."
        )


def _skipped_info(skipped: list[Skipped]) -> dict[str, Any]:
    messages = [text for s in skipped for text in s.messages][:MAX_MESSAGES]
    return {"left_out": {"count": sum(s.count for s in skipped), "first": messages}}


class _ProgressText:
    """Writes the text of a progress line: share done, rate and time left."""

    def __init__(self, total: int, missing: int):
        self._total, self._before, self._done = total, total - missing, 0
        self._begun = time.monotonic()

    def text(self, part: Part) -> str:
        """Counts one more finished part; returns the text of the progress line."""
        self._done += part.bytes
        rate = self._done / max(time.monotonic() - self._begun, 1e-9)
        left = (self._total - self._before - self._done) / max(rate, 1e-9)
        size = progress.size
        return (
            f"tokenizing {progress.bar((self._before + self._done) / max(1, self._total))}, "
            f"{size(self._before + self._done)} of {size(self._total)}, "
            f"{size(rate)}/s, {progress.duration(left)} left"
        )
