"""An estimate of the memory that a training step takes on a device, from shapes.

The compiler decides. The estimate is near enough to refuse a run, or to choose what to compile.
What TPU compilers reserve between the paper-scale steps is within 3 % of it, and within a step
within 11 %; with heads of 64 or 160 channels, which lie in lanes of 128 or not as the compiler sees
fit, up to 28 % more (tests/training/test_memory_estimate.py).
"""

import dataclasses
import functools
import math

import jax

from kvjax.costs import formulas
from kvjax.foundation.rounding import round_up
from kvjax.layers.weight import Axes
from kvjax.model import parameters
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute
from kvjax.optim import OptimizerConfig, parameter_labels, trainable


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes per device; of them parameters and optimizer lie there between steps."""

    parameters: int
    optimizer: int
    gradients: int
    weights: int = 0  # gathered and cast, as products use them
    activations: int = 0

    @property
    def temporaries(self) -> int:
        return self.gradients + self.weights + self.activations

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.temporaries


@functools.cache
def resident_memory(
    config: TransformerConfig,
    shards: int,
    optimizer: OptimizerConfig = OptimizerConfig(),
    lanes: int = 1,
) -> TrainingMemory:
    """Parameters, optimizer state and gradients in float32, split over `shards` devices.

    Args:
      lanes: that an array's last axis is padded to, see `lanes_of`.
    """
    shapes, axes = parameters.abstract(config)
    laid_out = lambda shapes, axes: [
        math.ceil(math.prod(x.shape) * _padding(x.shape, Axes.parse(text), shards, lanes))
        for x, text in zip(jax.tree.leaves(shapes), jax.tree.leaves(axes), strict=True)
    ]
    learned = laid_out(trainable(optimizer, shapes), trainable(optimizer, axes))
    labels = jax.tree.leaves(parameter_labels(trainable(optimizer, axes)))
    one = "matrix" if optimizer.matrices == "muon" else None  # Muon keeps one, Adam two
    moments = sum(
        size * (1 if label == one else 2) for size, label in zip(learned, labels, strict=True)
    )
    return TrainingMemory(
        parameters=4 * sum(laid_out(shapes, axes)) // shards,
        optimizer=4 * moments // shards,
        gradients=4 * sum(learned) // shards,
    )


def lane_width(platform: str) -> int:
    """What the last axis of an array in memory is a multiple of: a TPU's vector unit is so wide."""
    return 128 if platform == "tpu" else 1


