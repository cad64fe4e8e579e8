"""Chat templates are rendered in another process: they are programs of whoever published them.

Jinja's sandbox keeps a template from this machine's files, not from its memory and time.
"""

from collections.abc import Mapping
import contextlib
import functools
import json
import pathlib
import subprocess
import sys
import threading
import weakref

import jinja2  # noqa: F401  without it the worker would end as at a limit

from kvjax.foundation.errors import DataError, UserError, first_line

_WORKER = pathlib.Path(__file__).parent / "jinja_worker.py"
_MEMORY = 1 << 30  # bytes
_SECONDS = 20  # of one conversation, which takes some milliseconds
_TRIAL_SECONDS = 2  # of compiling a template, or of a conversation of some words
_CHARACTERS = 1 << 24  # that a conversation may have


class LimitError(UserError):
    """A chat template that takes too much memory or time, or writes too long a text."""


def literals(template: str) -> str:
    """Returns the texts of a template, outside of its blocks or quoted in them, one a line.

    Raises:
      UserError: a template that is none.
      LimitError: it takes too much memory or time.
    """
    return _answer(template, None, "", trial=True)["text"]


def render(template: str, values: Mapping, day: str = "", *, trial: bool = False) -> str:
    """Returns the text of a template.

    Args:
      values: what it sees, JSON-able.
      day: that it is told by strftime_now, in ISO's format; "": the present one.
      trial: whether the conversation has some words only; its text is kept.

    Raises:
      UserError: a template that is none.
      LimitError: it takes too much memory or time.
      DataError: the template refuses the values, or they are too long.
    """
    answer = _answer(template, values, day, trial)
    if "error" in answer:
        raise DataError(f"the chat template refuses a conversation: {first_line(answer['error'])}")
    return answer["text"]


def _answer(template: str, values: Mapping | None, day: str, trial: bool) -> dict[str, str]:
    seconds = _TRIAL_SECONDS if trial else _SECONDS
    request = json.dumps(dict(template=template, values=values, day=day, seconds=seconds))
    answer = _tried(request) if trial else _asked(request)
    if answer is None:
        limits = f"{_MEMORY >> 30} GiB of memory, {seconds} seconds or {_CHARACTERS:,} characters"
        given = len(json.dumps(values, ensure_ascii=False))
        if given > _CHARACTERS // 2:
            raise DataError(
                f"a conversation of {given:,} characters: the chat template takes more than "
                f"{limits} for it: shorten it"
            )
        raise LimitError(
            f"chat_template.jinja takes more than {limits} for a conversation: correct it, or "
            "remove it"
        )
    if "broken" in answer:
        raise UserError(f"chat_template.jinja is no template: {first_line(answer['broken'])}")
    return answer


def _asked(request: str) -> dict[str, str] | None:
    answer = _worker().ask(request)
    if answer is None:
        _worker.cache_clear()  # it has ended
    return answer


@functools.lru_cache(maxsize=16)
def _tried(request: str) -> dict[str, str] | None:
    """Returns the answer as `_asked`, which several readers of one model wait for once."""
    return _asked(request)


class _Worker:
    """The process, which ends with this one."""

    def __init__(self):
        limits = map(str, (_MEMORY, _CHARACTERS))
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
        weakref.finalize(self, _end, self._process)

    def ask(self, request: str) -> dict | None:
        """Returns the answer to a line of JSON; None where the process ended before it had one."""
        with self._lock:
            try:
                self._process.stdin.write(request.encode() + b"\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except OSError:
                line = b""
        return json.loads(line) if line.endswith(b"\n") else None


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()


@functools.cache
def _worker() -> _Worker:
    return _Worker()
