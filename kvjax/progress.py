"""A word for whoever waits: what takes over three seconds says so, on standard error."""

import contextlib
import sys
import threading
import time

FIRST_SECONDS = 3.0
_TERMINAL_EVERY, _LOG_EVERY = 1.0, 30.0


class waiting:  # reads as `with waiting("...")`
    """Says what is under way once it takes over three seconds, and for how long since.

    A terminal gets one line that counts seconds and is gone in the end; a log gets a line after
    three seconds, one every half minute, and one for the end.

    Args:
      what: "compiling the decode step", say.
    """

    def __init__(self, what: str):
        self._what = what
        self._ended = threading.Event()

    def now(self, what: str) -> None:
        """What is under way from here on."""
        self._what = what

    def __enter__(self):
        self._stream, self._begun = sys.stderr, time.monotonic()
        self._terminal = self._stream.isatty()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.end()

    def end(self) -> None:
        """Nothing is waited for any more; may be called again."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        if self._seconds > FIRST_SECONDS:
            if self._terminal:
                self._say("\r\x1b[K", "")
            else:
                self._say(f"kvjax: {self._what}: {self._seconds:.1f} s", "\n")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    def _watch(self) -> None:
        pause = FIRST_SECONDS
        while not self._ended.wait(pause):
            pause = _TERMINAL_EVERY if self._terminal else _LOG_EVERY
            if self._terminal:
                self._say(f"\r\x1b[K{self._what} ... {self._seconds:.0f} s", "")
            else:
                self._say(f"kvjax: {self._what} ({self._seconds:.0f} s so far)", "\n")

    def _say(self, text: str, end: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or full
            print(text, end=end, file=self._stream, flush=True)
