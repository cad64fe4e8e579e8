"""Exceptions that are a message to the user, not a bug."""


class UserError(Exception):
    """Something outside the program must change: a config key, a file, a machine.

    The message names the key or file, its value, what is allowed and what to do. Command lines
    print it without a traceback and exit with status 2.
    """


class DataError(UserError, ValueError):
    """A data set that cannot be as asked for."""


class MissingDataError(UserError, FileNotFoundError):
    """A file or folder of data that is not there."""
