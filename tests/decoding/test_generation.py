"""Generation with a cache: greedy is the argmax of the training model, and nothing else matters."""

import collections
import functools
import time
import types

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.aot import hlo
from kvjax.decoding import generation as generation_lib
from kvjax.decoding import program
from kvjax.decoding.generation import Generator
from kvjax.decoding.sampling import Sampling
from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Transformer
from tests import quick

V, L = 32, 2
GREEDY = Sampling(temperature=0.0)
HOT = Sampling(temperature=2.0)
PROMPTS = [[5], [1, 2, 3], [4] * 7 + [9], list(range(20, 32))]  # one chunk, several, and none

compilations = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compilations.update([event])
)


@functools.cache
def _model(randomise, make_mechanism, name, **block):
    block = BlockConfig(num_layers=L, d_model=16, mlp_dim=24, **block)
    config = TransformerConfig(block=block, mechanisms=(make_mechanism(name),) * L, vocab_size=V)
    return randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)[0]


@pytest.fixture
def make_model(randomise, make_mechanism):
    """A function of a mechanism's name and block options: a Transformer, no weight zero."""
    return functools.partial(_model, randomise, make_mechanism)


@pytest.fixture
def generator(randomise, make_mechanism):
    return _cached_generator(randomise, make_mechanism)


@functools.cache
def _cached_generator(randomise, make_mechanism):
    return Generator(_model(randomise, make_mechanism, "lrkv"), chunk=5)


def tokens(generator, prompts, **options) -> list[list[int]]:
    generation = generator.start(prompts, **(dict(num_tokens=10) | options))
    steps = list(generation)
    flat = [
        [i for new in steps for sequence, i in new if sequence == b] for b in range(len(prompts))
    ]
    assert flat == generation.tokens
    return generation.tokens


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("lrkv", {}),
        pytest.param("mla", {}, marks=pytest.mark.slow),
        pytest.param("mha", dict(positions="learned", max_positions=40), marks=pytest.mark.slow),
    ],
)
def test_greedy_is_the_argmax_of_the_training_model(make_model, name, block):
    model = make_model(name, **block)
    got = tokens(Generator(model, chunk=5), PROMPTS, num_tokens=20, sampling=GREEDY)
    clear = total = 0
    logits = jax.jit(lambda sequence: model.logits(model(sequence)))
    for prompt, ids in zip(PROMPTS, got, strict=True):
        assert len(ids) == 20
        sequence = jnp.asarray([(prompt + ids + [0] * 40)[:32]])
        logits_TV = np.asarray(logits(sequence))[0]
        for i, token in enumerate(ids):
            second, first = np.sort(logits_TV[len(prompt) - 1 + i])[-2:]
            assert logits_TV[len(prompt) - 1 + i][token] >= first - 1e-4
            clear, total = clear + (first - second > 1e-4), total + 1
    assert clear > 0.9 * total  # so most tokens are held to exactly one


def test_a_batch_of_any_lengths_is_one_prompt_at_a_time(generator):
    batch = tokens(generator, PROMPTS, sampling=HOT, seed=7)
    alone = [tokens(generator, [prompt], sampling=HOT, seed=7)[0] for prompt in PROMPTS]
    assert batch == alone
    assert tokens(generator, PROMPTS, sampling=HOT, seed=8) != batch


def test_every_position_draws_anew(generator):
    """So hot that only chance decides."""
    (ids,) = tokens(generator, [[1]], num_tokens=20, sampling=Sampling(temperature=1e4))
    assert len(set(ids)) > 8


def test_equal_prompts_get_different_texts(generator):
    first, second = tokens(generator, [[1, 2], [1, 2]], sampling=HOT)
    assert first != second
    assert tokens(generator, [[1, 2]], sampling=HOT) == [first]


@pytest.mark.parametrize("chunk", quick.only([128], [1, 128]))
def test_chunk_size_does_not_matter(generator, make_model, chunk):
    other = Generator(make_model("lrkv"), chunk=chunk)
    options = dict(sampling=HOT, seed=1)
    assert tokens(other, PROMPTS, **options) == tokens(generator, PROMPTS, **options)


