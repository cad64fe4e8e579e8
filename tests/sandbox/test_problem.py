"""Valid problems, and the candidate's functions that a test calls."""

import pytest

from kvjax.sandbox import Problem, SandboxError, problem as problem_lib

CHECK = "def check(candidate):\n    assert candidate(1) == 1\n"


def asked(test):
    return problem_lib.called_names(Problem("", test, "f"))


def test_names_that_a_test_does_not_define():
    test = """
import math, os.path
from random import choice as pick
SIZE: int = 3
def check(candidate, *rest, key=None, **more):
    for i in range(SIZE):
        assert abs(poly(i)) <= math.pi and len([x for x in rest]) == 0
    with open(os.devnull) as file, pick([file]) as other:
        later = lambda y: y + other
    try:
        assert (n := candidate(1)) == encode(n)
    except ValueError as error:
        raise error
"""
    assert asked(test) == ["encode", "poly"]
    assert asked(CHECK) == []


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(entry_point="a b"), "entry_point = 'a b': must be a Python identifier"),
        (dict(entry_point=""), "entry_point = '': must be a Python identifier"),
        (dict(entry_point="f(); g"), "must be a Python identifier"),
        (dict(test="def check(candidate)"), "test of f is not Python"),
        (dict(test="x\0"), "test of f is not Python"),
        (dict(test="(" * 10000), "test of f is not Python"),
        (dict(test="assert True"), "test of f defines no check"),
        (dict(test=""), "test of f defines no check"),
    ],
)
def test_what_cannot_be_judged(keys, message):
    problem = Problem(**(dict(program="", test=CHECK, entry_point="f") | keys))
    with pytest.raises(SandboxError, match=message):
        problem_lib.called_names(problem)


@pytest.mark.parametrize(
    "program, reason",
    [
        ("def f(x): return x", None),
        ("x = '\ud800'", "the program is not UTF-8: '\\ud800' at 5"),
        ("#" * (1 << 20) + "\n", "the program has 1,048,577 bytes, more than 1,048,576"),
    ],
)
def test_what_is_no_program(program, reason):
    assert problem_lib.invalid_program(program) == reason
