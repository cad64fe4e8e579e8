"""Topologies of absent TPUs and GPUs by name, and the arguments of their compilers."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets, topology


@pytest.fixture
def compilers(monkeypatch):
    """Compilers that log their arguments, and know no "3x3" and no more than six GPUs."""
    calls, environment = [], dict(TPU_SKIP_MDS_QUERY="0")

    def describe(*name, **options):
        calls.append((name, options))
        if name == ("v5e:3x3",) or options.get("topology") == "1x1x7":
            raise ValueError("no such shape\nmore") if name else NotImplementedError("too many")
        return types.SimpleNamespace(devices=(f"device of {name}", "other"))

    monkeypatch.setattr(topology.topologies, "get_topology_desc", describe)
    monkeypatch.setattr(topology.extras, "require", lambda *needed: calls.append(needed))
    monkeypatch.setattr(topology, "os", types.SimpleNamespace(environ=environment))
    return calls, environment


def test_what_compilers_are_asked_for(compilers):
    calls, environment = compilers
    assert topology.get_devices("v4:2x2x1") == ["device of ('v4:2x2x1',)", "other"]
    assert environment == dict(
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_SKIP_MDS_QUERY="0",  # as it was
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v5p-8",
    )
    topology.get_devices("v5e:4x4")
    assert topology.get_devices("h200:8") == ["device of ()", "other"]
    assert topology.gpu_device("h100") == "device of ()"
    needs, v4, _, v5e, needs_cuda, h200, _, h100 = calls
    assert (needs, needs_cuda) == (
        ("compiling for a TPU", "libtpu"),
        ("compiling for a GPU", "jax_cuda13_plugin"),
    )
    assert v4 == (("v4:2x2x1",), dict(platform="tpu", chip_config_name="megacore"))
    assert v5e == (("v5e:4x4",), dict(platform="tpu"))
    targets = [options.pop("target_config") for _, options in (h200, h100)]
    assert h200 == ((), dict(platform="cuda", topology="1x1x8"))
    assert h100 == ((), dict(platform="cuda", topology="1x1x1"))
    figures = (141_000_000_000, 4_800_000_000_000, "H200"), (80 * 10**9, 3_350 * 10**9, "H100")
    for text, (memory, bandwidth, name) in zip(targets, figures, strict=True):
        assert f"device_memory_size: {memory} memory_bandwidth: {bandwidth}\n" in text
        assert f'device_description_str: "NVIDIA {name}"' in text and "{{" not in text


def test_names_that_are_not_known_list_examples_of_both(compilers):
    examples = (
        "v4:2x2x1 v4:2x2x4 v4:4x4x4; v5e:2x2 v5e:4x4 v5e:8x8 v5e:16x16; "
        "v5p:2x2x1 v5p:2x2x4 v5p:4x4x4; v6e:2x2 v6e:4x4 v6e:8x8 v6e:16x16; "
        "h100:1 h100:8; h200:1 h200:8; "
        "a100:1 a100:8; l4:1 l4:8"
    )
    assert topology.examples() == examples
    bad_names = ("h200", "h200:", "h200:0", "h200:9", "h200:2x4", "b200:8", "", "v5e", "v5e:")
    cases = [(topology.get_devices, name) for name in (*bad_names, "v9:2x2", "v5e:3x3")]
    cases += [(topology.tpu_devices, "h200:8"), (topology.gpu_devices, "v5e:4x4")]
    for function, name in cases:
        with pytest.raises(UserError) as error:
            function(name)
        message = str(error.value)
        assert message.startswith(f"topology {name!r}: must be KIND:SHAPE") and examples in message
        assert message.endswith(". The compiler says: no such shape") == (name == "v5e:3x3")
    with pytest.raises(UserError, match="^GPU 'h200:7': too many; .* set JAX_PLATFORMS=cpu$"):
        topology.get_devices("h200:7")


def test_what_is_compiled_is_for_that_device():
    device, seen = jax.devices()[3], []

    @jax.jit
    def add(x, y):
        seen.append(jax.sharding.get_abstract_mesh())
        return x + y["z"]

    x = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    compiled = topology.compile_for(device, add, x, dict(z=np.ones((1, 3), np.float32)))
    assert all(s.device_set == {device} for s in jax.tree.leaves(compiled.input_shardings))
    assert seen[0].size == 1 and seen[0].abstract_device.platform == "cpu"
    assert (compiled.out_info.shape, compiled.out_info.dtype) == ((2, 3), jnp.float32)


@pytest.mark.aot
@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:2x2x4", "v4:2x2x4", "v6e:4x4"])
def test_a_device_per_chip(name):
    devices = topology.get_devices(name)
    assert len(devices) == len(set(devices)) == 16
    assert {device.platform for device in devices} == {"tpu"}
    assert datasheets.for_device(devices[0]).name == name.partition(":")[0]


@pytest.mark.aot
def test_the_gpus_of_a_host():
    pytest.importorskip("jax_cuda13_plugin")
    devices = topology.get_devices("h200:8")
    assert [device.id for device in devices] == list(range(8))
    assert {device.process_index for device in devices} == {0}
    assert {device.device_kind for device in devices} == {"NVIDIA H200"}