@pytest.mark.slow
def test_the_reference_implementation(generator, make_model):
    other = Generator(make_model("lrkv"), chunk=5, implementation="reference")
    assert tokens(other, PROMPTS, sampling=HOT) == tokens(generator, PROMPTS, sampling=HOT)


def test_nothing_is_compiled_twice(generator):
    tokens(generator, PROMPTS, sampling=HOT)
    sizes = lambda: [f._cache_size() for f in (generator._prefill, generator._decode_step)]
    before, events = sizes(), dict(compilations)
    for seed, prompts in enumerate(
        [PROMPTS[::-1], [[1]] * 4, [[i] * (13 * i + 1) for i in range(4)]]
    ):
        sampling = Sampling(temperature=0.3 * seed, top_k=3 * seed, top_p=1 - 0.2 * seed)
        options = dict(num_tokens=5 + 30 * seed, sampling=sampling, seed=seed)
        generation = generator.start(prompts, **options, stop_tokens=range(seed))
        for _ in generation:
            generation.finish(1)
    assert sizes() == before
    compiled = [e for e in compilations if "backend_compile" in e]
    assert compiled, "the event has another name now"
    assert [compilations[e] for e in compiled] == [events[e] for e in compiled]


def test_the_device_does_not_wait_for_the_host(generator, monkeypatch):
    """Step n + 1 is dispatched before the tokens of step n are read; a step uploads nothing."""
    log, real_step, real_get = [], generator._decode_step, jax.device_get
    generation = generator.start(PROMPTS, num_tokens=6)

    def step(*args):
        log.append("step")
        return real_step(*args)

    def get(x):
        log.append("read")
        return real_get(x)

    monkeypatch.setattr(generator, "_decode_step", step)
    monkeypatch.setattr(generation_lib.jax, "device_get", get)
    with jax.transfer_guard_host_to_device("disallow"):
        list(generation)
    assert log == ["step", "read"] * 5 + ["read"]


def test_the_cache_is_donated(generator):
    generation = generator.start(PROMPTS, num_tokens=3)
    before = generation.cache
    list(generation)
    assert all(array.is_deleted() for array in jax.tree.leaves(before))


def test_a_stop_token_ends_its_sequence_alone(generator):
    free = tokens(generator, PROMPTS, num_tokens=12, sampling=HOT)
    stop = free[1][4]
    generation = generator.start(PROMPTS, num_tokens=12, sampling=HOT, stop_tokens=[stop])
    list(generation)
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in free]
    assert generation.tokens == cut
    assert len(cut[1]) <= 4 and any(len(ids) == 12 for ids in cut)
    # The last token of a sequence that was not stopped is never appended.
    held = [len(p) + min(len(ids), 11) for p, ids in zip(PROMPTS, cut, strict=True)]
    assert np.asarray(generation.cache.lengths).tolist() == held


def test_generation_ends_when_all_sequences_have(generator):
    free = tokens(generator, [[1], [2]], num_tokens=12, sampling=HOT)
    generation = generator.start(
        [[1], [2]], num_tokens=12, sampling=HOT, stop_tokens=[free[0][2], free[1][1]]
    )
    assert len(list(generation)) <= 3
    assert generation.finished.all()


def test_a_sequence_that_the_host_ends_grows_no_more(generator):
    generation = generator.start(PROMPTS, num_tokens=12, sampling=HOT)
    for n, _ in enumerate(generation):
        if n == 3:
            generation.finish(2)
    assert [len(ids) for ids in generation.tokens] == [12, 12, 4, 12]
    # The fifth step after the prompt was under way.
    assert int(generation.cache.lengths[2]) == len(PROMPTS[2]) + 4
    assert int(generation.cache.lengths[1]) == len(PROMPTS[1]) + 11


def test_timing(generator):
    generation = generator.start(PROMPTS, num_tokens=5)
    list(generation)
    timing = generation.timing
    assert timing.decoded == 4 * 4 and timing.prompt_tokens == sum(map(len, PROMPTS))
    assert 0 < timing.first < timing.last
    assert timing.decode_tokens_per_second == 16 / (timing.last - timing.first)
    once = generator.start(PROMPTS, num_tokens=1)
    list(once)
    assert once.timing.decode_tokens_per_second is None


