"""Runs the data set's test, which calls the candidate through proxies."""

import builtins
import json
import os

from kvjax.sandbox.inside import values
from kvjax.sandbox.inside.channel import Channel

_FILE = "<test>"  # name of the test in tracebacks


class CandidateError(Exception):
    """The candidate raised an exception that is not a builtin."""


def serve(channel: Channel) -> None:
    """Runs the test it receives, calls `check` with a proxy, and replies with the outcome.

    Replies are `call` with a call of the candidate (the next request is its outcome), and at the
    end `passed`, `failed` with a reason, or `broken` with a reason if the test made no call.
    """
    task = json.loads(channel.receive())
    judge = _Judge(channel)
    names = {"__name__": "test"} | {name: judge.proxy(name) for name in task["names"]}
    try:
        exec(compile(task["test"], _FILE, "exec"), names)
        names["check"](judge.proxy(task["entry_point"]))
    except BaseException as error:
        judge.end("failed" if judge.has_called else "broken", _describe(error))
    judge.end("passed" if judge.has_called else "broken", "check returns")


class _Judge:
    def __init__(self, channel: Channel):
        self._channel, self.has_called = channel, False

    def end(self, outcome: str, reason: str = "") -> None:
        """Replies and exits, which a test that catches every exception cannot prevent."""
        self._channel.reply(f"{outcome} {json.dumps(reason)}")
        os._exit(0)

    def proxy(self, name: str):
        """Returns a function that calls the candidate's function of this name."""

        def candidate(*args, **keywords):
            self.has_called = True
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
    """Returns a builtin exception by name; a CandidateError for others."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return CandidateError(f"the candidate raised {name[:100]}")
    try:
        return kind("the candidate raised it")
    except TypeError:  # UnicodeDecodeError and others need more arguments
        return CandidateError(f"the candidate raised {name}")


def _describe(error: BaseException) -> str:
    """Returns an exception's name and message, with the line of the test that raised it."""
    line, trace = None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    text = f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
    return text + (f" in line {line} of the test" if line else "")


def _first_line(error: BaseException) -> str:
    try:
        return str(error).partition("\n")[0][:100]
    except Exception:  # its text holds an integer above Python's limit of digits
        return ""
