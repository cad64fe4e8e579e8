"""Checks of users' text; standard library only."""

from kvjax.foundation.errors import UserError


def check_text(key: str, value: str) -> None:
    """Raises a UserError for lone surrogates, Python's form of bytes that are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{key} = {value!r}: is not UTF-8 text ({error.reason})") from error
