"""Reads JSON from files that may hold anything."""

import json


def parse(text: str | bytes):
    """What the text says.

    Raises:
      ValueError: it is not UTF-8, no JSON, or nested deeper than Python recurses.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
