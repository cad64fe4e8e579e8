"""Configs become dataclasses or a message that names the key."""

import dataclasses
import re

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
    assert _read(count=3) == Example(3)
    given = _read(count=3, rate=0.25, name="b", on=True, ranks=(1, 2))
    assert given == Example(3, 0.25, "b", True, (1, 2))


def test_integers_pass_as_floats_and_lists_as_tuples():
    read = _read(count=3, rate=2, ranks=[4, 5])
    assert read == Example(3, 2.0, ranks=(4, 5))
    assert type(read.rate) is float
    assert type(read.ranks) is tuple


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
        said = f"config.example.{key} = {value!r} is a {kind}; it must be {hint}"
        assert str(error.value) == said


def test_a_value_is_no_section():
    with pytest.raises(UserError, match="^config.x = 3: must be a section, with keys$"):
        configuration.to_dataclass(Example, 3, "config.x")


def test_unknown_key_lists_those_there_are():
    with pytest.raises(UserError, match="config.example.cuont: no such key.*count, name, on"):
        _read(count=1, cuont=2)


def test_missing_key():
    with pytest.raises(UserError, match="config.example: missing key.* count"):
        _read(rate=0.1)


def test_one_of_and_at_least():
    configuration.one_of("config.k", "a", ("a", "b"))
    configuration.at_least("config.k", 2, 2)
    with pytest.raises(UserError, match="config.k = 'c': must be one of 'a', 'b'"):
        configuration.one_of("config.k", "c", ("a", "b"))
    with pytest.raises(UserError, match="config.k = 1: must be at least 2"):
        configuration.at_least("config.k", 1, 2)


def test_not_a_number_is_not_at_least_anything():
    with pytest.raises(UserError, match="config.k = nan"):
        configuration.at_least("config.k", float("nan"), 0)


def test_between():
    for value in (float("nan"), float("inf"), -1e-9, 2.0, 1e300):
        _check_between(value)


def _check_between(value):
    for fine in (0.5, 1, 1.5):
        configuration.between("config.k", fine, 0.5, 1.5)
    with pytest.raises(UserError, match=f"k = {re.escape(str(value))}: must be at least 0.5"):
        configuration.between("config.k", value, 0.5, 1.5)
    with pytest.raises(UserError, match="must be 0 [(]none[)], or at least 0.5 and at most 1.5"):
        configuration.between("config.k", value, 0.5, 1.5, zero="none")
    configuration.between("config.k", 0, 0.5, 1.5, zero="none")
    with pytest.raises(UserError, match="config.k = 0: must be at least 1 and at most 16,777,216"):
        configuration.between("config.k", 0, 1, 1 << 24)


def test_text_is_utf8():
    with pytest.raises(UserError, match="config.example.name = '.udcff': is not UTF-8 text"):
        _read(count=1, name="\udcff")


def test_text_is_one_sorted_line_per_leaf():
    config = ml_collections.ConfigDict(dict(b=dict(y=1, x="t"), a=0.5, c=(1, 2), e=dict(d=())))
    text = configuration.to_text(config)
    assert text == "a = 0.5\nb.x = 't'\nb.y = 1\nc = (1, 2)\ne.d = ()\n"
