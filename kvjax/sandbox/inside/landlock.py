"""Landlock: allows reading files beneath given paths, and opening nothing else."""

from collections.abc import Sequence
import ctypes
import os
import stat

from kvjax.sandbox.inside.system_calls import system_call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # equal on all architectures
_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_NETWORK = 0b11  # TCP: bind, connect
_SCOPE = 0b11  # abstract Unix sockets, signals


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scope")]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def restrict(readable: Sequence[str]) -> int:
    """Restricts this process, irrevocably; returns the version of Landlock.

    TCP is restricted from version 4, signals from version 6.

    Args:
      readable: files and folders that remain readable.

    Raises:
      OSError: there is no Landlock (ENOSYS, EOPNOTSUPP), or a path cannot be opened.
    """
    version = system_call(_CREATE_RULESET, None, 0, _VERSION)
    rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    rules = _Ruleset(
        files=(1 << rights) - 1,
        network=_NETWORK if version >= 4 else 0,
        scope=_SCOPE if version >= 6 else 0,
    )
    size = 8 if version < 4 else 16 if version < 6 else 24  # size of the struct in that version
    ruleset = system_call(_CREATE_RULESET, ctypes.byref(rules), size, 0)
    for path in readable:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        folder = stat.S_ISDIR(os.fstat(opened).st_mode)
        allowed = _READ_FILE | (_READ_DIRECTORY if folder else 0)  # a file gives EINVAL with both
        rule = _PathBeneath(allowed=allowed, parent=opened)
        system_call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(opened)
    system_call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return version
