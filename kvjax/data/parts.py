"""A corpus as an ordered list of parts: each is tokenized and packed by itself, wherever that is.

A part is a run of consecutive slices: whole files, or of large ones byte ranges (text, JSON lines),
row groups (Parquet) or examples (TFDS). Which slices make a part depends on the sources alone, so
the rows of a corpus are the same for any number of workers. A corpus of up to PART_BYTES is one
part.
"""

from collections.abc import Iterator
import dataclasses

from kvjax.data import config as config_lib
from kvjax.data import readers
from kvjax.data import sources
from kvjax.data.sources import Slice

PART_BYTES = 32 << 20  # of text: a kill costs as much for each process


@dataclasses.dataclass(frozen=True)
class Part:
    """Some consecutive slices of the sources, training and validation sources alike."""

    index: int
    slices: tuple[Slice, ...]

    @property
    def bytes(self) -> int:
        """About how much text it has, compressed as it lies."""
        return sum(piece.bytes for piece in self.slices)


def parts(config: config_lib.DataConfig, broken: readers.Broken = readers.refuse) -> list[Part]:
    """All parts of a corpus, in order.

    Args:
      broken: called with a source that cannot be opened.
    """
    found, slices, size = [], [], 0
    for piece in sources.slices(config, PART_BYTES, broken):
        if slices and size + piece.bytes > PART_BYTES:
            found.append(Part(len(found), tuple(slices)))
            slices, size = [], 0
        slices.append(piece)
        size += piece.bytes
    return [*found, Part(len(found), tuple(slices))]


def labelled(
    config: config_lib.DataConfig, part: Part, broken: readers.Broken = readers.refuse
) -> Iterator[sources.Labelled]:
    """The documents of a part in order, each as pieces with their split."""
    for piece in part.slices:
        yield from sources.labelled(config, piece, broken)
