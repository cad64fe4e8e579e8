"""Checks of text that users give; imports nothing outside the standard library."""

from kvjax.foundation.errors import UserError


def check_text(key: str, value: str) -> None:
    """Raises a UserError for what no file and no terminal takes: lone surrogates and NUL.

    Surrogates are what Python makes of a command line's bytes that are not UTF-8.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{key} = {value!r}: is not UTF-8 text ({error.reason})") from error
    if "\0" in value:
        raise UserError(f"{key} = {value!r}: must not hold the character NUL")
