"""Making a data set: begun, its parts made wherever that is, and finished.

    preparation = begin(config)         # one process, or one after the other
    preparation.make(...)               # any number of processes, machines, Beam workers
    path = preparation.finish()         # one process, when all is made

The folder of a data set is named by a hash of all that decides its content, and appears whole or
not at all (in a bucket its manifest does).
"""

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import time
from typing import Any, NamedTuple

from etils import epath

from kvjax.data import (
    config as config_lib,
    folders,
    manifest,
    packed_rows,
    partial_dataset as partial_dataset_lib,
    parts as parts_lib,
    pool,
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

# What decides the rows besides this code.
_LIBRARIES = ("tokenizers", "tiktoken", "regex", "pyarrow", "array_record")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a config names, looked at: where its data set is or will be, and of which parts."""

    config: config_lib.DataConfig
    skip_broken: bool
    path: epath.Path
    sources: dict[str, list[tuple[str, str]]]  # by key, name and hash of each
    parts: tuple[Part, ...] = ()  # none: the data set is there
    tokenizer_key: str = ""
    left_out: Skipped = Skipped()  # sources that cannot be opened

    @property
    def bytes(self) -> int:
        """The size of all sources as they are stored, roughly."""
        return sum(part.bytes for part in self.parts)

    def partial_dataset(self) -> PartialDataset:
        """Where it is made."""
        return PartialDataset(self.path, [part.digest for part in self.parts])


def inspect_sources(
    config: config_lib.DataConfig, *, skip_broken: bool = False, shown: bool = True
) -> Corpus:
    """Looks at every source, and reads the first document of each.

    Args:
      skip_broken: leave out what cannot be read.
      shown: say on standard error how far it is, where it takes seconds.

    Raises:
      FileNotFoundError: a source or tokenizer that isn't there.
      ValueError: a source that can't be read, an empty split.
    """
    with progress.waiting("looking at the sources", shown=shown) as doing:
        found = sources.fingerprints(config, doing.now)
        source = sources.fingerprint(config, found)
    extra = ("skip_broken",) if skip_broken else ()

    def path(key: str, *parts) -> epath.Path:
        name = digest_of(FORMAT_VERSION, source, key, config.sequence_length, *parts, *extra)
        return config.root / "datasets" / name

    key = vocabulary.key(config, source, 1)
    if folders.is_whole(path(key) / MANIFEST, manifest.read):
        return Corpus(config, skip_broken, path(key), found)  # of one part, or of before parts
    key = vocabulary.key(config, source, 2)  # of any number of parts above one
    found_path = path(key, parts_lib.part_bytes(config))
    if folders.is_whole(found_path / MANIFEST, manifest.read):
        return Corpus(config, skip_broken, found_path, found)
    left_out = ErrorCollector(skip_broken)
    with progress.waiting("opening the sources", shown=shown):
        sources.check(config, ErrorCollector(skip_broken))
        if not skip_broken:
            for split in SPLITS:  # An empty one is told before a tokenizer is trained.
                next(sources.pieces(config, split))
        parts = tuple(parts_lib.parts(config, found, left_out))
    if len(parts) == 1:
        key = vocabulary.key(config, source, 1)
        found_path = path(key)
    return Corpus(config, skip_broken, found_path, found, parts, key, left_out.said())


class Preparation:
    """The making of a corpus's rows."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer):
        self.corpus, self.tokenizer = corpus, tokenizer
        self.partial = corpus.partial_dataset()

    def make(
        self, *, workers: int = 0, share: tuple[int, int] = (0, 1), shown: bool = True
    ) -> None:
        """Makes the parts that are not done yet, in this process or in several.

        Args:
          workers: processes; 0: one for each core, and this one alone where that is one.
          share: (i, n): the i-th of n processes that make them together.
          shown: say on standard error how far it is.
        """
        corpus, (i, n) = self.corpus, share
        missing = [corpus.parts[part] for part in self.partial.missing() if part % n == i]
        so_far = _SoFar(sum(p.bytes for p in corpus.parts[i::n]), sum(p.bytes for p in missing))
        with progress.waiting("tokenizing", shown=shown) as doing:
            pool.make(
                corpus.config,
                self.tokenizer,
                missing,
                self.partial,
                workers=workers or runtime.cores(),
                skip_broken=corpus.skip_broken,
                made=lambda part: doing.now(so_far.text(part)),
            )

    def finish(self) -> epath.Path:
        """Writes the manifest and gives the folder its name, once all parts are made.

        Raises:
          DataError: a source changed meanwhile; too little text for one row; an empty split.
        """
        config, made = self.corpus.config, self.partial.all_made()
        if sources.fingerprints(config) != self.corpus.sources:
            self._forget_changed()
            raise DataError(_changed(self.partial.folder, self.corpus.sources, config))
        if missing := [i for i, found in enumerate(made) if found is None]:
            raise DataError(
                f"{os.fspath(self.partial.folder)}: {len(missing):,} of {len(made):,} parts are "
                f"not made (the first is {missing[0]}): do all workers see that folder? Run the "
                "same command again"
            )
        total = {split: sum((m.counts[split] for m in made), Counts()) for split in SPLITS}
        left_out = [self.corpus.left_out, *(m.left_out for m in made)]
        try:
            _check(config, total, [text for left in left_out for text in left.first])
        except DataError:
            with contextlib.suppress(DataError):  # somebody is at work there
                self.partial.remove()  # nobody would go on with it
            raise
        shards = {
            split: [
                packed_rows.Shard(m.counts[split].rows, m.counts[split].file_bytes) for m in made
            ]
            for split in SPLITS
        }
        info = self._info(total) | (_said(left_out) if self.corpus.skip_broken else {})
        if nulls := sum(left.nulls for left in left_out):
            warn(f"{nulls:,} records have no text ({config.text_key!r} is null): skipped")
            info["nulls"] = nulls
        dtype = tokenized_part.dtype_of(self.tokenizer)
        with self.partial.work() as work, folders.writing(self.partial.folder):
            rows = work / manifest.ROWS / manifest.ROWS_VERSION
            rows.mkdir(parents=True)
            packed_rows.describe(rows, shards, config.sequence_length + 1, dtype)
            self.tokenizer.save(work / TOKENIZER)
            files = manifest.digests(work)
            for split, found in shards.items():
                for i, shard in enumerate(found):
                    if shard.rows:
                        name = packed_rows.shard_name(split, i, len(found))
                        name = f"{manifest.ROWS}/{manifest.ROWS_VERSION}/{name}"
                        files[name] = {"bytes": shard.bytes}
            manifest.write(work, info, dict(sorted(files.items())))
            self.partial.finish(work, MANIFEST)
        return self.corpus.path

    def _forget_changed(self) -> None:
        """Parts of sources that changed may have been made of either text: they are made again."""
        before, now = self.corpus.sources, sources.fingerprints(self.corpus.config)
        changed = {name for key in now for name in _other(before[key], now[key])}
        for part in self.corpus.parts:
            if any(piece.name in changed for piece in part.slices):
                self.partial.forget(part.index)

    def _info(self, total: dict[str, Counts]) -> dict[str, Any]:
        tokenizer, held_out = self.tokenizer, total["validation"]
        return {
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(self.corpus.config),
            "tokenizer": {
                "vocab_size": tokenizer.vocab_size,
                "bos_id": tokenizer.bos_id,
                "sha256": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
            },
            "dtype": tokenized_part.dtype_of(tokenizer).name,
            "xz_bits_per_byte": 8 * held_out.xz_bytes / held_out.bytes,
            "splits": {
                split: {
                    key: getattr(found, key) for key in ("documents", "bytes", "tokens", "rows")
                }
                for split, found in total.items()
            },
        }


def begin(corpus: Corpus, *, shown: bool = True) -> Preparation:
    """Makes the tokenizer, and the folder that parts are written to.

    Raises:
      UserError: the sources changed since an earlier attempt; other code began it; a folder that
        cannot be written; too little text for the vocabulary.
    """
    earlier = _earlier(corpus)
    on_error = ErrorCollector(corpus.skip_broken)
    tokenizer = vocabulary.tokenizer(
        corpus.config, corpus.tokenizer_key, corpus.parts, on_error, shown=shown
    )
    preparation = Preparation(corpus, tokenizer)
    plan = _plan(corpus, tokenizer)
    with folders.writing(corpus.path.parent):
        preparation.partial.open(plan)
        for folder, theirs, is_mended in earlier:
            skip = corpus.skip_broken
            if all(theirs.get(key) == plan[key] for key in ("tokenizer", "code")):
                count = preparation.partial.adopt(folder, left_out=skip, shown=shown)
                if count and shown:
                    warn(f"{count:,} parts stay that {os.fspath(folder)} had of the same text")
            elif is_mended:
                preparation.partial.discard(folder)  # of a vocabulary learned from other text
    return preparation


def _plan(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "config": _asked(corpus.config),
        "skip_broken": corpus.skip_broken,
        "sources": {key: [list(pair) for pair in found] for key, found in corpus.sources.items()},
        "parts": len(corpus.parts),
        "left_out": list(corpus.left_out.first),
        "tokenizer": digest_of(tokenizer.to_json()),
        "code": code(),
    }


def _asked(config: config_lib.DataConfig) -> dict[str, Any]:
    asked = dataclasses.asdict(config)
    return {key: value for key, value in asked.items() if key != "directory"}


@functools.cache
def code() -> str:
    """A hash of the code that decides the rows: this package's and its libraries' versions."""
    files = [*sorted(pathlib.Path(__file__).parent.glob("*.py")), pathlib.Path(json_text.__file__)]
    content = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    versions = [(name, importlib.metadata.version(name)) for name in _LIBRARIES]
    return digest_of(content, versions)


class _Earlier(NamedTuple):
    """An earlier attempt at the same config, with or without what is broken."""

    folder: epath.Path
    plan: dict[str, Any]
    is_mended: bool  # since then; it will not go on


def _earlier(corpus: Corpus) -> list[_Earlier]:
    """Earlier attempts at the same config.

    Raises:
      DataError: one of them found other sources, and not because what was broken was mended.
    """
    found, own, asked = [], corpus.partial_dataset().folder, _asked(corpus.config)
    for folder, plan in partial_dataset_lib.plans(corpus.path.parent):
        if folder == own or plan.get("config") != asked:
            continue
        there = {k: [tuple(p) for p in pairs] for k, pairs in plan["sources"].items()}
        if not any(dict(there[k]).keys() & dict(p).keys() for k, p in corpus.sources.items()):
            continue  # of other files that the same pattern names
        changed = [name for k in there for name in _other(there[k], corpus.sources[k])]
        if not partial_dataset_lib.were_broken(folder, changed):
            raise DataError(_changed(folder, there, corpus.config))
        found.append(_Earlier(folder, plan, is_mended=bool(changed)))
    return found


def _other(before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]) -> list[str]:
    """The names of what one has otherwise than the other, or not at all."""
    before, after = dict(before), dict(after)
    return sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))


