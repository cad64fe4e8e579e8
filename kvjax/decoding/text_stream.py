"""Decodes a stream of tokens to text."""

from collections.abc import Sequence

from kvjax.data.tokenizer import Tokenizer


class TextStream:
    """The text of one sequence, decoded token by token up to the first stop string.

    Text is emitted once no later token can change it: an incomplete UTF-8 character, tokens of
    single bytes in a row and a possible start of a stop string are held back.

    Args:
      is_continued: the text follows another, and may open with a blank.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, is_continued: bool = False
    ):
        self._tokenizer, self._is_continued = tokenizer, is_continued
        self._stop = tuple(stop)
        self._window: list[int] = []  # tokens since the text last ended at a character boundary
        self._taken = 0  # number of characters of the window's text that are already in _held
        self._held = ""  # decoded, not emitted
        self.text = ""  # emitted
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token; returns the text that it makes final."""
        self._window.append(token)
        continued = self._is_continued
        text, is_whole = self._tokenizer.decode_settled(self._window, is_continued=continued)
        self._take(text)
        if is_whole:
            self._window, self._taken, self._is_continued = [], 0, True
        return self._emit(len(self._held) - self._stop_prefix_length())

    def close(self) -> str:
        """Returns the remaining text after the last token."""
        self._take(self._tokenizer.decode(self._window, is_continued=self._is_continued))
        return self._emit(len(self._held))

    def _take(self, text: str) -> None:
        if self.stopped:
            return
        self._held += text[self._taken :]
        self._taken = max(self._taken, len(text))
        # Chooses the stop string that ends first, and the longest if several end there.
        ends = [(i + len(s), i) for s in self._stop if (i := self._held.find(s)) >= 0]
        if ends:
            self._held = self._held[: min(ends)[1]]
            self.stopped = True

    def _stop_prefix_length(self) -> int:
        """Returns the length of the longest suffix of _held that starts a stop string."""
        if self.stopped:
            return 0
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stop):
                return n
        return 0

    def _emit(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.text += text
        return text
