"""Accelerators as their makers describe them: memory, bandwidth and arithmetic of one chip."""

import dataclasses

from kvjax.errors import UserError

_NVIDIA = "NVIDIA {} Tensor Core GPU datasheet, SXM; bfloat16 without sparsity"
_GOOGLE = "cloud.google.com/tpu/docs/{}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One chip: what its datasheet promises, not what a program gets."""

    name: str
    hbm_bytes: int
    bandwidth: float  # of HBM, bytes/s
    bf16_flops: float  # dense bfloat16, FLOP/s
    source: str

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic, not memory, sets the time."""
        return self.bf16_flops / self.bandwidth


# Where editions of a page differ by rounding (v4: 1200 or 1228 GB/s; v6e: 1600 or 1640 GB/s), the
# figure with more digits; where by unit (v5p: 95 GB or GiB), the smaller memory.
DEVICES = {
    device.name: device
    for device in (
        Device(
            name="h100",
            hbm_bytes=80 * 10**9,
            bandwidth=3.35e12,
            bf16_flops=989e12,
            source=_NVIDIA.format("H100"),
        ),
        Device(
            name="h200",
            hbm_bytes=141 * 10**9,
            bandwidth=4.8e12,
            bf16_flops=989e12,
            source=_NVIDIA.format("H200"),
        ),
        Device(
            name="v4",
            hbm_bytes=32 * 2**30,
            bandwidth=1228e9,
            bf16_flops=275e12,
            source=_GOOGLE.format("v4"),
        ),
        Device(
            name="v5e",
            hbm_bytes=16 * 10**9,
            bandwidth=819e9,
            bf16_flops=197e12,
            source=_GOOGLE.format("v5e"),
        ),
        Device(
            name="v5p",
            hbm_bytes=95 * 10**9,
            bandwidth=2765e9,
            bf16_flops=459e12,
            source=_GOOGLE.format("v5p"),
        ),
        Device(
            name="v6e",
            hbm_bytes=32 * 10**9,
            bandwidth=1640e9,
            bf16_flops=918e12,
            source=_GOOGLE.format("v6e"),
        ),
    )
}


def get(name: str) -> Device:
    """The device of that name.

    Raises:
      UserError: an unknown name; the message lists those known.
    """
    if name not in DEVICES:
        raise UserError(f"device {name!r}: known are {', '.join(DEVICES)}")
    return DEVICES[name]
