"""Predicts the bytes that a chip sends in a training step: a term per mesh axis, and one for Muon.

In a ring of n chips, each sends (n - 1)/n of an array's bytes for an all-gather or reduce-scatter,
and twice that for an all-reduce. All arrays are bfloat16.
"""

from collections.abc import Mapping
import math

from kvjax.config import Experiment
from kvjax.costs import formulas

ITEMSIZE = 2
# Rows of a TPU's tile. Compiled for v4, gradients with 36 rows per chip (not a multiple of a tile)
# are all-reduced; gradients with 144 or 200 rows are reduce-scattered.
_TILE = 8


def total_bytes(experiment: Experiment, mesh: Mapping[str, int]) -> float:
    """Returns the bytes that a chip sends in a step.

    Args:
      mesh: sizes of data, fsdp, sequence and tensor.
    """
    weights = formulas.matrix_weights(experiment.model)
    layers = (weights["attention"] + weights["mlp"]) / mesh["tensor"]
    matrices = layers + weights["head"] / mesh["tensor"]
    return (
        fsdp_bytes(experiment, mesh, matrices)
        + data_bytes(experiment, mesh, matrices)
        + tensor_bytes(experiment, mesh)
        + muon_bytes(mesh, layers)
    )


def fsdp_bytes(experiment: Experiment, mesh: Mapping[str, int], matrices: float) -> float:
    """Returns the bytes sent over `fsdp`: all-gathered weights, reduce-scattered gradients.

    Args:
      matrices: number of weights in one `tensor` shard.
    """
    passes = 2 if experiment.compute.remat == "none" else 3
    if not in_whole_tiles(experiment, mesh["fsdp"]):
        passes *= 2  # the compiler uses all-reduces, which send twice as much
    accumulation = experiment.train.grad_accumulation
    return ITEMSIZE * accumulation * passes * matrices * _sent_share(mesh["fsdp"])


def data_bytes(experiment: Experiment, mesh: Mapping[str, int], matrices: float) -> float:
    """Returns the bytes sent over `data`: gradients, all-reduced over the replicas of a shard."""
    accumulation = experiment.train.grad_accumulation
    return 2 * ITEMSIZE * accumulation * matrices / mesh["fsdp"] * _sent_share(mesh["data"])


def tensor_bytes(experiment: Experiment, mesh: Mapping[str, int]) -> float:
    """Returns the bytes sent over `tensor`: activations, in two all-reduces per layer and pass."""
    block, accumulation = experiment.model.block, experiment.train.grad_accumulation
    rows = experiment.train.batch_size // accumulation // (mesh["data"] * mesh["fsdp"])
    activations = rows * experiment.data.sequence_length / mesh["sequence"] * block.d_model
    sums = 4 if experiment.compute.remat == "none" else 6
    per_sum = ITEMSIZE * activations * block.num_layers * _sent_share(mesh["tensor"])
    return 2 * sums * accumulation * per_sum


def muon_bytes(mesh: Mapping[str, int], layers: float) -> float:
    """Returns the bytes sent by Muon: matrices to the chips that orthogonalise them, and back.

    Args:
      layers: number of weights of all layers in one `tensor` shard.
    """
    return 2 * ITEMSIZE * layers * mesh["tensor"] / math.prod(mesh.values())


def in_whole_tiles(experiment: Experiment, fsdp: int) -> bool:
    """Returns True if a chip's rows of a weight fill whole tiles; see `fsdp_bytes`."""
    return experiment.model.block.d_model // fsdp % _TILE == 0


def _sent_share(chips: int) -> float:
    """Returns the share of an array that a chip in a ring sends."""
    return (chips - 1) / chips
