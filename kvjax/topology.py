"""TPUs that are not there: devices to compile for, from a topology's name."""

import importlib.util
import os

import jax
from jax.experimental import topologies

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
