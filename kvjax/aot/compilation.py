"""Compiles a training or decode step for absent chips; reads its memory use and collectives."""

import dataclasses
import math
import re
import time

import jax
import jax.numpy as jnp

from kvjax.aot import hlo, roofline
from kvjax.aot.hlo import Collective, Memory
from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.decoding import program as decode_program
from kvjax.distributed import sharding
from kvjax.foundation.errors import UserError, first_line
from kvjax.hardware import datasheets, topology
from kvjax.hardware.datasheets import Device
from kvjax.training import preflight
from kvjax.training.program import Program

BF16 = jnp.dtype(jnp.bfloat16)
LIMIT = 0.9  # share of a chip's memory; the rest is for the runtime and fragmentation
LARGE = 10**6  # replicated parameters of more bytes are reported
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_OUT_OF_MEMORY = (  # (pattern of the message, True if its size includes the program's arguments)
    (rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)", False),
    (rf"Used {_SIZE} of {_SIZE} hbm", True),
)


class TooLarge(UserError):
    """The program needs `needed` bytes of a chip's `available`; both are 0 if unknown."""

    def __init__(self, message: str, needed: int, available: int):
        super().__init__(message)
        self.needed, self.available = needed, available


class DoesNotCompile(UserError):
    """The compiler failed for a reason other than memory, or its program cannot be parsed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A compiled step of an experiment on a topology; bytes are per chip."""

    device: Device
    mesh: dict[str, int]
    memory: Memory
    upper_bound: bool  # True if `memory` is an upper bound: the run itself uses a fused attention
    collectives: tuple[Collective, ...]
    causal_kernel: bool  # True if the compiled attention skips masked keys
    replicated: tuple[tuple[str, int], ...]  # parameters that no axis shards, and their bytes
    seconds_to_lower: float
    seconds_to_compile: float
    xla: dict[str, float]  # XLA's count of FLOPs and bytes, which counts each loop's body once

    @property
    def chips(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def memory_share(self) -> float:
        """Share of the chip's memory."""
        return self.memory.total / self.device.hbm_bytes

    @property
    def fits(self) -> bool:
        return self.memory_share <= LIMIT

    @property
    def wire_bytes(self) -> float:
        return sum(c.times * c.wire_bytes for c in self.collectives)


def datasheet(name: str) -> Device:
    """Returns the datasheet of a topology's chips."""
    return datasheets.get(name.partition(":")[0])


def training_step(experiment: Experiment, name: str) -> Step:
    """Compiles the training step.

    Args:
      name: a topology, see `topology.get_devices`.

    Raises:
      UserError: the topology is unknown, or mesh or batch does not divide.
      TooLarge: the step does not fit into memory.
      DoesNotCompile: the compiler fails for another reason.
    """
    devices = topology.get_devices(name)
    platform = devices[0].platform
    on_gpu = _is_gpu(datasheet(name))
    if on_gpu:  # lowering cuDNN's attention needs the library
        compute = dataclasses.replace(experiment.compute, attention="xla")
        experiment = dataclasses.replace(experiment, compute=compute)
    mesh = sharding.make_mesh(experiment.mesh, devices)
    preflight.check_mesh(experiment, mesh)
    compute = experiment.compute.resolve(platform, experiment.model.block.num_layers)
    start = time.perf_counter()
    program = Program(experiment, compute, mesh)
    arguments = (program.abstract_state, program.abstract_rows)
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = program.train_step.lower(*arguments)
    except NotImplementedError as error:  # the attention does not support these shapes
        raise DoesNotCompile(first_line(error)) from error
    return _compile(
        lowered,
        start,
        _bytes(arguments),
        device=datasheet(name),
        mesh=dict(mesh.shape),
        upper_bound=on_gpu,
        replicated=_replicated(program.abstract_state["params"]) if mesh.size > 1 else (),
    )


def decode_step(
    experiment: Experiment,
    name: str,
    *,
    batch: int,
    length: int,
    chips: int = 1,
    cache_bits: int | None = None,
) -> Step:
    """Compiles a decode step: one new token for `batch` sequences of `length` cached tokens.

    Args:
      chips: number of chips over which cached tokens are split; weights are replicated.
      cache_bits: bits per element of a quantised cache; None: the cache is in bfloat16.

    Raises:
      UserError: the topology is unknown or has fewer chips; see also `quantized.entry_of`.
      TooLarge: the step does not fit into memory.
      DoesNotCompile: the compiler fails for another reason.
    """
    mesh = decode_program.make_mesh(chips, topology.get_devices(name))
    start = time.perf_counter()
    compute = dataclasses.replace(decode_program.IN_BFLOAT16, cache_bits=cache_bits)
    shape = dict(batch=batch, length=length, compute=compute)
    lowered = decode_program.lowered_step(experiment.model, mesh, **shape)
    per_token = formulas.cache_bytes_per_token(experiment.model, BF16, cache_bits)
    caches = batch * length * per_token // chips
    return _compile(
        lowered,
        start,
        formulas.weight_bytes(experiment.model, BF16) + caches,
        device=datasheet(name),
        mesh=dict(mesh.shape),
        upper_bound=False,
        replicated=(),
    )


def bound(step: Step, experiment: Experiment) -> roofline.Bound:
    """Returns the roofline of a compiled training step, for the attention that a run uses."""
    return roofline.training_step(
        experiment,
        step.device,
        mesh=step.mesh,
        wire_bytes=step.wire_bytes,
        causal_kernel=kernel_when_run(step.causal_kernel, step.device, experiment),
    )


def kernel_when_run(compiled: bool, device: Device, experiment: Experiment) -> bool:
    """Returns True if a run on the device uses an attention kernel, which skips masked keys.

    On a GPU that is cuDNN's, which cannot be compiled without a GPU; `training_step` compiles XLA's
    attention in its place.

    Args:
      compiled: True if the program compiled here has an attention kernel.
    """
    return compiled or (_is_gpu(device) and experiment.uses_attention_kernel("gpu"))


def kernel_when_compiled_here(device: Device, experiment: Experiment) -> bool:
    """Returns True if the program compiled here will have an attention kernel."""
    return not _is_gpu(device) and experiment.compute.attention != "xla"


def _is_gpu(device: Device) -> bool:
    return device.name in topology.GPUS


def _compile(lowered, start: float, arguments: int, **fields) -> Step:
    """Compiles a lowered step and returns it with its sizes.

    Args:
      start: `time.perf_counter` before lowering.
      arguments: bytes of the program's arguments on one chip.
      fields: other fields of `Step`.
    """
    compile_start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise too_large(error, arguments) or DoesNotCompile(first_line(error)) from None
    end = time.perf_counter()
    text = compiled.as_text()
    try:
        collectives = tuple(hlo.collectives(text))
    except ValueError as error:
        raise DoesNotCompile(f"its collectives cannot be counted: {first_line(error)}") from error
    analysis = compiled.cost_analysis() or {}
    return Step(
        memory=hlo.memory(compiled),
        collectives=collectives,
        causal_kernel=bool(re.search(r"splash|__cudnn\$fmha", text)),
        seconds_to_lower=compile_start - start,
        seconds_to_compile=end - compile_start,
        xla={key: analysis[key] for key in ("flops", "bytes accessed") if key in analysis},
        **fields,
    )


def too_large(error: Exception, arguments: int) -> TooLarge | None:
    """Returns a TPU compiler's out-of-memory error with the sizes in its message; None for others.

    Args:
      arguments: bytes of the program's arguments, added to sizes that do not include them.
    """
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern, has_arguments in _OUT_OF_MEMORY:
        if match := re.search(pattern, message):
            number, unit, limit, limit_unit = match.groups()
            needed = round(float(number) * _UNITS[unit]) + (0 if has_arguments else arguments)
            available = round(float(limit) * _UNITS[limit_unit])
            sizes = f"{needed / 1e9:.1f} GB, and a chip has {available / 1e9:.1f} GB"
            return TooLarge(f"the compiler needs {sizes}", needed, available)
    return TooLarge(first_line(error), 0, 0)


def _bytes(tree) -> int:
    """Returns the bytes of a tree's arrays on one chip."""
    total = 0
    for x in jax.tree.leaves(tree):
        shape = x.sharding.shard_shape(x.shape) if x.sharding else x.shape
        total += math.prod(shape) * x.dtype.itemsize
    return total


def _replicated(params) -> tuple[tuple[str, int], ...]:
    """Returns paths and bytes of replicated parameters of more than LARGE bytes."""
    replicated = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if size > LARGE and leaf.sharding.shard_shape(leaf.shape) == leaf.shape:
            replicated.append((jax.tree_util.keystr(path, simple=True, separator="/"), size))
    return tuple(replicated)
