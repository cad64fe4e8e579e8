"""Sections of a config become dataclasses; messages name the key."""

import dataclasses

import ml_collections
import pytest

from kvjax.foundation import configuration
from kvjax.foundation.errors import UserError


@dataclasses.dataclass(frozen=True)
class Example:
    count: int
    rate: float = 0.5
    name: str = "a"
    on: bool = False
    ranks: tuple[int, ...] = ()


def _read(**values):
    return configuration.to_dataclass(Example, ml_collections.ConfigDict(values), "config.example")


def test_values_arrive():
    section = _read(count=3, rate=0.25, name="b", on=True, ranks=(1, 2))
    assert section == Example(3, 0.25, "b", True, (1, 2))
    read = _read(count=3, rate=2, ranks=[4, 5])
    assert read == Example(3, 2.0, ranks=(4, 5))
    assert type(read.rate) is float and type(read.ranks) is tuple


def test_wrong_types():
    hints = {field.name: field.type for field in dataclasses.fields(Example)}
    for key, value, kind in (
        ("count", "3", "str"),
        ("count", 3.0, "float"),
        ("count", True, "bool"),
        ("count", None, "NoneType"),
        ("rate", "0.1", "str"),
        ("rate", True, "bool"),
        ("name", 7, "int"),
        ("on", 1, "int"),
        ("on", "yes", "str"),
        ("ranks", 3, "int"),
        ("ranks[1]", "4", "str"),
        ("ranks[1]", 1.5, "float"),
        ("ranks[1]", True, "bool"),
    ):
        name, _, inside = key.partition("[")
        with pytest.raises(UserError) as error:
            _read(**{"count": 1, name: (3, value) if inside else value})
        hint = int if inside else hints[name]
        message = f"config.example.{key} = {value!r} is a {kind}; it must be {hint}"
        assert str(error.value) == message


def test_bad_sections():
    for values, message in (
        (dict(count=1, cuont=2), "config.example.cuont: no such key.*count, name, on"),
        (dict(rate=0.1), "config.example: missing key.* count"),
        (dict(count=1, name="\udcff"), "config.example.name = '.udcff': is not UTF-8 text"),
    ):
        with pytest.raises(UserError, match=message):
            _read(**values)
    with pytest.raises(UserError, match="^config.x = 3: must be a section, with keys$"):
        configuration.to_dataclass(Example, 3, "config.x")


def test_ranges():
    one_of, at_least, between = (
        getattr(configuration, name) for name in ("one_of", "at_least", "between")
    )
    one_of("k", "a", ("a", "b"))
    at_least("k", 2, 2)
    for fine in (0.5, 1, 1.5):
        between("k", fine, 0.5, 1.5)
    between("k", 0, 0.5, 1.5, zero="none")
    nan = float("nan")
    for check, arguments, message in (
        (one_of, ("c", ("a", "b")), "k = 'c': must be one of 'a', 'b'"),
        (at_least, (1, 2), "k = 1: must be at least 2"),
        (at_least, (nan, 0), "k = nan: must be at least 0"),
        *((between, (x, 0.5, 1.5), f"k = {x}: must be at least 0.5") for x in (nan, 1.6, -0.5)),
        (between, (0, 1, 1 << 24), "k = 0: must be at least 1 and at most 16,777,216"),
    ):
        with pytest.raises(UserError, match=message):
            check("k", *arguments)
    with pytest.raises(UserError, match="must be 0 [(]none[)], or at least 0.5 and at most 1.5"):
        between("k", 2.0, 0.5, 1.5, zero="none")


def test_text_is_one_sorted_line_per_leaf():
    config = ml_collections.ConfigDict(dict(b=dict(y=1, x="t"), a=0.5, c=(1, 2), e=dict(d=())))
    text = configuration.to_text(config)
    assert text == "a = 0.5\nb.x = 't'\nb.y = 1\nc = (1, 2)\ne.d = ()\n"
