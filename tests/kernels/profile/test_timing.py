"""Timing of decode kernels: chains of calls over a ring of caches, contenders in turns."""

import dataclasses
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention import cache_layouts, shapes
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes
from kvjax.kernels.profile import contenders, side_by_side, timing


def test_every_call_of_a_chain_runs_after_the_one_before_on_the_next_cache():
    """A call that does not depend on the one before would be hoisted out of the loop."""
    seen = []

    def attend(query, cache):
        seen.append((float(cache[0]), float(query.ravel()[0])))
        return np.float32(1e30 * len(seen))[None]

    def call(inputs, cache, first_B):
        del first_B
        result = jax.ShapeDtypeStruct((1,), jnp.float32)
        return jax.pure_callback(attend, result, inputs.query, cache["base_key"])

    inputs = cache_layouts.GroupedInputs(query=jnp.zeros((1, 1, 1, 1)), scale=1.0)
    caches = [dict(base_key=jnp.full((1,), float(i))) for i in range(3)]
    out = timing.chain(call, passes=2)(2, inputs, caches, jnp.zeros((1,), jnp.int32))
    assert [cache for cache, _ in seen] == [0.0, 1.0, 2.0] * 4
    # Call i returned 1e30·i; the next query increases by 1e-30 times this.
    np.testing.assert_allclose([q for _, q in seen], np.cumsum(range(12)), rtol=1e-6)
    np.testing.assert_allclose(out.query.ravel(), sum(range(13)), rtol=1e-6)


def test_a_chain_reads_the_caches_where_they_are():
    """All computation is inside the loop; temporaries are smaller than a cache."""
    shape = GroupedSizes(N=2, K=2)
    inputs, cache = shapes.abstract(shape, batch=1, length=4096, dtype=jnp.float32)

    def call(o, c, first_B):
        return jnp.sum(o.query[:, 0, :, :, None] * c["base_key"], axis=2)

    rounds, first_B = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((), (1,)))
    compiled = timing.chain(call, 5).lower(rounds, inputs, [cache] * 3, first_B).compile()
    _, _, entry = compiled.as_text().rpartition("\nENTRY")
    assert "while(" in entry and '"known_trip_count":{"n":"5"}' in compiled.as_text()
    assert "fusion(" not in entry
    cache_bytes = cache["base_key"].size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 4


def test_depend_on_changes_no_values():
    inputs, _ = shapes.problem(ResidualSizes(N=2, K=2, R=16), batch=1, length=8, dtype=jnp.bfloat16)
    moved = timing._depend_on(inputs, jnp.full((3,), 2.0))
    jax.tree.map(np.testing.assert_array_equal, moved, inputs)
    assert moved.expand_key is inputs.expand_key
    assert moved.query is not inputs.query
    assert moved.residual_query is not inputs.residual_query


def test_the_slope_excludes_a_runs_constant_cost():
    ran = []

    def seconds(run):
        ran.append(run())
        return 0.125 + 0.25 * ran[-1]

    sample = timing.slope(lambda rounds: lambda: rounds, 8, target=5.0, seconds=seconds)
    compiled = list(ran)
    assert sample() == 0.25 / 8
    long, short = ran[len(compiled) :]
    assert (short, long) == (1, 15)  # 5 s more of rounds that seem to take 0.125 + 0.25
    assert {long, short} == set(compiled)  # both ran before: nothing compiles in a sample


def test_measurements_are_taken_in_turns():
    clock = itertools.count()
    samples = {name: lambda: next(clock) for name in "abc"}
    seconds = timing.interleaved(samples, 4)
    assert seconds == dict(a=[0, 5, 7, 9], b=[1, 3, 8, 10], c=[2, 4, 6, 11])
    assert timing.spread([3, 1, 2, 9]) == timing.Spread(2.5, 1, 9)


def test_cuda_events_time_one_call_after_a_read():
    log = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            assert end is not self
            return 2.0  # milliseconds

    ahead = types.SimpleNamespace(sum=lambda: log.append("read"))
    cuda = types.SimpleNamespace(Event=Event, synchronize=lambda: log.append("wait"))
    torch = types.SimpleNamespace(cuda=cuda, ones=lambda *_, **__: ahead)

    def attend(keys, values):
        log.append((keys, values))

    caches = [("k0", "v0"), ("k1", "v1"), ("k2", "v2")]
    sample = contenders._by_events(torch, attend, caches, target=0.02)
    log.clear()
    assert sample() == 2e-3
    calls = log[2:-1:4]  # each on the cache after the last one's
    assert calls == [caches[(caches.index(calls[0]) + i) % 3] for i in range(10)]
    assert log == [x for call in calls for x in ("read", "event", call, "event")] + ["wait"]


