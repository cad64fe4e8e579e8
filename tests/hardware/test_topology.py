"""Names of TPUs and GPUs to compile for that need not be there."""

import pytest

from kvjax.foundation.errors import UserError
from kvjax.hardware import topology


@pytest.mark.parametrize("name", ["v5e", "v9:2x2", "h200:8", "", "v5e:"])
def test_unknown_topologies_name_those_known(name):
    with pytest.raises(UserError, match=rf"topology '{name}'.*v5e"):
        if name == "v5e:":
            pytest.importorskip("libtpu")
        topology.tpu_devices(name)


@pytest.mark.parametrize(
    "name", ["h200", "h200:", "h200:0", "h200:9", "h200:2x4", "a100:8", "v5e:3x3"]
)
def test_unknown_names_of_either_kind_list_examples_of_both(name):
    with pytest.raises(UserError, match=rf"topology '{name}'.*v5p:2x2x4.*h200:8"):
        if name == "v5e:3x3":
            pytest.importorskip("libtpu")
        topology.get_devices(name)


@pytest.mark.aot
@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:2x2x4", "v4:2x2x4"])
def test_a_device_per_chip(name):
    found = topology.get_devices(name)
    assert len(found) == len(set(found)) == 16
    assert {device.platform for device in found} == {"tpu"}


@pytest.mark.aot
def test_the_gpus_of_a_host():
    pytest.importorskip("jax_cuda13_plugin")
    found = topology.get_devices("h200:8")
    assert [device.id for device in found] == list(range(8))
    assert {device.process_index for device in found} == {0}
    assert {device.device_kind for device in found} == {"NVIDIA H200"}


@pytest.mark.aot
@pytest.mark.parametrize(
    "kind, name", [("v4", "v4:2x2x1"), ("v5p", "v5p:2x2x1"), ("v6e", "v6e:2x2")]
)
def test_kinds(kind, name):
    (device, *_) = topology.tpu_devices(name)
    assert device.platform == "tpu"
    assert kind.removesuffix("e").removesuffix("p") in device.device_kind.lower().replace(" ", "")
