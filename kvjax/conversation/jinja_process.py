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

import jinja2  # noqa: F401  an extra, which the worker needs

from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import UserError
from kvjax.foundation.errors import first_line

_WORKER = pathlib.Path(__file__).parent / "jinja_worker.py"
_MEMORY = 1 << 30  # bytes
_SECONDS = 20  # of one conversation, which takes some milliseconds
_CHARACTERS = 1 << 24  # that a conversation may have


def check(template: str) -> None:
    """Raises a UserError for a template that is none."""
    _answer(template, None, "")


def render(template: str, values: Mapping, day: str = "") -> str:
    """Returns the text of a template.

    Args:
      values: what it sees, JSON-able.
      day: that it is told by strftime_now, in ISO's format; "": the present one.

    Raises:
      UserError: a template that is none, or takes too much memory or time.
      DataError: the template refuses the values.
    """
    answer = _answer(template, values, day)
    if "error" in answer:
        raise DataError(f"the chat template refuses a conversation: {first_line(answer['error'])}")
    return answer["text"]


def _answer(template: str, values: Mapping | None, day: str) -> dict[str, str]:
    answer = _worker().ask(dict(template=template, values=values, day=day))
    if answer is None:
        _worker.cache_clear()  # it has ended
        raise UserError(
            f"chat_template.jinja takes more than {_MEMORY >> 30} GiB of memory, {_SECONDS} "
            f"seconds or {_CHARACTERS:,} characters for a conversation: correct it, or remove it"
        )
    if "broken" in answer:
        raise UserError(f"chat_template.jinja is no template: {first_line(answer['broken'])}")
    return answer


class _Worker:
    """The process, which ends with this one."""

    def __init__(self):
        limits = map(str, (_MEMORY, _CHARACTERS, _SECONDS))
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
        weakref.finalize(self, _end, self._process)

    def ask(self, request: dict) -> dict | None:
        """Returns the answer; None where the process ended before it had one."""
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
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
