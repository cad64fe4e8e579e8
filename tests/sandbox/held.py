"""Tries every attack on every combination of layers of this machine.

    python -m tests.sandbox.held [LAYERS ...] [--json] [--quick]

LAYERS are names of COMBINATIONS; all by default. Breaches are tried by the program, and then by
the test. Prints a row for each combination, with the attacks that succeeded, and exits with status
1 if any did. --quick leaves out sieges, which are slow. Needs only the standard library, so that
another user can run it.
"""

from collections.abc import Callable
import json
import os
import pathlib
import sys
import tempfile

from kvjax.sandbox import Limits, Problem, SandboxError, namespaces, webassembly
from kvjax.sandbox.box import Box
from kvjax.sandbox.layers import Layers, base_interpreter
from tests.sandbox import attacks, outside

LIMITS = Limits(seconds=1.0, retries=0)
TEST = """
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(2, 3) == 5
"""


def _bubblewrap():
    return namespaces.find(base_interpreter())


# Appended to an attack that the test tries; the program is right.
_BY_THE_TEST = "\ndef check(candidate): assert candidate(1, 2) == add(1, 2)\n"
_RIGHT = "def add(a, b): return a + b\n"
COMBINATIONS: dict[str, Callable[[], Layers]] = {
    "S+L": lambda: Layers(seccomp=True, landlock=True),
    "S+L+N": lambda: Layers(seccomp=True, landlock=True, bubblewrap=_bubblewrap()),
    "S+N": lambda: Layers(seccomp=True, bubblewrap=_bubblewrap()),
    "W": lambda: Layers(wasm=webassembly.find(base_interpreter())),
}


def try_all(box: Box, programs: dict[str, str], *, by_the_test: bool = False) -> list[str]:
    """Returns the names of programs that passed, and what they changed outside.

    Args:
      by_the_test: the programs, which are breaches, run in the test instead.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        outside.Outside(pathlib.Path(folder)) as environment,
    ):
        filled = [attacks.filled(program, environment.names) for program in programs.values()]
        problems = [
            Problem(_RIGHT, program + _BY_THE_TEST, "add")
            if by_the_test
            else Problem(program, TEST, "add")
            for program in filled
        ]
        verdicts = box.judge_all(problems)
        passed = [name for name, v in zip(programs, verdicts, strict=True) if v.passed]
        return passed + environment.changes()


def table(names: list[str], *, quick: bool) -> list[dict]:
    """Returns a row of results for each combination of layers."""
    programs = attacks.BREACHES | attacks.FORGERIES | ({} if quick else attacks.SIEGES)
    rows = []
    for name in names:
        row = dict(combination=name, user=os.geteuid())
        try:
            box = Box(COMBINATIONS[name](), LIMITS)
        except SandboxError as error:
            rows.append(row | dict(missing=str(error)))
            continue
        for by_the_test in (False, True):
            if try_all(box, {"right": _RIGHT}, by_the_test=by_the_test) != ["right"]:
                raise SystemExit(f"{name}: a right program fails")
        through = try_all(box, programs)
        through += try_all(box, attacks.BREACHES, by_the_test=True)
        tried = len(programs) + len(attacks.BREACHES)
        rows.append(row | dict(layers=box.layers, tried=tried, through=through))
    return rows


def main(arguments: list[str]) -> int:
    """Prints the table."""
    names = [name for name in arguments if not name.startswith("--")] or list(COMBINATIONS)
    rows = table(names, quick="--quick" in arguments)
    for row in rows:
        if "--json" in arguments:
            print(json.dumps(row))
        elif "missing" in row:
            print(f"{row['combination']:6} user {row['user']}: not here: {row['missing']}")
        else:
            stopped = row["tried"] - len(row["through"])
            summary = f"{row['combination']:6} user {row['user']}: {stopped} of {row['tried']} held"
            print(
                f"{summary}, {', '.join(row['layers'])}", *row["through"], sep="\n    ", flush=True
            )
    return int(any(row.get("through") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
