"""Where arrays live: the mesh, and one table from a parameter's path to the axes it is split over.

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
import re
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.configuration import between
from kvjax.errors import UserError

AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")

# First match wins, on the path without the segment; stacked layers put an unsplit axis in front.
# An axis of length 1 (LRKV's one base) stays whole.
TABLE = (
    ("embedding|positions", P(None, ("fsdp", "tensor"))),  # [V, D], [T, D]
    ("head", P("fsdp", "tensor")),  # [D, V]
    ("attention/mechanism/(query|rope_query)", P("fsdp", "tensor", None)),  # [D, N, H], [D, N, P]
    ("attention/mechanism/base_(key|value)", P("fsdp", "tensor", None)),  # [D, J, H]
    ("attention/mechanism/latent_(key|value)", P("fsdp", "tensor", None)),  # [D, K, R]
    ("attention/mechanism/expand_(key|value)", P("tensor", None, "fsdp")),  # [K, R, H]
    ("attention/mechanism/(down|rope_key)", P("fsdp", None)),  # [D, C], [D, P]
    ("attention/mechanism/up_(key|value)", P(None, "tensor", "fsdp")),  # [C, N, H]
    ("attention/mechanism/.*_bias", P("tensor", None)),  # [N, H], [J, H]
    ("attention/mechanism/(position_map|.*/gain)", P(None)),  # [m], [H], [C]
    ("attention/out", P("tensor", None, "fsdp")),  # [N, H, D]
    ("mlp/(up|gate)", P("fsdp", "tensor")),  # [D, M]
    ("mlp/down", P("tensor", "fsdp")),  # [M, D]
    ("mlp/up_bias", P("tensor")),  # [M]
    ("(attention/out|mlp/down)_bias|(.*/)?[a-z]+_norm/(gain|bias)", P(None)),  # [D]
)


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
    """Of rows [B, T + 1]: every device of a `sequence` or `tensor` group has the same ones."""
    return NamedSharding(mesh, P(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def rows_ways(mesh: Mesh) -> int:
    """How many ways the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


# -- parameters ------------------------------------------------------------------------------------


def spec(path: str, shape: tuple[int, ...]) -> P:
    """The table's axes for a parameter.

    Args:
      path: its keys joined by "/", with or without "segments/i" in front.
      shape: with any number of stacked axes in front.

    Raises:
      ValueError: no row matches, or the row that does is for another number of axes.
    """
    name = re.sub(r"^segments/\d+/", "", path)
    row = next((axes for pattern, axes in TABLE if re.fullmatch(pattern, name)), None)
    if row is None:
        raise ValueError(f"parameter {path} {shape}: no row of sharding.TABLE matches; add one")
    stacked = len(shape) - len(row)
    if not 0 <= stacked <= 1:
        raise ValueError(f"parameter {path} {shape}: sharding.TABLE gives {row}, of other length")
    kept = (None if n == 1 else axes for n, axes in zip(shape[stacked:], row, strict=True))
    return P(*[None] * stacked, *kept)


def parameter_shardings(mesh: Mesh, params: Any) -> Any:
    """The tree of NamedShardings of a tree of parameters (arrays or shapes).

    Raises:
      UserError: an axis of the mesh does not divide a parameter; the message names both.
      ValueError: see `spec`.
    """

    def sharding(leaf, path):
        axes = spec(path, leaf.shape)
        _check_divides(mesh, path, leaf.shape, axes)
        return NamedSharding(mesh, axes)

    return map_with_path(sharding, params)


def divides(shape: Mapping[str, int], params: Any) -> bool:
    """Whether a mesh of that shape, devices by axis, divides all parameters it splits."""
    try:
        parameter_shardings(AbstractMesh(tuple(shape.values()), tuple(shape)), params)
    except UserError:
        return False
    return True


def state_shardings(mesh: Mesh, params: Any, state: Any) -> Any:
    """Shardings of a training state: what has a parameter's path, under any prefix, lies as it.

    Args:
      params: tree of parameters (arrays or shapes).
      state: tree of arrays or ShapeDtypeStructs.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shardings = jax.tree.leaves(parameter_shardings(mesh, params))
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


def gather(weight: jax.Array, path: str, mesh: Mesh | None) -> jax.Array:
    """A weight whole along `fsdp`, as a product needs it; its gradient is scattered again.

    Without the second half the gradient would be summed whole on every device.
    """
    if mesh is None:
        return weight
    split = spec(path, weight.shape)
    whole = P(*(tuple(a for a in _tuple(axes) if a != "fsdp") or None for axes in split))
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


def map_with_path(function, tree: Any) -> Any:
    """A tree of `function(leaf, path)`, the path's keys joined by "/"."""
    call = lambda path, leaf: function(leaf, "/".join(_keys(path)))
    return jax.tree_util.tree_map_with_path(call, tree)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _tuple(axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _keys(path) -> tuple[str, ...]:
    return tuple(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)