def _padding(shape: tuple[int, ...], axes: Axes, shards: int, lanes: int) -> float:
    """How much larger a weight lies in memory than it is, whichever axis is the last one there.

    Heads of 64 channels take twice their bytes where the width is split to less than 128 too.
    """
    if not axes.is_matrix:
        return 1.0
    sizes = dict(zip(axes.names, shape[-len(axes.names) :], strict=True))
    if "D" in sizes:
        sizes["D"] = max(1, sizes["D"] // shards)
    return min(round_up(size, lanes) / size for size in sizes.values())


def estimate(
    config: TransformerConfig,
    compute: Compute,
    *,
    rows_per_device: int,
    sequence_length: int,
    fsdp: int,
    tensor: int = 1,
    sequence: int = 1,
    accumulation_steps: int = 1,
    attention_kernel: bool = False,
    optimizer: OptimizerConfig = OptimizerConfig(),
    teacher: TransformerConfig | None = None,
    lanes: int = 1,
) -> TrainingMemory:
    """The memory of a whole step.

    Args:
      rows_per_device: rows of one pass through the model (after gradient accumulation).
      fsdp, tensor, sequence: devices along these axes of the mesh.
      parts: of gradient accumulation; from 2 on there is a second tree of gradients.
      attention_kernel: softmax attention keeps no logits.
      optimizer: which parameters learn, and by what.
      teacher: a second model, whose weights lie beside.
      lanes: see `lanes_of`.
    """
    c, itemsize = config.block, compute.dtype.itemsize
    resting = resident_memory(config, fsdp * tensor, optimizer, lanes)
    if teacher is not None:
        beside = formulas.weight_bytes(teacher, compute.dtype) // (fsdp * tensor)
        resting = dataclasses.replace(resting, parameters=resting.parameters + beside)
    matrices = formulas.matrix_weights(config)
    layer = (matrices["attention"] + matrices["mlp"]) / c.num_layers
    # Two layers on their way; the head, its gradient, and that in float32.
    used = itemsize * 2 * layer + (2 * itemsize + 4) * matrices["head"]
    logits = 0 if attention_kernel else sequence_length
    wide = 4 if compute.remat == "none" else itemsize  # seen in bytes, not in which arrays
    padded = lambda dim: round_up(dim, lanes)
    inside = [
        wide
        * (
            2 * c.d_model  # normed inputs
            + 2 * m.query_heads * padded(m.query_dim) / tensor  # queries, before and after RoPE
            # Keys and values, likewise: where a row is split, those of all of it.
            + 2 * m.query_heads * (padded(m.query_dim) + padded(m.value_dim)) * sequence / tensor
            + m.query_heads * padded(m.value_dim) / tensor  # attention's output
            + 2 * c.mlp_dim / tensor
        )
        + 2 * 4 * m.query_heads * logits / tensor  # logits and softmax, float32
        for m in config.mechanisms
    ]
    inputs = c.num_layers * c.d_model
    found = saved_activations(config, compute.remat, kernel=True)  # named, whoever computes it
    if compute.remat == "dots":  # latents are gathered, so each device makes a whole row of these
        found += weight_products(config).from_latents * (sequence - 1)
    per_token = itemsize * (2 * inputs + (found - inputs) / tensor) + max(inside)
    if compute.remat == "none":
        per_token = 2 * itemsize * inputs + sum(inside)
    elif compute.remat != "full":  # log-sum-exp, float32
        per_token += 4 * sum(m.query_heads for m in config.mechanisms) / tensor
    # Seen in bytes: seven copies of one layer's keys and values of the row's other parts.
    keys_values = max(m.key_heads * (m.query_dim + m.value_dim) for m in config.mechanisms)
    per_token += 7 * itemsize * keys_values * (sequence - 1) / tensor
    # Logits and their gradient in float32, and the gradient as it enters its products.
    narrow = compute.dtype.itemsize if compute.dtype.itemsize < 4 else 0
    per_token += (2 * 4 + narrow) * config.vocab_size / tensor / compute.loss_chunks
    tokens = rows_per_device * sequence_length // sequence
    return dataclasses.replace(
        resting,
        gradients=min(accumulation_steps, 2) * resting.gradients,
        weights=round(used / tensor),
        activations=round(tokens * per_token),
    )


def saved_activations(config: TransformerConfig, remat: str, *, kernel: bool) -> int:
    """Elements per token that a backward pass needs and rematerialisation does not make again.

    Args:
      kernel: attention by one, whose output all policies but "full" keep.
    """
    c, mechanisms = config.block, config.mechanisms
    inputs = c.num_layers * c.d_model  # of each layer
    made = sum(m.query_heads * m.value_dim for m in mechanisms)  # by softmax attention
    if remat == "none":  # and queries, keys, values, what was made of them; of the MLP one product
        expanded = sum(
            m.query_heads * m.query_dim + m.key_heads * (m.query_dim + m.value_dim)
            for m in mechanisms
        )
        return inputs + made + expanded + c.num_layers * c.mlp_dim
    with_weights = weight_products(config).saved_activations if remat == "dots" else 0
    return inputs + with_weights + (made if kernel and remat != "full" else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightProducts:
    """The products with weights that a backward pass reads, for one token and all layers."""

    saved_activations: (
        int  # elements that the policy "dots" keeps: made by weights without a batch axis
    )
    from_latents: int  # of these, keys and values made of latents
    expansions: int  # multiply-adds with weights that have one


@functools.cache
def weight_products(config: TransformerConfig) -> WeightProducts:
    """Products with weights in the layers; embedding and head are outside of rematerialisation."""
    shapes, axes = parameters.abstract(config)
    elements = expansions = from_latents = 0
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), text in zip(leaves, jax.tree.leaves(axes), strict=True):
        keys, stored = [entry.key for entry in path], Axes.parse(text)
        if keys[0] != "segments" or not stored.is_matrix or keys[-2:] == ["mlp", "down"]:
            continue
        if stored.batch:
            expansions += math.prod(leaf.shape)
            continue
        sizes = dict(zip(stored.names, leaf.shape[-len(stored.names) :], strict=True))
        made = math.prod(leaf.shape) // math.prod(sizes[a] for a in stored.reduction)
        elements += made
        from_latents += made if stored.reduction == ("C",) else 0
    elements += sum(m.extra_activations for m in config.mechanisms)
    return WeightProducts(
        saved_activations=elements, expansions=expansions, from_latents=from_latents
    )
