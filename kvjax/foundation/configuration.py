"""Converts an ml_collections ConfigDict to frozen dataclasses, with errors that name the key."""

import dataclasses
import typing

import ml_collections

from kvjax.foundation.errors import UserError
from kvjax.foundation.text import check_text


def to_dataclass(cls: type, values: ml_collections.ConfigDict, where: str):
    """Returns a frozen dataclass made from a section of a config.

    Raises:
      UserError: an unknown or missing key, or a value of another type. Integers pass as floats and
        lists as tuples; nothing else is converted.
    """
    if not isinstance(values, ml_collections.ConfigDict):
        raise UserError(f"{where} = {values!r}: must be a section, with keys")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise UserError(f"{where}.{key}: no such key; {where} has {', '.join(sorted(fields))}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{where}: missing key(s) {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    return cls(**{key: checked(values[key], hints[key], f"{where}.{key}") for key in values})


def checked(value, hint, key: str):
    """Returns the value as the annotated type: int, float, bool, str or tuple[int, ...].

    Raises:
      UserError: a value of another type; integers pass as floats and lists as tuples.
    """
    expected = typing.get_origin(hint) or hint
    if expected is float and type(value) is int:
        return float(value)
    if expected is tuple and isinstance(value, (list, tuple)):
        (item, _) = typing.get_args(hint)
        return tuple(checked(v, item, f"{key}[{i}]") for i, v in enumerate(value))
    if type(value) is not expected:
        raise UserError(f"{key} = {value!r} is a {type(value).__name__}; it must be {hint}")
    if expected is str:
        check_text(key, value)
    return value


def one_of(key: str, value, allowed) -> None:
    """Raises a UserError unless the value is allowed."""
    if value not in allowed:
        raise UserError(f"{key} = {value!r}: must be one of {', '.join(map(repr, allowed))}")


def at_least(key: str, value, minimum) -> None:
    """Raises a UserError unless the value is at least the minimum."""
    if not value >= minimum:  # also refuses NaN
        raise UserError(f"{key} = {value}: must be at least {minimum}")


def between(key: str, value, low, high, *, zero: str = "") -> None:
    """Raises a UserError unless low <= value <= high.

    Args:
      zero: if given, 0 is allowed outside the range too, and has this meaning in the message.
    """
    if low <= value <= high or (zero and value == 0):  # also refuses NaN
        return
    low, high = (f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in (low, high))
    or_zero = f"0 ({zero}), or " if zero else ""
    raise UserError(f"{key} = {value}: must be {or_zero}at least {low} and at most {high}")


def to_text(config: ml_collections.ConfigDict) -> str:
    """Returns one sorted "key = value" line per leaf, as goldens and workdirs keep it."""
    return "\n".join(f"{key} = {value!r}" for key, value in sorted(_leaves(config))) + "\n"


def _leaves(config: ml_collections.ConfigDict, prefix: str = ""):
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
