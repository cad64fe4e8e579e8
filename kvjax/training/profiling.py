"""A profiler trace of a few training steps, which TensorBoard and Perfetto open."""

from collections.abc import Callable

from etils import epath
import jax

from kvjax.foundation.configuration import between
from kvjax.foundation.errors import first_line, say, warn
from kvjax.training.goodput import STEPS, Goodput
from kvjax.workdir.metrics import Clock

FOLDER = "profile"
WARM_UP = 3  # untraced steps at the start of this process
_MAX_STEPS = 1000
_OPTION = "--profile_steps"


def check(count: int) -> None:
    """Raises a UserError for a number of steps that cannot be traced."""
    between(_OPTION, count, 0, _MAX_STEPS)


class StepTrace:
    """Runs steps, and traces `count` of them after this process has compiled and warmed up.

    The trace begins once the preceding step has ended, and stops once its own last step has. Each
    step is an event "train" with its number. A failure of the profiler is only a warning.

    Args:
      folder: gets plugins/profile/TIME/, with xplane.pb for TensorBoard and
        perfetto_trace.json.gz; None: nothing is traced, as on all processes but the first.
      start: steps of the run before this process.
      clock, goodput: get the time that starting and writing the trace takes, as a pause.
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
            warn(f"{_OPTION} = {self._count}: no step was traced: the first {WARM_UP} never are")

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
        options.python_tracer_level = 0  # every Python call would be an event
        try:
            jax.profiler.start_trace(
                str(self._folder), create_perfetto_trace=True, profiler_options=options
            )
            self._is_on = True
        except Exception as error:  # another trace is on; no room
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
