"""Compiles a training or decode step for absent chips, and says what it needs of them."""

import dataclasses
import math
import re
import time

import jax
import jax.numpy as jnp

from kvjax.aot import hlo, roofline
from kvjax.aot.hlo import Collective, Memory
from kvjax.costs import formulas
from kvjax.decoding import program as decode_program
from kvjax.distributed import sharding
from kvjax.experiment import Experiment
from kvjax.foundation.errors import UserError, first_line
from kvjax.hardware import datasheets, topology
from kvjax.hardware.datasheets import Device
from kvjax.training import preflight
from kvjax.training.program import Program

BF16 = jnp.dtype(jnp.bfloat16)
LIMIT = 0.9  # of a chip's memory: the rest is for the runtime and fragmentation
LARGE = 10**6  # bytes above which a parameter that is whole on every chip is named
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_RAN_OUT = (  # and whether arguments are counted
    (rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)", False),
    (rf"Used {_SIZE} of {_SIZE} hbm", True),
)


class TooLarge(UserError):
    """The compiler gave up: `needed` bytes per chip, of `there`; 0 and 0 where it does not say."""

    def __init__(self, message: str, needed: int, there: int):
        super().__init__(message)
        self.needed, self.there = needed, there


class DoesNotCompile(UserError):
    """The compiler gave up for another reason, or what it made cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A compiled step of an experiment on a topology; bytes are of one chip."""

    device: Device
    mesh: dict[str, int]
    memory: Memory
    upper_bound: bool  # memory: the real attention needs less
    collectives: tuple[Collective, ...]
    causal_kernel: bool  # attention, as compiled, leaves out what the mask hides
    whole: tuple[tuple[str, int], ...]  # parameters that no axis splits, and their bytes
    seconds_to_lower: float
    seconds_to_compile: float
    xla: dict[str, float]  # the compiler's own count; bodies of loops once

    @property
    def chips(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def part(self) -> float:
        """The part of the chip's memory that it takes."""
        return self.memory.total / self.device.hbm_bytes

    @property
    def fits(self) -> bool:
        return self.part <= LIMIT

    @property
    def wire_bytes(self) -> float:
        return sum(c.times * c.wire_bytes for c in self.collectives)


def datasheet(name: str) -> Device:
    """The datasheet of the chips that a topology's name begins with."""
    return datasheets.get(name.partition(":")[0])


def training_step(experiment: Experiment, name: str) -> Step:
    """The whole training step, compiled.

    Args:
      name: a topology, see `topology.get_devices`.

    Raises:
      UserError: an unknown topology, a mesh or batch that does not divide.
      TooLarge: the compiler finds no place for it.
      DoesNotCompile: it fails otherwise.
    """
    devices = topology.get_devices(name)
    platform = devices[0].platform
    on_gpu = _is_gpu(datasheet(name))
    if on_gpu:  # cuDNN's attention needs its library to be lowered
        changed = dataclasses.replace(experiment.compute, attention="xla")
        experiment = dataclasses.replace(experiment, compute=changed)
    mesh = sharding.make_mesh(experiment.mesh, devices)
    preflight.check_mesh(experiment, mesh)
    compute = experiment.compute.resolve(platform, experiment.model.block.num_layers)
    start = time.perf_counter()
    program = Program(experiment, compute, mesh)
    arguments = (program.abstract_state, program.abstract_rows)
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = program.train_step.lower(*arguments)
    except NotImplementedError as error:  # an attention that does not take these shapes
        raise DoesNotCompile(first_line(error)) from error
    return _compile(
        lowered,
        start,
        _bytes(arguments),
        device=datasheet(name),
        mesh=dict(mesh.shape),
        upper_bound=on_gpu,
        whole=_whole(program.abstract_state["params"]) if mesh.size > 1 else (),
    )


def decode_step(
    experiment: Experiment, name: str, *, batch: int, length: int, chips: int = 1
) -> Step:
    """One step of decoding: a token for each of `batch` caches of `length`.

    Args:
      chips: of the topology, over which the caches' tokens are split; each has all weights.

    Raises:
      UserError: an unknown topology, or one of fewer chips.
      TooLarge: the compiler finds no place for it.
      DoesNotCompile: it fails otherwise.
    """
    mesh = decode_program.make_mesh(chips, topology.get_devices(name))
    start = time.perf_counter()
    shape = dict(batch=batch, length=length)
    lowered = decode_program.lowered_step(experiment.model, mesh, **shape)
    caches = batch * length * formulas.cache_bytes_per_token(experiment.model, BF16) // chips
    return _compile(
        lowered,
        start,
        formulas.weight_bytes(experiment.model, BF16) + caches,
        device=datasheet(name),
        mesh=dict(mesh.shape),
        upper_bound=False,
        whole=(),
    )


def bound(step: Step, experiment: Experiment) -> roofline.Bound:
    """The roofline of a compiled training step, with the attention that its run uses."""
    return roofline.training_step(
        experiment,
        step.device,
        mesh=step.mesh,
        wire_bytes=step.wire_bytes,
        causal_kernel=kernel_when_run(step.causal_kernel, step.device, experiment),
    )


def kernel_when_run(compiled: bool, device: Device, experiment: Experiment) -> bool:
    """Whether attention is a kernel, which leaves out what the mask hides, when the step is run.

    A GPU then runs cuDNN's, which cannot be compiled without one: here XLA's stands for it.

    Args:
      compiled: whether it is one in the program compiled here.
    """
    return compiled or (_is_gpu(device) and experiment.uses_attention_kernel("gpu"))


def kernel_when_compiled_here(device: Device, experiment: Experiment) -> bool:
    """Whether attention will be such a kernel in the program compiled here."""
    return not _is_gpu(device) and experiment.compute.attention != "xla"


def _is_gpu(device: Device) -> bool:
    return device.name in topology.GPUS


def _compile(lowered, start: float, arguments: int, **known) -> Step:
    middle = time.perf_counter()
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
    counted = compiled.cost_analysis() or {}
    return Step(
        memory=hlo.memory(compiled),
        collectives=collectives,
        causal_kernel=bool(re.search(r"splash|__cudnn\$fmha", text)),
        seconds_to_lower=middle - start,
        seconds_to_compile=end - middle,
        xla={key: counted[key] for key in ("flops", "bytes accessed") if key in counted},
        **known,
    )


def too_large(error: Exception, arguments: int) -> TooLarge | None:
    """The sizes in what a TPU's compiler says when memory runs out; None of another error.

    Args:
      arguments: bytes of the program's, which the compiler does not always count.
    """
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern, counted in _RAN_OUT:
        if found := re.search(pattern, message):
            needed, there = (
                round(float(number) * _UNITS[unit]) for number, unit in _pairs(found.groups())
            )
            needed += 0 if counted else arguments
            over = f"{needed / 1e9:.1f} GB, and a chip has {there / 1e9:.1f} GB"
            return TooLarge(f"the compiler needs {over}", needed, there)
    return TooLarge(first_line(error), 0, 0)


def _pairs(items):
    return zip(items[::2], items[1::2], strict=True)


def _bytes(tree) -> int:
    """Bytes of a tree's arrays on one chip."""
    own = lambda x: x.sharding.shard_shape(x.shape) if x.sharding else x.shape
    return sum(math.prod(own(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _whole(params) -> tuple[tuple[str, int], ...]:
    """Parameters of more than LARGE bytes that lie whole on every chip."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if size > LARGE and leaf.sharding.shard_shape(leaf.shape) == leaf.shape:
            found.append((jax.tree_util.keystr(path, simple=True, separator="/"), size))
    return tuple(found)
