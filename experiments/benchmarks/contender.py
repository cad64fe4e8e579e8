"""Runs a function in a process of its own, so that it leaves nothing on the device.

The parent writes arguments as JSON to the child's stdin; the child prints a line with its result.
Imports neither JAX nor PyTorch.
"""

from collections.abc import Callable, Mapping
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
import types

from kvjax.foundation.checkout import ROOT
from kvjax.foundation.command_line import reason_of
from kvjax.foundation.errors import UserError, first_line

_RESULT = "result: "  # marks the line of the result among lines that libraries print
_FRAMES = 12  # most frames of a traceback that are printed
_IGNORE_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
_CHILD = "import sys; from experiments.benchmarks import contender; contender.child(*sys.argv[1:])"


def python(code: str) -> list[str]:
    """Returns a command that runs code; it ignores Ctrl-C, since the parent kills it."""
    return [sys.executable, "-c", f"{_IGNORE_CTRL_C}; {code}"]


def run(
    module: str,
    arguments: dict,
    *,
    function: str = "training_speed",
    environment: Mapping[str, str] = types.MappingProxyType({}),
) -> dict:
    """Calls a module's function in a child process; returns {"error": one line} if it fails."""
    child = subprocess.run(
        [*python(_CHILD), module, function],
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | dict(environment),
        check=False,
    )
    results = [line for line in child.stdout.splitlines() if line.startswith(_RESULT)]
    if child.returncode or not results:
        return dict(error=f"{module} ended with status {child.returncode}, without a result")
    return json.loads(results[-1].removeprefix(_RESULT))


def child(module: str, function: str) -> None:
    """Calls a function with the arguments of stdin; the traceback of a bug goes to stderr."""
    try:
        result = getattr(importlib.import_module(module), function)(**json.load(sys.stdin))
    except Exception as error:  # errors of compilers and devices belong into the table
        if reason_of(error) is None:
            traceback.print_exc(limit=-_FRAMES)
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        result = dict(error=kind + first_line(error))
    print("\n" + _RESULT + json.dumps(result))


def step_seconds(
    dispatch: Callable[[], object], wait: Callable[[object], object], *, steps: int, warmup: int
) -> list[float]:
    """Returns the seconds of each of `steps` consecutive steps, after `warmup` others.

    A step is awaited after the next one has been dispatched, as in the training loop. Its time runs
    from the end of the previous step to its own end.

    Args:
      dispatch: starts a step.
      wait: blocks until a step is done; its argument is the step's return value of `dispatch`.
      warmup: at least 1.
    """
    ends, running = [], dispatch()
    for _ in range(warmup + steps):  # the last step that is dispatched is not timed
        following = dispatch()
        wait(running)
        ends.append(time.perf_counter())
        running = following
    wait(running)
    return [end - start for start, end in itertools.pairwise(ends[warmup - 1 :])]
