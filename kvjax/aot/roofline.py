"""Computes a lower bound of a training step's time from compute, HBM and interconnect.

The bound assumes that each of the three runs at its datasheet's rate all the time, and that they
overlap perfectly. The MFU at this time is an upper bound. Counted are:

- FLOPs of the model (forward and backward), of rematerialisation and of Newton-Schulz, spread
  evenly over the chips. A causal kernel computes half of attention, and its backward pass has 5
  products, because it recomputes the logits. (Splash has 7, in two separate backward kernels.)
  Elementwise operations are free.
- HBM bytes of parameters, gradients and optimizer state, read and written once; of the weights in
  the compute dtype, read in each pass; and of saved activations, written and read once. Other reads
  and writes inside a layer are free.
- Interconnect bytes of the compiled program's collectives by ring algorithms (`kvjax.aot.hlo`),
  over all links of a chip at once. Switches that reduce in the network (NVLink SHARP) can send
  less; with them the bound does not hold.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math

import jax

from kvjax.config import Experiment
from kvjax.costs import formulas
from kvjax.hardware.datasheets import Device
from kvjax.layers.weight import Axes
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.optim import OptimizerConfig, parameter_labels
from kvjax.training import memory_estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one training step on all chips."""

    model: int  # as formulas.training_flops_per_token: attention over all T keys
    needed: int  # with attention as the implementation computes it
    rematerialised: int
    newton_schulz: int

    @property
    def total(self) -> int:
        return self.needed + self.rematerialised + self.newton_schulz


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """Lower bounds of a step's time by resource, and bounds of the whole run."""

    compute: float  # seconds
    hbm: float  # seconds
    interconnect: float  # seconds
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
        """Upper bound of the MFU: the model's FLOPs per second over the chips' peak."""
        return self.model_flops / self.peak_flops / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Upper bound of the throughput."""
        return self.tokens / self.seconds

    @property
    def days(self) -> float:
        """Lower bound of the time for all steps of the config."""
        return self.steps * self.seconds / 86_400

    @property
    def exaflops(self) -> float:
        """The model's FLOPs in the whole run, over 10^18."""
        return self.steps * self.model_flops / 1e18


def training_step(
    experiment: Experiment,
    device: Device,
    *,
    mesh: Mapping[str, int],
    wire_bytes: float,
    causal_kernel: bool,
) -> Bound:
    """Returns the bound of an experiment's step on a mesh of chips.

    Args:
      mesh: chips along each axis, see `kvjax.distributed.sharding`.
      wire_bytes: bytes that one chip sends per step.
      causal_kernel: True if attention is a kernel that skips masked keys.
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


def _mean_keys(T: int, window: int) -> float:
    """Returns how many keys a query sees on average; window 0: all before it."""
    W = min(window or T, T)
    return W - W * W / (2 * T)


def step_flops(experiment: Experiment, *, causal_kernel: bool) -> Flops:
    """Returns the FLOPs of one step, 2 per multiply-add.

    Rematerialisation repeats work by policy. "full" repeats the layers' forward pass (without head
    and embedding) except for the MLP's last product, whose result the backward pass does not read.
    "attention" repeats the same, but no attention kernel. "dots" repeats no attention kernel either
    and, of the products with weights, only those with a separate weight per head (LRKV's B).
    """
    config, T = experiment.model, experiment.data.sequence_length
    weights = formulas.matrix_weights(config)
    layers = weights["attention"] + weights["mlp"]
    layers -= config.block.num_layers * config.block.mlp_dim * config.block.d_model
    # In multiply-adds per token, like `weights`.
    keys = values = 0.0
    for mechanism, kind in config.layers:
        seen = _mean_keys(T, kind.window) if causal_kernel else T
        keys += seen * mechanism.query_heads * mechanism.query_dim
        values += seen * mechanism.query_heads * mechanism.value_dim
    attention = 0 if causal_kernel else keys + values
    products = sum(m.extra_flops for m in config.mechanisms) / 2
    batched = sum(m.extra_flops for m in config.mechanisms if not m.extra_activations) / 2
    repeated = {
        "none": 0,
        "dots": attention + memory_estimate.weight_products(config).expansions + batched,
        "attention": layers + attention + products,
        "full": layers + keys + values + products,
    }
    needed = 6 * (sum(weights.values()) + keys + values + products)
    needed += 2 * keys if causal_kernel else 0  # logits in the backward pass
    tokens = experiment.tokens_per_step
    return Flops(
        model=tokens * formulas.training_flops_per_token(config, T),
        needed=round(tokens * needed),
        rematerialised=round(tokens * 2 * repeated[experiment.compute.remat]),
        newton_schulz=newton_schulz_flops(config, experiment.optimizer),
    )


@functools.cache
def newton_schulz_flops(config: TransformerConfig, optimizer: OptimizerConfig) -> int:
    """Returns the FLOPs of Muon's Newton-Schulz iterations in one step.

    An iteration computes X X' and two products with it: 2 m²n + 2 m³ + 2 m²n FLOPs for a matrix X
    [m, n] with m <= n.
    """
    shapes, axes = parameters.abstract(config)
    labels = parameter_labels(axes)
    total = 0
    for leaf, text, label in zip(*map(jax.tree.leaves, (shapes, axes, labels)), strict=True):
        if label != "matrix":
            continue
        stored = Axes.parse(text)
        matrix = stored.per_head() if optimizer.orthogonalize == "per_head" else stored
        sizes = dict(zip(stored.names, leaf.shape[-len(stored.names) :], strict=True))
        m, n = sorted(
            math.prod(sizes[a] for a in side) for side in (matrix.reduction, matrix.output)
        )
        total += math.prod(leaf.shape) // (m * n) * (4 * m * m * n + 2 * m**3)
    return optimizer.newton_schulz_steps * total


def hbm_bytes(experiment: Experiment, mesh: Mapping[str, int], *, causal_kernel: bool) -> float:
    """Returns the least bytes that one chip moves between HBM and its cores in a step.

    Args:
      causal_kernel: True if attention is a kernel. Its output then counts as a saved activation,
        except under the remat policy "full".
    """
    config, remat = experiment.model, experiment.compute.remat
    compute = experiment.compute.resolve("tpu", config.block.num_layers)
    memory = memory_estimate.resident_memory(config, mesh["fsdp"] * mesh["tensor"])
    # Parameters and state are read and written, gradients written and read.
    state = 2 * (memory.parameters + memory.optimizer + memory.gradients)
    passes = experiment.train.grad_accumulation * (3 if remat in ("full", "attention") else 2)
    matrices = sum(formulas.matrix_weights(config).values()) / mesh["tensor"]
    saved = memory_estimate.saved_activations(config, remat, kernel=causal_kernel)
    tokens = experiment.tokens_per_step / math.prod(mesh.values())
    return state + compute.dtype.itemsize * (passes * matrices + 2 * saved * tokens)
