"""The first thing that a locked interpreter does: it locks itself, and says what holds."""

import importlib
import io
import json
import sys

from kvjax.sandbox.inside import candidate, judge
from kvjax.sandbox.inside.channel import Channel

# The first is seeded; the second may need a library that cannot be read later.
_EARLY = ("random", "zlib")
_ROLES = {"candidate": candidate.serve, "judge": judge.serve}


class _Nowhere(io.RawIOBase):
    """Takes what is printed."""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        return len(data)


def main() -> None:
    """Locks this process as the first request says, replies what holds, and takes its role."""
    channel = Channel()
    asked = json.loads(channel.receive())
    for name in _EARLY:
        importlib.import_module(name)
    held = {}
    if asked["lock"]:
        from kvjax.sandbox.inside import lock

        held = lock.lock(**asked["lock"])
    sys.modules["random"].seed(0)  # the same verdict each time
    sys.stdin = io.StringIO()
    sys.stdout = sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Nowhere()), encoding="utf-8")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    channel.reply(json.dumps(held))
    _ROLES[asked["role"]](channel)