@pytest.mark.parametrize("library", ["torch", "torch_flash"])
def test_arguments_of_pytorch(monkeypatch, library):
    """Caches are in the library's layout, with `enable_gqa` for GQA; refused without a GPU."""
    calls, installed = [], []

    def attend(*arrays, **options):
        calls.append((*arrays, options))

    def draw(*dims, dtype, device):
        assert (dtype, device) == ("bf16", "cuda")
        return dims

    functional = types.SimpleNamespace(scaled_dot_product_attention=attend)
    torch = types.ModuleType("torch")
    torch.randn, torch.bfloat16 = draw, "bf16"
    torch.nn = types.SimpleNamespace(functional=functional)
    torch.cuda = types.SimpleNamespace(is_available=lambda: "gpu" in installed)
    flash = types.ModuleType("flash_attn")
    flash.flash_attn_with_kvcache = attend
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setattr(
        contenders.importlib.util, "find_spec", lambda name: name if name in installed else None
    )

    def by_events(torch, attend, caches, target):
        for cache in caches:
            attend(*cache)
        return target

    monkeypatch.setattr(contenders, "_by_events", by_events)

    def sample(shape):
        setup = types.SimpleNamespace(shape=shape, batch=2, length=8)
        problem = types.SimpleNamespace(setup=setup, caches=[{}] * 3)
        return contenders.sample(library, problem, None, target=0.5)

    for name, why in (("torch", "PyTorch is not installed"), ("gpu", "sees no CUDA device")):
        with pytest.raises(ImportError, match=why):
            sample(GroupedSizes(N=6, K=3))
        installed.append(name)
    if library == "torch_flash":
        with pytest.raises(ImportError, match="flash-attn is not installed"):
            sample(GroupedSizes(N=6, K=3))
    installed.append("flash_attn")

    def dims(heads, tokens, width):
        return (2, heads, tokens, width) if library == "torch" else (2, tokens, heads, width)

    for K in (3, 6):
        calls.clear()
        assert sample(GroupedSizes(N=6, K=K, H=16, Hv=32)) == 0.5
        options = dict(enable_gqa=True) if (library, K) == ("torch", 3) else {}
        arrays = dims(6, 1, 16), dims(K, 8, 16), dims(K, 8, 32)
        assert calls == [(*arrays, options)] * 3  # a ring of as many caches as ours


def test_arguments_of_cudnn(monkeypatch):
    """Copies of the caches with tokens second, lowered for the whole ring."""
    calls, targets = [], []

    def attend(query, keys, values, *, scale, implementation):
        calls.append((query.shape, keys.shape, values.shape, scale, implementation))
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sizes = dict(batch=2, length=64, dtype=jnp.dtype(jnp.float32), copies=3, passes=2)
    setup = contenders.Setup(shape=GroupedSizes(N=6, K=3, H=16, Hv=32), **sizes)
    chain, arguments = contenders.program("cudnn", setup)
    program = chain.lower(*arguments).compile()
    assert calls == [((2, 1, 6, 16), (2, 64, 3, 16), (2, 64, 3, 32), 0.25, "cudnn")]

    def slope(make, calls, *, target):
        targets.append((calls, target))
        return make(5)

    monkeypatch.setattr(timing, "slope", slope)
    run = contenders.sample("cudnn", contenders.Problem(setup), program, target=0.5)
    assert run().query.shape == (2, 1, 6, 16) and targets == [(6, 0.5)]
    assert contenders.default("gpu") == ("gpu", "xla", "cudnn", "torch", "torch_flash")
    assert contenders.default("tpu") == ("tpu", "xla") and contenders.default("cpu") == ("xla",)


