"""Runs a command as on a kernel that lacks some layers: their system calls fail with ENOSYS.

python -m tests.sandbox.missing landlock,seccomp COMMAND ...
"""

import ctypes
import errno
import os
import struct
import sys

from kvjax.sandbox.inside import seccomp
from kvjax.sandbox.inside.system_calls import prctl, system_call

PROCESSOR = seccomp.PROCESSORS.get(os.uname().machine)


def without(numbers: list[int]) -> None:
    """Makes these calls fail with ENOSYS in this process and its children."""
    code = [(0x20, 0, 0, 0)]
    for number in numbers:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, seccomp.ERROR | errno.ENOSYS)]
    code.append((0x06, 0, 0, seccomp.ALLOW))
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    sock_fprog = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    system_call(PROCESSOR.seccomp, 1, 0, ctypes.create_string_buffer(sock_fprog, len(sock_fprog)))


if __name__ == "__main__":
    calls = {"landlock": 444, "seccomp": PROCESSOR.seccomp}
    without([calls[name] for name in sys.argv[1].split(",")])
    os.execvp(sys.argv[2], sys.argv[2:])
