"""Goodput: the share of a process's wall time spent in training steps, and what took the rest."""

from collections.abc import Iterator, Mapping
import time

import jax

STEPS = "steps"
LOST = ("startup", "compiling", "data", "validating", "saving", "profiling")
_NAMES = {"data": "waiting for data"}


class Goodput:
    """Assigns every second of wall time to one cause, so that the shares sum to 1.

    `startup` is everything before the first step except its compilation: imports, checks, preparing
    data, reading weights. The first validation includes its compilation. A wait for data counts as
    lost only if the devices were idle.

    Args:
      seconds: startup time before this object was created.
    """

    def __init__(self, seconds: float = 0.0):
        self._spent = dict.fromkeys((STEPS, *LOST), 0.0)
        self._spent["startup"] = seconds
        self._since = time.monotonic()

    def book(self, cause: str) -> None:
        """Assigns the time since the last call to a cause."""
        now = time.monotonic()
        self._spent[cause] += now - self._since
        self._since = now

    def next(self, batches: Iterator, running: Mapping[str, jax.Array] | None):
        """Returns the next batch; the wait counts as lost if the previous step ends during it.

        Args:
          running: metrics of the previous step; None: it has ended.
        """
        self.book(STEPS)
        batch = next(batches)
        idle = running is None or all(value.is_ready() for value in running.values())
        self.book("data" if idle else STEPS)
        return batch

    def record(self) -> dict[str, float]:
        """Returns a record for timing.jsonl: goodput, and the share lost_CAUSE of every cause."""
        total = sum(self._spent.values())
        shares = {cause: seconds / total for cause, seconds in self._spent.items()}
        return {"goodput": shares[STEPS]} | {f"lost_{cause}": shares[cause] for cause in LOST}

    def __str__(self) -> str:
        total = sum(self._spent.values())
        lost = sorted(LOST, key=self._spent.get, reverse=True)
        shares = {_NAMES.get(c, c): 100 * self._spent[c] / total for c in lost}
        causes = [f"{name} {share:.1f} %" for name, share in shares.items() if share >= 0.05]
        share = 100 * self._spent[STEPS] / total
        return f"goodput: {share:.1f} % of {total:.1f} s in steps; {', '.join(causes)}"
