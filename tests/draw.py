"""A part of the slow tests, another at every commit: what CI runs of them.

    make test-all DRAW=4          # of every folder one in four slow cases, one at least
    make test-all DRAW=4 BY=648f  # those that were drawn at a commit
    make test-aot DRAW=4          # the same of what compiles for TPUs and GPUs

A test that is marked `whole` keeps all its cases.
"""

from collections.abc import Iterable, Sequence
import hashlib
import math

import pytest


def add_options(parser: pytest.Parser) -> None:
    add = parser.getgroup("kvjax").addoption
    add("--draw", type=int, default=1, metavar="N", help="of slow and aot tests run one in N (all)")
    add("--draw-by", default="", metavar="TEXT", help="what decides which, as a commit")


def check_options(config: pytest.Config) -> None:
    """Raises a UsageError if nothing decides which cases are drawn."""
    if config.getoption("draw") > 1 and not config.getoption("draw_by"):
        raise pytest.UsageError("--draw: give --draw-by too, as the commit")


def by_folder(cases: Iterable[str]) -> list[list[str]]:
    """Cases in groups, those of a folder in one."""
    folders: dict[str, list[str]] = {}
    for case in cases:
        folders.setdefault(case.partition("::")[0].rpartition("/")[0], []).append(case)
    return list(folders.values())


def drawn(cases: Sequence[str], one_in: int, by: str) -> set[str]:
    """The cases of one group that are run: one in so many, and one at least."""
    order = sorted(cases, key=lambda case: hashlib.sha256(f"{by} {case}".encode()).digest())
    return set(order[: math.ceil(len(cases) / one_in)])


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow cases that are not drawn."""
    one_in, by = config.getoption("draw"), config.getoption("draw_by")
    if one_in <= 1:
        return
    marked = lambda item, name: item.get_closest_marker(name) is not None
    long = lambda item: marked(item, "slow") or marked(item, "aot")
    slow = lambda item: long(item) and not marked(item, "whole")
    asked = [item.nodeid for item in items if slow(item)]
    kept = {case for cases in by_folder(asked) for case in drawn(cases, one_in, by)}
    left_out = set(asked) - kept
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def said(config: pytest.Config) -> str:
    """A line for the end of a run that left cases out; "" of one that did not."""
    one_in, by = config.getoption("draw"), config.getoption("draw_by")
    if one_in <= 1:
        return ""
    return f"Of slow tests 1 in {one_in} was drawn: DRAW={one_in} BY={by}"
