"""A set's conversations as tokens in memory: one by one in any order, as its place asks for."""

from collections.abc import Callable, Iterator
import dataclasses
import lzma
from typing import Any

import numpy as np

from kvjax.conversation import sets
from kvjax.conversation.mixture import MixtureConfig
from kvjax.conversation.packing import Tokens
from kvjax.conversation.render import Renderer
from kvjax.data.tokenized_part import BATCH_CHARACTERS, MAX_MESSAGES, XZ_PRESET
from kvjax.foundation.errors import DataError, first_line


@dataclasses.dataclass
class SetCounts:
    """What a manifest says of a set."""

    key: str  # of config.mixture
    source: str
    sha256: str
    rows: int  # in its files
    read: int = 0  # of them
    cut: int = 0  # longer than the limit
    rejected: int = 0  # no conversations
    tokens: int = 0
    trained: int = 0  # tokens that the assistant is trained on
    first_rejected: list[str] = dataclasses.field(default_factory=list)  # messages


class RenderedSet:
    """The rows of a set that a mixture asks for, rendered.

    Args:
      order: which rows, in the set's own order once it is shuffled.
      dtype: of tokens.
      compressor: gets the text, in the files' order; None: nothing does.
      say: called with how many rows are read.

    Raises:
      DataError: a row that is no conversation, unless those are left out.
    """

    def __init__(
        self,
        found: sets.OpenedSet,
        order: np.ndarray,
        counts: SetCounts,
        mixture: MixtureConfig,
        renderer: Renderer,
        limit: int,
        dtype: np.dtype,
        compressor: "Compressor | None",
        say: Callable[[int], None],
    ):
        self.counts, self._order = counts, order
        self._limit, self._dtype, self._renderer = limit, dtype, renderer
        self._chunks: list[Tokens] = []
        # For each row: its chunk, and where it begins and ends there.
        self._places = np.full((counts.rows, 3), -1, np.int64)
        wanted = np.zeros(counts.rows, bool)
        wanted[order] = True
        batch, characters = [], 0
        for i, (place, row) in enumerate(found.rows()):
            if i >= len(wanted):
                raise DataError(f"{found.spec.where}: its files grew while they were read")
            if not wanted[i]:
                continue
            try:
                told = sets.conversation(found.spec.kind, row, place)
            except DataError as error:
                self._reject(error, mixture.skip_broken)
                counts.read += 1
                continue
            batch.append((i, told, place))
            characters += len(str(told))
            if characters >= BATCH_CHARACTERS:
                self._render(batch, mixture, compressor)
                batch, characters = [], 0
                say(counts.read)
        self._render(batch, mixture, compressor)
        if counts.read < len(order):
            raise DataError(f"{found.spec.where}: its files shrank while they were read")

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: int) -> Tokens | None:
        """The conversation there; None: that row was rejected."""
        chunk, start, stop = self._places[self._order[place]]
        if chunk < 0:
            return None
        ids, mask = self._chunks[chunk]
        return ids[start:stop], mask[start:stop]

    def _render(self, batch, mixture: MixtureConfig, compressor: "Compressor | None") -> None:
        told = [(conversation, place) for _, conversation, place in batch]
        ids, mask, end, counts = [], [], 0, self.counts
        results = self._renderer.batch(told, limit=self._limit)
        for (i, conversation, _), result in zip(batch, results, strict=True):
            counts.read += 1
            if isinstance(result, DataError):
                self._reject(result, mixture.skip_broken)
                continue
            ids.append(np.array(result.ids, self._dtype))
            mask.append(np.array(result.mask, np.uint8))
            self._places[i] = len(self._chunks), end, end + len(result.ids)
            end += len(result.ids)
            counts.cut += result.is_cut
            counts.tokens += len(result.ids)
            counts.trained += sum(result.mask)
            if compressor:
                compressor.add(conversation)
        if ids:
            self._chunks.append((np.concatenate(ids), np.concatenate(mask)))

    def _reject(self, error: DataError, allowed: bool) -> None:
        if not allowed:
            raise DataError(
                f"{error}. config.mixture.skip_broken=True leaves such rows out"
            ) from error
        self.counts.rejected += 1
        if len(self.counts.first_rejected) < MAX_MESSAGES:
            self.counts.first_rejected.append(first_line(error))


class Compressor:
    """What `xz -9e` makes of the text of conversations: a yardstick beside bits per byte."""

    def __init__(self):
        self._xz, self._in, self._out = lzma.LZMACompressor(preset=XZ_PRESET), 0, 0

    def add(self, conversation: dict) -> None:
        """One more."""
        for text in texts(conversation):
            content = text.encode()
            self._in += len(content)
            self._out += len(self._xz.compress(content))

    def bits_per_byte(self) -> float:
        """Compressed bits per byte of all text that was added; nothing can be added afterwards."""
        return 8 * (self._out + len(self._xz.flush())) / max(self._in, 1)


def texts(conversation: dict[str, Any]) -> Iterator[str]:
    """What a conversation says, piece by piece."""
    for message in conversation["messages"]:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content)
