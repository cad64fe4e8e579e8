"""A problem to judge: a program, a test, and the function that the test calls."""

import ast
import builtins
import dataclasses

from kvjax.sandbox.errors import SandboxError

MAX_BYTES = 1 << 20  # maximum size of a program


@dataclasses.dataclass(frozen=True)
class Problem:
    """A candidate's program and a test that it has not seen.

    `test` defines `check(candidate)`, which raises if the candidate is wrong.
    """

    program: str
    test: str
    entry_point: str


def check(problem: Problem) -> None:
    """Raises a SandboxError for a problem that cannot be judged with any program."""
    called_names(problem)


def called_names(problem: Problem) -> list[str]:
    """Returns the names that the test uses and does not define: functions of the candidate.

    Raises:
      SandboxError: an invalid test or entry point.
    """
    if not problem.entry_point.isidentifier():
        raise SandboxError(f"entry_point = {problem.entry_point!r}: must be a Python identifier")
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


def invalid_program(program: str) -> str | None:
    """Returns why a program cannot be run; None if it can."""
    try:
        size = len(program.encode())
    except UnicodeEncodeError as error:
        return f"the program is not UTF-8: {program[error.start]!r} at {error.start}"
    if size > MAX_BYTES:
        return f"the program has {size:,} bytes, more than {MAX_BYTES:,}"
    return None
