"""Estimates the device memory of a training step from shapes.

The estimate serves to refuse runs and to choose what to compile. For the paper-scale runs, the
memory that TPU compilers reserve differs from the estimate by at most 3 % between steps and 11 %
during a step. With heads of 64 or 160 channels, which compilers may pad to lanes of 128, they
reserve up to 28 % more (tests/training/test_memory_estimate.py).
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
from kvjax.model.loss import num_slices
from kvjax.model.transformer import Compute
from kvjax.optim import OptimizerConfig, parameter_labels, trainable


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes per device."""

    parameters: int  # resident between steps
    optimizer: int  # resident between steps
    gradients: int
    weights: int = 0  # gathered and cast for matrix products
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
    """Returns parameters, optimizer state and gradients in float32, sharded over `shards` devices.

    Args:
      lanes: multiple that an array's last axis is padded to, see `lane_width`.
    """
    shapes, axes = parameters.abstract(config)

    def padded_sizes(shapes, axes) -> list[int]:
        return [
            math.ceil(math.prod(x.shape) * _padding(x.shape, Axes.parse(text), shards, lanes))
            for x, text in zip(jax.tree.leaves(shapes), jax.tree.leaves(axes), strict=True)
        ]

    learned = padded_sizes(trainable(optimizer, shapes), trainable(optimizer, axes))
    labels = jax.tree.leaves(parameter_labels(trainable(optimizer, axes)))
    # Muon keeps one moment of a matrix, Adam two.
    one_moment = "matrix" if optimizer.matrices == "muon" else None
    moments = sum(
        size * (1 if label == one_moment else 2)
        for size, label in zip(learned, labels, strict=True)
    )
    return TrainingMemory(
        parameters=4 * sum(padded_sizes(shapes, axes)) // shards,
        optimizer=4 * moments // shards,
        gradients=4 * sum(learned) // shards,
    )


def lane_width(platform: str) -> int:
    """Returns the multiple that layouts pad an array's last axis to: a TPU's vector lanes."""
    return 128 if platform == "tpu" else 1


def _padding(shape: tuple[int, ...], axes: Axes, shards: int, lanes: int) -> float:
    """Returns a weight's padded size over its actual size.

    Assumes that the compiler pads the axis that costs least. Heads of 64 channels then take twice
    their bytes only if the sharded width is below 128 too.
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
    """Estimates the memory of a whole step.

    Args:
      rows_per_device: rows of one microbatch.
      fsdp, tensor, sequence: devices along these axes of the mesh.
      accumulation_steps: microbatches per step; two or more need a second tree of gradients.
      attention_kernel: softmax attention is a fused kernel, which stores no logits.
      optimizer: determines the trainable parameters and their moments.
      teacher: a second model with resident weights; None: none.
      lanes: see `lane_width`.
    """
    c, itemsize = config.block, compute.dtype.itemsize
    resident = resident_memory(config, fsdp * tensor, optimizer, lanes)
    if teacher is not None:
        teacher_bytes = formulas.weight_bytes(teacher, compute.dtype) // (fsdp * tensor)
        resident = dataclasses.replace(resident, parameters=resident.parameters + teacher_bytes)
    matrices = formulas.matrix_weights(config)
    layer = (matrices["attention"] + matrices["mlp"]) / c.num_layers
    # Gathered weights of two layers (the next one is prefetched), the gathered head, and the head's
    # gradient in the compute dtype and in float32.
    gathered = itemsize * 2 * layer + (2 * itemsize + 4) * matrices["head"]
    logits = 0 if attention_kernel else sequence_length
    # Fitted to compilers' totals.
    layer_itemsize = 4 if compute.remat == "none" else itemsize

    def padded(dim: int) -> int:
        return round_up(dim, lanes)

    within_layer = [  # bytes per token, of each layer
        layer_itemsize
        * (
            2 * c.d_model  # normed inputs
            + 2 * m.query_heads * padded(m.query_dim) / tensor  # queries, before and after RoPE
            # Keys and values, before and after RoPE; under context parallelism of the whole row.
            + 2 * m.query_heads * (padded(m.query_dim) + padded(m.value_dim)) * sequence / tensor
            + m.query_heads * padded(m.value_dim) / tensor  # attention's output
            + 2 * c.mlp_dim / tensor
        )
        + 2 * 4 * m.query_heads * logits / tensor  # logits and softmax, float32
        for m in config.mechanisms
    ]
    inputs = c.num_layers * c.d_model
    saved = saved_activations(config, compute.remat, kernel=True)  # saved by XLA's attention too
    if compute.remat == "dots":  # under context parallelism, each device expands all latents
        saved += weight_products(config).from_latents * (sequence - 1)
    per_token = itemsize * (2 * inputs + (saved - inputs) / tensor) + max(within_layer)
    if compute.remat == "none":
        per_token = 2 * itemsize * inputs + sum(within_layer)
    elif compute.remat != "full":  # log-sum-exp, float32
        per_token += 4 * sum(m.query_heads for m in config.mechanisms) / tensor
    # Fitted to compilers' totals: one layer's keys and values from the row's other shards, seven
    # times.
    keys_values = max(m.key_heads * (m.query_dim + m.value_dim) for m in config.mechanisms)
    per_token += 7 * itemsize * keys_values * (sequence - 1) / tensor
    tokens = rows_per_device * sequence_length // sequence
    # One slice's logits, and their gradient in the dtype of its products.
    logits = config.vocab_size / num_slices(tokens, config.vocab_size, compute.loss_chunks)
    per_token += (4 + itemsize) * logits / tensor
    return dataclasses.replace(
        resident,
        gradients=min(accumulation_steps, 2) * resident.gradients,
        weights=round(gathered / tensor),
        activations=round(tokens * per_token),
    )


def saved_activations(config: TransformerConfig, remat: str, *, kernel: bool) -> int:
    """Returns how many elements per token a remat policy saves for the backward pass.

    Args:
      kernel: attention is a fused kernel; all policies but "full" save its output.
    """
    c, mechanisms = config.block, config.mechanisms
    inputs = c.num_layers * c.d_model
    attention = sum(m.query_heads * m.value_dim for m in mechanisms)  # outputs
    if remat == "none":  # also queries, keys, values, and one product of the MLP
        expanded = sum(
            m.query_heads * m.query_dim + m.key_heads * (m.query_dim + m.value_dim)
            for m in mechanisms
        )
        return inputs + attention + expanded + c.num_layers * c.mlp_dim
    dots = weight_products(config).saved if remat == "dots" else 0
    return inputs + dots + (attention if kernel and remat != "full" else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightProducts:
    """Matrix products with weights that the backward pass reads, per token over all layers."""

    saved: int  # elements that the policy "dots" saves: products with weights without batch axis
    from_latents: int  # elements of `saved` that are keys and values expanded from latents
    expansions: int  # multiply-adds with weights that have a batch axis


@functools.cache
def weight_products(config: TransformerConfig) -> WeightProducts:
    """Counts products with weights in the layers; remat excludes embedding and head."""
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
        outputs = math.prod(leaf.shape) // math.prod(sizes[a] for a in stored.reduction)
        elements += outputs
        from_latents += outputs if stored.reduction == ("C",) else 0
    elements += sum(m.extra_activations for m in config.mechanisms)
    return WeightProducts(saved=elements, expansions=expansions, from_latents=from_latents)