def test_device_memory_and_bytes_of_a_copy(monkeypatch):
    slopes = []

    def slope(make, calls, *, target):
        slopes.append((calls, target, int(make(3)()[0])))  # one more each time
        return make

    monkeypatch.setattr(timing, "slope", slope)
    assert timing.copy(target=0.5, num_bytes=64)[1] == 128  # read and written
    assert slopes.pop() == (4, 0.5, 12)
    monkeypatch.setattr(timing, "_CPU_COPY_BYTES", 32)
    monkeypatch.setattr(timing, "_COPY_BYTES", 16)
    assert timing.copy(target=0.5)[1] == 64
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert timing.copy(target=0.5)[1] == 32

    assert 2**20 < timing.memory_bytes() < 2**50
    stats = [dict(bytes_limit=123.0), dict(other=1), None]
    for limit in stats:
        gpu = types.SimpleNamespace(
            platform="gpu", device_kind="a GPU", memory_stats=lambda limit=limit: limit
        )
        monkeypatch.setattr(jax, "devices", lambda gpu=gpu: [gpu])
        if limit is stats[0]:
            assert timing.memory_bytes() == 123
            continue
        with pytest.raises(UserError, match="^a GPU does not report its memory$"):
            timing.memory_bytes()


def test_pytorch_gives_memory_back_where_it_was_used(monkeypatch):
    calls, used = [], []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: bool(used), empty_cache=lambda: calls.append(1)
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    contenders.free()
    used.append(True)
    contenders.free()
    assert calls == [1]
    monkeypatch.delitem(sys.modules, "torch")
    contenders.free()


def test_the_ring_is_larger_than_the_chip_keeps():
    assert timing.ring(50, 100) == 16
    assert timing.ring(10**9, 100) == 1
    assert timing.ring(1, 10**6) == timing.MAX_RING


def test_a_round_takes_milliseconds_however_small_the_caches():
    assert timing.passes(10**9, 1, 1e12) == 5  # of 1 ms each
    assert timing.passes(10**6, 2, 1e12) == 125  # a call may be 20 us of launches
    assert timing.passes(10**12, 1, 1e12) == timing.passes(10**9, 1, -1.0) == 1


def test_a_contender_is_timed_by_the_program_that_was_compiled_before():
    sizes = dict(batch=2, length=64, dtype=jnp.dtype(jnp.float32))
    setup = contenders.Setup(shape=GroupedSizes(N=2, K=1), copies=3, passes=2, **sizes)
    chain, arguments = contenders.program("xla", setup, tile_kv=64)
    program = chain.lower(*arguments).compile()
    problem, ran = contenders.Problem(setup), []

    def counted(rounds, *arguments):
        ran.append(int(rounds))
        return program(rounds, *arguments)

    sample = contenders.sample("xla", problem, counted, target=1e-4)
    ran.clear()
    assert abs(sample()) < 1.0
    assert ran[1] == 1 < ran[0]
    with pytest.raises(NotImplementedError, match="torch reads MHA's and GQA's cache only"):
        contenders.program("torch", dataclasses.replace(setup, shape=shapes.SHAPES["d12"]["mla"]))
    assert contenders.program("torch", setup) is None
    with pytest.raises(ImportError, match="there is no GPU"):
        contenders.program("cudnn", setup)


def test_programs_compile_side_by_side_and_failures_wait_until_asked():
    def fails():
        raise NotImplementedError("not this")

    def add():
        return jax.jit(lambda x: x + 1), (jax.ShapeDtypeStruct((), jnp.int32),)

    stored = dict(kept=lambda x: x + 2)
    makers = dict(add=add, none=lambda: None, fails=fails, kept=fails)
    programs = side_by_side.compiled(makers, stored.get)
    assert programs["kept"]()(1) == 3
    assert programs["add"]()(1) == 2 and programs["none"]() is None
    with pytest.raises(NotImplementedError, match="not this"):
        programs["fails"]()


def test_a_problem_is_a_ring_of_full_distinct_caches():
    shape = ResidualSizes(N=2, K=2, R=16)
    sizes = dict(batch=2, length=3000, dtype=jnp.dtype(jnp.bfloat16))
    problem = contenders.Problem(contenders.Setup(shape=shape, copies=2, passes=1, **sizes))
    inputs, cache = shapes.abstract(shape, batch=2, length=3000, dtype=jnp.bfloat16)

    def kinds(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert kinds(problem.inputs) == kinds(inputs)
    assert [kinds(c) for c in problem.caches] == [kinds(cache)] * 2
    assert problem.first_B.tolist() == [2999, 2999]
    a, b = (c["base_key"].astype(jnp.float32) for c in problem.caches)
    assert (a != b).mean() > 0.9
    assert (a[0] != a[1]).mean() > 0.9 and (a != 0).mean() > 0.9
