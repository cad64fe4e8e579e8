"""The datasheets' figures, and the ridges that follow from them."""

import types

import jax
import pytest

from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets


def test_datasheets():
    """Bytes of memory, bytes/s of it, FLOP/s, FLOP per byte, bytes/s to other chips."""
    nvidia = "NVIDIA {} Tensor Core GPU datasheet, SXM; bfloat16 without sparsity; NVLink"
    google = "cloud.google.com/tpu/docs/{}"
    l4 = "NVIDIA L4 Tensor Core GPU datasheet; bfloat16 without sparsity; PCIe Gen4 x16"
    v4 = google.format("v4") + "; 6 links of 50 GB/s: arXiv 2304.01433"
    figures = {
        name: (d.hbm_bytes, d.bandwidth, d.bf16_flops, round(d.ridge), d.interconnect, d.source)
        for name, d in datasheets.DEVICES.items()
    }
    assert figures == dict(
        h100=(80e9, 3.35e12, 989e12, 295, 450e9, nvidia.format("H100")),
        h200=(141e9, 4.8e12, 989e12, 206, 450e9, nvidia.format("H200")),
        a100=(80e9, 2.039e12, 312e12, 153, 300e9, nvidia.format("A100 80GB")),
        l4=(24e9, 0.3e12, 121e12, 403, 32e9, l4),
        v4=(32 * 2**30, 1.228e12, 275e12, 224, 300e9, v4),
        v5e=(16e9, 0.819e12, 197e12, 241, 200e9, google.format("v5e")),
        v5p=(95e9, 2.765e12, 459e12, 166, 600e9, google.format("v5p")),
        v6e=(32e9, 1.64e12, 918e12, 560, 400e9, google.format("v6e")),
    )
    assert all(datasheets.get(name).name == name for name in figures)
    alone = datasheets.Device(name="x", hbm_bytes=1, bandwidth=1.0, bf16_flops=1.0, source="")
    assert alone.interconnect == float("inf")


def test_unknown_device_lists_those_known():
    with pytest.raises(
        UserError, match="'b200': known are h100, h200, a100, l4, v4, v5e, v5p, v6e"
    ):
        datasheets.get("b200")


def test_a_device_that_is_there():
    kinds = [
        ("TPU v4", "tpu", "v4"),
        ("TPU v5 lite", "tpu", "v5e"),
        ("TPU v5e", "tpu", "v5e"),
        ("TPU v5", "tpu", "v5p"),
        ("TPU v5p", "tpu", "v5p"),
        ("TPU v6 lite", "tpu", "v6e"),
        ("TPU v6e", "tpu", "v6e"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA H100 PCIe", "gpu", None),
        ("NVIDIA A100-SXM4-80GB", "gpu", "a100"),
        ("NVIDIA A100-SXM4-40GB", "gpu", None),
        ("NVIDIA A100 80GB PCIe", "gpu", None),
        ("TPU v9", "tpu", None),
        ("h200", "other", None),
    ]
    for kind, platform, name in kinds:
        device = datasheets.for_device(types.SimpleNamespace(device_kind=kind, platform=platform))
        assert device == (datasheets.get(name) if name else None), kind
    assert datasheets.for_device(jax.devices("cpu")[0]) is None
