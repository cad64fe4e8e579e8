"""Checks of users' text, suggestions for misspelled words, lists; standard library only."""

from collections.abc import Iterable
import difflib

from kvjax.foundation.errors import UserError

_MOST_LISTED = 8


def check_text(key: str, value: str) -> None:
    """Raises a UserError for lone surrogates, Python's form of bytes that are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{key} = {value!r}: is not UTF-8 text ({error.reason})") from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the closest known word, or ""."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Returns names as text: the first ones, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
