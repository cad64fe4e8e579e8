"""TPUs and GPUs that are not there: devices to compile for, from a name."""

import importlib.util
import os

import jax
from jax.experimental import topologies
import numpy as np

from kvjax import devices
from kvjax.errors import UserError

# libtpu reads these when it is loaded; without them it looks for the machine's own TPU.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}
KINDS = ("v4", "v5e", "v5p", "v6e")
GPUS = ("h100", "h200")

# A GpuTargetConfigProto: what XLA asks a GPU, here of Hopper's full SXM part.
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  device_memory_size: {memory} memory_bandwidth: {bandwidth}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "NVIDIA {name}"
"""


def tpu_devices(name: str) -> list[jax.Device]:
    """The devices of a topology, to lower and compile for; nothing can run on them.

    Args:
      name: a kind and its shape in chips, "v5e:2x2", "v4:2x2x1", "v5p:2x2x4".

    Raises:
      UserError: an unknown name, or libtpu is not installed.
    """
    kind = name.partition(":")[0]
    if kind not in KINDS or ":" not in name:
        raise UserError(
            f"topology {name!r}: must be KIND:SHAPE with KIND one of {', '.join(KINDS)} and SHAPE "
            "its chips, as in v5e:2x2 or v5p:2x2x4"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("compiling for a TPU needs libtpu: pip install -e '.[aot]'")
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        topology = topologies.get_topology_desc(name, platform="tpu", **_OPTIONS.get(kind, {}))
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
        raise UserError(f"topology {name!r}: {str(error).splitlines()[0]}") from error
    return list(topology.devices)


def gpu_device(name: str) -> jax.Device:
    """A GPU to lower and compile for, "h100" or "h200"; nothing can run on it.

    Pallas kernels are lowered inside `jax.sharding.use_abstract_mesh` of a mesh with this device.

    Raises:
      UserError: an unknown name, or JAX's CUDA plugin is not installed.
    """
    if name not in GPUS:
        raise UserError(f"GPU {name!r}: must be one of {', '.join(GPUS)}")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise UserError("compiling for a GPU needs JAX's CUDA plugin: pip install -e '.[aot]'")
    device = devices.get(name)
    target = _HOPPER.format(
        memory=device.hbm_bytes, bandwidth=int(device.bandwidth), name=name.upper()
    )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology="1x1x1", target_config=target
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise UserError(
            f"GPU {name!r}: {str(error).splitlines()[0]}; without CUDA's libraries set "
            "JAX_PLATFORMS=cpu"
        ) from error
    return topology.devices[0]


def compile_for(device: jax.Device, function, *arguments) -> jax.stages.Compiled:
    """A jitted function compiled for one device of a topology.

    What the function chooses by device, its kernels among it, it chooses for this one.

    Args:
      arguments: arrays or ShapeDtypeStructs, in trees.
    """
    mesh = jax.sharding.Mesh(np.array([device]), ("chip",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return function.lower(*jax.tree.map(place, arguments)).compile()
