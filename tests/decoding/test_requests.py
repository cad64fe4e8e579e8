"""Refusals before anything is compiled: ids, lengths, capacities, memory, devices."""

import types

from flax import nnx
import jax
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.decoding import engine, generator as generator_lib, program
from kvjax.decoding.generator import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from tests.decoding.prompts import HOT, tokens


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 2 has no tokens: start it with the tokenizer's BOS"),
        (
            [[1], [2, 32]],
            {},
            "prompt 2, token 2: no id 32; the vocabulary has 32 tokens, ids 0 to 31",
        ),
        ([[-1]], {}, "prompt 1, token 1: no id -1"),
        ([[1]], dict(stop_tokens=[3, 40]), "stop token 40: no such id"),
        ([[1]], dict(num_tokens=0), "num_tokens = 0: must be at least 1"),
        ([[1]], dict(capacity=-1), "capacity = -1"),
        ([[1]], dict(seed=-1), "seed = -1"),
        ([[1]], dict(seed=1 << 32), "must be below 2\\*\\*32"),
        ([[1], [1] * 9], dict(capacity=8), "prompt 2 has 9 tokens and capacity = 8"),
        ([[1] * 7], dict(capacity=8), "sequence 1 holds 7 tokens and 9 more.*capacity of 8"),
        ([[1] * 7], dict(num_tokens=1 << 20), "rope positions end after 1048576 tokens"),
    ],
)
def test_invalid_requests(generator, prompts, options, message):
    with pytest.raises(UserError, match=message):
        generator.start(prompts, **(dict(num_tokens=10) | options))


@pytest.mark.slow
def test_a_capacity_suffices_to_its_last_token(generator):
    """The default capacity is equally small; the last token is never appended."""
    roomy = tokens(generator, [[1] * 119], num_tokens=10, capacity=256, sampling=HOT)
    exact = tokens(generator, [[1] * 119], num_tokens=10, capacity=128, sampling=HOT)
    generation = generator.start([[1] * 119], num_tokens=10, sampling=HOT)
    list(generation)
    assert roomy == exact == generation.tokens and generation.cache.capacity == 128
    assert int(generation.cache.lengths[0]) == 128
    with pytest.raises(UserError, match="sequence 1 holds 120 tokens and 9 more follow"):
        generator.start([[1] * 120], num_tokens=10, capacity=128)


@pytest.mark.slow
def test_learned_positions_end(make_model):
    learned = Generator(make_model("mha", positions="learned", max_positions=40))
    assert generator_lib.max_positions(learned.config) == 40
    with pytest.raises(UserError, match="learned positions end after 40 tokens"):
        learned.start([[1] * 30], num_tokens=12)
    assert len(tokens(learned, [[1] * 30], num_tokens=11)[0]) == 11


def test_a_capacity_beyond_the_angles_of_rope(generator, on_chips, make_model, monkeypatch):
    limit = 1 << 20
    message = "capacity = 1048577: the model's positions have angles for 1048576 tokens; give"
    with pytest.raises(UserError, match=message):
        generator.start([[1]], num_tokens=2, capacity=limit + 1)
    sizes = []

    def stop(batch, capacity):
        sizes.append(capacity)
        raise StopIteration

    def capacity_of(generator, **options):
        monkeypatch.setattr(generator, "_check_memory", stop)
        with pytest.raises(StopIteration):
            generator.start([[1]], **options)
        return sizes[-1]

    assert capacity_of(generator, num_tokens=2, capacity=limit) == limit
    # Three chips: 128 · 2^i slots on each would be 1.5 times what there are angles for.
    three, most = on_chips("lrkv", 3), limit // 384 * 384
    assert capacity_of(three, num_tokens=limit - 300) == most
    with pytest.raises(UserError, match=f"{most} tokens in a cache split over 3 chips"):
        three.start([[1]], num_tokens=2, capacity=limit)
    with pytest.raises(UserError, match=f"rope positions end after {most} tokens"):
        three.start([[1]], num_tokens=limit)
    # Without angles there is no such limit; with those of "+" there is.
    none = Generator(make_model("mha", positions="none"))
    assert capacity_of(none, num_tokens=2, capacity=2 * limit) == 2 * limit
    plus = Generator(make_model("qk_tied_plus", positions="none"))
    with pytest.raises(UserError, match=message):
        plus.start([[1]], num_tokens=2, capacity=limit + 1)
    with pytest.raises(UserError, match="length = 1048577: the model's positions have angles"):
        mesh = program.make_mesh(1, jax.devices())
        program.lowered_step(generator.config, mesh, batch=1, length=limit + 1)