@pytest.mark.slow
def test_what_compiles_is_run_once_beforehand_and_counted_apart(make_model, monkeypatch):
    generator = Generator(make_model("lrkv"), chunk=5)
    log = []
    for name in ("_prefill", "_decode_step"):
        real = getattr(generator, name)
        call = lambda *args, name=name, real=real: log.append(name) or real(*args)
        monkeypatch.setattr(generator, name, call)
    first = generator.start(PROMPTS, num_tokens=1)
    list(first)
    work = ["_prefill"] * 3 + ["_decode_step"]
    assert log == ["_prefill", "_decode_step", *work]
    assert first.timing.compiling > first.timing.first > 0
    del log[:]
    again = generator.start(PROMPTS[::-1], num_tokens=1)
    list(again)
    assert log == work and again.timing.compiling == 0
    del log[:]
    generator.start(PROMPTS, num_tokens=1, capacity=256)  # other arrays
    assert log == ["_prefill", "_decode_step", *work]


@pytest.mark.parametrize("name", quick.only(["mla"], ["lrkv", "mla"]))
def test_what_is_traced_does_not_grow_with_the_batch(make_model, name):
    """Not for devices that are not there either: every platform's branches are traced."""
    generator = Generator(make_model(name))

    def size(batch):
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), generator.weights)
        cache = generator._cache(batch, 128)
        int_B = jax.ShapeDtypeStruct((batch,), jnp.int32)
        flag_B = jax.ShapeDtypeStruct((batch,), jnp.bool)
        choice = program.Choice(
            jax.eval_shape(Sampling().parameters),
            jax.eval_shape(lambda: jax.random.key(0)),
            jax.ShapeDtypeStruct((batch,), jnp.uint32),
            jax.ShapeDtypeStruct((V,), jnp.bool),
        )
        chunk = jax.ShapeDtypeStruct((batch, 16), jnp.int32)
        traced = (
            generator._prefill.trace(whole, cache, chunk, int_B),
            generator._decode_step.trace(whole, cache, int_B, flag_B, flag_B, choice),
        )
        return [(_equations(t.jaxpr.jaxpr), t.lower().as_text().count("\n")) for t in traced]

    few, many = size(8), size(256)
    assert few == many
    assert all(300 < equations < 10_000 for equations, _ in few)


def _equations(jaxpr) -> int:
    """How many equations a jaxpr and all within it have."""
    return len(jaxpr.eqns) + sum(map(_equations, jax.extend.core.subjaxprs(jaxpr)))


def test_who_asks_hears_of_compiling_and_of_prompts(make_model):
    generator, heard = Generator(make_model("lrkv"), chunk=5), []
    options = dict(
        num_tokens=2,
        sampling=HOT,
        on_compile=lambda: heard.append(("compiling", generator._decode_step._cache_size())),
        on_prefill=lambda done, of: heard.append((done, of)),
    )
    got = tokens(generator, PROMPTS, **options)
    assert heard == [("compiling", 0), (1, 3), (2, 3), (3, 3)]
    del heard[:]
    assert tokens(generator, PROMPTS, **options) == got
    assert heard == [(1, 3), (2, 3), (3, 3)]
    del heard[:]
    tokens(generator, [[1]] * 4, **options)  # nothing to read, and all sizes as before
    assert heard == []


def test_time_runs_from_the_call(generator, monkeypatch):
    tokens(generator, PROMPTS)
    real = generator._check_memory
    monkeypatch.setattr(generator, "_check_memory", lambda *a: time.sleep(0.3) or real(*a))
    generation = generator.start(PROMPTS, num_tokens=1)
    list(generation)
    assert generation.timing.first > 0.3


