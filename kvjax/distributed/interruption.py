"""Stops the training loop on SIGTERM, SIGINT and SIGHUP, after the same step on all processes."""

import contextlib
import os
import signal

from kvjax.distributed import agreement
from kvjax.foundation import interrupted

TRY_AGAIN = 75
STATUS = {signal.SIGTERM: TRY_AGAIN, signal.SIGINT: interrupted.STATUS, signal.SIGHUP: 129}
_STOP = "kvjax/stop"


class Interruption:
    """A stop signal that all processes of a job obey after the same step.

    A process that has dispatched n steps has the results of step n - 1, to which all contributed.
    So no other process is more than one step ahead. The process requests a stop after step n + 2,
    which all others read in time. Each step costs one read of the coordination service, while the
    devices compute.

    Attributes:
      signal: the signal that ended the loop; None: the loop has not been ended.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._agreed: signal.Signals | None = None
        # A Ctrl-C before this, even if a library has swallowed the KeyboardInterrupt.
        self._received = signal.SIGINT if interrupted.taken() else None
        self._requested = self._known = False
        self._stop_step: int | None = None

    @contextlib.contextmanager
    def handling_signals(self):
        """Handles the signals, except those that this process ignores (as under `nohup`).

        A second signal ends the process at once, except SIGHUP, which both terminal and shell may
        send.
        """
        terminal = [number for number in (1, 2) if os.isatty(number)]

        def handle(number, frame):
            del frame
            self._received = self._received or signal.Signals(number)
            if number == signal.SIGHUP:
                signal.signal(number, signal.SIG_IGN)
                _redirect_to_null(terminal)  # writing to a closed terminal fails
            else:
                signal.signal(number, signal.SIG_DFL)
                _write_line(
                    f"{signal.Signals(number).name}: stops after the work under way; a second "
                    "signal ends it at once"
                )

        handled = [s for s in STATUS if signal.getsignal(s) != signal.SIG_IGN]
        earlier_handlers = {s: signal.signal(s, handle) for s in handled}
        try:
            yield
        finally:
            for number, handler in earlier_handlers.items():
                signal.signal(number, handler)

    def should_stop(self, step: int) -> bool:
        """Returns True if the loop should end; call before every step.

        Args:
          step: number of steps dispatched so far.
        """
        if agreement.count() == 1:
            self.signal = self._received
            return self.signal is not None
        if not self._known:
            self._exchange(step)
        if not self._known or step < self._stop_step:
            return False
        self.signal = self._agreed  # only now, since the run's last step may come before this one
        return True

    def _exchange(self, step: int) -> None:
        """Requests a stop if this process got a signal; reads the job's request, if any."""
        from jax.errors import JaxRuntimeError

        client = agreement.client()
        if self._received and not self._requested:
            self._requested = True
            with contextlib.suppress(JaxRuntimeError):  # another process was first
                client.key_value_set(_STOP, f"{step + 2} {self._received.name}")
        try:
            text = client.key_value_try_get(_STOP)
        except JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return
        step_text, name = text.split()
        self._stop_step, self._agreed, self._known = int(step_text), signal.Signals[name], True


def _redirect_to_null(descriptors: list[int]) -> None:
    """Redirects file descriptors to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _write_line(text: str) -> None:
    """Writes a line to standard error from a signal handler, bypassing Python's buffers."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nkvjax: {text}\n".encode())