def _changed(folder: epath.Path, there: dict, config: config_lib.DataConfig) -> str:
    """What to say of sources that are not what a preparation began with."""
    now = sources.fingerprints(config)
    key = next((key for key in now if now[key] != there[key]), "source")
    names = _other(there[key], now[key])
    which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"config.data.{key} = {getattr(config, key)!r}: changed since its preparation was begun "
        f"({which or 'their order'}), and parts of it are done. Put back what it was, or remove "
        f"{os.fspath(folder)} to begin anew"
    )


def _check(
    config: config_lib.DataConfig, total: dict[str, Counts], left_out: Sequence[str]
) -> None:
    for split, found in total.items():
        if not found.documents and not found.bytes:
            raise DataError(
                f"config.data.source = {config.source!r}: the {split} split is empty once what "
                f"cannot be read is left out{': ' + left_out[0] if left_out else ''}"
            )
    if not total["train"].rows:
        raise DataError(
            f"config.data.sequence_length = {config.sequence_length}: "
            f"the train split has {total['train'].tokens} tokens, and a row needs"
            f" sequence_length + 1 = {config.sequence_length + 1}: lower sequence_length, or"
            f" give more text in source={config.source!r}."
        )


def _said(left_out: list[Skipped]) -> dict[str, Any]:
    first = [text for left in left_out for text in left.first][:MAX_MESSAGES]
    return {"left_out": {"count": sum(left.count for left in left_out), "first": first}}


class _SoFar:
    """How far it is, how fast, and how long it will take from here."""

    def __init__(self, total: int, missing: int):
        self._total, self._before, self._done = total, total - missing, 0
        self._begun = time.monotonic()

    def text(self, part: Part) -> str:
        """Counts one more part as done; returns the text of a progress line."""
        self._done += part.bytes
        rate = self._done / max(time.monotonic() - self._begun, 1e-9)
        left = (self._total - self._before - self._done) / max(rate, 1e-9)
        size = progress.size
        return (
            f"tokenizing {progress.bar((self._before + self._done) / max(1, self._total))}, "
            f"{size(self._before + self._done)} of {size(self._total)}, "
            f"{size(rate)}/s, {progress.duration(left)} left"
        )
