"""Datasheets of accelerators: memory, bandwidth and peak FLOP/s of one chip."""

import dataclasses
import math

import jax

from kvjax.foundation.errors import UserError

_NVIDIA = "NVIDIA {} Tensor Core GPU datasheet, SXM; bfloat16 without sparsity; NVLink"
_GOOGLE = "cloud.google.com/tpu/docs/{}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One chip and its datasheet's peak figures (upper bounds: no program reaches them)."""

    name: str
    hbm_bytes: int
    bandwidth: float  # of HBM, bytes/s
    bf16_flops: float  # dense bfloat16, FLOP/s
    source: str
    interconnect: float = math.inf  # bytes/s in one direction, over all links to other chips

    @property
    def ridge(self) -> float:
        """Ridge of the roofline: FLOP per byte above which a program is compute-bound."""
        return self.bf16_flops / self.bandwidth


def _device(
    name: str, hbm_bytes: int, *, hbm: int, tflops: int, interconnect: int, source: str
) -> Device:
    """Returns a device; `hbm` and `interconnect` are in GB/s."""
    return Device(
        name=name,
        hbm_bytes=hbm_bytes,
        bandwidth=hbm * 1e9,
        bf16_flops=tflops * 1e12,
        interconnect=interconnect * 1e9,
        source=source,
    )


# Editions of a datasheet differ. If one is rounded (v4: 1200 or 1228 GB/s; v6e: 1600 or 1640 GB/s),
# the figure with more digits is used; if units differ (v5p: 95 GB or GiB), the smaller memory.
# Datasheets give the interconnect of both directions together (v5e 400, v5p 1200, v6e 800, NVLink
# 900 GB/s); half of it is used.
# A100: the edition of 80 GB. L4: of PCIe, one direction.
_H100, _H200 = _NVIDIA.format("H100"), _NVIDIA.format("H200")
_A100 = _NVIDIA.format("A100 80GB")
_L4 = "NVIDIA L4 Tensor Core GPU datasheet; bfloat16 without sparsity; PCIe Gen4 x16"
_V4 = _GOOGLE.format("v4") + "; 6 links of 50 GB/s: arXiv 2304.01433"
_V5E, _V5P, _V6E = (_GOOGLE.format(name) for name in ("v5e", "v5p", "v6e"))
DEVICES = {
    device.name: device
    for device in (
        _device("h100", 80 * 10**9, hbm=3350, tflops=989, interconnect=450, source=_H100),
        _device("h200", 141 * 10**9, hbm=4800, tflops=989, interconnect=450, source=_H200),
        _device("a100", 80 * 10**9, hbm=2039, tflops=312, interconnect=300, source=_A100),
        _device("l4", 24 * 10**9, hbm=300, tflops=121, interconnect=32, source=_L4),
        _device("v4", 32 * 2**30, hbm=1228, tflops=275, interconnect=300, source=_V4),
        _device("v5e", 16 * 10**9, hbm=819, tflops=197, interconnect=200, source=_V5E),
        _device("v5p", 95 * 10**9, hbm=2765, tflops=459, interconnect=600, source=_V5P),
        _device("v6e", 32 * 10**9, hbm=1640, tflops=918, interconnect=400, source=_V6E),
    )
}

# Devices by `jax.Device.device_kind`. An ahead-of-time topology names a GPU by its first two words.
# Other form factors of a GPU (PCIe, NVL, 40 GB) have other figures, and no datasheet here.
_GPU_KINDS = {
    "NVIDIA H200": "h200",
    "NVIDIA H100": "h100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L4": "l4",
}
# libtpu's spelling comes first.
TPU_KINDS = {
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
    name = (TPU_KINDS | _GPU_KINDS).get(device.device_kind)
    return DEVICES[name] if name else None


def get(name: str) -> Device:
    """Returns the datasheet of that name.

    Raises:
      UserError: an unknown name.
    """
    if name not in DEVICES:
        raise UserError(f"device {name!r}: known are {', '.join(DEVICES)}")
    return DEVICES[name]
