"""Exceptions that are a message to the user, not a bug; other exceptions in a line; warnings."""

from collections.abc import Iterator
import contextlib
import sys


class UserError(Exception):
    """Something outside the program must change: a config key, a file, a machine.

    The message names the key or file, its value, what is allowed and what to do. Command lines
    print it without a traceback and exit with status 2.
    """


class DataError(UserError, ValueError):
    """A data set that cannot be as asked for."""


class MissingDataError(UserError, FileNotFoundError):
    """A file or folder of data that is not there."""


def first_line(error: BaseException | str) -> str:
    """The first line of an exception's text, to quote in a message; its type if it has no text.

    Runtimes put pages after it: the program, addresses, advice.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class NativePanicError(RuntimeError):
    """A panic of a library in Rust, which is a BaseException as the library raises it."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Around calls of a library in Rust: raises a NativePanicError for its panic."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its class cannot be imported
            raise
        raise NativePanicError(first_line(error)) from error


def warn(text: str) -> None:
    """One line on stderr, above a progress bar: something its user must know, and the run goes on.

    Not a log's, whose level libraries change.
    """
    bars = sys.modules.get("tqdm")  # without it there is no bar
    write = bars.tqdm.write if bars else print
    write(f"WARNING: {text}", file=sys.stderr)
    sys.stderr.flush()
