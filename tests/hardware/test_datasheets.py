"""The datasheets' figures, and the ridges that follow from them."""

import types

import jax
import pytest

from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets


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
    device = datasheets.get(name)
    assert (device.name, device.hbm_bytes) == (name, memory)
    assert (device.bandwidth, device.bf16_flops) == (bandwidth, flops)
    assert round(device.ridge) == ridge
    assert device.source


def test_every_device_is_tested_above():
    assert set(datasheets.DEVICES) == {"h100", "h200", "v4", "v5e", "v5p", "v6e"}


def test_unknown_device_lists_those_known():
    with pytest.raises(UserError, match="'a100': known are h100, h200, v4, v5e, v5p, v6e"):
        datasheets.get("a100")


@pytest.mark.parametrize(
    "kind, platform, name",
    [
        ("TPU v4", "tpu", "v4"),
        ("TPU v5 lite", "tpu", "v5e"),
        ("TPU v5", "tpu", "v5p"),
        ("TPU v5p", "tpu", "v5p"),
        ("TPU v6 lite", "tpu", "v6e"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA A100-SXM4-40GB", "gpu", None),
        ("TPU v9", "tpu", None),
    ],
)
def test_a_device_that_is_there(kind, platform, name):
    device = datasheets.of(types.SimpleNamespace(device_kind=kind, platform=platform))
    assert device == (datasheets.get(name) if name else None)


def test_a_cpu_has_no_datasheet():
    assert datasheets.of(jax.devices("cpu")[0]) is None
