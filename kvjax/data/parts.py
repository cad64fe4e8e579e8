"""Splits a corpus into an ordered list of parts, each tokenized and packed independently.

A part consists of consecutive slices. A slice is a whole file, or a range of a large one: of bytes
(text, JSON lines), row groups (Parquet) or examples (TFDS). The parts depend only on the sources
and the row length, so that the rows are the same for any number of workers. A corpus of up to
`part_bytes` is one part.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses

from kvjax.data import config as config_lib, readers, source_kinds, sources
from kvjax.data.manifest import digest_of
from kvjax.data.sources import Slice

PART_BYTES = 32 << 20  # bytes of text; a killed process loses at most one part
# Least number of rows of a part. Tokens that do not fill its last row are dropped: half a row on
# average, 0.2 % of 256 rows.
_ROWS = 256
_BYTES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive slices of the training and validation sources."""

    index: int
    slices: tuple[Slice, ...]
    digest: str  # hash of its documents and their splits

    @property
    def bytes(self) -> int:
        """Stored size in bytes; about that of the text, unless files are compressed."""
        return sum(piece.bytes for piece in self.slices)


def part_bytes(config: config_lib.DataConfig) -> int:
    """Returns the approximate size of a part in bytes, which is larger for long rows."""
    return max(PART_BYTES, _ROWS * _BYTES_PER_TOKEN * config.sequence_length)


def parts(
    config: config_lib.DataConfig,
    fingerprints: Mapping[str, Sequence[tuple[str, str]]],
    on_error: readers.OnError = readers.raise_error,
) -> list[Part]:
    """Returns all parts of a corpus, in order.

    Args:
      fingerprints: result of `sources.fingerprints`.
      on_error: called for a source that cannot be opened.
    """
    hashes = {}
    for key, pairs in fingerprints.items():
        hashes |= {(key, name): content for name, content in pairs}
    runs, size, limit = [[]], 0, part_bytes(config)
    for piece in sources.slices(config, limit, on_error):
        if runs[-1] and size + piece.bytes > limit:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.bytes
    return [
        Part(
            i,
            tuple(run),
            digest_of([(s.key, hashes[s.key, s.name], *s.range[:2]) for s in run]),
        )
        for i, run in enumerate(runs)
    ]


def split_pieces(
    config: config_lib.DataConfig, part: Part, on_error: readers.OnError = readers.raise_error
) -> Iterator[source_kinds.SplitPiece]:
    """Yields the documents of a part in order, as pieces with their split."""
    for piece in part.slices:
        yield from sources.split_pieces(config, piece, on_error)
