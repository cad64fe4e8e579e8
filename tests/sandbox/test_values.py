"""Plain data round-trips through JSON, and nothing else does."""

import collections
import enum
import json
import math

import pytest

from kvjax.sandbox.inside import values


def there_and_back(value):
    return values.decode(json.loads(json.dumps(values.encode(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        10**100,
        0.1,
        -0.0,
        math.inf,
        1e-320,
        1 - 2j,
        "",
        "é\n\ud800\0",
        b"\xff\0",
        [],
        (1,),
        {1, "a"},
        frozenset([()]),
        {(1, "a"): [None], 1.5: {}},
        [[["list"]], ["int", "1"], {"object": ["object"]}],
    ],
)
def test_plain_data(value):
    back = there_and_back(value)
    assert back == value and type(back) is type(value)
    assert math.copysign(1, back) == math.copysign(1, value) if value == 0 else True


def test_numbers_keep_their_type():
    assert [type(x) for x in there_and_back([1, 1.0, True, 1j])] == [int, float, bool, complex]


def test_an_integer_too_long_to_be_printed():
    value = 10**100000
    assert (there_and_back(value) == value) is True


def test_what_is_not_a_number():
    assert math.isnan(there_and_back(math.nan))
    assert len(there_and_back({math.nan: 1, -math.nan: 2})) == 2


def test_a_subclass_becomes_its_base():
    class Text(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    class Colour(enum.IntEnum):
        RED = 3

    assert there_and_back(Text("a")) != "b"
    assert type(there_and_back(Colour.RED)) is int
    assert there_and_back(collections.Counter("aa")) == {"a": 2}
    assert there_and_back(collections.namedtuple("Pair", "a b")(1, 2)) == (1, 2)


@pytest.mark.parametrize("value", [object(), len, int, range(3), iter([]), bytearray(b"a"), ...])
def test_anything_else_is_equal_to_nothing(value):
    back = there_and_back(value)
    assert isinstance(back, values.Opaque)
    assert not back == value
    for operation in (bool, lambda x: x != 1, lambda x: x + 1, len, iter, lambda x: x < 1):
        with pytest.raises(TypeError):
            operation(back)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_ends():
    assert there_and_back(nested(values.NESTING)) == nested(values.NESTING)
    with pytest.raises(ValueError, match="nested more than 200 deep"):
        values.encode(nested(values.NESTING + 1))
    deep = ["list"]
    for _ in range(values.NESTING + 1):
        deep = ["list", deep]
    with pytest.raises(ValueError, match="nested more than 200 deep"):
        values.decode(deep)


@pytest.mark.parametrize(
    "data",
    [
        1,
        1.5,
        {},
        [],
        [1],
        ["no"],
        ["int"],
        ["int", "x"],
        ["int", 3],
        ["int", "1", "2"],
        ["float", None],
        ["bytes", "f"],
        ["dict", "a"],
        ["object", "a"],
        ["list", 1],
        [["int", "1"]],
    ],
)
def test_other_json_is_refused(data):
    with pytest.raises(ValueError):
        values.decode(data)


@pytest.mark.parametrize("data", [["dict", ["list"], None], ["set", ["list"]]])
def test_keys_that_cannot_be(data):
    with pytest.raises(TypeError):
        values.decode(data)
