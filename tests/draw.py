"""Draws the share of the slow tests that CI runs, another share at every commit.

    make test-all DRAW=4          # in every folder one in four slow cases, at least one
    make test-all DRAW=4 BY=648f  # the cases that were drawn at commit 648f
    make test-aot DRAW=4          # likewise of the tests that compile for TPUs and GPUs

A test that is marked `whole` keeps all its cases.
"""

import hashlib
import math

import pytest


def add_options(parser: pytest.Parser) -> None:
    add = parser.getgroup("kvjax").addoption
    add("--draw", type=int, default=1, metavar="N", help="run one in N slow and aot tests (all)")
    add("--draw-by", default="", metavar="TEXT", help="seed of the draw, as a commit")


def check_options(config: pytest.Config) -> None:
    """Raises a UsageError if the draw has no seed."""
    if config.getoption("draw") > 1 and not config.getoption("draw_by"):
        raise pytest.UsageError("--draw: give --draw-by too, as the commit")


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes slow cases that are not drawn."""
    one_in, seed = config.getoption("draw"), config.getoption("draw_by")
    folders: dict[str, list[str]] = {}
    for item in items if one_in > 1 else ():
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"slow", "aot"} and "whole" not in marks:
            folders.setdefault(str(item.path.parent), []).append(item.nodeid)
    left_out = set()
    for cases in folders.values():
        cases.sort(key=lambda case: hashlib.sha256(f"{seed} {case}".encode()).digest())
        left_out.update(cases[math.ceil(len(cases) / one_in) :])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def summary(config: pytest.Config) -> str:
    """Returns a line that repeats the draw; "" if all cases run."""
    one_in, seed = config.getoption("draw"), config.getoption("draw_by")
    return f"1 in {one_in} slow tests was drawn: DRAW={one_in} BY={seed}" if one_in > 1 else ""