def test_short_prompts_enter_in_narrow_chunks(make_model, monkeypatch):
    generator = Generator(make_model("lrkv"))
    widths, seen = [], set()
    record = lambda weights, cache, tokens_BT, _: widths.append(tokens_BT.shape[1]) or cache
    monkeypatch.setattr(generator, "_prefill", record)
    for longest in (2, 17, 18, 33, 34, 65, 66, 129, 200, 1):
        del widths[1:]
        generator.start([[1], [2] * longest], num_tokens=1, capacity=256)
        want = min(128, max(16, 1 << (longest - 2).bit_length()))
        assert set(widths[1:]) <= {want} and (widths[1:] or longest == 1)
        seen |= {*widths}
    assert len(seen) == 4  # programs


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
        ([[1.7]], {}, "prompt 1, token 1: no id 1.7; the vocabulary"),
        ("ab", {}, "prompt 1, token 1: no id a"),
        ([[1]], dict(stop_tokens=[1.0]), "stop token 1.0: no such id"),
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
def test_requests_that_cannot_be(generator, prompts, options, message):
    with pytest.raises(UserError, match=message):
        generator.start(prompts, **(dict(num_tokens=10) | options))


@pytest.mark.slow
def test_the_capacity_asked_for_suffices_to_its_last_token(generator):
    """And is what is taken where none is asked for; the last token is never appended."""
    roomy = tokens(generator, [[1] * 119], num_tokens=10, capacity=256, sampling=HOT)
    asked = tokens(generator, [[1] * 119], num_tokens=10, capacity=128, sampling=HOT)
    generation = generator.start([[1] * 119], num_tokens=10, sampling=HOT)
    list(generation)
    assert roomy == asked == generation.tokens and generation.cache.capacity == 128
    assert int(generation.cache.lengths[0]) == 128
    with pytest.raises(UserError, match="sequence 1 holds 120 tokens and 9 more are to come"):
        generator.start([[1] * 120], num_tokens=10, capacity=128)


def test_learned_positions_end(make_model):
    learned = Generator(make_model("mha", positions="learned", max_positions=40))
    assert generation_lib.max_positions(learned.config) == 40
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

    def asked(generator, **options):
        monkeypatch.setattr(generator, "_check_memory", stop)
        with pytest.raises(StopIteration):
            generator.start([[1]], **options)
        return sizes[-1]

    assert asked(generator, num_tokens=2, capacity=limit) == limit
    # Three chips: 128 · 2^i slots on each would be 1.5 times what there are angles for.
    three, most = on_chips("lrkv", 3), limit // 384 * 384
    assert asked(three, num_tokens=limit - 300) == most
    with pytest.raises(UserError, match=f"{most} tokens in a cache split over 3 chips"):
        three.start([[1]], num_tokens=2, capacity=limit)
    with pytest.raises(UserError, match=f"rope positions end after {most} tokens"):
        three.start([[1]], num_tokens=limit)
    # Without angles there is no such limit; with those of "+" there is.
    none = Generator(make_model("mha", positions="none"))
    assert asked(none, num_tokens=2, capacity=2 * limit) == 2 * limit
    plus = Generator(make_model("qk_tied_plus", positions="none"))
    with pytest.raises(UserError, match=message):
        plus.start([[1]], num_tokens=2, capacity=limit + 1)
    with pytest.raises(UserError, match="length = 1048577: the model's positions have angles"):
        mesh = program.make_mesh(1, jax.devices())
        program.lowered_step(generator.config, mesh, batch=1, length=limit + 1)


def test_a_cache_beyond_memory(generator, monkeypatch):
    monkeypatch.setattr(runtime, "memory_per_device", lambda: 1000)
    with pytest.raises(UserError, match="a cache of 1 sequences of 128 tokens needs"):
        generator.start([[1]], num_tokens=3)


def test_memory_that_a_device_has_left(generator, monkeypatch):
    """What is in use there is not free; of a CPU's memory it was never counted."""
    generation = generator.start([[1]], num_tokens=3)
    need = cache_lib.live_bytes(generation.cache)
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: dict(bytes_in_use=50_000))
    monkeypatch.setattr(runtime, "memory_per_device", lambda: need + 49_999)
    tokens(generator, [[1]], num_tokens=3)
    monkeypatch.setattr(generation_lib.jax, "local_devices", lambda: [device])
    with pytest.raises(UserError, match="a cache of 1 sequences of 128 tokens needs"):
        generator.start([[1]], num_tokens=3)
    monkeypatch.setattr(runtime, "memory_per_device", lambda: need + 50_000)
    tokens(generator, [[1]], num_tokens=3)


