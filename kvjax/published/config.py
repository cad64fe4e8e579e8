"""The keys of a published config.json."""

from collections.abc import Mapping

from kvjax.foundation.configuration import checked
from kvjax.foundation.errors import UserError


class PublishedConfig:
    """The keys of a published config; errors name the file, the key and the value.

    Args:
      values: the config by transformers' keys; a key that is null counts as absent.
      source: the config's file, for messages.
      names: the file's own names of keys where they differ, for messages.

    Attributes:
      nulls: keys that are null, because null and absence mean different things in some keys.
    """

    def __init__(self, values: Mapping, source: str, names: Mapping[str, str] | None = None):
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = frozenset(values) - frozenset(self.values)
        self.source = source
        self._names = names or {}

    def error(self, key: str, allowed: str) -> UserError:
        """Returns the error for a key's value, with the allowed values."""
        return UserError(f"{self._name(key)} = {self.values.get(key)!r}: {allowed}")

    def _name(self, key: str) -> str:
        return f"{self.source}: {self._names.get(key, key)}"

    def get(self, key: str, hint: type, default=None):
        value = self.values.get(key, default)
        if value is None:
            raise UserError(f"{self._name(key)} is missing: this family's configs need it")
        return checked(value, hint, self._name(key))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if not 1 <= value < 1 << 31:
            raise self.error(key, "must be at least 1, and less than 2**31")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self.get(key, float, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.get(key, bool, default)

    def section(self, key: str) -> dict:
        return self.get(key, dict, {})

    def one_of(self, key: str, meanings: Mapping, default):
        """Maps a value by a table; raises a UserError for values that are not in it."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in meanings:
            known = ", ".join(map(repr, meanings))
            raise self.error(key, f"must be one of {known} in this family")
        return meanings[value]
