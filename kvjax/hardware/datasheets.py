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
# name, bytes of HBM, GB/s of HBM, dense bfloat16 TFLOP/s, GB/s to other chips, source
_FIGURES = (
    ("h100", 80 * 10**9, 3350, 989, 450, _NVIDIA.format("H100")),
    ("h200", 141 * 10**9, 4800, 989, 450, _NVIDIA.format("H200")),
    (
        "v4",
        32 * 2**30,
        1228,
        275,
        300,
        _GOOGLE.format("v4") + "; 6 links of 50 GB/s: arXiv 2304.01433",
    ),
    ("v5e", 16 * 10**9, 819, 197, 200, _GOOGLE.format("v5e")),
    ("v5p", 95 * 10**9, 2765, 459, 600, _GOOGLE.format("v5p")),
    ("v6e", 32 * 10**9, 1640, 918, 400, _GOOGLE.format("v6e")),
)
DEVICES = {
    name: Device(
        name=name,
        hbm_bytes=hbm_bytes,
        bandwidth=bandwidth * 1e9,
        bf16_flops=tflops * 1e12,
        interconnect=interconnect * 1e9,
        source=source,
    )
    for name, hbm_bytes, bandwidth, tflops, interconnect, source in _FIGURES
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
