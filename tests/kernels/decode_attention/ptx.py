"""Finds unordered accesses to shared memory in a compiled Hopper kernel's PTX.

Follows every path through the program. Addresses are ignored: an order is required between all
accesses of two kinds, except that one product may be in flight while a ring fills another slot. The
requirements are those of PTX's proxies:

    earlier                         later                  required between them
    st.shared, stmatrix             wgmma, bulk copy       fence.proxy.async, then bar.sync
    ld.shared, ldmatrix             bulk copy              fence.proxy.async, then bar.sync
    wgmma                           st.shared, stmatrix    commit_group, wait_group 0
    wgmma, but the youngest group   bulk copy              commit_group, wait_group, then bar.sync

A copy into a product's operand needs no fence after the product: both belong to one proxy. Arrivals
of copies and slots are not read (`hopper` models both), nor are registers (wgmma.fence): ptxas adds
missing fences.
"""

from collections.abc import Iterator
import re
from typing import NamedTuple

_KINDS = {
    "store": r"\bst(matrix)?\.\S*shared",
    "load": r"\bld(matrix)?\.\S*shared",
    "product": r"\bwgmma\.mma_async",
    "group": r"\bwgmma\.commit_group",
    "wait": r"\bwgmma\.wait_group\S*\s+(\d+)",
    "copy": r"\bcp\.async\.bulk\.tensor",
    "fence": r"\bfence\.proxy\.async",
    "barrier": r"\bbar\.sync",
    "jump": r"^bra(?:\.uni)?\s+(\$\w+)",
    "branch": r"^@\S+\s+bra(?:\.uni)?\s+(\$\w+)",  # not those that wait for a copy: DONE, LAB_WAIT
    "label": r"^(\$\w+):",
    "end": r"^ret;",
}


_MANY = 8  # stands for this number of groups in flight, or more
_DONE, _FENCED, _ACCESSED = range(3)  # loads and stores: ordered, fenced only, not ordered


class _State(NamedTuple):
    """Accesses on a path that are not ordered with later accesses."""

    stored: int = _DONE
    loaded: int = _DONE
    unsynchronised: bool = False  # products that other warps may still wait for
    open: bool = False  # products of no group
    groups: int = 0  # in flight


def hazards(ptx: str) -> list[str]:
    """Returns a message for each unordered access, by line.

    Raises:
      ValueError: there is no product, or no copy.
    """
    steps = list(_steps(ptx))
    if not {"product", "copy"} <= {kind for kind, _, _ in steps}:
        raise ValueError("a program without wgmma or bulk copies")
    labels = {name: i for i, (kind, name, _) in enumerate(steps) if kind == "label"}
    messages, seen, pending = set(), set(), [(0, _State())]
    while pending:
        i, state = visit = pending.pop()
        if visit in seen or i == len(steps):
            continue
        seen.add(visit)
        kind, argument, line = steps[i]
        messages |= {
            (line, f"line {line}: {kind} {hazard}") for hazard in _hazards_of_step(kind, state)
        }
        if kind in ("jump", "branch"):
            pending.append((labels[argument], state))
        if kind not in ("jump", "end"):
            pending.append((i + 1, _after(kind, argument, state)))
    return [message for _, message in sorted(messages)]


def _steps(ptx: str) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(ptx.splitlines(), start=1):
        for kind, pattern in _KINDS.items():
            if match := re.search(pattern, line.strip()):
                yield kind, match[match.lastindex or 0], number


def _hazards_of_step(kind: str, state: _State) -> Iterator[str]:
    missing = {_ACCESSED: "fence.proxy.async", _FENCED: "bar.sync"}
    if kind in ("product", "copy") and state.stored:
        yield f"after a store without {missing[state.stored]}"
    if kind == "copy" and state.loaded:
        yield f"after a load without {missing[state.loaded]}"
    if kind == "copy" and state.unsynchronised:
        yield "after a product without bar.sync"
    in_flight = state.groups + state.open
    if (kind == "store" and in_flight > 0) or (kind == "copy" and in_flight > 1):
        yield "without wgmma.wait_group after a product"


def _after(kind: str, argument: str, state: _State) -> _State:
    match kind:
        case "store":
            return state._replace(stored=_ACCESSED)
        case "load":
            return state._replace(loaded=_ACCESSED)
        case "fence":
            stored, loaded = min(state.stored, _FENCED), min(state.loaded, _FENCED)
            return state._replace(stored=stored, loaded=loaded)
        case "barrier":
            stored, loaded = (_DONE if x == _FENCED else x for x in (state.stored, state.loaded))
            return state._replace(stored=stored, loaded=loaded, unsynchronised=False)
        case "product":
            return state._replace(open=True)
        case "group":
            return state._replace(open=False, groups=min(state.groups + 1, _MANY))
        case "wait":
            groups = min(state.groups, int(argument))
            waited = groups < state.groups
            return state._replace(groups=groups, unsynchronised=state.unsynchronised or waited)
    return state
