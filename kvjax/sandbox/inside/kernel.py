"""System calls that the standard library does not have."""

import ctypes
import os

_LIBRARY = ctypes.CDLL(None, use_errno=True)


def call(number: int, *args) -> int:
    """The result of a system call, by number.

    Args:
      args: integers and pointers.

    Raises:
      OSError: it failed.
    """
    whole = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return _checked(_LIBRARY.syscall(ctypes.c_long(number), *whole))


def prctl(option: int, value: int) -> None:
    """Sets one thing of this process.

    Raises:
      OSError: it failed.
    """
    zeros = [ctypes.c_ulong(0)] * 3
    _checked(_LIBRARY.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *zeros))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
