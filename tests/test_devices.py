"""The datasheets' figures, and the ridges that follow from them."""

import pytest

from kvjax import devices
from kvjax.errors import UserError


@pytest.mark.parametrize(
    "name, memory, bandwidth, flops, ridge",
    [
        ("h100", 80e9, 3.35e12, 989e12, 295),
        ("h200", 141e9, 4.8e12, 989e12, 206),
        ("v4", 32 * 2**30, 1.228e12, 275e12, 224),
        ("v5e", 16e9, 0.819e12, 197e12, 241),
        ("v5p", 95e9, 2.765e12, 459e12, 166),
        ("v6e", 32e9, 1.64e12, 918e12, 560),
    ],
)
def test_datasheet(name, memory, bandwidth, flops, ridge):
    device = devices.get(name)
    assert (device.name, device.hbm_bytes) == (name, memory)
    assert (device.bandwidth, device.bf16_flops) == (bandwidth, flops)
    assert round(device.ridge) == ridge
    assert device.source


def test_every_device_is_tested_above():
    assert set(devices.DEVICES) == {"h100", "h200", "v4", "v5e", "v5p", "v6e"}


def test_unknown_device_lists_those_known():
    with pytest.raises(UserError, match="'a100': known are h100, h200, v4, v5e, v5p, v6e"):
        devices.get("a100")
