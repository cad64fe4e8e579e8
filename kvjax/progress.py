"""A word for whoever waits: what takes over three seconds says so, on standard error."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import sys
import threading
import time

FIRST_SECONDS = 3.0
_TERMINAL_EVERY, _LOG_EVERY = 1.0, 30.0


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Says what is under way once it takes over three seconds, and for how long since.

    A terminal gets one line that counts seconds and is gone in the end; a log gets a line after
    three seconds, one every half minute, and one for the end.

    Args:
      what: "compiling the decode step", say.

    Yields:
      A function that is told where in it the work is: "LRKV, 2 of 14".
    """
    stream, begun, ended = sys.stderr, time.monotonic(), threading.Event()
    terminal, place = stream.isatty(), ""

    def tell(where: str) -> None:
        nonlocal place
        place = f": {where}"

    def say(text: str, end: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or full
            print(text, end=end, file=stream, flush=True)

    def watch() -> None:
        pause = FIRST_SECONDS
        while not ended.wait(pause):
            pause = _TERMINAL_EVERY if terminal else _LOG_EVERY
            seconds = time.monotonic() - begun
            if terminal:
                say(f"\r\x1b[K{what}{place} ... {seconds:.0f} s", "")
            else:
                say(f"kvjax: {what}{place} ({seconds:.0f} s so far)", "\n")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()
        seconds = time.monotonic() - begun
        if seconds > FIRST_SECONDS:
            say("\r\x1b[K", "") if terminal else say(f"kvjax: {what}: {seconds:.1f} s", "\n")
