"""Runs code that a language model wrote against a test that it can neither see nor forge.

    from kvjax import sandbox

    box = sandbox.open("auto")
    verdict = box.judge(program="def add(a, b): ...", test="def check(candidate): ...",
                        entry_point="add")

The program and the test run in two interpreters, each locked before it is given anything: the test
asks, the program answers, and this process hands lines between them. What cannot be locked is not
run. Imports the standard library only.

It keeps what a program does from this machine. It does not keep from a program that it is judged,
nor how late it is, nor which files there are (their contents, yes); and whoever finds a hole in the
kernel gets out.
"""

from kvjax.sandbox.box import Box, Verdict
from kvjax.sandbox.errors import SandboxError
from kvjax.sandbox.limits import Limits
from kvjax.sandbox.policy import open_box as open
from kvjax.sandbox.problem import Problem, asked_names, check

__all__ = ["Box", "Limits", "Problem", "SandboxError", "Verdict", "asked_names", "check", "open"]
