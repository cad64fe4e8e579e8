"""Profiler traces of training steps, for TensorBoard and Perfetto."""

from collections.abc import Callable

from etils import epath
import jax

from kvjax.foundation.configuration import between
from kvjax.foundation.errors import first_line, say, warn
from kvjax.training.goodput import STEPS, Goodput
from kvjax.workdir.metrics import Clock

FOLDER = "profile"
WARM_UP = 3  # steps at the start of a process that are never traced
_MAX_STEPS = 1000
_OPTION = "--profile_steps"


def check(count: int) -> None:
    """Raises a UserError if the number of steps to trace is negative or too large."""
    between(_OPTION, count, 0, _MAX_STEPS)


class StepTrace:
    """Runs training steps, and traces `count` of them after the first `WARM_UP` steps.

    Waits for the step before the trace, and for the last traced step, so that the trace contains
    exactly the traced steps. Each is an event "train" with its number. A failure of the profiler is
    only a warning.

    Args:
      folder: the trace is written to plugins/profile/TIME/ in it (xplane.pb for TensorBoard,
        perfetto_trace.json.gz); None: nothing is traced, as on all processes but the first.
      start: number of steps that the run took before this process.
      clock, goodput: do not count the time to start and write the trace as training.
    """

    def __init__(
        self,
        folder: epath.Path | None,
        count: int,
        start: int,
        clock: Clock,
        goodput: Goodput,
    ):
        self._folder, self._count, self._is_on = folder, count if folder else 0, False
        self._first, self._last = start + WARM_UP + 1, start + WARM_UP + count
        self._clock, self._goodput = clock, goodput

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._is_on:  # the loop ended within the traced steps
            self._stop()
        elif self._count:
            warn(
                f"{_OPTION} = {self._count}: no step was traced, since the run ended within this "
                f"process's first {WARM_UP} steps, which are never traced"
            )

    def run(self, number: int, step: Callable, state: dict, *inputs) -> tuple[dict, dict]:
        """Runs step `number`, and returns its new state and metrics."""
        if not self._count:
            return step(state, *inputs)
        if number == self._first:
            jax.block_until_ready(state)
            self._outside_steps(self._start)
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            result = step(state, *inputs)
        if self._is_on and number == self._last:
            jax.block_until_ready(result)
            self._outside_steps(self._stop)
        return result

    def _outside_steps(self, operation: Callable[[], None]) -> None:
        self._goodput.book(STEPS)
        with self._clock.paused():
            operation()
        self._goodput.book("profiling")

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # else every Python call is an event
        try:
            jax.profiler.start_trace(
                str(self._folder), create_perfetto_trace=True, profiler_options=options
            )
            self._is_on = True
        except Exception as error:  # such as another running trace, or a full disk
            self._failed(error)

    def _stop(self) -> None:
        self._is_on = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            self._failed(error)
            return
        self._count = 0
        say(
            f"trace of steps from {self._first:,} on: {self._folder} (TensorBoard's profiler, or "
            "perfetto_trace.json.gz in https://ui.perfetto.dev)"
        )

    def _failed(self, error: Exception) -> None:
        self._count = 0
        warn(f"{self._folder}: no trace was written; the run goes on ({first_line(error)})")
