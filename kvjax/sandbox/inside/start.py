"""Entry point of a locked interpreter: locks itself, and reports which layers hold."""

import importlib
import io
import json
import sys

from kvjax.sandbox.inside import candidate, judge
from kvjax.sandbox.inside.channel import Channel

# `random` is seeded below; `zlib` may need a library that cannot be read once locked.
_EARLY = ("random", "zlib")
_ROLES = {"candidate": candidate.serve, "judge": judge.serve}


class _Nowhere(io.RawIOBase):
    """Discards output."""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        return len(data)


def main() -> None:
    """Applies the layers of the first request, replies which ones hold, and takes its role."""
    channel = Channel()
    request = json.loads(channel.receive())
    for name in _EARLY:
        importlib.import_module(name)
    held = {}
    if request["lock"]:
        from kvjax.sandbox.inside import lock

        held = lock.lock(**request["lock"])
    sys.modules["random"].seed(0)  # reproducible verdicts
    sys.stdin = io.StringIO()
    sys.stdout = sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Nowhere()), encoding="utf-8")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    channel.reply(json.dumps(held))
    _ROLES[request["role"]](channel)
