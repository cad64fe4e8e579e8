"""Searches for the best mesh, gradient accumulation and rematerialisation on a topology.

A compilation takes minutes. Candidates are therefore sorted by a prediction (`predict`) and
compiled in that order, until no other candidate is predicted to be faster than one that fits. Every
compilation corrects the predicted temporaries of the others. If none fits, `advice` and
`decode_advice` name settings that are predicted to fit.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import math

from kvjax.aot import compilation, roofline, traffic
from kvjax.aot.compilation import Step, TooLarge
from kvjax.cache import quantized
from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.distributed import sharding
from kvjax.hardware import topology
from kvjax.hardware.datasheets import Device
from kvjax.model import parameters
from kvjax.model.transformer import REMAT_POLICIES
from kvjax.training import memory_estimate

MESHES = ("data", "fsdp", "tensor")  # axes that are searched; `sequence` is the config's
TENSOR = (1, 2, 4, 8)  # sizes of `tensor` that are tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A candidate's predicted bytes on a chip, and its roofline with predicted collectives."""

    state: int  # parameters and optimizer state, the program's arguments
    temporaries: float
    bound: roofline.Bound

    @property
    def order(self) -> tuple[float, float]:
        """Sort key, the best first: the bound in 3 digits, then the time without any overlap."""
        b = self.bound
        return float(f"{b.seconds:.3g}"), b.compute + b.hbm + b.interconnect


@dataclasses.dataclass
class Candidate:
    """An experiment with other settings, its prediction and, later, its compilation's result."""

    experiment: Experiment
    predicted: Prediction
    step: Step | None = None
    too_large: TooLarge | None = None
    failure: str = ""  # the compiler's error, if it is not about memory

    @property
    def needed(self) -> int:
        """Bytes on a chip according to the compiler; 0 if unknown."""
        if self.step:
            return self.step.memory.total
        return self.too_large.needed if self.too_large else 0

    @property
    def overrides(self) -> list[str]:
        """Command-line options that change the user's config into this candidate."""
        e = self.experiment
        return [
            *(f"--config.mesh.{axis}={getattr(e.mesh, axis)}" for axis in MESHES),
            f"--config.train.grad_accumulation={e.train.grad_accumulation}",
            f"--config.compute.remat={e.compute.remat}",
        ]


def candidates(experiment: Experiment, device: Device, chips: int) -> list[Candidate]:
    """Returns all combinations of mesh, accumulation and remat policy, best prediction first."""
    result = []
    for mesh in _meshes(experiment, chips):
        rows = experiment.train.batch_size // (mesh.data * mesh.fsdp)
        for accumulation in sharding.divisors(rows):
            if accumulation & (accumulation - 1):
                continue  # powers of two are enough
            for remat in REMAT_POLICIES:
                changed = dataclasses.replace(
                    experiment,
                    mesh=mesh,
                    train=dataclasses.replace(experiment.train, grad_accumulation=accumulation),
                    compute=dataclasses.replace(experiment.compute, remat=remat),
                )
                result.append(Candidate(changed, predict(changed, device)))
    return sorted(result, key=lambda c: c.predicted.order)


