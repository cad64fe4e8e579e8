"""Runs the program and answers calls of its functions."""

import json
import sys
import types

from kvjax.sandbox.inside import values
from kvjax.sandbox.inside.channel import Channel


def serve(channel: Channel) -> None:
    """Runs the program it receives, then answers calls until it is killed.

    Replies are `value` with the result, or `raised` with an exception's name.
    """
    program = types.ModuleType("candidate")  # not __main__, so its demonstrations do not run
    sys.modules["candidate"] = program
    channel.reply(_outcome(_run, json.loads(channel.receive()), program.__dict__))
    while True:
        name, args, keywords = values.decode(json.loads(channel.receive()))
        channel.reply(_outcome(_call, program.__dict__, name, args, keywords))


def _run(text: str, names: dict) -> None:
    exec(compile(text, "<program>", "exec"), names)


def _call(names: dict, name: str, args: tuple, keywords: dict) -> object:
    if name not in names:
        raise NameError(name)
    return names[name](*args, **keywords)


def _outcome(function, *args, dumps=json.dumps, encode=values.encode) -> str:
    """Returns a reply; `dumps` and `encode` are bound here, before a program can replace them."""
    try:
        return "value " + dumps(encode(function(*args)))
    except Exception as error:
        return "raised " + dumps(type(error).__name__)
