"""Runs a program and answers calls of what it defines."""

import json
import sys
import types

from kvjax.sandbox.inside import values
from kvjax.sandbox.inside.channel import Channel


def serve(channel: Channel) -> None:
    """Runs the program that is received, then answers calls for ever.

    Replies are `value` with the value, or `raised` with the name of an exception.
    """
    program = types.ModuleType("candidate")  # not __main__: its demonstrations do not run
    sys.modules["candidate"] = program
    run = lambda text: exec(compile(text, "<program>", "exec"), program.__dict__)
    channel.reply(_outcome(run, json.loads(channel.receive())))
    while True:
        name, args, keywords = values.decode(json.loads(channel.receive()))
        channel.reply(_outcome(_call, program.__dict__, name, args, keywords))


def _call(names: dict, name: str, args: tuple, keywords: dict) -> object:
    if name not in names:
        raise NameError(name)
    return names[name](*args, **keywords)


def _outcome(function, *args, dumps=json.dumps, encode=values.encode) -> str:
    try:
        return "value " + dumps(encode(function(*args)))
    except Exception as error:
        return "raised " + dumps(type(error).__name__)
