"""Reads memory, launches and collectives of a compiled program from its executable.

XLA's text after optimisation contains every collective; how often it runs follows from the trip
counts of the loops around it. Two forms need care. On a TPU, a reduce-scatter is a fusion that
calls `all-reduce-scatter`. An asynchronous collective appears several times: in the fusion that
starts it, in those that run at the same time, and in the one that awaits it.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
import re

import jax

# Parts of the model that a collective belongs to: names of jax.named_scope, or keys of the state.
# A collective without one is named after its pass.
SCOPES = ("muon", "latents", "loss", "attention", "mlp", "embedding", "head", "optimizer")
_PASSES = {"rematted_computation": "recomputed", "transpose": "backward", "jvp": "forward"}
KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
_NOT_LAUNCHED = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_TYPE = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while the program runs."""

    arguments: int
    outputs: int  # except for outputs that reuse an argument's memory
    temporaries: int
    program: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.program


def memory(compiled: jax.stages.Compiled) -> Memory:
    """Returns the memory that the compiler reserves for a program.

    XLA's `peak_memory_in_bytes` is not used: on a TPU it includes on-chip memory.
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
    """A collective, and how often one call of the program runs it."""

    kind: str
    bytes: int  # per device and run: of an all-gather's output, of another collective's input
    group: int  # number of devices that take part
    times: int = 1  # runs per call
    op_name: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one run, by ring algorithms.

        Only switches that reduce in the network (NVLink SHARP) can send less.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (self.group - 1) / self.group

    @property
    def scope(self) -> str:
        """The first of SCOPES that op_name contains; if there is none, the pass or "other"."""
        names = set(re.findall(r"\w+", self.op_name))
        known = dict(zip(SCOPES, SCOPES, strict=True)) | _PASSES
        return next((scope for name, scope in known.items() if name in names), "other")


def summary(items: Sequence[Collective]) -> list[dict]:
    """Returns runs, bytes and bytes sent per call, by kind and scope; the most sent come first."""
    totals = collections.defaultdict(lambda: dict(count=0, bytes=0, wire_bytes=0.0))
    for c in items:
        row = totals[c.kind, c.scope]
        row["count"] += c.times
        row["bytes"] += c.times * c.bytes
        row["wire_bytes"] += c.times * c.wire_bytes
    rows = [dict(kind=kind, scope=scope) | row for (kind, scope), row in totals.items()]
    return sorted(rows, key=lambda row: -row["wire_bytes"])


def launches(text: str) -> dict[str, str]:
    """Returns the programs that one call of an optimised HLO module launches on a GPU.

    Every fusion, matrix product, copy and custom call is one program. A loop or conditional counts
    as one, too; its body is not counted.

    Returns:
      Result types by name of the instruction, in order.
    """
    module = _Module(text)
    instructions = module.computations[module.entry].values()
    launched = (i for i in instructions if i.opcode not in _NOT_LAUNCHED)
    return {i.name: i.type for i in launched if not i.opcode.endswith("-done")}


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of an optimised HLO module, with their number of runs per call.

    All branches of a conditional are counted. Collectives of a single device are left out.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: a loop with a collective has an unknown trip count.
    """
    module = _Module(text)
    return module.collectives(module.entry)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    type: str
    rest: str  # operands and attributes

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the operands."""
        depth = itertools.accumulate((c == "(") - (c == ")") for c in self.rest)
        end = next(end for end, open_ in enumerate(depth) if not open_)
        return re.findall(r"%([\w.\-]+)", self.rest[:end])

    def attribute(self, pattern: str) -> str | None:
        match = re.search(pattern, self.rest)
        return match and match[1]

    @property
    def op_name(self) -> str:
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def constant(self) -> int | None:
        """The value of an integer constant; None for other instructions."""
        match = re.match(r"\((-?\d+)\)", self.rest) if self.opcode == "constant" else None
        return match and int(match[1])


class _Module:
    """An HLO module, parsed into computations with their instructions in order."""

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
        self._collectives: dict[str, list[Collective]] = {}  # by computation

    def _add(self, computation: str, line: str) -> None:
        left, equals, right = line.partition(" = ")
        opcode = _OPCODE.search(f" {right}") if equals else None
        if not opcode:
            return
        # The type precedes the opcode; positions are one larger, because of the added space.
        type_, rest = right[: max(opcode.start() - 1, 0)], right[opcode.end() - 2 :]
        instruction = _Instruction(left.split("%")[-1].split()[-1], opcode[1], type_, rest)
        self.computations[computation][instruction.name] = instruction
        if left.startswith("ROOT"):
            self.roots[computation] = instruction

    def collectives(self, computation: str) -> list[Collective]:
        """Returns the collectives that one run of a computation executes, called ones included."""
        if computation not in self._collectives:
            instructions = self.computations.get(computation, {})
            starts_collective = "AsyncCollectiveStart" in "".join(
                i.rest for i in instructions.values() if i.opcode == "custom-call"
            )
            self._collectives[computation] = []
            for i in instructions.values():
                if "chain_id=" in i.rest and not starts_collective and i.opcode in KINDS:
                    continue  # counted in the fusion that starts it
                self._collectives[computation] += self._instruction_collectives(computation, i)
        return self._collectives[computation]

    def _instruction_collectives(self, computation: str, i: _Instruction) -> list[Collective]:
        """Returns the collectives that one run of an instruction executes."""
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            return self._collective(computation, i, kind)
        called = _CALLS.findall(i.rest)
        if branches := i.attribute(r"branch_computations=\{([^}]*)\}"):
            called += re.findall(r"[\w.\-]+", branches)
        inside = [c for name in called for c in self.collectives(name)]
        if not inside:
            return []
        if i.opcode == "while":
            trips = self._trip_count(computation, i)
            inside = [dataclasses.replace(c, times=c.times * trips) for c in inside]
        name = i.op_name or self._user_name(computation, i)
        return [c if c.op_name else dataclasses.replace(c, op_name=name) for c in inside]

    def _collective(self, computation: str, i: _Instruction, kind: str) -> list[Collective]:
        group = self._group(i)
        size = _bytes(i.type)
        # The type of a -start instruction contains operands and results. Only the larger counts.
        if i.opcode in ("all-gather-start", "reduce-scatter-start"):
            size = size * group // (group + 1)
        elif i.opcode == "all-to-all-start":
            size //= 2
        elif i.opcode == "collective-permute-start":  # operand, result, contexts
            size = _bytes(_TYPE.search(i.type)[0])
        elif kind == "reduce-scatter":
            size *= group
        if kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind = "reduce-scatter"
        if group == 1:
            return []
        name = i.op_name or self._user_name(computation, i)
        return [Collective(kind=kind, bytes=size, group=group, op_name=name)]

    def _user_name(self, computation: str, i: _Instruction) -> str:
        """Returns the op_name of the first instruction that reads i and has one; or ""."""
        users = (u for u in self.computations[computation].values() if i.name in u.operands)
        return next((u.op_name for u in users if u.op_name), "")

    def _group(self, i: _Instruction) -> int:
        """Returns the number of devices in a group.

        XLA writes groups as `{{0,1},{2,3}}`, `[2,2]<=[4]` or `mesh['a'=2,'b'=2] {'b'}`.
        """
        if "source_target_pairs=" in i.rest:
            return self.devices
        if sizes := i.attribute(r"replica_groups=\[\d+,(\d+)\]"):
            return int(sizes)
        if first := i.attribute(r"replica_groups=\{\{([\d,]+)\}"):
            return len(first.split(","))
        if mesh := re.search(r"replica_groups=@?\w*mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}", i.rest):
            axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
            named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])  # 'b':(2)4 is a sub-axis of b
            return math.prod(int(size) if size else axes[name] for name, size in named)
        return self.devices

    def _trip_count(self, computation: str, loop: _Instruction) -> int:
        """Returns a loop's trip count, as the compiler states it or from counter and condition."""
        known = loop.attribute(r'known_trip_count[^\d}]*"?(\d+)')
        if known:
            return int(known)
        condition = loop.attribute(r"condition=%?([\w.\-]+)")
        instructions, root = self.computations[condition], self.roots[condition]
        limits = {i.constant for i in instructions.values() if i.constant is not None}
        compare = root
        if root.opcode == "fusion":
            inner = root.attribute(r"calls=%?([\w.\-]+)")
            compare = self.roots[inner]
            constants = (i.constant for i in self.computations[inner].values())
            limits |= {c for c in constants if c is not None}
        direction = compare.attribute(r"direction=(\w+)")
        if len(limits) != 1 or direction not in ("LT", "LE"):
            raise ValueError(f"loop {loop.name}: unknown trip count ({root.opcode} {root.rest})")
        counters = [i for i in instructions.values() if i.opcode == "get-tuple-element"]
        index = int(counters[0].attribute(r"index=(\d+)")) if len(counters) == 1 else None
        start, step = self._start_and_step(computation, loop, index)
        return max(0, -(-(limits.pop() + (direction == "LE") - start) // step))

    def _start_and_step(self, computation, loop, index: int | None) -> tuple[int, int]:
        """Returns a loop counter's start and step. Unknown ones are 0 and 1, as in JAX's loops."""
        start, step = 0, 1
        if index is None:
            return start, step
        instructions = self.computations[computation]
        initial = instructions.get(loop.operands[0])
        if initial and initial.opcode == "tuple":
            value = instructions.get(initial.operands[index])
            while value and value.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
                value = instructions.get(value.operands[0])
            start = value.constant or 0 if value else 0
        body = loop.attribute(r"body=%?([\w.\-]+)")
        root, instructions = self.roots[body], self.computations[body]
        if root.opcode == "tuple" and (update := instructions.get(root.operands[index])):
            if update.opcode == "add":
                operands = [instructions[o] for o in update.operands if o in instructions]
                constants = [operand.constant for operand in operands]
                step = next((c for c in constants if c), 1)
        return start, step


def _bytes(type_: str) -> int:
    """Returns the bytes of all arrays in a type, without padding."""
    return sum(
        math.ceil(math.prod(int(d) for d in shape.split(",") if d) * _bits(dtype) / 8)
        for dtype, shape in _TYPE.findall(type_)
    )


def _bits(dtype: str) -> int:
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    return int(re.search(r"\d+", dtype)[0])
