"""TPUs and GPUs that this machine lacks, as devices to compile for, by names like "v5e:4x4"."""

from collections.abc import Mapping
import os
from typing import NamedTuple

import jax
from jax.experimental import topologies
import numpy as np

from kvjax.foundation import extras
from kvjax.foundation.errors import UserError, first_line
from kvjax.hardware import datasheets

# libtpu reads these when it is loaded; without them it searches this machine for a TPU.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}
GPUS_PER_HOST = 8
SHAPES = {  # examples, the smallest first
    "v4": ("2x2x1", "2x2x4", "4x4x4"),
    "v5e": ("2x2", "4x4", "8x8", "16x16"),
    "v5p": ("2x2x1", "2x2x4", "4x4x4"),
    "v6e": ("2x2", "4x4", "8x8", "16x16"),
    "h100": ("1", "8"),
    "h200": ("1", "8"),
    "a100": ("1", "8"),
    "l4": ("1", "8"),
}


class _Chip(NamedTuple):
    """Properties that XLA would query from a GPU, besides memory and bandwidth."""

    capability: str  # of CUDA
    cores: int  # multiprocessors
    clock: float  # GHz
    l2: int  # bytes
    shared: int  # bytes of a multiprocessor
    threads: int  # of a multiprocessor


_HOPPER = _Chip(
    "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES", 132, 1.98, 50 * 2**20, 233472, 2048
)
_GPUS = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "a100": _Chip("major: 8 minor: 0", 108, 1.41, 40 * 2**20, 167936, 2048),
    "l4": _Chip("major: 8 minor: 9", 58, 2.04, 48 * 2**20, 102400, 1536),
}
GPUS = tuple(_GPUS)
KINDS = tuple(kind for kind in SHAPES if kind not in GPUS)

# A GpuTargetConfigProto.
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ {chip.capability} }}
  core_count: {chip.cores} fpus_per_core: 128 clock_rate_ghz: {chip.clock}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {chip.threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {optin}
  shared_memory_per_core: {chip.shared} l2_cache_size: {chip.l2}
  device_memory_size: {memory} memory_bandwidth: {bandwidth}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "NVIDIA {name}"
"""
_RESERVED = 1024  # bytes of shared memory that CUDA reserves per program


def get_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a topology, to lower and compile for; nothing can run on them.

    Args:
      name: KIND:SHAPE; SHAPE is chips along each side ("v5e:4x4", "v5p:2x2x4"), or the number of
        GPUs in one host ("h200:8").

    Raises:
      UserError: an unknown name, or the compiler is not installed.
    """
    return gpu_devices(name) if name.partition(":")[0] in GPUS else tpu_devices(name)


def tpu_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a TPU topology, one per chip; see `get_devices`."""
    kind, _, shape = name.partition(":")
    if kind not in KINDS or not shape:
        raise UserError(_unknown(name))
    extras.require("compiling for a TPU", "libtpu")
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        topology = topologies.get_topology_desc(name, platform="tpu", **_OPTIONS.get(kind, {}))
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise UserError(f"{_unknown(name)}. The compiler says: {reason}") from error
    return list(topology.devices)


def examples() -> str:
    """Returns examples of names, by kind."""
    return "; ".join(" ".join(f"{kind}:{s}" for s in shapes) for kind, shapes in SHAPES.items())


def _unknown(name: str) -> str:
    return (
        f"topology {name!r}: must be KIND:SHAPE, where SHAPE is the number of chips along each "
        f"side, or the number of GPUs in one host. Examples: {examples()}"
    )


def gpu_device(name: str) -> jax.Device:
    """Returns a GPU to lower and compile for, as "h200" or "l4"; nothing can run on it.

    Lower Pallas kernels inside `jax.sharding.use_abstract_mesh` of a mesh with this device.

    Raises:
      UserError: an unknown name, or JAX's CUDA plugin is not installed.
    """
    return gpu_devices(f"{name}:1")[0]


def gpu_devices(name: str) -> list[jax.Device]:
    """Returns the GPUs of one host, "h200:8"; see `get_devices`."""
    kind, _, count = name.partition(":")
    if kind not in GPUS or not count.isdecimal() or not 1 <= int(count) <= GPUS_PER_HOST:
        raise UserError(_unknown(name))
    extras.require("compiling for a GPU", "jax_cuda13_plugin")
    device, chip = datasheets.get(kind), _GPUS[kind]
    target = _TARGET.format(
        chip=chip,
        optin=chip.shared - _RESERVED,
        memory=device.hbm_bytes,
        bandwidth=int(device.bandwidth),
        name=kind.upper(),
    )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x1x{int(count)}",  # partitions x hosts x GPUs per host
            target_config=target,
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise UserError(
            f"GPU {name!r}: {first_line(error)}; without CUDA's libraries set JAX_PLATFORMS=cpu"
        ) from error
    return list(topology.devices)


def lower_for(device: jax.Device, function, *arguments) -> jax.stages.Lowered:
    """Lowers a jitted function for one device of a topology.

    The function sees this device as its platform and chooses kernels for it.

    Args:
      arguments: arrays or ShapeDtypeStructs, in trees.
    """
    mesh = jax.sharding.Mesh(np.array([device]), ("chip",))
    on_device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return function.lower(*jax.tree.map(abstract, arguments))


def compile_for(
    device: jax.Device, function, *arguments, compiler_options: Mapping | None = None
) -> jax.stages.Compiled:
    """Compiles a jitted function for one device of a topology; see `lower_for`."""
    return lower_for(device, function, *arguments).compile(compiler_options)
