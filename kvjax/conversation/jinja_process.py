"""Renders chat templates in a separate process, since they are code from a model's publisher.

Jinja's sandbox protects files, not memory and time.
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

import jinja2  # noqa: F401  a missing package fails here, not as a worker that exceeds its limits

from kvjax.foundation.errors import DataError, UserError, first_line

_WORKER = pathlib.Path(__file__).parent / "jinja_worker.py"
_MEMORY = 1 << 30  # bytes
_SECONDS = 20  # CPU time for one conversation, which normally takes milliseconds
_TRIAL_SECONDS = 2  # to compile a template, or to render a short conversation
_CHARACTERS = 1 << 24  # maximum of rendered text


class LimitError(UserError):
    """A chat template exceeded its limit of memory, time or length of text."""


def literals(template: str) -> str:
    """Returns a template's literal texts, one per line: text outside blocks, and quoted strings.

    Raises:
      UserError: not a valid template.
      LimitError: too much memory or time.
    """
    return _answer(template, None, "", trial=True)["text"]


def render(template: str, values: Mapping, day: str = "", *, trial: bool = False) -> str:
    """Renders a template.

    Args:
      values: its variables, JSON-able.
      day: date for strftime_now, in ISO format; "": today.
      trial: a short conversation: cached, with a lower time limit.

    Raises:
      UserError: not a valid template.
      LimitError: too much memory or time.
      DataError: the template refuses the values, or they are too long.
    """
    answer = _answer(template, values, day, trial)
    if "error" in answer:
        raise DataError(f"the chat template refuses a conversation: {first_line(answer['error'])}")
    return answer["text"]


def _answer(template: str, values: Mapping | None, day: str, trial: bool) -> dict[str, str]:
    seconds = _TRIAL_SECONDS if trial else _SECONDS
    request = json.dumps(dict(template=template, values=values, day=day, seconds=seconds))
    answer = _cached_answer(request) if trial else _worker_answer(request)
    if answer is None:
        limits = f"{_MEMORY >> 30} GiB of memory, {seconds} seconds or {_CHARACTERS:,} characters"
        length = len(json.dumps(values, ensure_ascii=False))
        if length > _CHARACTERS // 2:
            raise DataError(
                f"a conversation of {length:,} characters: the chat template needs more than "
                f"{limits} for it: shorten it"
            )
        raise LimitError(
            f"chat_template.jinja needs more than {limits} for a conversation: correct it, or "
            "remove it"
        )
    if "broken" in answer:
        raise UserError(
            f"chat_template.jinja is not a valid template: {first_line(answer['broken'])}"
        )
    return answer


def _worker_answer(request: str) -> dict[str, str] | None:
    answer = _worker().ask(request)
    if answer is None:
        _worker.cache_clear()  # it has ended
    return answer


@functools.lru_cache(maxsize=16)
def _cached_answer(request: str) -> dict[str, str] | None:
    """Returns `_worker_answer`, cached: a model's template is inspected several times."""
    return _worker_answer(request)


class _Worker:
    """The worker process, killed with this object."""

    def __init__(self):
        limits = map(str, (_MEMORY, _CHARACTERS))
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # keeps Ctrl-C from the worker
        )
        weakref.finalize(self, _end, self._process)

    def ask(self, request: str) -> dict | None:
        """Returns the answer to a line of JSON; None if the process ended without one."""
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
