"""Runs a language model's program against a test that the program can neither read nor forge.

    from kvjax import sandbox

    box = sandbox.open("auto")
    verdict = box.judge(program="def add(a, b): ...", test="def check(candidate): ...",
                        entry_point="add")

Program and test run in two interpreters, each locked before it receives any code. The test calls
the program's functions, and this process passes the calls between them as lines of text. If an
interpreter cannot be locked, nothing runs. Imports the standard library only.

The sandbox protects this machine from the program. The program can still find out that it is being
judged, the time, and names of files (but not their contents). The sandbox does not protect against
bugs of the kernel.
"""

from kvjax.sandbox.box import Box, Verdict
from kvjax.sandbox.errors import SandboxError
from kvjax.sandbox.limits import Limits
from kvjax.sandbox.policy import open_box as open
from kvjax.sandbox.problem import Problem, called_names, check

__all__ = ["Box", "Limits", "Problem", "SandboxError", "Verdict", "called_names", "check", "open"]
