"""Generation with a cache: greedy tokens are the argmax of the training model."""

import collections
import time

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.decoding import generator as generator_lib, program
from kvjax.decoding.generator import Generator, chunk_width
from kvjax.decoding.sampling import Sampling
from tests.decoding.prompts import GREEDY, HOT, PROMPTS, V, tokens

compilations = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compilations.update([event])
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block"),
    [("lrkv", {}), ("mla", {}), ("mha", dict(positions="learned", max_positions=40))],
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
    assert clear > 0.9 * total  # most tokens have one admissible value


def test_a_batch_of_any_lengths_is_one_prompt_at_a_time(generator):
    batch = tokens(generator, PROMPTS, sampling=HOT, seed=7)
    alone = [tokens(generator, [prompt], sampling=HOT, seed=7)[0] for prompt in PROMPTS]
    assert batch == alone
    assert tokens(generator, PROMPTS, sampling=HOT, seed=8) != batch


def test_every_position_draws_anew(generator):
    """At this temperature tokens are nearly uniform."""
    (ids,) = tokens(generator, [[1]], num_tokens=20, sampling=Sampling(temperature=1e4))
    assert len(set(ids)) > 8


def test_equal_prompts_get_different_texts(generator):
    first, *others = tokens(generator, [[1, 2]] * 4, sampling=HOT)
    assert first not in others
    assert tokens(generator, [[1, 2]], sampling=HOT) == [first]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 128])
def test_chunk_size_does_not_matter(generator, make_model, chunk):
    other = Generator(make_model("lrkv"), chunk=chunk)
    options = dict(sampling=HOT, seed=1)
    assert tokens(other, PROMPTS, **options) == tokens(generator, PROMPTS, **options)


def test_nothing_is_compiled_twice(generator):
    tokens(generator, PROMPTS, sampling=HOT)

    def sizes():
        return [f._cache_size() for f in (generator.engine.prefill, generator.engine.decode_step)]

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
    log, real_step, real_get = [], generator.engine.decode_step, jax.device_get
    generation = generator.start(PROMPTS, num_tokens=6)

    def step(*args):
        log.append("step")
        return real_step(*args)

    def get(x):
        log.append("read")
        return real_get(x)

    monkeypatch.setattr(generator.engine, "decode_step", step)
    monkeypatch.setattr(generator_lib.jax, "device_get", get)
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
    prompts = [[1], [2], [3], [4]]
    first, *others = tokens(generator, prompts, num_tokens=12, sampling=HOT)
    stops = [first[2], *(ids[1] for ids in others)]
    generation = generator.start(prompts, num_tokens=12, sampling=HOT, stop_tokens=stops)
    assert len(list(generation)) <= 3
    assert generation.finished.all()


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
def test_compilation_is_a_warm_up_and_timed_separately(make_model, monkeypatch):
    generator = Generator(make_model("lrkv"), chunk=5)
    log = []
    for name in ("prefill", "decode_step"):
        real = getattr(generator.engine, name)

        def call(*args, name=name, real=real):
            log.append(name)
            return real(*args)

        monkeypatch.setattr(generator.engine, name, call)
    first = generator.start(PROMPTS, num_tokens=1)
    list(first)
    work = ["prefill"] * 3 + ["decode_step"]
    assert log == ["prefill", "decode_step", *work]
    assert first.timing.compiling > first.timing.first > 0
    del log[:]
    again = generator.start(PROMPTS[::-1], num_tokens=1)
    list(again)
    assert log == work and again.timing.compiling == 0
    del log[:]
    generator.start(PROMPTS, num_tokens=1, capacity=256)  # other arrays
    assert log == ["prefill", "decode_step", *work]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lrkv", "mla"])
def test_the_traced_program_does_not_grow_with_the_batch(make_model, name):
    """The branches of all platforms are traced, even without their devices."""
    engine = Generator(make_model(name)).engine
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), engine.weights)

    def size(batch):
        cache = engine.cache(batch, 128)
        int_B = jax.ShapeDtypeStruct((batch,), jnp.int32)
        flag_B = jax.ShapeDtypeStruct((batch,), jnp.bool)
        choice = program.SamplingState(
            jax.eval_shape(Sampling().parameters),
            jax.eval_shape(lambda: jax.random.key(0)),
            jax.ShapeDtypeStruct((batch,), jnp.uint32),
            jax.ShapeDtypeStruct((V,), jnp.bool),
        )
        chunk = jax.ShapeDtypeStruct((batch, 16), jnp.int32)
        traced = (
            engine.prefill.trace(weights, cache, chunk, int_B),
            engine.decode_step.trace(weights, cache, int_B, flag_B, flag_B, choice),
        )
        return [(_equations(t.jaxpr.jaxpr), t.lower().as_text().count("\n")) for t in traced]

    few, many = size(8), size(256)
    assert few == many
    assert all(300 < equations < 10_000 for equations, _ in few)


def _equations(jaxpr) -> int:
    """Counts the equations of a jaxpr and of all jaxprs in it."""
    return len(jaxpr.eqns) + sum(map(_equations, jax.extend.core.subjaxprs(jaxpr)))


@pytest.mark.slow
def test_callbacks_of_compilation_and_prefill(make_model):
    generator, heard = Generator(make_model("lrkv"), chunk=5), []
    options = dict(
        num_tokens=2,
        sampling=HOT,
        on_compile=lambda: heard.append(("compiling", generator.engine.decode_step._cache_size())),
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


@pytest.mark.slow
def test_time_runs_from_the_call(generator, monkeypatch):
    tokens(generator, PROMPTS)
    real = generator._check_memory
    monkeypatch.setattr(generator, "_check_memory", lambda *a: time.sleep(0.3) or real(*a))
    generation = generator.start(PROMPTS, num_tokens=1)
    list(generation)
    assert generation.timing.first > 0.3


def test_chunks_of_prompts_have_few_widths():
    widths = [chunk_width(tokens, 128) for tokens in (0, 1, 16, 17, 33, 65, 129, 200)]
    assert widths == [16, 16, 16, 32, 64, 128, 128, 128] and chunk_width(20, 24) == 24
