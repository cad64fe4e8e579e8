"""A strict model of a Hopper GPU's shared memory for Mosaic GPU's interpreter.

The interpreter completes products (wgmma) and copies (TMA) at once, and makes stores visible at
once. A GPU runs products and copies asynchronously, through the async proxy. With this model a
kernel fails at the first access to shared memory that only the interpreter orders:

    earlier            later                     required between them
    a store            a product, a copy         commit_smem
    a load             a copy                    commit_smem: any warp may lag behind
    a product          a store, a copy           wgmma_wait, which makes its reads loads
    a copy             anything                  barrier_wait on its barrier

An accumulator may be read when no product into it is in flight. A wait for all but n products
leaves the n youngest in flight.

Pallas orders the threads' own loads and stores, and registers (wgmma.fence); neither is modelled.
It also puts a barrier of the warpgroup before every copy, but does not guarantee it: in the model
only commit_smem is a barrier. The model covers one warpgroup per program, products, and copies into
shared memory; other kernels and clusters are refused.

Importing this module installs the model, for interpreters with this module's `InterpretGPUParams`.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from unittest import mock

import jax
from jax._src import callback as jax_callback, source_info_util
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax._src.pallas.mosaic_gpu import core, primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu


# Pallas compares the class's name.
class InterpretGPUParams(plgpu.InterpretGPUParams):
    """Interpreters with these raise `Hazard`."""


class Hazard(Exception):
    """Two accesses to shared memory that a GPU may reorder."""


_BETWEEN = {  # kinds of access, earlier and later
    ("store", "product"): "commit_smem",
    ("store", "copy"): "commit_smem",
    ("load", "copy"): "commit_smem",
    ("product", "store"): "wgmma_wait",
    ("product", "copy"): "wgmma_wait",
    ("copy", "load"): "barrier_wait",
    ("copy", "store"): "barrier_wait",
    ("copy", "product"): "barrier_wait",
    ("copy", "copy"): "barrier_wait",
}
_SMEM = shared_memory.get_memory_space_idx(core.MemorySpace.SMEM)


@dataclasses.dataclass(frozen=True)
class _Access:
    kind: str  # as in _BETWEEN
    buffer: tuple
    range: tuple[slice | int, ...]
    line: str
    barrier: tuple | None = None  # of a copy


@dataclasses.dataclass
class _Program:
    """A program's accesses that later accesses are not ordered with yet."""

    accesses: list[_Access] = dataclasses.field(default_factory=list)
    # The oldest first: an accumulator and its operands.
    products: list[tuple[tuple, list[_Access]]] = dataclasses.field(default_factory=list)

    def access(self, new: _Access) -> None:
        for old in self.accesses:
            between = _BETWEEN.get((old.kind, new.kind))
            if between is None or old.buffer != new.buffer:
                continue
            if race_detection_state._ranges_overlap(old.range, new.range):
                raise Hazard(f"no {between} after the {old.kind} in {old.line}: {new.line}")
        self.accesses.append(new)

    def commit(self) -> None:
        self.accesses = [a for a in self.accesses if a.kind not in ("load", "store")]

    def wait(self, n: int) -> None:
        done = self.products[: max(len(self.products) - n, 0)]
        self.products = self.products[len(done) :]
        for operand in (operand for _, operands in done for operand in operands):
            self.accesses.remove(operand)
            self.accesses.append(dataclasses.replace(operand, kind="load"))

    def arrive(self, barrier: tuple, arrivals: int) -> None:
        """Ends a phase of the barrier: its oldest copies are complete."""
        for copy in [a for a in self.accesses if a.barrier == barrier][:arrivals]:
            self.accesses.remove(copy)

    def read(self, accumulator: tuple, line: str) -> None:
        if any(accumulator == written for written, _ in self.products):
            raise Hazard(f"no wgmma_wait before the accumulator: {line}")


def _program() -> _Program:
    memory = gpu_callbacks._get_shared_memory()
    if memory.num_pallas_threads_per_block != 1 or memory.num_blocks_per_cluster != 1:
        raise NotImplementedError("one warpgroup per program, no clusters")
    return vars(memory).setdefault("unordered", _Program())  # a memory lives as long as a kernel


# -- callbacks of the interpreter ------------------------------------------------------------------

