"""Compiling for TPUs that are not there: names, and what the decode step does to memory."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import decode_memory
from experiments.tables import d36
from kvjax.foundation.errors import UserError
from kvjax.hardware import topology
from tests import quick


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


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    for name in ("v5e:2x2", "h200:8"):
        with pytest.raises(UserError, match=r"pip install -e '\.\[aot\]'"):
            topology.get_devices(name)


@pytest.fixture(scope="module")
def v5e():
    jax.config.update("jax_enable_compilation_cache", False)  # its programs cannot be read back
    yield topology.tpu_devices("v5e:2x2")[0]
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.aot
@pytest.mark.parametrize(
    "kind, name", [("v4", "v4:2x2x1"), ("v5p", "v5p:2x2x1"), ("v6e", "v6e:2x2")]
)
def test_kinds(kind, name):
    (device, *_) = topology.tpu_devices(name)
    assert device.platform == "tpu"
    assert kind.removesuffix("e").removesuffix("p") in device.device_kind.lower().replace(" ", "")


@pytest.mark.aot
@pytest.mark.parametrize(
    "name, batch, implementation, kernel_calls",
    [
        ("MHA", 1, None, 4),
        ("LRKV", 1, "xla", 0),
        ("LRKV", 8, None, 4),
        ("LRKV without QK-norm", 1, "xla", 0),
        ("LRKV x GQA-6", 2, None, 4),
        ("MLA", 2, None, 4),
        ("Q-K=V", 2, None, 0),  # no kernel takes tied values
    ],
)
def test_decode_step_writes_in_place_and_grows_with_nothing(
    v5e, name, batch, implementation, kernel_calls
):
    """Four layers of d36; a copy of one array of one layer would be more than 5 %."""
    config = d36.model(name, layers=4)
    options = dict(batch=batch, device=v5e, implementation=implementation)
    short, long = (
        decode_memory.step_memory(config, length=length, **options)
        for length in decode_memory.LENGTHS
    )
    for step in (short, long):
        assert step["kernel_calls"] == kernel_calls
        assert step["logical"] == step["costs"]
        assert step["aliased"] == step["physical"]
        assert step["logical"] <= step["physical"] < 1.001 * step["logical"] + 4096
    assert abs(decode_memory.growth(short, long)) < 0.05
    per_layer = {"MHA": 9216, "LRKV": 5192, "LRKV without QK-norm": 5120}
    if name in per_layer:
        assert long["logical"] == 4 * batch * 32_768 * per_layer[name]


@pytest.mark.aot
def test_physical_bytes_count_padding(v5e):
    """A rank of 46 takes the room of 48 on the TPU."""
    config = d36.model("LRKV without QK-norm", layers=1)
    thinner = tuple(dataclasses.replace(m, rank=46) for m in config.mechanisms)
    config = dataclasses.replace(config, mechanisms=thinner)
    step = decode_memory.step_memory(config, batch=1, length=1024, device=v5e)
    assert step["logical"] == 1024 * 2 * 2 * (128 + 18 * 46)
    assert step["physical"] - 512 == 1024 * 2 * 2 * (128 + 18 * 48)


@pytest.mark.parametrize("name", quick.only(["LRKV"], ["MHA", "LRKV", "LRKV x GQA-6", "Q-K=V"]))
def test_attention_on_the_cpu_makes_nothing_that_grows_like_the_cache(name):
    short, long = (decode_memory.attention_memory(name, s) for s in decode_memory.LENGTHS)
    assert abs(decode_memory.growth(short, long)) < 0.05


def test_expanding_first_would_be_seen():
    function, arguments = d36.abstract_attention("LRKV", 4096, jnp.dtype(jnp.float32))
    expanding = lambda *a: function(*a, implementation="reference")
    memory = jax.jit(expanding).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes > sum(x.size * 4 for x in arguments[2].values())


@pytest.mark.aot
@pytest.mark.parametrize("name, batch", [("LRKV", 2), ("MHA", 1)])
def test_decode_step_on_a_gpu_writes_in_place_and_grows_with_nothing(name, batch):
    """Two layers of d36; what is appended is no loop of windows, and no cache is copied."""
    pytest.importorskip("jax_cuda13_plugin")
    config = d36.model(name, layers=2)
    short, long = (
        decode_memory.step_memory(
            config, batch=batch, length=length, device=topology.gpu_device("h200")
        )
        for length in decode_memory.LENGTHS
    )
    for step in (short, long):
        assert step["kernel_calls"] == 2
        assert step["aliased"] == step["physical"]
    assert abs(decode_memory.growth(short, long)) < 0.05
