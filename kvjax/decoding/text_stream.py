"""Text from tokens as they come."""

from collections.abc import Sequence

from kvjax.data.tokenizer import Tokenizer


class TextStream:
    """The text of one sequence, token by token, up to the first stop string.

    Text is given out once no later token can change it: not in the middle of a character, nor
    what may turn out to be the start of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window: list[int] = []  # tokens since the text last ended between characters
        self._taken = 0  # characters of the window's text that went on to _held
        self._held = ""
        self.text = ""  # given out so far
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that has become certain with one more token."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        broken = text.endswith("\ufffd")  # at the end: bytes that the next token may complete
        self._take(text.removesuffix("\ufffd"))
        if not broken:
            self._window, self._taken = [], 0
        return self._give(len(self._held) - self._maybe_stop())

    def close(self) -> str:
        """The rest, once there are no more tokens."""
        self._take(self._tokenizer.decode(self._window))
        return self._give(len(self._held))

    def _take(self, text: str) -> None:
        if self.stopped:
            return
        self._held += text[self._taken :]
        self._taken = max(self._taken, len(text))
        # The stop string that is complete first, and of those the longest.
        ends = [(i + len(s), i) for s in self._stop if (i := self._held.find(s)) >= 0]
        if ends:
            self._held = self._held[: min(ends)[1]]
            self.stopped = True

    def _maybe_stop(self) -> int:
        """Characters at the end that a stop string begins with."""
        if self.stopped:
            return 0
        longest = max((len(s) for s in self._stop), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        begins = lambda n: any(s.startswith(self._held[-n:]) for s in self._stop)
        return next((n for n in sizes if begins(n)), 0)

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        self.text += given
        return given
