"""A command that does what none may: the oracle has to see each of its ways."""

import os
import pathlib
import sys

from kvjax.foundation import command_line
from kvjax.foundation.command_line import say
from kvjax.foundation.errors import UserError


def main(arguments: list[str]) -> int:
    """Does what its only option says."""
    parser = command_line.Parser(__doc__)
    parser.add_argument("--way")
    way = parser.parse(arguments).way
    if way == "raises":
        raise KeyError(way)
    if way == "accepts":
        return 0
    if way == "empties":
        pathlib.Path("notes.txt").write_text("")
    if way == "moves":
        pathlib.Path("notes.txt").rename("elsewhere.txt")
    if way == "writes to shared":
        pathlib.Path("../shared/a_file").write_text("other\n")
    if way == "two messages":
        say("the option --way is unusual")
    if way == "noise":
        print("E0000 00:00:00 some_library.cc] --way", file=sys.stderr)
    if way == "talks":
        print("on my way")
    if way == "hoards":
        bytearray(1_200_000_000)
    if way == "dies":
        os.abort()
    if way == "unnamed":
        raise UserError("something is not as it should be")
    raise UserError(f"--way={way}: is none")


if __name__ == "__main__":
    command_line.run(main)
