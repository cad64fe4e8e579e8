"""SIGTERM, Ctrl-C and SIGHUP end a loop of steps, on all processes after the same step."""

import contextlib
import os
import signal

from kvjax.distributed import agreement
from kvjax.foundation import interrupted

TRY_AGAIN = 75
STATUS = {signal.SIGTERM: TRY_AGAIN, signal.SIGINT: interrupted.STATUS, signal.SIGHUP: 129}
_STOP = "kvjax/stop"


class Interruption:
    """SIGTERM, Ctrl-C and SIGHUP end a loop of steps, on all processes after the same step.

    A process is never more than one step ahead of another (it has the results of the step before
    the last, to which all contributed): whoever gets the signal while n steps are dispatched asks
    for the end after n + 2, and all have read that before they get there. It costs each process
    one look at the coordination service a step, while the devices compute.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None  # what the loop ended for
        self._agreed: signal.Signals | None = None
        # One that came before, and that something swallowed, ends the loop too.
        self._received = signal.SIGINT if interrupted.taken() else None
        self._asked = self._known = False
        self._stop_step: int | None = None

    @contextlib.contextmanager
    def handling_signals(self):
        """Takes the signals, but for those that this process ignores (`nohup`).

        A second one ends the process; of SIGHUP there may be several, from the terminal and from
        the shell.
        """
        terminal = [number for number in (1, 2) if os.isatty(number)]

        def handle(number, frame):
            del frame
            self._received = self._received or signal.Signals(number)
            if number == signal.SIGHUP:
                signal.signal(number, signal.SIG_IGN)
                _discard(terminal)  # what is written there would fail
            else:
                signal.signal(number, signal.SIG_DFL)
                _say(f"{signal.Signals(number).name}: stops after what is under way; again: now")

        taken = [s for s in STATUS if signal.getsignal(s) != signal.SIG_IGN]
        before = {s: signal.signal(s, handle) for s in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def should_stop(self, step: int) -> bool:
        """Whether the loop ends here; call before every step, with the steps dispatched so far."""
        if agreement.count() == 1:
            self.signal = self._received
            return self.signal is not None
        if not self._known:
            self._ask_and_look(step)
        if not self._known or step < self._stop_step:
            return False
        self.signal = self._agreed  # not before: a loop may end by itself first, on all processes
        return True

    def _ask_and_look(self, step: int) -> None:
        from jax.errors import JaxRuntimeError

        client = agreement.client()
        if self._received and not self._asked:
            self._asked = True
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


def _discard(descriptors: list[int]) -> None:
    """Sends to nowhere what is written to these files."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _say(text: str) -> None:
    """A line on standard error from a signal handler, where Python's own files may be in use."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nkvjax: {text}\n".encode())
