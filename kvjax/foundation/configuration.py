"""From an ml_collections ConfigDict to frozen dataclasses, once, with errors that name the key."""

import dataclasses
import typing

import ml_collections

from kvjax.foundation.errors import UserError
from kvjax.foundation.text import check_text


def to_dataclass(cls: type, values: ml_collections.ConfigDict, where: str):
    """An instance of a frozen dataclass from the part of a config that has its name.

    Raises:
      UserError: for a key the dataclass does not have, a key it needs and does not get, or a value
        of another type. Integers pass as floats and lists as tuples, nothing else is converted.
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
    """The value as the annotated type, one of int, float, bool, str, tuple[int, ...].

    Raises:
      UserError: for a value of another type; integers pass as floats and lists as tuples.
    """
    wanted = typing.get_origin(hint) or hint
    if wanted is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise UserError(f"{key} = {value}: is no number that a computer has") from error
    if wanted is tuple and isinstance(value, (list, tuple)):
        (item, _) = typing.get_args(hint)
        return tuple(checked(v, item, f"{key}[{i}]") for i, v in enumerate(value))
    if type(value) is not wanted:
        raise UserError(f"{key} = {value!r} is a {type(value).__name__}; it must be {hint}")
    if wanted is str:
        check_text(key, value)
    return value


def one_of(key: str, value, allowed) -> None:
    """Raises a UserError unless the value is one of those allowed."""
    if value not in allowed:
        raise UserError(f"{key} = {value!r}: must be one of {', '.join(map(repr, allowed))}")


def at_least(key: str, value, minimum) -> None:
    """Raises a UserError unless the value is at least the minimum."""
    if not value >= minimum:  # NaN is not
        raise UserError(f"{key} = {value}: must be at least {minimum}")


def between(key: str, value, low, high, *, zero: str = "") -> None:
    """Raises a UserError unless low <= value <= high.

    Args:
      zero: what 0 means, where that is allowed too.
    """
    if low <= value <= high or (zero and value == 0):  # NaN is neither
        return

    def shown(bound):
        return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"

    none = f"0 ({zero}), or " if zero else ""
    raise UserError(
        f"{key} = {value}: must be {none}at least {shown(low)} and at most {shown(high)}"
    )


def to_text(config: ml_collections.ConfigDict) -> str:
    """One "key = value" line per leaf, sorted: what golden tests and workdirs keep."""
    return "\n".join(f"{key} = {value!r}" for key, value in sorted(_leaves(config))) + "\n"


def _leaves(config: ml_collections.ConfigDict, prefix: str = ""):
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
