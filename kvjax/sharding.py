"""Where arrays live: a mesh of `data` x `fsdp`, and the axis of each weight that is split.

Weights are split over `fsdp` (along D where they have it) and replicated over `data`; batches are
split over both. Optimizer state lies as its parameter does.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from kvjax.configuration import at_least
from kvjax.errors import UserError
from kvjax.layers.weight import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis; fsdp = 0 takes all that `data` leaves."""

    data: int = 1
    fsdp: int = 0

    def __post_init__(self):
        at_least("config.mesh.data", self.data, 1)
        at_least("config.mesh.fsdp", self.fsdp, 0)


def make_mesh(config: MeshConfig, devices: list[jax.Device]) -> Mesh:
    """The mesh over all devices; a UserError names the numbers if they do not multiply."""
    fsdp = config.fsdp or max(len(devices) // config.data, 1)
    if config.data * fsdp != len(devices):
        raise UserError(
            f"config.mesh: data = {config.data} x fsdp = {fsdp} is {config.data * fsdp}, and there "
            f"are {len(devices)} devices; choose factors of {len(devices)}"
        )
    grid = np.asarray(devices).reshape(config.data, fsdp)
    return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(("data", "fsdp")))  # [B, T]


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def parameter_sharding(mesh: Mesh, axes: str, shape: tuple[int, ...]) -> NamedSharding:
    """Split along D, [.., D, ..] -> P(.., "fsdp", ..); a matrix without D along its longest axis.

    An axis that fsdp does not divide is passed over; what has none left is replicated.
    """
    parsed = Axes.parse(axes)
    layers = len(shape) - len(parsed.names)
    positions = range(layers, len(shape))
    if "D" in parsed.names:
        wanted = [layers + parsed.names.index("D")]
    else:
        wanted = sorted(positions, key=lambda i: -shape[i]) if parsed.is_matrix else []
    split = next((i for i in wanted if shape[i] % mesh.shape["fsdp"] == 0), None)
    return NamedSharding(mesh, P(*("fsdp" if i == split else None for i in range(len(shape)))))


def state_sharding(mesh: Mesh, axes: Any, state: Any) -> Any:
    """Shardings of a training state: anything whose path ends in a parameter's lies as it does.

    Args:
      axes: tree of axes strings in the shape of the parameters.
      state: tree of arrays or ShapeDtypeStructs that holds parameters under any prefix.
    """
    by_path = {_keys(path): text for path, text in jax.tree_util.tree_leaves_with_path(axes)}

    def sharding(path, leaf):
        keys = _keys(path)
        for start in range(len(keys)):
            text = by_path.get(keys[start:])
            if text is not None and leaf.ndim >= len(Axes.parse(text).names):
                return parameter_sharding(mesh, text, leaf.shape)
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, state)


def _keys(path) -> tuple[str, ...]:
    return tuple(str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path)
