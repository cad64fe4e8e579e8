"""A corpus as an ordered list of parts: each is tokenized and packed by itself, wherever that is.

A part is a run of consecutive slices: whole files, or of large ones byte ranges (text, JSON lines),
row groups (Parquet) or examples (TFDS). Which slices make a part depends on the sources alone, so
the rows of a corpus are the same for any number of workers. A corpus of up to `limit` bytes is one
part.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses

from kvjax.data import config as config_lib, readers, source_kinds, sources
from kvjax.data.manifest import digest_of
from kvjax.data.sources import Slice

PART_BYTES = 32 << 20  # of text: a kill costs as much for each process
# What does not fill a part's last row is left out: half a row, so 0.2 % of so many.
_ROWS = 256
_BYTES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True)
class Part:
    """Some consecutive slices of the sources, training and validation sources alike."""

    index: int
    slices: tuple[Slice, ...]
    digest: str  # of its documents and their splits

    @property
    def bytes(self) -> int:
        """About how much text it has, compressed as it lies."""
        return sum(piece.bytes for piece in self.slices)


def part_bytes(config: config_lib.DataConfig) -> int:
    """Bytes of a part, about: more where rows are long."""
    return max(PART_BYTES, _ROWS * _BYTES_PER_TOKEN * config.sequence_length)


def parts(
    config: config_lib.DataConfig,
    found: Mapping[str, Sequence[tuple[str, str]]],
    on_error: readers.OnError = readers.raise_error,
) -> list[Part]:
    """All parts of a corpus, in order.

    Args:
      found: what `sources.fingerprints` found.
      on_error: called with a source that cannot be opened.
    """
    marks = {(key, name): mark for key, pairs in found.items() for name, mark in pairs}
    runs, size, most = [[]], 0, part_bytes(config)
    for piece in sources.slices(config, most, on_error):
        if runs[-1] and size + piece.bytes > most:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.bytes
    content = lambda piece: (piece.key, marks[piece.key, piece.name], *piece.range[:2])
    return [
        Part(i, tuple(run), digest_of([content(piece) for piece in run]))
        for i, run in enumerate(runs)
    ]


def split_pieces(
    config: config_lib.DataConfig, part: Part, on_error: readers.OnError = readers.raise_error
) -> Iterator[source_kinds.SplitPiece]:
    """The documents of a part in order, each as pieces with their split."""
    for piece in part.slices:
        yield from sources.split_pieces(config, piece, on_error)
