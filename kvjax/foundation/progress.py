"""Progress on standard error: a line or bar on terminals, occasional lines in logs."""

import contextlib
import sys
import threading
import time

FIRST_SECONDS = 3.0
_TERMINAL_EVERY, _LOG_EVERY = 1.0, 30.0
_STEPS_EVERY = 10.0
_BAR = 20  # characters


def size(count: float) -> str:
    """Formats bytes: 12.3 MB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def count(number: float) -> str:
    """Formats a number of tokens: 12.3M."""
    return f"{number / 1e9:,.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def bar(share: float) -> str:
    """Formats a share from 0 to 1 as a bar: ━━━━──── 50 %."""
    done = round(_BAR * min(max(share, 0), 1))
    return f"{'━' * done}{'─' * (_BAR - done)} {100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Formats seconds: 3.4 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


class waiting:  # reads as `with waiting("...")`
    """Reports work that takes over three seconds, with its elapsed time.

    A terminal shows one line that disappears at the end; a log gets a line after three seconds, one
    every half minute, and one at the end.

    Args:
      work: for example "compiling the decode step".
      shown: False prints nothing.
    """

    def __init__(self, work: str, *, shown: bool = True):
        self._work, self._where = work, ""
        self._ended = threading.Event()
        if not shown:
            self._ended.set()

    def now(self, work: str) -> None:
        """Changes the description of the work."""
        self._work, self._where = work, ""

    def at(self, where: str) -> None:
        """Sets the position in the work: "LRKV, 2 of 14"."""
        self._where = f": {where}"

    def __enter__(self):
        self._stream, self._begun = sys.stderr, time.monotonic()
        self._terminal = self._stream.isatty()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.end()

    def end(self) -> None:
        """Ends the report; may be called again."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        if self._seconds > FIRST_SECONDS:
            if self._terminal:
                self._say("\r\x1b[K", "")
            else:
                self._say(f"kvjax: {self._work}: {self._seconds:.1f} s", "\n")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    def _watch(self) -> None:
        pause = FIRST_SECONDS
        while not self._ended.wait(pause):
            pause = _TERMINAL_EVERY if self._terminal else _LOG_EVERY
            if self._terminal:
                self._say(f"\r\x1b[K{self._work}{self._where} ... {self._seconds:.0f} s", "")
            else:
                self._say(f"kvjax: {self._work}{self._where} ({self._seconds:.0f} s so far)", "\n")

    def _say(self, text: str, end: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed stream, a full disk
            print(text, end=end, file=self._stream, flush=True)


class Steps:
    """Progress of a loop: a bar on a terminal, else a line every ten seconds.

    Args:
      total: steps in total.
      start: steps done before.
      shown: False prints nothing.
      unit: name of one step.
    """

    def __init__(self, total: int, start: int, *, shown: bool = True, unit: str = "step"):
        import tqdm  # late: slow to import

        self._unit = unit
        self._total, self._done, self._shown = total, start, shown
        self._terminal, self._said = sys.stderr.isatty(), time.monotonic()
        self._bar = tqdm.tqdm(
            total=total,
            initial=start,
            mininterval=0.5,
            unit=unit,
            disable=not (shown and self._terminal),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def step(self, text: str, count: int = 1) -> None:
        """Advances by `count` steps.

        Args:
          text: metrics of the step.
        """
        self._done += count
        self._bar.set_postfix_str(text, False)
        self._bar.update(count)
        waited = time.monotonic() - self._said > _STEPS_EVERY
        if self._shown and not self._terminal and (waited or self._done == self._total):
            self._said = time.monotonic()
            position = f"{self._unit} {self._done:,} of {self._total:,}"
            print(f"{position}: {text}", file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        """Prints a line on standard output, above the bar."""
        if self._shown:
            self._bar.write(text)
            sys.stdout.flush()
