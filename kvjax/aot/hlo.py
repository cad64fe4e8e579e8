"""Memory and collectives of a compiled program, read from its executable.

The text that XLA prints after optimisation names every collective, but not how often it runs: what
stands in a loop runs as often as the loop turns, and compilers hide collectives. A TPU's
reduce-scatter is a fusion that calls `all-reduce-scatter`; one of its asynchronous collectives
stands in the fusion that starts it, in those that run beside it and in the one that awaits it.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
import re

import jax

# Scopes (jax.named_scope, or keys of the state) that a collective is counted under; then, for what
# has none, parts of the names that JAX gives to passes.
SCOPES = ("muon", "latents", "loss", "attention", "mlp", "embedding", "head", "optimizer")
_PASSES = {"rematted_computation": "recomputed", "transpose": "backward", "jvp": "forward"}
KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_TYPE = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while the program runs."""

    arguments: int
    outputs: int  # that are not updated in place
    temporaries: int
    program: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.program


def memory(compiled: jax.stages.Compiled) -> Memory:
    """What the compiler reserves for a program.

    `peak_memory_in_bytes` is not used: on a TPU it counts the on-chip memory too.
    """
    m = compiled.memory_analysis()
    return Memory(
        arguments=m.argument_size_in_bytes,
        outputs=m.output_size_in_bytes - m.alias_size_in_bytes,
        temporaries=m.temp_size_in_bytes,
        program=m.generated_code_size_in_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of the program and how often it runs in one call.

    `bytes` are one device's of one run: of an all-gather what it makes, of the others what they
    take.
    """

    kind: str
    bytes: int
    group: int  # devices that take part together
    times: int = 1
    op_name: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes a device sends in one run, by ring algorithms.

        Among devices they send least; switches that add (NVLink SHARP) can do with less.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (self.group - 1) / self.group

    @property
    def scope(self) -> str:
        """The first of SCOPES that its op_name has; else the pass; else "other"."""
        names = set(re.findall(r"\w+", self.op_name))
        known = dict(zip(SCOPES, SCOPES, strict=True)) | _PASSES
        return next((scope for name, scope in known.items() if name in names), "other")


def summary(found: Sequence[Collective]) -> list[dict]:
    """Totals by kind and scope: runs, bytes and bytes sent per call; JSON-able, most sent first."""
    totals = collections.defaultdict(lambda: dict(count=0, bytes=0, wire_bytes=0.0))
    for c in found:
        row = totals[c.kind, c.scope]
        row["count"] += c.times
        row["bytes"] += c.times * c.bytes
        row["wire_bytes"] += c.times * c.wire_bytes
    rows = [dict(kind=kind, scope=scope) | row for (kind, scope), row in totals.items()]
    return sorted(rows, key=lambda row: -row["wire_bytes"])


def collectives(text: str) -> list[Collective]:
    """The collectives of an optimised HLO module, loops counted by their trip counts.

    All branches are counted. A group of one device communicates nothing and is left out.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: a loop that holds a collective turns an unknown number of times.
    """
    return _Module(text).run()


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    type: str
    rest: str  # operands and attributes

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names inside the parentheses of the call."""
        depth = itertools.accumulate((c == "(") - (c == ")") for c in self.rest)
        end = next(end for end, open_ in enumerate(depth) if not open_)
        return re.findall(r"%([\w.\-]+)", self.rest[:end])

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.rest)
        return found and found[1]

    @property
    def op_name(self) -> str:
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def constant(self) -> int | None:
        """Its value, if it is an integer constant."""
        found = re.match(r"\((-?\d+)\)", self.rest) if self.opcode == "constant" else None
        return found and int(found[1])


