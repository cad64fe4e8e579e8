"""Parses list options such as --mechanisms=mha,lrkv and --batch=1,8."""

from collections.abc import Collection

from kvjax.foundation.errors import UserError
from kvjax.foundation.text import did_you_mean


def one(option: str, name: str, known: Collection[str]) -> None:
    """Raises a UserError unless the name is known; suggests the closest one."""
    if name not in known:
        meant = did_you_mean(name, known)
        raise UserError(f"{option}: {name!r} is none of {', '.join(known)}{meant}")


def names(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Returns the names of a comma-separated list, each once; refuses unknown ones."""
    found = tuple(dict.fromkeys(text.split(",")))
    for name in found:
        one(f"{option}={text}", name, known)
    return found


def integers(
    option: str, text: str, at_least: int = 1, at_most: int | None = None
) -> tuple[int, ...]:
    """Returns the numbers of a comma-separated list, each once; raises a UserError outside the
    range.
    """
    try:
        found = tuple(dict.fromkeys(map(int, text.split(","))))
    except ValueError:
        found = (at_least - 1,)
    if min(found) < at_least or (at_most is not None and max(found) > at_most):
        most = "or more" if at_most is None else f"to {at_most:,}"
        raise UserError(f"{option} {text!r}: must be integers of {at_least} {most}, as in 1,8")
    return found
