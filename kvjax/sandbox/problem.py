"""What is judged: a program, the test of a data set, and the name that the test calls."""

import ast
import builtins
import dataclasses

from kvjax.sandbox.errors import SandboxError

MOST_BYTES = 1 << 20  # of a program


@dataclasses.dataclass(frozen=True)
class Problem:
    """A candidate's program and the test that it has not seen.

    `test` defines `check(candidate)`, which raises if the candidate is wrong.
    """

    program: str
    test: str
    entry_point: str


def check(problem: Problem) -> None:
    """Raises a SandboxError for a problem that cannot be judged, whatever its program."""
    asked_names(problem)


def asked_names(problem: Problem) -> list[str]:
    """The names that the test uses and does not define: functions of the candidate.

    Raises:
      SandboxError: program, test or entry point are not what can be judged.
    """
    for name in ("program", "test", "entry_point"):
        if not isinstance(value := getattr(problem, name), str):
            raise SandboxError(f"{name} is {type(value).__name__}: must be str")
    if not problem.entry_point.isidentifier():
        raise SandboxError(f"entry_point = {problem.entry_point!r}: must be a name of Python")
    try:
        tree = ast.parse(problem.test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SandboxError(f"test of {problem.entry_point} is not Python: {error}") from error
    used, defined = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.add(name)
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                defined.add(name)
            case ast.alias(name=name, asname=other):
                defined.add(other or name.partition(".")[0])
    if "check" not in defined:
        raise SandboxError(f"test of {problem.entry_point} defines no check(candidate)")
    return sorted(name for name in used - defined if not hasattr(builtins, name))


def why_not_a_program(program: str) -> str | None:
    """Why Python would not take it; None if it may."""
    try:
        size = len(program.encode())
    except UnicodeEncodeError as error:
        return f"the program is not UTF-8: {program[error.start]!r} at {error.start}"
    if size > MOST_BYTES:
        return f"the program has {size:,} bytes, more than {MOST_BYTES:,}"
    return None