def _meshes(experiment: Experiment, chips: int) -> Iterator[sharding.MeshConfig]:
    sequence = experiment.mesh.sequence
    for tensor in TENSOR:
        if chips % (sequence * tensor):
            continue
        for fsdp in sharding.divisors(chips // sequence // tensor):
            data = chips // sequence // tensor // fsdp
            if experiment.train.batch_size % (data * fsdp):
                continue
            shape = dict(data=data, fsdp=fsdp, sequence=sequence, tensor=tensor)
            mesh = sharding.MeshConfig(**shape)
            if _divides(mesh, experiment):
                yield mesh


def _divides(mesh: sharding.MeshConfig, experiment: Experiment) -> bool:
    """Returns True if every axis of the mesh divides the weights that it shards."""
    return sharding.divides(dataclasses.asdict(mesh), *parameters.abstract(experiment.model))


def predict(experiment: Experiment, device: Device) -> Prediction:
    """Predicts, by formulas, the memory of the compiled program and the time of a run's step."""
    kernel = compilation.kernel_when_compiled_here(device, experiment)
    mesh = dataclasses.asdict(experiment.mesh)
    config, c = experiment.model, experiment.model.block
    compute = experiment.compute.resolve("tpu", c.num_layers)
    accumulation = experiment.train.grad_accumulation
    memory = memory_estimate.estimate(
        config,
        compute,
        rows_per_device=experiment.train.batch_size
        // accumulation
        // (mesh["data"] * mesh["fsdp"]),
        sequence_length=experiment.data.sequence_length,
        **{axis: mesh[axis] for axis in ("fsdp", "tensor", "sequence")},
        accumulation_steps=accumulation,
        attention_kernel=kernel,
        optimizer=experiment.optimizer,
        lanes=memory_estimate.lane_width("gpu" if device.name in topology.GPUS else "tpu"),
    )
    return Prediction(
        state=memory.parameters + memory.optimizer,
        temporaries=memory.temporaries,
        bound=roofline.training_step(
            experiment,
            device,
            mesh=mesh,
            wire_bytes=traffic.total_bytes(experiment, mesh),
            causal_kernel=compilation.kernel_when_run(kernel, device, experiment),
        ),
    )


def search(experiment: Experiment, name: str, *, compiles: int, say=print) -> list[Candidate]:
    """Compiles the config itself, then candidates in predicted order; returns the compiled ones.

    The search ends when no other candidate is predicted both to fit and to be faster than the best
    so far.

    Args:
      compiles: largest number of compilations.
      say: called with a line of progress before each compilation.

    Raises:
      UserError: the topology is unknown, or the config's own mesh does not divide.
    """
    own = _with_mesh(experiment, name)
    device, chips = compilation.datasheet(name), math.prod(dataclasses.asdict(own.mesh).values())
    queue = [Candidate(own, predict(own, device)), *candidates(own, device, chips)]
    tried: list[Candidate] = []
    while queue and len(tried) < compiles:
        candidate = queue.pop(0)
        say(f"compiling {' '.join(candidate.overrides)}")
        try:
            candidate.step = compilation.training_step(candidate.experiment, name)
        except TooLarge as error:
            candidate.too_large = error
        except compilation.DoesNotCompile as error:
            candidate.failure = str(error)
            say(f"did not compile: {error}")
        tried.append(candidate)
        experiments = [c.experiment for c in tried]
        fastest, corrected = best(tried), corrections(tried)
        queue = [
            c
            for c in queue
            if c.experiment not in experiments
            and (not fastest or c.predicted.order < fastest.predicted.order)
            and may_fit(c, device, corrected)
        ]
    return tried


def _with_mesh(experiment: Experiment, name: str) -> Experiment:
    """Returns the experiment with a mesh whose sizes are all numbers."""
    mesh = sharding.make_mesh(experiment.mesh, topology.get_devices(name))
    return dataclasses.replace(experiment, mesh=sharding.MeshConfig(**mesh.shape))


def best(tried: Iterable[Candidate]) -> Candidate | None:
    """Returns the fastest candidate that fits, with bounds from compilation; None if none fits."""

    def order(c: Candidate):
        return dataclasses.replace(c.predicted, bound=compilation.bound(c.step, c.experiment)).order

    return min((c for c in tried if c.step and c.step.fits), key=order, default=None)


def corrections(tried: Iterable[Candidate]) -> dict[str, float]:
    """Returns by remat policy the compiled temporaries over the predicted ones."""
    ratios = {}
    for c in tried:
        temporaries = c.needed - c.predicted.state
        if temporaries > 0:
            ratios[c.experiment.compute.remat] = temporaries / c.predicted.temporaries
    return ratios


def may_fit(candidate: Candidate, device: Device, corrected: dict[str, float]) -> bool:
    """Returns True if the corrected prediction exceeds the limit of memory by less than 10 %."""
    remat = candidate.experiment.compute.remat
    factor = corrected.get(remat, max(corrected.values(), default=1.0))
    needed = candidate.predicted.state + factor * candidate.predicted.temporaries
    return needed < 1.1 * compilation.LIMIT * device.hbm_bytes


def advice(experiment: Experiment, name: str, needed: int) -> str:
    """Returns a text with settings that are predicted to fit, for a training step that does not.

    Args:
      needed: bytes per chip that the step needs, which correct the prediction; 0 if unknown.
    """
    device, own = compilation.datasheet(name), _with_mesh(experiment, name)
    limit = compilation.LIMIT * device.hbm_bytes
    predicted = predict(own, device)
    factor = max(needed - predicted.state, 0) / predicted.temporaries if needed else 1.0

    def fits(predicted: Prediction) -> bool:
        return predicted.state + factor * predicted.temporaries <= limit

    chips = math.prod(dataclasses.asdict(own.mesh).values())
    lines = [f"{_over(device, needed)} Predicted to fit:"]
    if other := next((c for c in candidates(own, device, chips) if fits(c.predicted)), None):
        lines.append(f"  on these {chips} chips: {' '.join(other.overrides)}")
    for times in (2**n for n in range(1, 12)):
        rows = own.train.batch_size // own.train.grad_accumulation
        if rows % (times * own.mesh.data * own.mesh.fsdp):
            break
        larger = (dataclasses.replace(own, mesh=mesh) for mesh in _larger(own, times))
        if other := next((e for e in larger if fits(predict(e, device))), None):
            mesh = other.mesh
            split = "" if mesh.data == own.mesh.data else f" with --config.mesh.data={mesh.data}"
            lines.append(f"  unchanged, on {times * chips} chips of {device.name}{split}")
            break
    return "\n".join(lines if len(lines) > 1 else [*lines, "  no candidate"])


def _larger(own: Experiment, times: int) -> list[sharding.MeshConfig]:
    """Returns meshes with `times` as many chips along data and fsdp, the fastest ones first."""
    meshes = []
    for copies in (2**n for n in range(times.bit_length())):
        sizes = dict(data=own.mesh.data * copies, fsdp=own.mesh.fsdp * times // copies)
        if _divides(mesh := dataclasses.replace(own.mesh, **sizes), own):
            meshes.append(mesh)
    return sorted(meshes, key=lambda mesh: not traffic.in_whole_tiles(own, mesh.fsdp))


def decode_advice(
    experiment: Experiment,
    name: str,
    needed: int,
    *,
    batch: int,
    length: int,
    chips: int,
    cache_dtype: str = "",
) -> str:
    """Returns a text with batches and chips that are predicted to fit, if a decode step does not.

    Args:
      needed: bytes per chip that the step needs, which correct the caches' size; 0 if unknown.
      cache_dtype: "int8" or "int4" for a quantised cache; "": bfloat16.
    """
    bits = quantized.bits_of(cache_dtype)
    device = compilation.datasheet(name)
    weights = formulas.weight_bytes(experiment.model, compilation.BF16)
    free = compilation.LIMIT * device.hbm_bytes - weights
    per_token = formulas.cache_bytes_per_token(experiment.model, compilation.BF16, bits)
    caches = batch * length * per_token
    caches *= max(1.0, (needed - weights) * chips / caches)  # padding and copies
    over = _over(device, needed)
    if free <= 0:
        return f"{over} Weights alone are {weights / 1e9:.1f} GB on every chip."
    lines = [f"{over} Predicted to fit:"]
    if most := min(math.floor(free * chips * batch / caches), batch - 1):
        lines.append(f"  on {chips} of these chips: --batch={most}")
    more = next((n for n in (2**i * chips for i in range(1, 12)) if caches / n <= free), None)
    if more:
        lines.append(f"  unchanged, on --chips={more} of {device.name}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "  no candidate"])


def _over(device: Device, needed: int) -> str:
    """Returns a sentence on how far a chip's limit is exceeded."""
    if not needed:
        return "The compiler does not report the size."
    limit = compilation.LIMIT * device.hbm_bytes
    return (
        f"It exceeds {compilation.LIMIT:.0%} of a {device.name}'s "
        f"{device.hbm_bytes / 1e9:.0f} GB by {(needed - limit) / 1e9:.1f} GB per chip."
    )
