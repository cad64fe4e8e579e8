"""A set's conversations as tokens in memory, in any order."""

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
    """Content of a set, for the manifest."""

    key: str  # a key of config.mixture
    source: str
    sha256: str
    rows: int  # in the set's files
    read: int = 0  # rows that the mixture uses
    cut: int = 0  # rows longer than the limit, which are truncated
    rejected: int = 0  # rows that are not conversations
    tokens: int = 0
    trained: int = 0  # tokens with loss mask 1
    first_rejected: list[str] = dataclasses.field(default_factory=list)  # messages


class RenderedSet:
    """The rendered rows of a set that a mixture uses.

    Args:
      order: row indices, in the set's shuffled order.
      dtype: dtype of token ids.
      compressor: receives all text, in the files' order; None: no compression.
      say: called with progress.

    Raises:
      DataError: a row that is not a conversation, unless `mixture.skip_broken`.
    """

    def __init__(
        self,
        opened: sets.OpenedSet,
        order: np.ndarray,
        counts: SetCounts,
        mixture: MixtureConfig,
        renderer: Renderer,
        limit: int,
        dtype: np.dtype,
        compressor: "Compressor | None",
        say: Callable[[str], None],
    ):
        self.counts, self._order = counts, order
        self._limit, self._dtype, self._renderer = limit, dtype, renderer
        self._chunks: list[Tokens] = []
        # For each row: its chunk, and its start and end within the chunk; -1 if rejected.
        self._spans = np.full((counts.rows, 3), -1, np.int64)
        wanted = np.zeros(counts.rows, bool)
        wanted[order] = True
        batch, characters = [], 0
        for i, (place, row) in enumerate(opened.rows()):
            if i >= len(wanted):
                raise DataError(f"{opened.spec.where}: its files grew while they were read")
            if not wanted[i]:
                continue
            try:
                parsed = sets.conversation(opened.spec.kind, row, place)
            except DataError as error:
                self._reject(error, mixture.skip_broken)
                counts.read += 1
                continue
            batch.append((i, parsed, place))
            characters += len(str(parsed))
            if characters >= BATCH_CHARACTERS:
                self._render(batch, mixture, compressor)
                batch, characters = [], 0
                say(f"{opened.spec.kind} {counts.read:,} of {len(order):,}")
        self._render(batch, mixture, compressor)
        if counts.read < len(order):
            raise DataError(f"{opened.spec.where}: its files shrank while they were read")

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Tokens | None:
        """Returns the conversation at an index of `order`; None if its row was rejected."""
        chunk, start, stop = self._spans[self._order[index]]
        if chunk < 0:
            return None
        ids, mask = self._chunks[chunk]
        return ids[start:stop], mask[start:stop]

    def _render(self, batch, mixture: MixtureConfig, compressor: "Compressor | None") -> None:
        conversations = [(conversation, place) for _, conversation, place in batch]
        ids, mask, end, counts = [], [], 0, self.counts
        results = self._renderer.batch(conversations, limit=self._limit)
        for (i, conversation, _), result in zip(batch, results, strict=True):
            counts.read += 1
            if isinstance(result, DataError):
                self._reject(result, mixture.skip_broken)
                continue
            ids.append(np.array(result.ids, self._dtype))
            mask.append(np.array(result.mask, np.uint8))
            self._spans[i] = len(self._chunks), end, end + len(result.ids)
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
            raise DataError(f"{error}. config.mixture.skip_broken=True skips such rows") from error
        self.counts.rejected += 1
        if len(self.counts.first_rejected) < MAX_MESSAGES:
            self.counts.first_rejected.append(first_line(error))


class Compressor:
    """Compresses the text of conversations with `xz -9e`, as a reference for bits per byte."""

    def __init__(self):
        self._xz, self._in, self._out = lzma.LZMACompressor(preset=XZ_PRESET), 0, 0

    def add(self, conversation: dict) -> None:
        """Adds a conversation."""
        for text in texts(conversation):
            content = text.encode()
            self._in += len(content)
            self._out += len(self._xz.compress(content))

    def bits_per_byte(self) -> float:
        """Returns compressed bits per byte of all text; call it once, at the end."""
        return 8 * (self._out + len(self._xz.flush())) / max(self._in, 1)


def texts(conversation: dict[str, Any]) -> Iterator[str]:
    """Yields the texts of a conversation."""
    for message in conversation["messages"]:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content)
