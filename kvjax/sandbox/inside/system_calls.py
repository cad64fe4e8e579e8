"""System calls that the standard library lacks."""

import ctypes
import os

_LIBRARY = ctypes.CDLL(None, use_errno=True)
_CAPABILITIES_VERSION = 0x20080522


def system_call(number: int, *args) -> int:
    """Invokes system call `number` and returns its result.

    Args:
      args: integers and pointers.

    Raises:
      OSError: the call failed.
    """
    converted = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return _checked(_LIBRARY.syscall(ctypes.c_long(number), *converted))


def prctl(option: int, value: int) -> None:
    """Sets one attribute of this process.

    Raises:
      OSError: the call failed.
    """
    zeros = [ctypes.c_ulong(0)] * 3
    _checked(_LIBRARY.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *zeros))


def drop_capabilities() -> None:
    """Drops this process's capabilities, irrevocably.

    Raises:
      OSError: the call failed.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    _checked(_LIBRARY.capset(header, (ctypes.c_uint32 * 6)()))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
