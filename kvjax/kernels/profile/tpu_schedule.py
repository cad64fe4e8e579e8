"""Counts how often each bundle of a TPU kernel runs, by interpreting its scalar instructions.

That is possible because loops and `pl.when` depend only on scalars that are known in advance: grid
indices, constants, and the slot of a sequence's last token.
"""

from collections.abc import Callable, Iterator
import functools
import operator
import re

import numpy as np

_WORD = 2**32
_MAX_BUNDLES = 20_000_000  # executed bundles before giving up


class CannotFollow(Exception):
    """A branch depends on an unknown scalar, or the program does not end."""


class Schedule:
    """The packed bundles of one kernel, and the instructions of each bundle for each unit."""

    def __init__(self, bundles: str, utilization: str):
        """Parses `packed-bundles-post-ra` and `pre-delay_..-per-bundle-utilization`."""
        self.bundles = [_Bundle(text) for text in _split(bundles)]
        lines = utilization.splitlines()
        self.units = [name.strip() for name in lines[1].split(",")]
        self.capacity = np.array(lines[2].split(), int)  # instructions that one bundle holds
        self.use = np.array([line.split() for line in lines[4:] if re.match(r"\s*\d", line)], int)
        if len(self.use) != len(self.bundles):
            raise CannotFollow(f"{len(self.bundles)} bundles, but utilization of {len(self.use)}")

    def executed(self, last_slot: int, *, core: int, delay: int) -> np.ndarray:
        """Returns how often each bundle is executed, for one sequence that ends in `last_slot`.

        Args:
          last_slot: value of the kernel's scalar operand.
          core: index of the core, on chips whose cores share the grid; else 0.
          delay: bundles that still run after a taken branch.
        """
        counts = np.zeros(len(self.bundles), int)
        state: dict = {_OPERAND: last_slot, _CORE: core}
        at, target, wait = 0, None, 0
        for _ in range(_MAX_BUNDLES):
            if at >= len(self.bundles):
                return counts
            counts[at] += 1
            branch, wait = self.bundles[at].run(state, at), wait - 1
            if branch is not None:
                target, wait = branch, delay
            at += 1
            if target is not None and not wait:
                at, target = target, None
        raise CannotFollow(f"no end after {_MAX_BUNDLES} bundles")

    def cycles(self, counts: np.ndarray) -> dict[str, float]:
        """Returns the cycles of each unit if only its own instructions took time."""
        return dict(zip(self.units, (counts @ self.use / self.capacity).tolist(), strict=True))


_OPERAND, _CORE = "operand", "core"


def _split(text: str) -> Iterator[str]:
    """Yields the text of each bundle; a comment may span lines."""
    starts = list(re.finditer(r"^\s*(?:0x[0-9a-f]+|0)\s+[A-Z ]*:\s*>*\s*\{", text, re.MULTILINE))
    ends = [*(start.start() for start in starts[1:]), len(text)]
    for start, end in zip(starts, ends, strict=True):
        yield text[start.end() : end]


class _Bundle:
    """The scalar instructions of a bundle; all read their operands before any writes a result."""

    def __init__(self, text: str):
        core = re.findall(r"(%s\d+_s\d+) = sld \S+ /\* megacore core id", text)
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).strip().removesuffix("}")
        steps = [_Instruction(t.strip(), core) for t in text.split(" ;; ") if _SCALAR.search(t)]
        self.instructions = steps

    def run(self, state: dict, at: int) -> int | None:
        """Updates registers and scalar memory; returns the target of a taken branch."""
        target, writes = None, []
        for i in self.instructions:
            guard = i.guard(state)
            if i.branch is not None:
                if guard is None:
                    raise CannotFollow(f"bundle {at:#x} branches on an unknown scalar: {i.text}")
                target = i.branch if guard else target
            elif guard is not False and (place := i.place(state)) is not None:
                writes.append((place, i.value(state) if guard else None))
        state.update(writes)
        return target


_SCALAR = re.compile(r"%[sp]\d+_[sp]\d+ = (?!sphi)|\bsst\b|\bsbr\.rel\b")
_GUARD = re.compile(r"\((!?)%p\d+_(p\d+)(?:, [^)]*)?\),?")  # (predicate, value if it is false)


