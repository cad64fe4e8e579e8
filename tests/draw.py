"""A part of the slow cases, another at every commit: what CI runs of tests that have many.

make test-all DRAW=4          # of a test with more than four slow cases one in four
make test-all DRAW=4 BY=648f  # those that were drawn at a commit
"""

from collections.abc import Sequence
import hashlib
import math
import subprocess

import pytest

FEW = 4  # a test with so many slow cases keeps them all


def add_options(parser: pytest.Parser) -> None:
    add = parser.getgroup("kvjax").addoption
    add("--draw", type=int, default=1, metavar="N", help="of many slow cases run one in N (all)")
    add("--draw-by", default="", metavar="TEXT", help="what decides which (the commit)")


def by(config: pytest.Config) -> str:
    """What decides which cases are drawn: the commit, if nothing was given; "" without git."""
    if given := config.getoption("draw_by"):
        return given
    asked = ("git", "-C", str(config.rootpath), "rev-parse", "HEAD")
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def drawn(cases: Sequence[str], one_in: int, by: str) -> set[str]:
    """The cases of one test that are run: all of a few, else one in so many, rounded up."""
    if len(cases) <= FEW:
        return set(cases)
    order = sorted(cases, key=lambda case: hashlib.sha256(f"{by} {case}".encode()).digest())
    return set(order[: max(FEW, math.ceil(len(cases) / one_in))])


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow cases that are not drawn."""
    one_in = config.getoption("draw")
    if one_in <= 1:
        return
    slow: dict[str, list[str]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            slow.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    decided = by(config)
    kept = {case for cases in slow.values() for case in drawn(cases, one_in, decided)}
    left_out = [i for i in items if i.get_closest_marker("slow") and i.nodeid not in kept]
    config.hook.pytest_deselected(items=left_out)
    dropped = set(left_out)
    items[:] = [item for item in items if item not in dropped]


def said(config: pytest.Config) -> str:
    """A line for the end of a run that left cases out; "" of one that did not."""
    one_in, decided = config.getoption("draw"), by(config)
    if one_in <= 1:
        return ""
    what = f"Of tests with more than {FEW} slow cases 1 in {one_in} was drawn"
    return f"{what}: DRAW={one_in} BY={decided}"
