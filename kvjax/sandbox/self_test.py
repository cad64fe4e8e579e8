"""Tests that a box judges and that its layers hold, before it is used.

First a right program must pass and a wrong one fail: if no program ran at all, every attack would
seem to be prevented. Then a program tries what every layer must prevent.
"""

import dataclasses
import os
import socket
import tempfile

from kvjax.sandbox.box import Box
from kvjax.sandbox.errors import SandboxError
from kvjax.sandbox.process import OUT_OF_TIME

_TEST = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
_RIGHT = "def add(a, b):\n    return a + b\n"
_WRONG = "def add(a, b):\n    return a - b\n"
_LOOP = "while True: pass\n"
_SECONDS = 0.1  # time limit of the test with an endless loop
# Statements that raise if they are prevented.
_BREACHES = {
    "writes a file": "open({file!r}, 'w').close()",
    "connects": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "reads the environment of the process that judges": "open('/proc/{process}/environ').read()",
    "starts a process": "import os; os.fork() or os._exit(0)",
    "takes a GB": "bytearray(1 << 30)",
}
_TRY = """
def attempt(statement):
    try:
        exec(statement, {})
    except BaseException:
        return False
    return True
"""


def check(box: Box, *, breaches: bool = True) -> None:
    """Tests a box.

    Args:
      breaches: test that the layers hold, too.

    Raises:
      SandboxError: a test failed.
    """
    right = box.judge(program=_RIGHT, test=_TEST, entry_point="add")
    if not right.passed:
        raise SandboxError(f"self-test: a right program fails: {right.reason}")
    if box.judge(program=_WRONG, test=_TEST, entry_point="add").passed:
        raise SandboxError("self-test: a wrong program passes")
    quick = box.with_limits(dataclasses.replace(box.limits, seconds=_SECONDS, retries=0))
    loop = quick.judge(program=_LOOP, test=_TEST, entry_point="add")
    if OUT_OF_TIME not in loop.reason:
        raise SandboxError(f"self-test: a loop does not run out of time: {loop.reason}")
    if breaches:
        _hold(box)


def _hold(box: Box) -> None:
    """Raises a SandboxError if a program gets out of the box."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        file, port = os.path.join(folder, "written"), listener.getsockname()[1]
        test = "def check(candidate):\n"
        for name, template in _BREACHES.items():
            statement = template.format(file=file, port=port, process=os.getpid())
            test += f"    assert not candidate({statement!r}), {name!r}\n"
        verdict = box.judge(program=_TRY, test=test, entry_point="attempt")
        listener.settimeout(0)
        try:
            listener.accept()[0].close()
            connected = True
        except BlockingIOError:
            connected = False
        if not verdict.passed or connected or os.path.exists(file):
            reason = verdict.reason or "its program reached a file or a port"
            raise SandboxError(f"self-test: the layers do not hold: {reason}")
