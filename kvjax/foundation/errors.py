"""User errors, other exceptions in one line, and warnings."""

from collections.abc import Iterator
import contextlib
import sys


class UserError(Exception):
    """An error that the user can resolve: a config key, a file, a machine.

    The message names the key or file, its value, the allowed values and the remedy. Command lines
    print it without a traceback and exit with status 2.
    """


class DataError(UserError, ValueError):
    """A data set that cannot be used as requested."""


class MissingDataError(UserError, FileNotFoundError):
    """A data file or folder that does not exist."""


def first_line(error: BaseException | str) -> str:
    """Returns the first line of an exception's text, or its type if it has no text.

    Runtimes may append pages of program text, addresses and advice.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class NativePanicError(RuntimeError):
    """A panic in a Rust library, which raises it as a BaseException."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turns panics of Rust libraries into NativePanicErrors."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # PyO3 does not export its class
            raise
        raise NativePanicError(first_line(error)) from error


def warn(text: str) -> None:
    """Prints a warning on standard error, above a progress bar.

    Not through `logging`, whose level libraries change.
    """
    say(f"WARNING: {text}")


def say(text: str) -> None:
    """Prints a line on standard error, above a progress bar."""
    tqdm = sys.modules.get("tqdm")  # not imported: no progress bar
    write = tqdm.tqdm.write if tqdm else print
    write(text, file=sys.stderr)
    sys.stderr.flush()
