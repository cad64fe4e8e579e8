"""The mesh, and the sharding of weights by the letters of their axes.

    data      shards rows of the batch, and replicates weights
    fsdp      shards rows of the batch, and weights, which are gathered for use
    sequence  shards the tokens of a row (context parallelism): each device has some of the queries
              and all latents
    tensor    shards heads, MLP channels and the vocabulary

Optimizer state is sharded like its parameter. Nothing is padded: an axis that the mesh does not
divide is a user error.
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

_TENSOR = frozenset("NKJMV")  # letters that `tensor` shards: heads, MLP channels, vocabulary
_MODEL = "D"  # letter that `fsdp` shards if a weight has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis."""

    data: int = 1  # over rows; weights are replicated
    fsdp: int = 0  # over rows and weights; 0: all devices that the other axes leave
    sequence: int = 1  # over the tokens of a row
    tensor: int = 1  # over heads, MLP channels, vocabulary

    def __post_init__(self):
        for key in AXES:
            between(f"config.mesh.{key}", getattr(self, key), 0 if key == "fsdp" else 1, 1 << 20)

    def shape(self, devices: int) -> dict[str, int]:
        """Returns the length of every axis, with fsdp = 0 resolved for a number of devices.

        The product of the lengths may differ from the number of devices.
        """
        others = self.data * self.sequence * self.tensor
        return dataclasses.asdict(self) | {"fsdp": self.fsdp or max(devices // others, 1)}


def make_mesh(config: MeshConfig, devices: list[jax.Device]) -> Mesh:
    """Returns a mesh over all devices, ordered for their interconnect where JAX knows it.

    Raises:
      UserError: the product of the axes is not the number of devices.
    """
    others = config.data * config.sequence * config.tensor
    shape = config.shape(len(devices))
    size = math.prod(shape.values())
    if size != len(devices):
        product = " x ".join(f"{key} = {shape[key]}" for key in AXES)
        fsdp = len(devices) // others if len(devices) % others == 0 else 0
        fitting = (
            f"set config.mesh.fsdp = {fsdp} (or 0)"
            if fsdp
            else (
                "data x sequence x tensor must be one of its divisors "
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
    """Returns the sharding of rows [B, T + 1], replicated over `sequence` and `tensor`."""
    return NamedSharding(mesh, P(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards of a batch's rows."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


# -- parameters ------------------------------------------------------------------------------------


def spec(axes: str, shape: tuple[int, ...]) -> P:
    """Returns a parameter's PartitionSpec from the letters of its axes (`kvjax.layers.weight`).

    `tensor` shards the first of N, K, J, M and V that is longer than 1. `fsdp` shards a matrix
    along D, or, without D, along the last axis that `tensor` does not shard. Both shard a lookup
    table ("V D", "T D") along D, so that every device has a part of every row. All other axes, and
    axes of length 1, are replicated.

    Args:
      axes: axes string, such as "D -> N H".
      shape: may have more axes in front, of stacked layers, which are not sharded.
    """
    parsed = Axes.parse(axes)
    names = parsed.names
    stacked = len(shape) - len(names)
    split: dict[int, str | tuple[str, ...]] = {}
    if not parsed.is_matrix and len(names) == 2 and names[1] == _MODEL:
        split[1] = ("fsdp", "tensor")
    else:
        eligible = [i for i, n in enumerate(names) if n in _TENSOR and shape[stacked + i] > 1]
        split |= dict.fromkeys(eligible[:1], "tensor")
        if parsed.is_matrix:
            free = [i for i in range(len(names)) if i not in split]
            model = [i for i in free if names[i] == _MODEL]
            split |= dict.fromkeys(model[:1] or free[-1:], "fsdp")
    sharded = [None if shape[stacked + i] == 1 else split.get(i) for i in range(len(names))]
    return P(*[None] * stacked, *sharded)


def parameter_shardings(mesh: Mesh, shapes: Any, axes: Any) -> Any:
    """Returns a tree of NamedShardings for a tree of parameters.

    Args:
      shapes: arrays or ShapeDtypeStructs.
      axes: the same tree of axes strings.

    Raises:
      UserError: an axis of the mesh does not divide a parameter.
    """

    def sharding(path, leaf, text):
        split = spec(text, leaf.shape)
        _check_divides(mesh, "/".join(_keys(path)), leaf.shape, split)
        return NamedSharding(mesh, split)

    return jax.tree_util.tree_map_with_path(sharding, shapes, axes)


def divides(shape: Mapping[str, int], shapes: Any, axes: Any) -> bool:
    """Returns True if a mesh of `shape` (devices by axis) divides all parameters."""
    try:
        parameter_shardings(AbstractMesh(tuple(shape.values()), tuple(shape)), shapes, axes)
    except UserError:
        return False
    return True


def state_shardings(mesh: Mesh, shapes: Any, axes: Any, state: Any) -> Any:
    """Returns shardings of a training state.

    A leaf is sharded like a parameter if it has the parameter's shape and its path ends in the
    parameter's path, as optimizer moments do. Other leaves are replicated.

    Args:
      shapes, axes: shapes and axes of the parameters, see `parameter_shardings`.
      state: tree of arrays or ShapeDtypeStructs.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    shardings = jax.tree.leaves(parameter_shardings(mesh, shapes, axes))
    known = {_keys(p): (x.shape, s) for (p, x), s in zip(leaves, shardings, strict=True)}

    def sharding(path, leaf):
        keys = _keys(path)
        for start in range(len(keys)):
            shape, parameter_sharding = known.get(keys[start:], (None, None))
            if shape == leaf.shape:
                return parameter_sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, state)


def _check_divides(mesh: Mesh, name: str, shape: tuple[int, ...], axes: P) -> None:
    for length, names in zip(shape, axes, strict=True):
        shards = math.prod(mesh.shape[axis] for axis in _tuple(names))
        if length % shards:
            shown = " x ".join(f"config.mesh.{a} = {mesh.shape[a]}" for a in _tuple(names))
            raise UserError(
                f"{shown} does not divide the {length} of {name} {list(shape)}; use one of "
                f"{', '.join(map(str, divisors(length)))}"
            )


# -- in the program --------------------------------------------------------------------------------


def constrain(x: jax.Array, mesh: Mesh | None, *axes) -> jax.Array:
    """Constrains an array's sharding; further axes are replicated. No-op without a mesh.

    Args:
      axes: mesh axes (a name, several, or None) for each of the array's first axes.
    """
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def gather(weight: jax.Array, axes: str, mesh: Mesh | None) -> jax.Array:
    """Gathers a weight along `fsdp` for a product; the backward pass scatters its gradient.

    The backward pass constrains the gradient's sharding. Otherwise the compiler would have to infer
    it from the optimizer state.
    """
    if mesh is None:
        return weight
    sharded = spec(axes, weight.shape)
    gathered = P(*(tuple(n for n in _tuple(names) if n != "fsdp") or None for names in sharded))
    return _gather(mesh, sharded, gathered, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(mesh: Mesh, sharded: P, gathered: P, weight: jax.Array) -> jax.Array:
    # The first constraint makes the compiler cast before it gathers, which sends fewer bytes.
    return constrain(constrain(weight, mesh, *sharded), mesh, *gathered)


def _gather_forward(mesh, sharded, gathered, weight):
    return _gather(mesh, sharded, gathered, weight), None


def _gather_backward(mesh, sharded, gathered, residuals, gradient):
    del gathered, residuals
    return (constrain(gradient, mesh, *sharded),)


_gather.defvjp(_gather_forward, _gather_backward)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _tuple(axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _keys(path) -> tuple[str, ...]:
    return tuple(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)