_CALLBACKS: dict[str, Callable] = {}  # by their names in `gpu_callbacks`


def _before(name: str) -> Callable:
    """Returns a decorator: the function runs before the interpreter's callback `name`."""
    original = getattr(gpu_callbacks, name)
    signature = inspect.signature(original)

    def decorate(note: Callable) -> Callable:
        @gpu_callbacks.fail_on_exception
        @functools.wraps(original)
        def callback(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            note(_program(), bound.arguments)
            return original(*args, **kwargs)

        _CALLBACKS[name] = callback
        return note

    return decorate


def _key(array) -> tuple:
    return tuple(int(i) for i in array)


def _line(arguments: dict) -> str:
    return source_info_util.summarize(arguments["source_info"])


def _accessed(kind: str, arguments: dict, prefix: str = "", barrier=None) -> list[_Access]:
    """Returns the access to the ref of arguments with this prefix; [] outside shared memory."""
    key = arguments[f"{prefix}allocation_key_as_array"]
    host_key = gpu_callbacks.HostAllocationKey.from_array(key)
    if host_key.memory_space_id != _SMEM:
        return []
    transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{prefix}transforms"])
    transforms = jax.tree.map(int, transforms)
    access = gpu_callbacks._get_shared_memory().access(host_key, transforms)
    return [_Access(kind, _key(key), access.range, _line(arguments), barrier)]


@_before("_get")
def _(program, arguments):
    for access in _accessed("load", arguments):
        program.access(access)


@_before("_swap")
def _(program, arguments):
    for access in _accessed("store", arguments):
        program.access(access)


@_before("copy_gmem_to_smem")
def _(program, arguments):
    barrier = _key(arguments["barrier_allocation_key_as_array"])
    for access in _accessed("copy", arguments, "dst_", barrier):
        program.access(access)


@_before("wgmma")
def _(program, arguments):
    operands = [o for name in ("a_", "b_") for o in _accessed("product", arguments, name)]
    for operand in operands:
        program.access(operand)
    program.products.append((_key(arguments["acc_allocation_key_as_array"]), operands))


@_before("wgmma_accumulator_deref")
def _(program, arguments):
    if arguments["wait_n"] is not None:
        program.wait(arguments["wait_n"])
    program.read(_key(arguments["acc_allocation_key_as_array"]), _line(arguments))


@_before("commit_smem")
def _(program, arguments):
    program.commit()


@_before("_barrier_wait")
def _(program, arguments):
    key = arguments["allocation_key_as_array"]
    barrier = gpu_callbacks._get_shared_memory().get_barrier(
        gpu_callbacks.HostAllocationKey.from_array(key)
    )
    program.arrive(_key(key), barrier.num_arrivals)


@gpu_callbacks.fail_on_exception
def _wgmma_wait(*, token, thread, n: int):
    _program().wait(n)
    return token


class _Interpreter(jaxpr_interpret.JaxprInterpreter):
    """The interpreter with these callbacks; its own ignores `wgmma_wait`."""

    def interpret(self, jaxpr, token, *args):
        if not isinstance(self.interpret_params, InterpretGPUParams):
            return super().interpret(jaxpr, token, *args)
        for eqn in jaxpr.eqns:
            if eqn.primitive is primitives.copy_smem_to_gmem_p:
                raise NotImplementedError("copies out of shared memory")

        # A wait is interpreted as a commit that has a count.
        def is_wait(eqn):
            return eqn.primitive is primitives.wgmma_wait_p

        def as_commit(eqn):
            return eqn.replace(primitive=primitives.commit_smem_p)

        eqns = [as_commit(eqn) if is_wait(eqn) else eqn for eqn in jaxpr.eqns]
        with mock.patch.multiple(gpu_callbacks, **_CALLBACKS):
            return super().interpret(jaxpr.replace(eqns=eqns), token, *args)

    def _interpret_commit_smem_p(self, eqn, token, get_invals):
        if "n" not in eqn.params:
            return super()._interpret_commit_smem_p(eqn, token, get_invals)
        token = jax_callback.io_callback(
            functools.partial(_wgmma_wait, n=eqn.params["n"]),
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            thread=self.thread,
        )
        return token, []


jaxpr_interpret.JaxprInterpreter = _Interpreter