class _Instruction:
    """A scalar instruction: an operation, load, store or branch, under an optional guard."""

    def __init__(self, text: str, core: list[str]):
        self.text = text
        guard = _GUARD.search(text)
        self._guard = (guard[2], not guard[1]) if guard else None
        text = _GUARD.sub("", text)
        target = re.search(r"sbr\.rel +target bundleno = (\d+)", text)
        self.branch = int(target[1]) if target else None
        name, _, rest = text.partition(" = ")
        self._dest, self._op, operands = None, "", ""
        if re.fullmatch(r"%[sp]\d+_[sp]\d+", name):
            self._dest = name.rpartition("_")[2]
            self._op, _, operands = rest.partition(" ")
        elif store := re.search(r"sst (\[smem:\[.*?\]\]) (.*)", text):
            self._op, operands = "sst", store[2]
            self._cell = _cell(store[1])
        if self._op == "sld":
            self._cell = _cell(operands)
        if self._op == "inlined_call_operand.<no":  # memory space>: a scalar
            self._op, operands = "smov", _OPERAND
        if name in core:
            self._op, operands = "smov", _CORE
        self._read = [_operand(x.strip()) for x in operands.split(",")]

    def guard(self, state: dict) -> bool | None:
        """Returns True if the instruction takes effect; None if its guard is unknown."""
        if self._guard is None:
            return True
        register, expected = self._guard
        value = state.get(register)
        return None if value is None else bool(value) == expected

    def place(self, state: dict):
        """Returns the key in `state` that the result is stored under."""
        return self._cell(state) if self._op == "sst" else self._dest

    def value(self, state: dict) -> int | None:
        """Returns the result; None if it is unknown."""
        if self._op == "sld":
            return state.get(self._cell(state))
        values = [read(state) for read in self._read]
        if self._op in _LOGIC:
            return _LOGIC[self._op](*values)
        if self._op == "scalar_select":
            predicate, yes, no = values
            return None if predicate is None else yes if predicate else no
        if self._op == "sst":
            return values[0]
        operation = _OPERATIONS.get(self._op) or _comparison(self._op)
        return operation(*values) if operation and None not in values else None


def _operand(text: str) -> Callable[[dict], int | None]:
    if text in (_OPERAND, _CORE):
        return lambda state: state[text]
    if re.fullmatch(r"\d+", text):
        number = int(text)
        return lambda state: number
    register = re.fullmatch(r"(!?)%[sp]\d+_([sp]\d+)", text)
    if not register:
        return lambda state: None
    if register[1]:
        return lambda state: _not(state.get(register[2]))
    return lambda state: state.get(register[2])


def _cell(text: str) -> Callable[[dict], tuple | None]:
    """Returns a function from the state to a word's (allocation, offset), or None if unknown."""
    match = re.search(r"\[smem:\[(#\w+)(?: \+ (\S+?))?\]", text)
    if not match:
        return lambda state: None
    name, offset = match.groups()
    if offset is None:
        return lambda state: (name, 0)
    if offset.startswith("$"):
        number = int(offset[1:], 16)
        return lambda state: (name, number)
    read = _operand(offset)
    return lambda state: None if read(state) is None else (name, read(state))


def _signed(value: int) -> int:
    return value - _WORD if value >= _WORD // 2 else value


def _not(a: bool | None) -> bool | None:
    return None if a is None else not a


def _and(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if None in (a, b) else a and b


def _or(a: bool | None, b: bool | None) -> bool | None:
    return _not(_and(_not(a), _not(b)))


_LOGIC = {
    "por": _or,
    "pand": _and,
    "pnand": lambda a, b: _not(_and(a, b)),
    "pnor": lambda a, b: _not(_or(a, b)),
    "pneg": _not,
    "pmov": lambda a: None if a is None else bool(a),
}
_OPERATIONS = {
    "smov": lambda a: a,
    "sadd.s32": lambda a, b: (a + b) % _WORD,
    "ssub.s32": lambda a, b: (a - b) % _WORD,
    "smul.u32": lambda a, b: a * b % _WORD,
    "sshll.u32": lambda a, b: (a << b) % _WORD,
    "sshrl.u32": operator.rshift,
    "sshra.s32": lambda a, b: (_signed(a) >> b) % _WORD,
    "sand.u32": operator.and_,
    "sor.u32": operator.or_,
    "sxor.u32": operator.xor,
    "smin.u32": min,
    "smax.u32": max,
    "smin.s32": lambda a, b: min(a, b, key=_signed),
    "smax.s32": lambda a, b: max(a, b, key=_signed),
}


@functools.cache
def _comparison(op: str) -> Callable[[int, int], bool] | None:
    match = re.fullmatch(r"scmp\.(eq|ne|lt|le|gt|ge)\.([su])32\.totalorder", op)
    if not match:
        return None
    compare = getattr(operator, match[1])
    if match[2] == "u":
        return compare
    return lambda a, b: compare(_signed(a), _signed(b))
