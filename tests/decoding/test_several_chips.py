"""Generation with the cache split over several chips gives the same tokens."""

from flax import nnx
import jax
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.aot import hlo
from kvjax.decoding import program
from kvjax.decoding.generator import Generator
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from tests.decoding.prompts import GREEDY, HOT, L, tokens

LONG = [[5], list(range(32)) * 9, [4] * 127, [1, 2] * 63]  # two end near the end of stripe 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, sampling, several",
    [
        ("lrkv", GREEDY, (2, 8)),
        ("mla", GREEDY, (2, 8)),
        ("lrkv", HOT, (2,)),
        ("lrkv", HOT, (8,)),
    ],
)
def test_chips_change_no_token(make_model, on_chips, name, sampling, several):
    """150 prompt tokens at a time: chunks lie over two stripes of 128, on two chips."""
    options = dict(num_tokens=8, sampling=sampling, seed=3)
    alone = tokens(Generator(make_model(name), chunk=150), LONG, **options)
    for chips in several:
        assert tokens(on_chips(name, chips), LONG, **options) == alone


@pytest.mark.slow
def test_every_chip_holds_its_part_and_none_moves(on_chips):
    generator = on_chips("lrkv", 8)
    generation = generator.start(LONG, num_tokens=4)
    before = generation.cache
    list(generation)
    cache = generation.cache
    assert all(array.is_deleted() for array in jax.tree.leaves(before))
    assert cache.capacity == 8 * 128
    for array in jax.tree.leaves(cache.layers):
        assert {shard.device for shard in array.addressable_shards} == set(jax.devices())
        assert all(8 * shard.data.nbytes == array.nbytes for shard in array.addressable_shards)
        held = [np.any(np.asarray(shard.data)) for shard in array.addressable_shards]
        assert held == [True] * 3 + [False] * 5  # 291 tokens are two stripes and some
    assert cache.lengths.sharding.is_fully_replicated
    tokens_BT, counts_B = np.zeros((4, 128), np.int32), np.zeros(4, np.int32)
    engine = generator.engine
    prefill = engine.prefill.lower(engine.weights, cache, tokens_BT, counts_B).compile()
    state = *generation._first, generation._cancelled_B, generation._sampling
    step = engine.decode_step.lower(engine.weights, cache, *state).compile()
    # A prompt needs only the cache of the last layer: nothing there attends.
    for compiled, T, layers in ((prefill, 128, L - 1), (step, 1, L)):
        collectives = hlo.collectives(compiled.as_text())
        assert {c.kind for c in collectives} == {"all-reduce"}
        outputs = 4 * T * 4 * (8 + 1) * 4  # [B, T, N, Hv + 1] float32
        assert sum(c.bytes for c in collectives) == layers * (outputs + 4 * T * 4 * 4)
        aliased = compiled.memory_analysis().alias_size_in_bytes
        assert aliased == cache_lib.live_bytes(cache) // 8 + 4 * 4


def test_weights_are_whole_on_every_chip(on_chips):
    for weight in jax.tree.leaves(on_chips("lrkv", 2).engine.weights):
        assert weight.sharding.is_fully_replicated and len(weight.sharding.device_set) == 2


def test_memory_is_counted_per_chip(on_chips, monkeypatch):
    generator = on_chips("lrkv", 2)
    need = cache_lib.live_bytes(generator.engine.cache(1, 256)) // 2
    monkeypatch.setattr(runtime, "memory_per_device", lambda: need)
    assert generator._check_memory(1, 256) == 256
    monkeypatch.setattr(runtime, "memory_per_device", lambda: need - 1)
    with pytest.raises(UserError, match="1 sequences of 256 tokens .* GB on each of 2 chips"):
        generator._check_memory(1, 256)


def test_invalid_chips(on_chips, make_model):
    mesh = jax.make_mesh((2, 2), ("data", "cache"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="data = 2, cache = 2: decoding needs one axis 'cache'"):
        Generator(make_model("lrkv"), mesh=mesh)
    assert list(program.make_mesh(8, jax.devices()).devices) == jax.devices()
    with pytest.raises(UserError, match=r"chips = 9: there are 8 \(cpu:0, .*cpu:7\)"):
        on_chips("lrkv", 9)
    with pytest.raises(
        UserError, match="'reference': reads a whole cache.*2 chips: use one of xla"
    ):
        on_chips("lrkv", 2, implementation="reference")
    with pytest.raises(UserError, match="'tpu': runs on one TPU; the model is on 2 x cpu"):
        on_chips("lrkv", 2, implementation="tpu")


@pytest.mark.slow
def test_sharded_weights_generate_the_same(make_model):
    """Training on several devices samples from sharded weights."""
    graph, params = nnx.split(make_model("lrkv"))
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))

    def split(x):
        axes = [None] * x.ndim
        if x.shape[-1] % 2 == 0:
            axes[-1] = "fsdp"
        return jax.device_put(x, jax.NamedSharding(devices, jax.sharding.PartitionSpec(*axes)))

    params = jax.tree.map(split, params)
    assert any(not x.is_fully_replicated for x in jax.tree.leaves(params))
    generator = Generator(nnx.merge(graph, params))
    alone = Generator(make_model("lrkv"))
    options = dict(num_tokens=8, sampling=GREEDY, seed=3)
    assert tokens(generator, LONG[:2], **options) == tokens(alone, LONG[:2], **options)
