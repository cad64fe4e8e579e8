"""What is drawn of slow tests: a part of each folder's, the same at a commit, in time all."""

import math
import re
import subprocess
import sys
import types

import pytest

from kvjax.foundation.checkout import ROOT
from tests import draw


def test_of_many_a_part_and_of_one_all():
    many = [f"t[{i}]" for i in range(41)]
    found = draw.drawn(many, 4, "a commit")
    assert len(found) == 11 and found < set(many) and found == draw.drawn(many, 4, "a commit")
    assert draw.drawn(many[:1], 4, "a commit") == {"t[0]"}


def test_cases_of_a_folder_are_one_group():
    first, second = ["a/a.py::t[0]", "a/b.py::u", "a/a.py::t[1]"], ["a/b/a.py::t[x/y]"]
    assert draw.by_folder([*first[:2], *second, first[2]]) == [first, second]


def test_over_commits_every_case_is_run():
    many = [f"t[{i}]" for i in range(41)]
    found = [draw.drawn(many, 4, f"commit {i}") for i in range(40)]
    assert set().union(*found) == set(many)
    assert len({frozenset(cases) for cases in found}) == 40


class _Item:
    def __init__(self, nodeid, *marks):
        self.nodeid, self._marks = nodeid, marks

    def get_closest_marker(self, name):
        return name in self._marks or None


def _config(one_in, by, left_out=()):
    hook = types.SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    options = dict(draw=one_in, draw_by=by)
    return types.SimpleNamespace(getoption=options.__getitem__, hook=hook, rootpath=".")


@pytest.mark.parametrize("mark", ["slow", "aot"])
@pytest.mark.parametrize("one_in", [1, 5])
def test_only_slow_cases_are_left_out(one_in, mark):
    quick = [_Item(f"t.py::many[q{i}]") for i in range(20)]
    slow = [_Item(f"t.py::many[{i}]", mark) for i in range(30)]
    other = [_Item(f"b/other.py::alone_{i}", mark) for i in range(3)]
    items, left_out = [*slow, *quick, *other], []
    before = list(items)
    config = _config(one_in, "a commit", left_out)
    draw.deselect(config, items)
    assert [item for item in before if item not in left_out] == items
    assert set(quick) < set(items)
    assert len(set(slow) & set(items)) == 30 // one_in
    assert len(set(other) & set(items)) == (3 if one_in == 1 else 1)
    assert bool(draw.said(config)) == (one_in > 1)


def test_what_is_said_repeats_it():
    assert draw.said(_config(4, "648f8c0")).endswith("DRAW=4 BY=648f8c0")


def test_a_whole_test_keeps_all():
    items = [_Item(f"t.py::many[{i}]", "slow", "whole") for i in range(30)]
    draw.deselect(_config(5, "a commit", []), items)
    assert len(items) == 30


def test_nothing_is_drawn_by_nothing():
    with pytest.raises(pytest.UsageError, match="--draw: give --draw-by too"):
        draw.check_options(_config(4, ""))
    draw.check_options(_config(1, ""))


@pytest.mark.slow
def test_the_command_line_draws(tmp_path):
    """On a test of this suite that has many slow cases, with workers."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-n", "2"]
    command += ["tests/attention/test_mechanism.py", "-k", "keys_and_values_follow"]

    def counted(*more):
        done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return int(re.search(r"(\d+) passed", done.stdout)[1]), done.stdout

    every, _ = counted()
    few, said = counted("--draw=20", "--draw-by=a commit")
    assert few == math.ceil(every / 20) and "DRAW=20 BY=a commit" in said
