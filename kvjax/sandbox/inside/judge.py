"""Runs the data set's test, which calls the candidate through a proxy."""

import builtins
import json
import os

from kvjax.sandbox.inside import values
from kvjax.sandbox.inside.channel import Channel

_CALLED = "<test>"


class CandidateError(Exception):
    """The candidate raised something that has no name here."""


def serve(channel: Channel) -> None:
    """Runs the test that is received, calls `check` with a proxy, and replies what came of it.

    Replies are `call` with a call of the candidate, whose outcome is the next request, and last
    `passed`, or `failed` with a reason, or `broken` with one: the test ended before it asked.
    """
    task = json.loads(channel.receive())
    judge = _Judge(channel)
    names = {"__name__": "test"} | {name: judge.proxy(name) for name in task["names"]}
    try:
        exec(compile(task["test"], _CALLED, "exec"), names)
        names["check"](judge.proxy(task["entry_point"]))
    except BaseException as error:
        judge.end("failed" if judge.asked else "broken", _where(error))
    judge.end("passed" if judge.asked else "broken", "check returns")


class _Judge:
    def __init__(self, channel: Channel):
        self._channel, self.asked = channel, False

    def end(self, outcome: str, reason: str = "") -> None:
        """Replies for the last time; a test that catches everything cannot go on."""
        self._channel.reply(f"{outcome} {json.dumps(reason)}")
        os._exit(0)

    def proxy(self, name: str):
        """A function that has the candidate call its function of this name."""

        def candidate(*args, **keywords):
            self.asked = True
            try:
                call = json.dumps(values.encode((name, args, keywords)))
            except ValueError as error:
                self.end("failed", f"the test passes arguments {error}")
            self._channel.reply(f"call {call}")
            outcome, _, text = self._channel.receive().partition(" ")
            try:
                value = values.decode(json.loads(text))
                if outcome == "value":
                    return value
                if outcome != "raised" or not isinstance(value, str):
                    raise ValueError("neither a value nor the name of an exception")
            except (ValueError, TypeError, RecursionError) as error:
                self.end("failed", f"a reply that is not plain data: {error}")
            raise _exception(value)

        return candidate


def _exception(name: str) -> Exception:
    """The builtin exception of this name, unless it is one that ends programs."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return CandidateError(f"the candidate raised {name[:100]}")
    try:
        return kind("the candidate raised it")
    except TypeError:  # UnicodeDecodeError and its like want more
        return CandidateError(f"the candidate raised {name}")


def _where(error: BaseException) -> str:
    """The exception's name, and the last line of the test that it passed."""
    line, trace = None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == _CALLED:
            line = trace.tb_lineno
        trace = trace.tb_next
    said = f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
    return said + (f" in line {line} of the test" if line else "")


def _first_line(error: BaseException) -> str:
    try:
        return str(error).partition("\n")[0][:100]
    except Exception:  # it holds an integer too long to be printed
        return ""
