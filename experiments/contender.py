"""A training program timed in a process of its own: nothing is left on the device for the next.

The parent writes arguments as JSON to the child's stdin; the child prints a line with its result.
Imports neither JAX nor PyTorch.
"""

from collections.abc import Callable
import itertools
import json
import pathlib
import subprocess
import sys
import time
import traceback

from kvjax.errors import first_line

_ROOT = pathlib.Path(__file__).parents[1]
_RESULT = "result: "  # libraries may print before and after
_FRAMES = 12  # of a traceback: compilers' are long


def run(module: str, arguments: dict) -> dict:
    """What `main` of that module measured; {"error": one line} if it raised or was killed."""
    child = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        check=False,
    )
    results = [line for line in child.stdout.splitlines() if line.startswith(_RESULT)]
    if child.returncode or not results:
        return dict(error=f"{module} ended with status {child.returncode}, without a result")
    return json.loads(results[-1].removeprefix(_RESULT))


def main(measure: Callable[..., dict]) -> None:
    """The child: calls `measure` with the arguments; a traceback goes to stderr."""
    try:
        result = measure(**json.load(sys.stdin))
    except Exception as error:  # whatever a compiler or a device says belongs into the table
        traceback.print_exc(limit=-_FRAMES)
        result = dict(error=f"{type(error).__name__}: {first_line(error)}")
    print("\n" + _RESULT + json.dumps(result))


def step_seconds(
    dispatch: Callable[[], object], wait: Callable[[object], object], *, steps: int, warmup: int
) -> list[float]:
    """Seconds of each of `steps` steps in a row, after `warmup` others.

    A step is waited for once the next one is dispatched, as in the training loop; its time is that
    between its end and the end of the one before.

    Args:
      dispatch: starts a step.
      wait: blocks until the step whose dispatch returned its argument is done.
      warmup: at least 1.
    """
    ends, before = [], dispatch()
    for _ in range(warmup + steps):  # the last one dispatched is not timed
        following = dispatch()
        wait(before)
        ends.append(time.perf_counter())
        before = following
    wait(before)
    return [end - start for start, end in itertools.pairwise(ends[warmup - 1 :])]
