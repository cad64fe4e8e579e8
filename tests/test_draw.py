"""CI's draw of slow tests: a share of every folder, equal for a commit, over commits all cases."""

import pathlib
import types

from tests import draw


def _item(nodeid, *marks):
    markers = [types.SimpleNamespace(name=name) for name in marks]
    path = pathlib.Path(nodeid.partition("::")[0])
    return types.SimpleNamespace(nodeid=nodeid, path=path, iter_markers=lambda: markers)


ALWAYS = [_item(f"a/t.py::quick[{i}]") for i in range(9)]
ALWAYS += [_item(f"a/t.py::whole[{i}]", "slow", "whole") for i in range(9)]
SLOW = [_item(f"a/t.py::slow[{i}]", "slow") for i in range(41)]
OTHER = [_item(f"b/t.py::aot[{i}]", "aot") for i in range(3)]


def _config(one_in, seed):
    hook = types.SimpleNamespace(pytest_deselected=lambda items: None)
    options = {"draw": one_in, "draw_by": seed}
    return types.SimpleNamespace(getoption=options.__getitem__, hook=hook)


def _drawn(one_in, seed="648f8c0"):
    items = [*SLOW, *ALWAYS, *OTHER]
    draw.deselect(_config(one_in, seed), items)
    return [item.nodeid for item in items]


def test_a_share_of_each_folders_slow_cases():
    names = [{item.nodeid for item in items} for items in (ALWAYS, SLOW, OTHER)]
    drawn = set(_drawn(4))
    assert [len(drawn & group) for group in names] == [18, 11, 1]
    assert _drawn(4) == _drawn(4) and len(_drawn(1)) == 62
    draws = [frozenset(_drawn(4, f"commit {i}")) for i in range(40)]
    assert frozenset().union(*draws) == frozenset(_drawn(1)) and len(set(draws)) == 40
