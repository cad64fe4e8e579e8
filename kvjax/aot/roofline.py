"""The least time a training step can take on a device: compute, memory, interconnect.

The time is a lower bound, so the MFU that follows from it is an upper bound: each resource is used
at its datasheet's rate all the time, and the three overlap perfectly. Counted are:

- FLOPs: the model's (forward and backward), what rematerialisation computes again, and
  Newton-Schulz, spread evenly over the chips. A kernel that is causal computes half of attention
  and, in its backward pass, the logits once more: the 5 products that are needed. Splash, its two
  backward kernels not fused, does 7. Elementwise work is free.
- HBM bytes: parameters, gradients and optimizer state read and written once; of each pass the
  weights, in the compute dtype; of the activations what the backward pass must find again, written
  and read once. What products inside a layer read and write otherwise is free.
- interconnect bytes: what the compiled program's collectives send by ring algorithms
  (`kvjax.aot.hlo`), over all links of a chip at once. Switches that add up what passes through
  them (NVLink SHARP) can do with less: there this part is no bound.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math

import jax

from kvjax.costs import formulas
from kvjax.experiment import Experiment
from kvjax.hardware.datasheets import Device
from kvjax.layers.weight import Axes
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.optim import OptimizerConfig, parameter_labels
from kvjax.training import memory_estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one training step, all chips together."""

    model: int  # as formulas.training_flops_per_token: attention over all T keys
    needed: int  # the same, attention as the implementation computes it
    rematerialised: int
    newton_schulz: int

    @property
    def total(self) -> int:
        return self.needed + self.rematerialised + self.newton_schulz


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """The least seconds of a step by resource, and what follows for the run.

    Units: seconds, FLOPs of all chips.
    """

    compute: float
    hbm: float
    interconnect: float
    model_flops: int
    peak_flops: float  # of all chips, per second
    tokens: int  # per step
    steps: int

    @property
    def seconds(self) -> float:
        return max(self.compute, self.hbm, self.interconnect)

    @property
    def binding(self) -> str:
        """The resource that sets the bound."""
        return max(("compute", "hbm", "interconnect"), key=lambda name: getattr(self, name))

    @property
    def mfu(self) -> float:
        """At most this part of the chips' peak goes into the model's FLOPs."""
        return self.model_flops / self.peak_flops / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """At most."""
        return self.tokens / self.seconds

    @property
    def days(self) -> float:
        """At least, for all steps of the config."""
        return self.steps * self.seconds / 86_400

    @property
    def exaflops(self) -> float:
        """Model FLOPs of the whole run, 10^18."""
        return self.steps * self.model_flops / 1e18


def training_step(
    experiment: Experiment,
    device: Device,
    *,
    mesh: Mapping[str, int],
    wire_bytes: float,
    causal_kernel: bool,
) -> Bound:
    """The bound of an experiment's step on a mesh of chips.

    Args:
      mesh: chips along each axis, see `kvjax.distributed.sharding`.
      wire_bytes: what one chip sends per step.
      causal_kernel: attention by a kernel that leaves out what the mask hides.
    """
    flops = step_flops(experiment, causal_kernel=causal_kernel)
    chips = math.prod(mesh.values())
    return Bound(
        compute=flops.total / chips / device.bf16_flops,
        hbm=hbm_bytes(experiment, mesh, causal_kernel=causal_kernel) / device.bandwidth,
        interconnect=wire_bytes / device.interconnect,
        model_flops=flops.model,
        peak_flops=chips * device.bf16_flops,
        tokens=experiment.tokens_per_step,
        steps=experiment.train.num_steps,
    )


def step_flops(experiment: Experiment, *, causal_kernel: bool) -> Flops:
    """FLOPs of one step, 2 per multiply-add.

    Rematerialisation in full runs the layers forward once more (head and embedding are outside),
    but for the MLP's last product, which nothing in the backward pass reads; "attention" and "dots"
    keep what an attention kernel made, "dots" the products with a weight too, but not those of a
    weight for each head (LRKV's B).
    """
    config, T = experiment.model, experiment.data.sequence_length
    weights = formulas.matrix_weights(config)
    layers = weights["attention"] + weights["mlp"]
    layers -= config.block.num_layers * config.block.mlp_dim * config.block.d_model
    part = 0.5 if causal_kernel else 1.0
    keys = part * T * sum(m.query_heads * m.query_dim for m in config.mechanisms)
    values = part * T * sum(m.query_heads * m.value_dim for m in config.mechanisms)
    attention = 0 if causal_kernel else keys + values
    # Multiply-adds, as the others; those of a weight, head by head, are kept as any product is.
    products = sum(m.extra_flops for m in config.mechanisms) / 2
    batched = sum(m.extra_flops for m in config.mechanisms if not m.extra_activations) / 2
    again = {
        "none": 0,
        "dots": attention + memory_estimate.weight_products(config).expansions + batched,
        "attention": layers + attention + products,
        "full": layers + keys + values + products,
    }
    needed = 6 * (sum(weights.values()) + keys + values + products)
    needed += 2 * keys if causal_kernel else 0
    tokens = experiment.tokens_per_step
    return Flops(
        model=tokens * formulas.training_flops_per_token(config, T),
        needed=round(tokens * needed),
        rematerialised=round(tokens * 2 * again[experiment.compute.remat]),
        newton_schulz=newton_schulz_flops(config, experiment.optimizer),
    )


@functools.cache
def newton_schulz_flops(config: TransformerConfig, optimizer: OptimizerConfig) -> int:
    """FLOPs of Muon in one step: X X' and two products with it, per iteration and matrix.

    For an m x n matrix, m <= n: 2 m²n + 2 m³ + 2 m²n.
    """
    shapes, axes = parameters.abstract(config)
    labels = parameter_labels(axes)
    total = 0
    for leaf, text, label in zip(*map(jax.tree.leaves, (shapes, axes, labels)), strict=True):
        if label != "matrix":
            continue
        stored = Axes.parse(text)
        meant = stored.per_head() if optimizer.orthogonalize == "per_head" else stored
        sizes = dict(zip(stored.names, leaf.shape[-len(stored.names) :], strict=True))
        m, n = sorted(math.prod(sizes[a] for a in part) for part in (meant.reduction, meant.output))
        total += math.prod(leaf.shape) // (m * n) * (4 * m * m * n + 2 * m**3)
    return optimizer.newton_schulz_steps * total


def hbm_bytes(experiment: Experiment, mesh: Mapping[str, int], *, causal_kernel: bool) -> float:
    """Bytes that one chip must at least move between HBM and the cores in a step.

    Args:
      causal_kernel: attention by a kernel, whose output all policies but "full" keep.
    """
    config, remat = experiment.model, experiment.compute.remat
    compute = experiment.compute.resolve("tpu", config.block.num_layers)
    memory = memory_estimate.resident_memory(config, mesh["fsdp"] * mesh["tensor"])
    # Parameters and state: read, written. Gradients: written, read.
    state = 2 * (memory.parameters + memory.optimizer + memory.gradients)
    passes = experiment.train.grad_accumulation * (3 if remat in ("full", "attention") else 2)
    matrices = sum(formulas.matrix_weights(config).values()) / mesh["tensor"]
    kept = memory_estimate.saved_activations(config, remat, kernel=causal_kernel)
    tokens = experiment.tokens_per_step / math.prod(mesh.values())
    return state + compute.dtype.itemsize * (passes * matrices + 2 * kept * tokens)
