"""Datasheet figures of accelerators: memory, bandwidth and peak FLOP/s of one chip."""

import dataclasses
import math

import jax

from kvjax.foundation.errors import UserError

_NVIDIA = "NVIDIA {} Tensor Core GPU datasheet, SXM; bfloat16 without sparsity; NVLink"
_GOOGLE = "cloud.google.com/tpu/docs/{}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One chip, with peak figures of its datasheet (programs reach less)."""

    name: str
    hbm_bytes: int
    bandwidth: float  # of HBM, bytes/s
    bf16_flops: float  # dense bfloat16, FLOP/s
    source: str
    interconnect: float = math.inf  # of all links to other chips, one direction, bytes/s

    @property
    def ridge(self) -> float:
        """Ridge of the roofline: FLOP per byte above which a program is compute-bound."""
        return self.bf16_flops / self.bandwidth


# Pages differ between editions. By rounding (v4: 1200 or 1228 GB/s; v6e: 1600 or 1640 GB/s): the
# figure with more digits. By unit (v5p: 95 GB or GiB): the smaller memory. Interconnects are given
# for both directions together (v5e 400, v5p 1200, v6e 800, NVLink 900 GB/s): half of that.
DEVICES = {
    device.name: device
    for device in (
        Device(
            name="h100",
            hbm_bytes=80 * 10**9,
            bandwidth=3.35e12,
            bf16_flops=989e12,
            interconnect=450e9,
            source=_NVIDIA.format("H100"),
        ),
        Device(
            name="h200",
            hbm_bytes=141 * 10**9,
            bandwidth=4.8e12,
            bf16_flops=989e12,
            interconnect=450e9,
            source=_NVIDIA.format("H200"),
        ),
        Device(
            name="v4",
            hbm_bytes=32 * 2**30,
            bandwidth=1228e9,
            bf16_flops=275e12,
            interconnect=300e9,
            source=_GOOGLE.format("v4") + "; 6 links of 50 GB/s: arXiv 2304.01433",
        ),
        Device(
            name="v5e",
            hbm_bytes=16 * 10**9,
            bandwidth=819e9,
            bf16_flops=197e12,
            interconnect=200e9,
            source=_GOOGLE.format("v5e"),
        ),
        Device(
            name="v5p",
            hbm_bytes=95 * 10**9,
            bandwidth=2765e9,
            bf16_flops=459e12,
            interconnect=600e9,
            source=_GOOGLE.format("v5p"),
        ),
        Device(
            name="v6e",
            hbm_bytes=32 * 10**9,
            bandwidth=1640e9,
            bf16_flops=918e12,
            interconnect=400e9,
            source=_GOOGLE.format("v6e"),
        ),
    )
}


TPU_KINDS = {  # `jax.Device.device_kind`, libtpu's own first; a GPU's contains its name as a word
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def for_device(device: jax.Device) -> Device | None:
    """Returns the datasheet of a device of this machine, or None (a CPU, an unlisted GPU)."""
    kind = device.device_kind
    words = kind.lower().split() if device.platform == "gpu" else []
    name = TPU_KINDS.get(kind) or next((name for name in DEVICES if name in words), None)
    return DEVICES[name] if name else None


def get(name: str) -> Device:
    """Returns the datasheet of that name.

    Raises:
      UserError: an unknown name.
    """
    if name not in DEVICES:
        raise UserError(f"device {name!r}: known are {', '.join(DEVICES)}")
    return DEVICES[name]
