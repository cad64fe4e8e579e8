"""Runs the command as a user does."""

from kvjax.compare import __main__ as command
from kvjax.foundation import command_line


def run(*arguments) -> int:
    return command_line.status(command.main, list(map(str, arguments)))
