"""Parses list options such as --mechanisms=mha,lrkv and --batch=1,8."""

from collections.abc import Collection

from kvjax.foundation.errors import UserError
from kvjax.foundation.text import did_you_mean


def one(option: str, name: str, known: Collection[str]) -> None:
    """Raises a UserError unless the name is known; suggests the closest one."""
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(f"{option}: {name!r} is none of {', '.join(known)}{hint}")


def names(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Returns the names of a comma-separated list, each once; refuses unknown ones."""
    chosen = tuple(dict.fromkeys(text.split(",")))
    for name in chosen:
        one(f"{option}={text}", name, known)
    return chosen


def integers(
    option: str, text: str, at_least: int = 1, at_most: int | None = None
) -> tuple[int, ...]:
    """Returns the integers of a comma-separated list, each once.

    Raises:
      UserError: not integers, or one outside the range.
    """
    try:
        numbers = tuple(dict.fromkeys(map(int, text.split(","))))
    except ValueError:
        numbers = (at_least - 1,)
    if min(numbers) < at_least or (at_most is not None and max(numbers) > at_most):
        upper = "or more" if at_most is None else f"to {at_most:,}"
        raise UserError(f"{option} {text!r}: must be integers of {at_least} {upper}, as in 1,8")
    return numbers