class _Module:
    """Computations of a module, each with its instructions in order."""

    def __init__(self, text: str):
        self.devices = max(
            int(n) for n in (*re.findall(r"(?:num_partitions|replica_count)=(\d+)", text), "1")
        )
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.roots: dict[str, _Instruction] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")) and line.endswith("{"):
                name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
                self.computations[name] = {}
                self.entry = name if line.startswith("ENTRY") else self.entry
            elif line.startswith("  ") and name:
                self._add(name, line.strip())
        self.found: dict[str, list[Collective]] = {}

    def _add(self, computation: str, line: str) -> None:
        left, equals, right = line.partition(" = ")
        opcode = _OPCODE.search(f" {right}") if equals else None
        if not opcode:
            return
        # The type stands before the opcode; the match is one longer, for the space put before.
        type_, rest = right[: max(opcode.start() - 1, 0)], right[opcode.end() - 2 :]
        instruction = _Instruction(left.split("%")[-1].split()[-1], opcode[1], type_, rest)
        self.computations[computation][instruction.name] = instruction
        if left.startswith("ROOT"):
            self.roots[computation] = instruction

    def run(self) -> list[Collective]:
        return self.of(self.entry)

    def of(self, computation: str) -> list[Collective]:
        """The collectives of one run of a computation and of all that it calls."""
        if computation not in self.found:
            instructions = self.computations.get(computation, {})
            continued = "AsyncCollectiveStart" not in "".join(
                i.rest for i in instructions.values() if i.opcode == "custom-call"
            )
            self.found[computation] = []
            for i in instructions.values():
                if "chain_id=" in i.rest and continued and i.opcode in KINDS:
                    continue  # counted where it starts
                self.found[computation] += self._at(computation, i)
        return self.found[computation]

    def _at(self, computation: str, i: _Instruction) -> list[Collective]:
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            return self._collective(computation, i, kind)
        called = _CALLS.findall(i.rest)
        if branches := i.attribute(r"branch_computations=\{([^}]*)\}"):
            called += re.findall(r"[\w.\-]+", branches)
        inside = [c for name in called for c in self.of(name)]
        if not inside:
            return []
        if i.opcode == "while":
            turns = self._turns(computation, i)
            inside = [dataclasses.replace(c, times=c.times * turns) for c in inside]
        name = i.op_name or self._user_name(computation, i)
        return [c if c.op_name else dataclasses.replace(c, op_name=name) for c in inside]

    def _collective(self, computation: str, i: _Instruction, kind: str) -> list[Collective]:
        group = self._group(i)
        size = _bytes(i.type)
        # Started ones have operands and results in their type, of which the larger counts.
        if i.opcode in ("all-gather-start", "reduce-scatter-start"):
            size = size * group // (group + 1)
        elif i.opcode == "all-to-all-start":
            size //= 2
        elif i.opcode == "collective-permute-start":  # operand, result, contexts
            size = _bytes(_TYPE.search(i.type)[0])
        elif kind == "reduce-scatter":
            size *= group
        if kind == "all-reduce" and self._is_scattered(computation):
            kind = "reduce-scatter"
        if group == 1:
            return []
        name = i.op_name or self._user_name(computation, i)
        return [Collective(kind=kind, bytes=size, group=group, op_name=name)]

    def _is_scattered(self, computation: str) -> bool:
        """Whether an all-reduce in it is the half of a reduce-scatter: only slices leave."""
        return "all-reduce-scatter" in computation

    def _user_name(self, computation: str, i: _Instruction) -> str:
        users = (u for u in self.computations[computation].values() if i.name in u.operands)
        return next((u.op_name for u in users if u.op_name), "")

    def _group(self, i: _Instruction) -> int:
        """Devices of one group: `{{0,1},{2,3}}`, `[2,2]<=[4]`, `mesh['a'=2,'b'=2] {'b'}`."""
        if "source_target_pairs=" in i.rest:
            return self.devices
        if sizes := i.attribute(r"replica_groups=\[\d+,(\d+)\]"):
            return int(sizes)
        if first := i.attribute(r"replica_groups=\{\{([\d,]+)\}"):
            return len(first.split(","))
        if mesh := re.search(r"replica_groups=@?\w*mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}", i.rest):
            axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
            named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])  # 'b':(2)4 is a part of b
            return math.prod(int(part) if part else axes[name] for name, part in named)
        return self.devices

    def _turns(self, computation: str, loop: _Instruction) -> int:
        """How often a loop turns: as the compiler says, or from its counter and its condition."""
        known = loop.attribute(r'known_trip_count[^\d}]*"?(\d+)')
        if known:
            return int(known)
        condition = loop.attribute(r"condition=%?([\w.\-]+)")
        instructions, root = self.computations[condition], self.roots[condition]
        ends = {i.constant for i in instructions.values() if i.constant is not None}
        compare = root
        if root.opcode == "fusion":
            inner = root.attribute(r"calls=%?([\w.\-]+)")
            compare = self.roots[inner]
            ends |= {c for i in self.computations[inner].values() if (c := i.constant) is not None}
        direction = compare.attribute(r"direction=(\w+)")
        if len(ends) != 1 or direction not in ("LT", "LE"):
            raise ValueError(f"loop {loop.name}: unknown trip count ({root.opcode} {root.rest})")
        counters = [i for i in instructions.values() if i.opcode == "get-tuple-element"]
        index = int(counters[0].attribute(r"index=(\d+)")) if len(counters) == 1 else None
        start, step = self._start_and_step(computation, loop, index)
        return max(0, -(-(ends.pop() + (direction == "LE") - start) // step))

    def _start_and_step(self, computation, loop, index: int | None) -> tuple[int, int]:
        """A loop counter's start and step; 0 and 1, as in JAX's loops, if they are not plain."""
        start, step = 0, 1
        if index is None:
            return start, step
        here = self.computations[computation]
        initial = here.get(loop.operands[0])
        if initial and initial.opcode == "tuple":
            value = here.get(initial.operands[index])
            while value and value.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
                value = here.get(value.operands[0])
            start = value.constant or 0 if value else 0
        body = loop.attribute(r"body=%?([\w.\-]+)")
        root, inside = self.roots[body], self.computations[body]
        if root.opcode == "tuple" and (next_ := inside.get(root.operands[index])):
            if next_.opcode == "add":
                constants = [inside[o].constant for o in next_.operands if o in inside]
                step = next((c for c in constants if c), 1)
        return start, step


def _bytes(type_: str) -> int:
    """The logical bytes of all arrays in a type."""
    return sum(
        math.ceil(math.prod(int(d) for d in shape.split(",") if d) * _bits(dtype) / 8)
        for dtype, shape in _TYPE.findall(type_)
    )


def _bits(dtype: str) -> int:
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    return int(re.search(r"\d+", dtype)[0])