def test_free_memory_of_a_device(generator, monkeypatch):
    """Bytes in use on an accelerator are subtracted; a CPU's figure is free memory already."""
    tokens, used = 1 << 20, 5 * 10**9
    need = cache_lib.live_bytes(generator.engine.cache(500, tokens))
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: dict(bytes_in_use=used))
    monkeypatch.setattr(runtime, "memory_per_device", lambda: need)
    assert generator._check_memory(500, tokens - 100) == tokens
    monkeypatch.setattr(generator_lib.jax, "local_devices", lambda: [device])
    sizes = f"{need / 1e9:,.1f} GB of {(need - used) / 1e9:,.1f} GB"
    message = f"a cache of 500 sequences of 1,048,576 tokens needs {sizes}: generate fewer tokens"
    with pytest.raises(UserError, match=message):
        generator._check_memory(500, tokens)
    monkeypatch.setattr(runtime, "memory_per_device", lambda: need + used)
    assert generator._check_memory(500, tokens) == tokens
    monkeypatch.setattr(runtime, "memory_per_device", lambda: 1000)
    with pytest.raises(UserError, match="a cache of 1 sequences of 128 tokens needs"):
        generator.start([[1]], num_tokens=3)


def test_invalid_models_and_options(make_model):
    with pytest.raises(UserError, match="causal = False: only a causal model"):
        Generator(make_model("mha", causal=False))
    with pytest.raises(UserError, match="implementation = 'fast': must be one of 'xla'"):
        Generator(make_model("lrkv"), implementation="fast")
    with pytest.raises(UserError, match="'tpu': runs on one TPU; the model is on 1 x cpu"):
        Generator(make_model("lrkv"), implementation="tpu")
    with pytest.raises(UserError, match="chunk = 0"):
        Generator(make_model("lrkv"), chunk=0)
    # By what is asked for, where the model is, and over how many chips its cache is split.
    cpu, gpu = jax.devices()[0], types.SimpleNamespace(platform="gpu", device_kind="H100")
    for implementation, devices, chips, chosen in (
        (None, [cpu], 1, None),
        (None, [gpu], 1, "xla"),  # not what the first device would have
        (None, jax.devices()[:2], 1, "xla"),
        (None, jax.devices()[:2], 2, None),
        ("reference", [cpu], 1, "reference"),
        ("xla", jax.devices()[:2], 2, "xla"),
        ("gpu", [gpu], 1, "gpu"),
    ):
        assert engine._for_devices(implementation, devices, chips, None) == chosen


@pytest.mark.parametrize("options", [dict(temperature=0.0), dict(temperature=1.0, top_k=3)])
def test_logits_that_are_not_finite_are_no_token(make_model, options):
    """The argmax of NaN is token 0, which is often the end of a text."""
    broken = nnx.clone(make_model("lrkv"))  # models are shared between tests
    broken.embedding[...] = np.nan * broken.embedding[...]
    generation = Generator(broken).start([[1, 2]], num_tokens=2, sampling=Sampling(**options))
    with pytest.raises(UserError, match="logits are NaN or infinite"):
        next(iter(generation))


def test_capacities_are_few():
    assert [generator_lib._round(n) for n in (1, 128, 129, 256, 257, 600, 1025)] == [
        *(128, 128, 256, 256, 512, 1024, 2048)
    ]