def test_models_and_options_that_cannot_be(make_model):
    with pytest.raises(UserError, match="causal = False: only a causal model"):
        Generator(make_model("mha", causal=False))
    with pytest.raises(UserError, match="implementation = 'fast': must be one of 'xla'"):
        Generator(make_model("lrkv"), implementation="fast")
    with pytest.raises(UserError, match="'tpu': runs on one TPU; the model is on 1 x cpu"):
        Generator(make_model("lrkv"), implementation="tpu")
    with pytest.raises(UserError, match="chunk = 0"):
        Generator(make_model("lrkv"), chunk=0)


# -- the cache on several chips --------------------------------------------------------------------


@pytest.fixture
def on_chips(make_model):
    """A function of a mechanism's name, a number of chips and options: a Generator."""

    def build(name, chips, **options):
        mesh = program.make_mesh(chips, jax.devices())
        return Generator(make_model(name), chunk=150, mesh=mesh, **options)

    return build


LONG = [[5], list(range(32)) * 9, [4] * 127, [1, 2] * 63]  # to the third stripe, ends of the first


@pytest.mark.parametrize(
    "name, sampling, several",
    quick.only(
        [("lrkv", HOT, (2,))],
        [
            ("lrkv", GREEDY, (2, 8)),
            ("mla", GREEDY, (2, 8)),
            ("lrkv", HOT, (2,)),
            ("lrkv", HOT, (8,)),
        ],
    ),
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
    prefill = generator._prefill.lower(generator.weights, cache, tokens_BT, counts_B).compile()
    state = *generation._first, generation._cancelled_B, generation._choice
    step = generator._decode_step.lower(generator.weights, cache, *state).compile()
    # A prompt needs only the cache of the last layer: nothing there attends.
    for compiled, T, layers in ((prefill, 128, L - 1), (step, 1, L)):
        found = hlo.collectives(compiled.as_text())
        assert {c.kind for c in found} == {"all-reduce"}
        outputs = 4 * T * 4 * (8 + 1) * 4  # [B, T, N, Hv + 1] float32
        assert sum(c.bytes for c in found) == layers * (outputs + 4 * T * 4 * 4)
        aliased = compiled.memory_analysis().alias_size_in_bytes
        assert aliased == cache_lib.live_bytes(cache) // 8 + 4 * 4


def test_weights_are_whole_on_every_chip(on_chips):
    for weight in jax.tree.leaves(on_chips("lrkv", 2).weights):
        assert weight.sharding.is_fully_replicated and len(weight.sharding.device_set) == 2


def test_memory_is_counted_per_chip(on_chips, monkeypatch):
    generator = on_chips("lrkv", 2)
    need = cache_lib.live_bytes(generator._cache(1, 256)) // 2
    monkeypatch.setattr(runtime, "memory_per_device", lambda: need)
    assert generator._check_memory(1, 256) == 256
    monkeypatch.setattr(runtime, "memory_per_device", lambda: need - 1)
    with pytest.raises(UserError, match="1 sequences of 256 tokens .* GB on each of 2 chips"):
        generator._check_memory(1, 256)


def test_chips_that_cannot_be(on_chips, make_model):
    mesh = jax.make_mesh((2, 2), ("data", "cache"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="data = 2, cache = 2: decoding takes one axis 'cache'"):
        Generator(make_model("lrkv"), mesh=mesh)
    with pytest.raises(UserError, match=r"chips = 9: there are 8 \(cpu:0, .*cpu:7\)"):
        on_chips("lrkv", 9)
    with pytest.raises(
        UserError, match="'reference': reads a whole cache.*2 chips: use one of xla"
    ):
        on_chips("lrkv", 2, implementation="reference")
    with pytest.raises(UserError, match="'tpu': runs on one TPU; the model is on 2 x cpu"):
        on_chips("lrkv", 2, implementation="tpu")


def test_capacities_are_few():
    assert [generation_lib._round(n) for n in (1, 128, 129, 256, 257, 600, 1025)] == [
        *(128, 128, 256, 256, 512, 1024, 2048)
    ]
