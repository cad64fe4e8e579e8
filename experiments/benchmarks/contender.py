"""A training program timed in a process of its own: nothing is left on the device for the next.

The parent writes arguments as JSON to the child's stdin; the child prints a line with its result.
Imports neither JAX nor PyTorch.
"""

from collections.abc import Callable
import importlib
import itertools
import json
import subprocess
import sys
import time
import traceback

from kvjax.foundation.checkout import ROOT
from kvjax.foundation.command_line import reason_of
from kvjax.foundation.errors import UserError, first_line

_RESULT = "result: "  # libraries may print before and after
_FRAMES = 12  # of a traceback: compilers' are long
_IGNORE_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
_CHILD = "import sys; from experiments.benchmarks import contender; contender.child(sys.argv[1])"


def python(code: str) -> list[str]:
    """A command that runs code; Ctrl-C is left to the parent, which kills it."""
    return [sys.executable, "-c", f"{_IGNORE_CTRL_C}; {code}"]


def run(module: str, arguments: dict) -> dict:
    """Calls a module's `training_speed` in a child process; {"error": one line} if it fails."""
    child = subprocess.run(
        [*python(_CHILD), module],
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )
    results = [line for line in child.stdout.splitlines() if line.startswith(_RESULT)]
    if child.returncode or not results:
        return dict(error=f"{module} ended with status {child.returncode}, without a result")
    return json.loads(results[-1].removeprefix(_RESULT))


def child(module: str) -> None:
    """Calls `training_speed` with the arguments; the traceback of a bug goes to stderr."""
    try:
        result = importlib.import_module(module).training_speed(**json.load(sys.stdin))
    except Exception as error:  # whatever a compiler or a device says belongs into the table
        if reason_of(error) is None:
            traceback.print_exc(limit=-_FRAMES)
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        result = dict(error=kind + first_line(error))
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
