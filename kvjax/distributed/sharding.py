"""The mesh, and how arrays are split over it: one rule on the letters of a weight's axes.

    data      rows of the batch; weights are replicated
    fsdp      rows of the batch; weights are split, gathered for use, their gradients scattered
    sequence  tokens of a row (context parallelism): each device has a part of the queries and all
              of the latents
    tensor    heads, MLP channels, vocabulary

Optimizer state lies as its parameter does. Nothing is padded: what a mesh does not divide is an
error that names the numbers.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from kvjax.foundation.configuration import between
from kvjax.foundation.errors import UserError
from kvjax.layers.weight import Axes

AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")

_TENSOR = frozenset("NKJMV")  # letters that `tensor` splits: heads, MLP channels, vocabulary
_MODEL = "D"  # the letter that `fsdp` splits where a weight has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis; fsdp = 0 takes all that the others leave."""

    data: int = 1  # over rows; weights are copied
    fsdp: int = 0  # over rows and weights; 0: all that are left
    sequence: int = 1  # over the tokens of a row
    tensor: int = 1  # over heads, MLP channels, vocabulary

    def __post_init__(self):
        for key in AXES:
            between(f"config.mesh.{key}", getattr(self, key), 0 if key == "fsdp" else 1, 1 << 20)

    def shape(self, devices: int) -> dict[str, int]:
        """Devices along each axis of so many, fsdp = 0 filled in; they need not multiply to it."""
        others = self.data * self.sequence * self.tensor
        return dataclasses.asdict(self) | dict(fsdp=self.fsdp or max(devices // others, 1))


def make_mesh(config: MeshConfig, devices: list[jax.Device]) -> Mesh:
    """The mesh over all devices, laid along their interconnect where that is known.

    Raises:
      UserError: the axes do not multiply to the devices; names the numbers and what would.
    """
    others = config.data * config.sequence * config.tensor
    shape = config.shape(len(devices))
    size = math.prod(shape.values())
    if size != len(devices):
        product = " x ".join(f"{key} = {shape[key]}" for key in AXES)
        wanted = len(devices) // others if len(devices) % others == 0 else 0
        fitting = (
            f"with config.mesh.fsdp = {wanted} (or 0) they are used"
            if wanted
            else (
                f"data x sequence x tensor must divide {len(devices)}: one of "
                + ", ".join(map(str, divisors(len(devices))))
            )
        )
        raise UserError(
            f"config.mesh: {product} is {size}, and there are {len(devices)} devices; {fitting}"
        )
    grid = mesh_utils.create_device_mesh(
        tuple(shape[key] for key in AXES), devices, allow_split_physical_axes=True
    )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """How rows [B, T + 1] are split: devices of a `sequence` or `tensor` group have the same."""
    return NamedSharding(mesh, P(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_shards(mesh: Mesh) -> int:
    """How many ways the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


# -- parameters ------------------------------------------------------------------------------------


def spec(axes: str, shape: tuple[int, ...]) -> P:
    """How a parameter is split, by the letters of its axes (see `kvjax.layers.weight`).

    `tensor` splits the first of N, K, J, M and V that is longer than 1. `fsdp` splits a matrix
    along D, or along the last axis that is left where it has no D. A table of vectors ("V D",
    "T D"), whose rows are looked up, is split along D by both. Vectors are otherwise whole, and so
    is an axis of length 1 (LRKV's one base).

    Args:
      axes: "D -> N H", say.
      shape: with any number of stacked axes in front; those are not split.
    """
    parsed = Axes.parse(axes)
    names = parsed.names
    stacked = len(shape) - len(names)
    if stacked < 0:
        raise ValueError(f"axes {axes!r} name more than the {len(shape)} axes of {shape}")
    split: dict[int, str | tuple[str, ...]] = {}
    if not parsed.is_matrix and len(names) == 2 and names[1] == _MODEL:
        split[1] = ("fsdp", "tensor")
    else:
        heads = [i for i, n in enumerate(names) if n in _TENSOR and shape[stacked + i] > 1][:1]
        split |= dict.fromkeys(heads, "tensor")
        if parsed.is_matrix:
            left = [i for i in range(len(names)) if i not in split]
            split |= dict.fromkeys([i for i in left if names[i] == _MODEL][:1] or left[-1:], "fsdp")
    whole = lambda i: shape[stacked + i] == 1
    return P(*[None] * stacked, *(None if whole(i) else split.get(i) for i in range(len(names))))


def parameter_shardings(mesh: Mesh, shapes: Any, axes: Any) -> Any:
    """The tree of NamedShardings of a tree of parameters.

    Args:
      shapes: arrays, or ShapeDtypeStructs.
      axes: the same tree of axes strings.

    Raises:
      UserError: an axis of the mesh does not divide a parameter; the message names both.
    """

    def sharding(path, leaf, text):
        split = spec(text, leaf.shape)
        _check_divides(mesh, "/".join(_keys(path)), leaf.shape, split)
        return NamedSharding(mesh, split)

    return jax.tree_util.tree_map_with_path(sharding, shapes, axes)


def divides(shape: Mapping[str, int], shapes: Any, axes: Any) -> bool:
    """Whether a mesh of that shape, devices by axis, divides all parameters it splits."""
    try:
        parameter_shardings(AbstractMesh(tuple(shape.values()), tuple(shape)), shapes, axes)
    except UserError:
        return False
    return True


def state_shardings(mesh: Mesh, shapes: Any, axes: Any, state: Any) -> Any:
    """Shardings of a training state: what has a parameter's path, under any prefix, lies as it.

    Args:
      shapes, axes: of the parameters, see `parameter_shardings`.
      state: tree of arrays or ShapeDtypeStructs.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    shardings = jax.tree.leaves(parameter_shardings(mesh, shapes, axes))
    known = {_keys(p): (x.shape, s) for (p, x), s in zip(leaves, shardings, strict=True)}

    def sharding(path, leaf):
        keys = _keys(path)
        for start in range(len(keys)):
            shape, found = known.get(keys[start:], (None, None))
            if shape == leaf.shape:
                return found
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, state)


def _check_divides(mesh: Mesh, name: str, shape: tuple[int, ...], axes: P) -> None:
    for length, names in zip(shape, axes, strict=True):
        ways = math.prod(mesh.shape[axis] for axis in _tuple(names))
        if length % ways:
            shown = " x ".join(f"config.mesh.{a} = {mesh.shape[a]}" for a in _tuple(names))
            raise UserError(
                f"{shown} does not divide the {length} of {name} {list(shape)}, and nothing is "
                f"padded: {length} can be split in {', '.join(map(str, divisors(length)))}"
            )


# -- in the program --------------------------------------------------------------------------------


def constrain(x: jax.Array, mesh: Mesh | None, *axes) -> jax.Array:
    """An array laid out as the axes say (the rest whole); without a mesh, as it is."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def gather(weight: jax.Array, axes: str, mesh: Mesh | None) -> jax.Array:
    """A weight whole along `fsdp`, as a product needs it; its gradient is scattered again.

    Without the second half only the optimizer's state would tell the compiler how it lies.
    """
    if mesh is None:
        return weight
    split = spec(axes, weight.shape)
    whole = P(*(tuple(n for n in _tuple(names) if n != "fsdp") or None for names in split))
    return _gather(mesh, split, whole, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(mesh: Mesh, split: P, whole: P, weight: jax.Array) -> jax.Array:
    # Split first: what travels is the weight as it was cast, not as it is stored.
    return constrain(constrain(weight, mesh, *split), mesh, *whole)


def _gather_forward(mesh, split, whole, weight):
    return _gather(mesh, split, whole, weight), None


def _gather_backward(mesh, split, whole, saved, gradient):
    del whole, saved
    return (constrain(gradient, mesh, *split),)


_gather.defvjp(_gather_forward, _gather_backward)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _tuple(axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _keys(path) -> tuple[str, ...]:
    return tuple(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)
