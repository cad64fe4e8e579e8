"""A decode step writes its cache in place, and takes no memory that grows with it."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import d36
from experiments.benchmarks import decode_memory
from kvjax import config as config_lib
from kvjax.aot import hlo
from kvjax.decoding import program
from kvjax.decoding.generator import Generator
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.hardware import topology
from kvjax.model.transformer import Compute
from tests.decoding.prompts import GREEDY, V


@pytest.fixture(scope="module")
def v5e(no_compilation_cache):
    return topology.tpu_devices("v5e:2x2")[0]


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


RIVALS = {
    "gla_narrow": 2,
    "mlra4_narrow": 2,
    "gta_narrow": 2,
    "mfa_narrow": 2,
    "shared_kv_narrow": 2,
    **dict.fromkeys(("mfa_kr_wide", "tpa_wide", "mla_lrkv_wide", "mla_lrkv_narrow"), 0),
}


@pytest.mark.aot
@pytest.mark.parametrize("name", RIVALS)
def test_caches_of_rivals_take_the_bytes_of_their_formulas(v5e, name):
    """The compiled step of two layers is counted, padding included."""
    loaded = load_config(CONFIGS / f"rivals.py:{name}_2p5b", ["--config.model.num_layers=2"])
    config = config_lib.resolve(loaded).model
    step = decode_memory.step_memory(config, batch=2, length=4096, device=v5e)
    assert step["kernel_calls"] == RIVALS[name]
    assert step["logical"] == step["costs"] and step["aliased"] == step["physical"]
    assert step["logical"] <= step["physical"] <= step["logical"] + 4096


@pytest.mark.aot
@pytest.mark.parametrize(
    "kind, name, bits, batch, implementation",
    [
        ("v5e", "MHA", 8, 1, None),
        ("v5e", "MHA", 8, 2, "xla"),
        ("v5e", "LRKV", 8, 8, None),
        ("v5e", "LRKV", 4, 2, None),
        ("v5e", "MLA", 4, 8, None),
        ("v6e", "MHA", 4, 2, None),
        ("v6e", "MLA", 8, 2, None),
    ],
)
def test_a_quantised_cache_takes_its_bytes_on_a_tpu(
    no_compilation_cache, kind, name, bits, batch, implementation
):
    """The compiled step's are those of the formula, and it is written in place."""
    config = d36.model(name, layers=1)
    device = topology.tpu_devices(f"{kind}:2x2")[0]
    options = dict(batch=batch, device=device, cache_bits=bits, implementation=implementation)
    short, long = (
        decode_memory.step_memory(config, length=length, **options)
        for length in decode_memory.LENGTHS
    )
    written = {"MHA": 2, "LRKV": 4, "MLA": 1}[name]  # fields of bytes, each by a kernel
    for step in (short, long):
        assert step["kernel_calls"] == written + (implementation is None)
        assert step["logical"] == step["costs"] and step["aliased"] == step["physical"]
        assert step["logical"] <= step["physical"] <= 1.001 * step["logical"] + 4096
    assert abs(decode_memory.growth(short, long)) < 0.05


@pytest.mark.aot
def test_physical_bytes_count_padding(v5e):
    """A rank of 46 takes the room of 48 on the TPU."""
    config = d36.model("LRKV without QK-norm", layers=1)
    thinner = tuple(dataclasses.replace(m, rank=46) for m in config.mechanisms)
    config = dataclasses.replace(config, mechanisms=thinner)
    step = decode_memory.step_memory(config, batch=1, length=1024, device=v5e)
    assert step["logical"] == 1024 * 2 * 2 * (128 + 18 * 46)
    assert step["physical"] - 512 == 1024 * 2 * 2 * (128 + 18 * 48)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MHA", "LRKV", "LRKV x GQA-6", "Q-K=V"])
def test_attention_on_the_cpu_makes_nothing_that_grows_like_the_cache(name):
    short, long = (decode_memory.attention_memory(name, s) for s in decode_memory.LENGTHS)
    assert abs(decode_memory.growth(short, long)) < 0.05


def test_the_lowered_step_is_the_one_that_decodes(make_model):
    """It lowers from shapes, in bfloat16, and donates the cache."""
    generator = Generator(make_model("lrkv"), Compute(dtype=jnp.dtype("bfloat16")))
    cache, weights = generator.engine.cache(3, 200), generator.engine.weights
    tokens_B, flags_B = np.zeros(3, np.int32), np.zeros(3, bool)
    streams_B, ends_V = np.zeros(3, np.uint32), np.zeros(V, bool)
    choice = program.SamplingState(GREEDY.parameters(), jax.random.key(0), streams_B, ends_V)
    state = (weights, cache, tokens_B, flags_B, flags_B, choice)
    mesh = program.make_mesh(1, jax.devices())
    lowered = program.lowered_step(generator.config, mesh, batch=3, length=200)
    arguments, keywords = lowered.args_info
    assert _described(arguments) == _described(state) and not keywords
    donated = [{x.donated for x in jax.tree.leaves(argument)} for argument in arguments]
    assert donated == [{False}, {True}, {False}, {False}, {False}, {False}]
    assert _described(lowered.out_info) == _described((cache, tokens_B, flags_B))
    assert cache.capacity == 256


def _described(tree) -> list:
    return [(path, x.shape, x.dtype) for path, x in jax.tree.leaves_with_path(tree)]


@pytest.mark.aot
@pytest.mark.parametrize("name, batch", [("LRKV", 2), ("MHA", 1)])
def test_decode_step_on_a_gpu_writes_in_place_and_grows_with_nothing(name, batch):
    """Two layers of d36: appending is no loop of windows, and no cache is copied."""
    pytest.importorskip("jax_cuda13_plugin")
    config = d36.model(name, layers=2)
    short, long = (
        decode_memory.step_memory(
            config, batch=batch, length=length, device=topology.gpu_device("h200")
        )
        for length in decode_memory.LENGTHS
    )
    for step in (short, long):
        # prepare, decode_attention, combine_splits, add_norm; add_norm again between the layers.
        assert step["kernel_calls"] == 2 * 4 + 1
        assert step["aliased"] == step["physical"]
    assert abs(decode_memory.growth(short, long)) < 0.05


# Programs that a layer adds to the step, in experiments/LOG.md by date.
LAUNCHES = {"LRKV": 11, "MHA": 10, "MLA": 11}


@pytest.mark.aot
@pytest.mark.parametrize("name", LAUNCHES)
def test_programs_of_a_layer_on_a_gpu(no_compilation_cache, name):
    """Counts what a second layer adds; no program copies the weights of the projections."""
    pytest.importorskip("jax_cuda13_plugin")
    mesh = program.make_mesh(1, [topology.gpu_device("h200")])

    def launches(layers):
        config = d36.model(name, layers=layers)
        lowered = program.lowered_step(config, mesh, batch=4, length=32_768)
        return hlo.launches(lowered.compile().as_text())

    one, two = launches(1), launches(2)
    assert len(two) - len(one) <= LAUNCHES[name]
    width = d36.model(name, layers=1).block.d_model
    for kernel, types in two.items():
        for shape in re.findall(r"\[([\d,]+)\]", types):
            dims = [int(n) for n in shape.split(",")]
            assert width not in dims or math.prod(dims) < 128 * width, f"{kernel} makes {types}"
