"""Opens the sets of a mixture: files, number of rows, rows as conversations."""

from collections.abc import Iterator
import hashlib
import json
import os
import re
from typing import Any

from etils import epath
import numpy as np

from kvjax.conversation import questions, synthetic
from kvjax.conversation.mixture import SetSpec
from kvjax.data import matching, records, source_kinds, tfds_sets
from kvjax.foundation.errors import DataError, MissingDataError, warn

EMBEDDED = "embedded"  # the synthetic conversations
_HUB = "https://huggingface.co/datasets"
# The folders to download, and the folder to put them in.
_PUBLISHED = {
    "smoltalk": (f"data/ of {_HUB}/HuggingFaceTB/smol-smoltalk", "~/data/smol-smoltalk/data/"),
    "mmlu": (f"auxiliary_train/ and all/ of {_HUB}/cais/mmlu", "~/data/mmlu/"),
    "gsm8k": (f"main/ of {_HUB}/openai/gsm8k", "~/data/gsm8k/main/"),
    "arc": (f"ARC-Easy/ and ARC-Challenge/ of {_HUB}/allenai/ai2_arc", "~/data/ai2_arc/"),
}
# Numbers of rows in the published splits.
_PUBLISHED_ROWS = {
    ("train", "smoltalk"): (460_341,),
    ("train", "mmlu"): (99_842,),
    ("train", "gsm8k"): (7_473,),
    ("train", "arc"): (2_251, 1_119),  # Easy, Challenge
    ("validation", "smoltalk"): (24_229,),
    ("validation", "mmlu"): (14_042,),
    ("validation", "gsm8k"): (1_319,),
    ("validation", "arc"): (2_376, 1_172),
}
_SHARD = re.compile(r"(.*-)\d{5}-of-(\d{5})(\..*)")


class OpenedSet:
    """An opened set of a mixture: its rows, their number and their hashes.

    Raises:
      MissingDataError: its files are missing or incomplete; the message says what to download.
    """

    def __init__(self, spec: SetSpec):
        self.spec = spec
        self.is_tfds = spec.source.startswith(tfds_sets.PREFIX)
        self.is_synthetic = spec.kind == "conversations" and spec.source == EMBEDDED
        self.files = [] if self.is_tfds or self.is_synthetic else _files(spec)
        if self.is_tfds:
            name, split = tfds_sets.split_name(spec.source)
            self._split = split or spec.split
            try:
                self._builder = tfds_sets.builder(name)
            except DataError as error:
                raise DataError(f"{spec.where}: {error}") from error
            if self._split not in self._builder.info.splits:
                raise DataError(
                    f"{spec.where}: has no split {self._split!r}; it has "
                    f"{', '.join(self._builder.info.splits)}"
                )

    @property
    def identity(self) -> str:
        """The rows that numbers refer to: a pattern of files, or a split of a TFDS set."""
        if self.is_tfds:
            return f"{self._builder.info.full_name}#{self._split}"
        return self.spec.source

    def fingerprint(self) -> str:
        """Returns a text that changes when the rows do, without reading large files in full."""
        if self.is_tfds:
            info = self._builder.info
            return f"{info.full_name} {self._split} {info.splits[self._split].shard_lengths}"
        if self.is_synthetic:
            return hashlib.sha256(json.dumps(synthetic.conversations()).encode()).hexdigest()
        return " ".join(map(source_kinds.file_hash, self.files))

    def digest(self) -> str:
        """Returns the SHA-256 of all files, read in full; without files, the fingerprint."""
        return records.digest(self.files) if self.files else self.fingerprint()

    def count(self) -> int:
        """Returns the number of rows; warns if it differs from the published set's.

        Raises:
          DataError: too few rows for the spec's range, or none.
        """
        spec = self.spec
        if self.is_tfds:
            count = self._builder.info.splits[self._split].num_examples
        elif self.is_synthetic:
            count = synthetic.COUNT
        else:
            count = sum(map(records.count, self.files))
        known = _PUBLISHED_ROWS.get((spec.split, spec.kind), ())
        if known and count not in known:
            numbers = " or ".join(f"{number:,}" for number in known)
            warn(f"{spec.where}: has {count:,} rows; the published set has {numbers}")
        if count < (spec.stop or spec.start + 1):
            wanted = f"{spec.stop:,}" if spec.stop else f"more than {spec.start:,}"
            raise DataError(
                f"{spec.where}: has {count:,} rows, and {wanted} are needed: {_advice(spec)}, or "
                "lower the range"
            )
        return count

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yields (file and row number, row)."""
        if self.is_tfds:
            yield from self._examples()
        if self.is_synthetic:
            for i, row in enumerate(synthetic.conversations()):
                yield f"{EMBEDDED} conversation {i}", row
        for file in self.files:
            yield from records.read(file)

    def _examples(self) -> Iterator[tuple[str, dict]]:
        features = self._builder.info.features
        for place, example in records.tfds_rows(self._builder, self._split, self.spec.source):
            try:
                yield place, _plain(example, features)
            except UnicodeDecodeError as error:
                raise DataError(f"{place} is not UTF-8: {error}") from error


def conversation(kind: str, row, place: str) -> dict:
    """Parses a row as a conversation.

    Raises:
      DataError: the row is of another form.
    """
    if kind in ("smoltalk", "conversations"):
        return questions.smoltalk(row, place)
    if kind == "gsm8k":
        return questions.gsm8k(row, place)
    parse = questions.arc if kind == "arc" else questions.mmlu
    parse = questions.mmlu_csv if kind == "mmlu" and isinstance(row, list) else parse
    item = parse(row, place)
    return questions.conversation(questions.multiple_choice(item), item.answer)


def _plain(value, feature):
    """Converts a TFDS value to Python: bytes to text, class numbers to names, arrays to lists."""
    if isinstance(value, dict):
        # TFDS stores a sequence of dicts as a dict of sequences.
        inner = getattr(feature, "feature", feature)
        return {key: _plain(item, inner[key]) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        inner = getattr(feature, "feature", feature)
        return [_plain(item, inner) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    scalar = value.item() if hasattr(value, "item") else value
    if isinstance(scalar, bytes):
        return scalar.decode()
    return feature.int2str(scalar) if hasattr(feature, "int2str") else scalar


def _files(spec: SetSpec) -> list[epath.Path]:
    """Returns the files of a path, folder or glob, after checking that no shard is missing."""
    files = matching.files(spec.source, records.SUFFIXES, spec.where, f": {_advice(spec)}")
    for file in files:
        if shard := _SHARD.fullmatch(file.name):
            _check_shards(spec, files, file, *shard.groups())
    return files


def _check_shards(spec: SetSpec, files, file: epath.Path, prefix, count, suffix) -> None:
    present = {other.name for other in files if other.parent == file.parent}
    expected = [f"{prefix}{i:05}-of-{count}{suffix}" for i in range(int(count))]
    if missing := [name for name in expected if name not in present]:
        raise MissingDataError(
            f"{spec.where}: {len(missing)} of {int(count)} shards are missing in "
            f"{os.fspath(file.parent)}, the first is {missing[0]}: {_advice(spec)}"
        )


def _advice(spec: SetSpec) -> str:
    if spec.kind not in _PUBLISHED:
        return 'give a file with lines of {"messages": [{"role", "content"}, ...]}'
    folders, target = _PUBLISHED[spec.kind]
    return f"download the folders {folders} to {target}, or give another path"
