"""A part of the slow cases, another at every commit: what CI runs of tests that have many.

    make test-all DRAW=4          # of a test with more than four slow cases one in four, or four
    make test-all DRAW=4 BY=648f  # those that were drawn at a commit

A test that is marked `whole` keeps all.
"""

from collections.abc import Sequence
import hashlib
import math

import pytest

FEW = 4  # a test with so many slow cases keeps them all


def add_options(parser: pytest.Parser) -> None:
    add = parser.getgroup("kvjax").addoption
    add("--draw", type=int, default=1, metavar="N", help="of many slow cases run one in N (all)")
    add("--draw-by", default="", metavar="TEXT", help="what decides which, as a commit")


def drawn(cases: Sequence[str], one_in: int, by: str) -> set[str]:
    """The cases of one test that are run: all of a few, else one in so many, and no fewer."""
    if len(cases) <= FEW:
        return set(cases)
    order = sorted(cases, key=lambda case: hashlib.sha256(f"{by} {case}".encode()).digest())
    return set(order[: max(FEW, math.ceil(len(cases) / one_in))])


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow cases that are not drawn; a UsageError if nothing decides which are."""
    one_in, by = config.getoption("draw"), config.getoption("draw_by")
    if one_in <= 1:
        return
    if not by:
        raise pytest.UsageError("--draw: give --draw-by too, as the commit")
    marked = lambda item, name: item.get_closest_marker(name) is not None
    slow: dict[str, list[str]] = {}
    for item in items:
        if marked(item, "slow") and not marked(item, "whole"):
            slow.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    kept = {case for cases in slow.values() for case in drawn(cases, one_in, by)}
    asked = {case for cases in slow.values() for case in cases}
    config.hook.pytest_deselected(items=[i for i in items if i.nodeid in asked - kept])
    items[:] = [item for item in items if item.nodeid not in asked - kept]


def said(config: pytest.Config) -> str:
    """A line for the end of a run that left cases out; "" of one that did not."""
    one_in, by = config.getoption("draw"), config.getoption("draw_by")
    if one_in <= 1:
        return ""
    what = f"Of tests with more than {FEW} slow cases 1 in {one_in} was drawn, {FEW} at least"
    return f"{what}: DRAW={one_in} BY={by}"
