"""A case made slow stays the case that it was; workers share the cores; marks say what is so."""

import ast
import os
import pathlib
import re

import pytest

from tests import quick

TESTS = pathlib.Path(__file__).parent


def test_a_slow_case_keeps_its_arguments_name_and_marks():
    skipped = pytest.param("mla", 3, marks=pytest.mark.skip, id="a name")
    plain, pair, param = quick.every(4, ("gqa", ("mla", 2), skipped), first=3)
    assert [plain.values, pair.values, param.values] == [("gqa",), ("mla", 2), ("mla", 3)]
    assert param.id == "a name"
    assert [mark.name for mark in param.marks] == ["skip", "slow"]


def test_what_is_named_stays_quick():
    assert quick.only(["mla"], ["gqa", "mla"])[1] == "mla"
    with pytest.raises(AssertionError, match="mlra"):
        quick.only(["mlra"], ["gqa", "mla"])


@pytest.mark.parametrize(
    "worker, count, own",
    [
        ("gw0", 2, [0, 2]),
        ("gw1", 2, [1, 3]),
        ("gw5", 6, [1]),  # more workers than cores
        ("gw2", 2, None),  # stands in for another
        ("left", 2, None),
        ("", 1, None),
    ],
)
def test_each_worker_has_its_share_of_the_cores(monkeypatch, worker, count, own):
    chosen = []
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(count))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cores: chosen.append(cores), raising=False
    )
    quick.keep_to_own_cores()
    assert chosen == ([] if own is None else [own])


def test_no_slow_test_has_cases_that_look_quick():
    """A test that is slow as a whole has no quick cases, whatever `only` and `every` say."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "quick." in text else ():
            marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", ())]
            if "pytest.mark.slow" in marks and any(
                re.search(r"quick\.(only|every)\b", mark) for mark in marks
            ):
                found.append(f"{path.name}: {node.name}")
    assert not found
