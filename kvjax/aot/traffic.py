"""What a chip sends in a training step, predicted: one term for each kind of collective.

A ring of n chips passes (n - 1)/n of an array on; an all-reduce passes it twice. All of it is
bfloat16.
"""

from collections.abc import Mapping
import math

from kvjax.costs import formulas
from kvjax.experiment import Experiment

ITEMSIZE = 2
_TILE = 8  # 36 rows to a chip are all-reduced (twice the bytes, on v4), 144 and 200 scattered


def sent(experiment: Experiment, mesh: Mapping[str, int]) -> float:
    """Bytes that a chip sends in a step.

    Args:
      mesh: the sizes of data, fsdp, sequence and tensor.
    """
    weights = formulas.matrix_weights(experiment.model)
    layers = (weights["attention"] + weights["mlp"]) / mesh["tensor"]
    matrices = layers + weights["head"] / mesh["tensor"]
    return (
        gathered(experiment, mesh, matrices)
        + summed_gradients(experiment, mesh, matrices)
        + summed_activations(experiment, mesh)
        + orthogonalised(mesh, layers)
    )


def gathered(experiment: Experiment, mesh: Mapping[str, int], matrices: float) -> float:
    """`fsdp`: weights gathered, and again where they are needed again; gradients scattered.

    Args:
      matrices: weights of one `tensor` shard.
    """
    passes = 2 if experiment.compute.remat == "none" else 3
    if not in_whole_tiles(experiment, mesh["fsdp"]):
        passes *= 2
    parts = experiment.train.grad_accumulation
    return ITEMSIZE * parts * passes * matrices * _passed_on(mesh["fsdp"])


def summed_gradients(experiment: Experiment, mesh: Mapping[str, int], matrices: float) -> float:
    """`data`: gradients summed over the copies of a shard."""
    parts = experiment.train.grad_accumulation
    return 2 * ITEMSIZE * parts * matrices / mesh["fsdp"] * _passed_on(mesh["data"])


def summed_activations(experiment: Experiment, mesh: Mapping[str, int]) -> float:
    """`tensor`: activations, two sums in each pass through a layer."""
    block, parts = experiment.model.block, experiment.train.grad_accumulation
    rows = experiment.train.batch_size // parts // (mesh["data"] * mesh["fsdp"])
    activations = rows * experiment.data.sequence_length / mesh["sequence"] * block.d_model
    sums = 4 if experiment.compute.remat == "none" else 6
    each = ITEMSIZE * activations * block.num_layers * _passed_on(mesh["tensor"])
    return 2 * sums * parts * each


def orthogonalised(mesh: Mapping[str, int], layers: float) -> float:
    """Muon: matrices to the chips that orthogonalise them, and back.

    Args:
      layers: weights of all layers in one `tensor` shard.
    """
    return 2 * ITEMSIZE * layers * mesh["tensor"] / math.prod(mesh.values())


def in_whole_tiles(experiment: Experiment, fsdp: int) -> bool:
    """Whether a chip's rows of a weight are whole tiles: of others compilers make all-reduces."""
    return experiment.model.block.d_model // fsdp % _TILE == 0


def _passed_on(chips: int) -> float:
    """The part of an array that a chip of a ring sends."""
    return (chips - 1) / chips
