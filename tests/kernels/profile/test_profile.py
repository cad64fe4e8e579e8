"""The kernel profiler: how it times, what its rows say, and the command with its messages."""

import itertools
import json
import pathlib
import subprocess
import sys
import types
import weakref

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import GroupedConfig
from kvjax.attention import LatentConfig
from kvjax.foundation import command_line
from kvjax.foundation import provenance
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.hardware import datasheets
from kvjax.kernels.decode_attention import readings
from kvjax.kernels.decode_attention import shapes
from kvjax.kernels.decode_attention import tuning
from kvjax.kernels.decode_attention.readings.grouped import GroupedSizes
from kvjax.kernels.decode_attention.readings.residual import ResidualSizes
from kvjax.kernels.profile import __main__ as profile
from kvjax.kernels.profile import contenders
from kvjax.kernels.profile import measured
from kvjax.kernels.profile import static
from kvjax.kernels.profile import timing
from kvjax.kernels.profile import tpu_static

# Timing


def test_every_call_of_a_chain_runs_after_the_one_before_on_the_next_cache():
    """Calls are counted where they run; one that nothing ties to the last would be hoisted."""
    seen = []

    def attend(query, cache):
        seen.append((float(cache[0]), float(query.ravel()[0])))
        return np.float32(1e30 * len(seen))[None]

    def call(operands, cache, first_B):
        del first_B
        result = jax.ShapeDtypeStruct((1,), jnp.float32)
        return jax.pure_callback(attend, result, operands.query, cache["base_key"])

    operands = readings.GroupedReading(query=jnp.zeros((1, 1, 1, 1)), scale=1.0)
    caches = [dict(base_key=jnp.full((1,), float(i))) for i in range(3)]
    out = timing.chain(call, 4)(operands, caches, jnp.zeros((1,), jnp.int32))
    assert [cache for cache, _ in seen] == [0.0, 1.0, 2.0] * 4
    # Call i returned 1e30·i, of which the next query got 1e-30.
    np.testing.assert_allclose([q for _, q in seen], np.cumsum(range(12)), rtol=1e-6)
    np.testing.assert_allclose(out.query.ravel(), sum(range(13)), rtol=1e-6)


def test_a_chain_reads_the_caches_where_they_are():
    """Its program computes within the loop, and has no room for a copy of a cache."""
    shape = GroupedSizes(N=2, K=2)
    operands, cache = shapes.abstract(shape, batch=1, length=4096, dtype=jnp.float32)
    call = lambda o, c, first_B: jnp.sum(o.query[:, 0, :, :, None] * c["base_key"], axis=2)
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = timing.chain(call, 5).lower(operands, [cache] * 3, first_B).compile()
    _, _, entry = compiled.as_text().rpartition("\nENTRY")
    assert "while(" in entry and '"known_trip_count":{"n":"5"}' in compiled.as_text()
    assert "fusion(" not in entry
    one = cache["base_key"].size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < one / 4


def test_what_follows_an_output_leaves_weights_and_the_figures_as_they_are():
    operands, _ = shapes.problem(
        ResidualSizes(N=2, K=2, R=16), batch=1, length=8, dtype=jnp.bfloat16
    )
    moved = timing._follow(operands, jnp.full((3,), 2.0))
    jax.tree.map(np.testing.assert_array_equal, moved, operands)
    assert moved.expand_key is operands.expand_key
    assert moved.query is not operands.query
    assert moved.residual_query is not operands.residual_query


def test_the_slope_leaves_out_what_a_run_costs():
    ran = []

    def seconds(run):
        ran.append(run())
        return 0.125 + 0.25 * ran[-1]

    make = lambda rounds: lambda: rounds
    sample = timing.slope(make, 8, target=5.0, seconds=seconds)
    compiled = list(ran)
    assert sample() == 0.25 / 8
    long, short = ran[len(compiled) :]
    assert long - short == 18  # 5 s of rounds that seem to take (0.125 + 4·0.25) / 4
    assert {long, short} == set(compiled)  # both ran before: nothing compiles in a sample


def test_measurements_are_taken_in_turns():
    clock = itertools.count()
    samples = {name: lambda: next(clock) for name in "abc"}
    taken = timing.interleaved(samples, 4)
    assert taken == dict(a=[0, 5, 7, 9], b=[1, 3, 8, 10], c=[2, 4, 6, 11])
    assert timing.spread([3, 1, 2, 9]) == timing.Spread(2.5, 1, 9)


def test_between_cuda_events_there_is_one_call_and_before_them_a_read():
    did = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            did.append("event")

        def elapsed_time(self, end):
            assert end is not self
            return 2.0  # milliseconds

    ahead = types.SimpleNamespace(sum=lambda: did.append("read"))
    cuda = types.SimpleNamespace(Event=Event, synchronize=lambda: did.append("wait"))
    torch = types.SimpleNamespace(cuda=cuda, ones=lambda *_, **__: ahead)
    attend = lambda keys, values: did.append((keys, values))
    caches = [("k0", "v0"), ("k1", "v1"), ("k2", "v2")]
    sample = contenders._by_events(torch, attend, caches, target=0.02)
    did.clear()
    assert sample() == 2e-3
    calls = did[2:-1:4]  # each on the cache after the last one's
    assert calls == [caches[(caches.index(calls[0]) + i) % 3] for i in range(10)]
    assert did == [x for call in calls for x in ("read", "event", call, "event")] + ["wait"]


@pytest.mark.parametrize("name, options", [("mha", {}), ("gqa", dict(enable_gqa=True))])
def test_pytorch_hears_of_groups_where_there_are_some(monkeypatch, name, options):
    heard = []

    def attend(query, keys, values, **options):
        heard.append(options)

    torch = types.SimpleNamespace(
        randn=lambda *dims, **_: dims,
        bfloat16=None,
        nn=types.SimpleNamespace(
            functional=types.SimpleNamespace(scaled_dot_product_attention=attend)
        ),
    )
    monkeypatch.setattr(contenders, "_torch_with_cuda", lambda: torch)
    by_events = lambda torch, attend, caches, target: [attend(*cache) for cache in caches]
    monkeypatch.setattr(contenders, "_by_events", by_events)
    shape = shapes.SHAPES["d12"][name]
    contenders._torch(types.SimpleNamespace(shape=shape, batch=1, length=8, caches=[{}] * 3), 1.0)
    assert heard == [options] * 3  # a ring of as many caches as ours


def test_pytorch_gives_memory_back_where_it_was_used(monkeypatch):
    did, used = [], []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: bool(used), empty_cache=lambda: did.append(1)
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    contenders.free()
    used.append(True)
    contenders.free()
    assert did == [1]
    monkeypatch.delitem(sys.modules, "torch")
    contenders.free()


def test_the_ring_is_larger_than_the_chip_keeps():
    assert timing.ring(50, 100) == 16
    assert timing.ring(10**9, 100) == 1
    assert timing.ring(1, 10**6) == timing.MAX_RING


def test_a_problem_is_a_ring_of_full_caches_none_like_another():
    shape = ResidualSizes(N=2, K=2, R=16)
    problem = contenders.Problem(shape, batch=2, length=3000, dtype=jnp.bfloat16, copies=2)
    operands, cache = shapes.abstract(shape, batch=2, length=3000, dtype=jnp.bfloat16)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert kinds(problem.operands) == kinds(operands)
    assert [kinds(c) for c in problem.caches] == [kinds(cache)] * 2
    assert problem.first_B.tolist() == [2999, 2999]
    a, b = (c["base_key"].astype(jnp.float32) for c in problem.caches)
    assert (a != b).mean() > 0.9
    assert (a[0] != a[1]).mean() > 0.9 and (a != 0).mean() > 0.9


# Rows


def _run(**changes):
    run = dict(mechanisms=("mha", "lrkv"), points=((2, 512),), rounds=3, target=1e-3)
    run |= dict(model="d12", implementations=("xla", "tpu"), device="h200") | changes
    return measured.Run(**run)


def test_a_row_is_bytes_and_flops_over_the_median():
    problem = types.SimpleNamespace(
        shape=GroupedSizes(N=6, K=2),
        batch=2,
        length=1000,
        dtype=jnp.dtype(jnp.bfloat16),
        caches=[{}] * 7,
    )
    row = measured.row(problem, [3e-6, 1e-6, 2e-6], copied=2.048e12, run=_run())
    assert row == dict(
        cache_bytes=2 * 1000 * 2 * 256 * 2,
        seconds=dict(median=2e-6, low=1e-6, high=3e-6),
        gbps=pytest.approx(1024.0),
        of_datasheet=pytest.approx(1.024 / 4.8),
        of_copy=pytest.approx(0.5),
        tflops=pytest.approx(2000 * 2 * 6 * 256 / 2),
        caches=7,
        may_stay_on_chip=True,
        may_be_launches=False,
    ) | dict(tflops=pytest.approx(2000 * 2 * 6 * 256 / 2e-6 / 1e12))
    assert measured.row(problem, [1.0], copied=1.0, run=_run(device=None))["of_datasheet"] is None
    assert "noise" in measured.row(problem, [2.0, -1.0, -1.0], copied=1.0, run=_run())["why"]
    problem.caches = [{}] * 245  # of 2,048,000 bytes, beside 60 MiB
    assert measured.row(problem, [1.0], copied=1.0, run=_run())["may_stay_on_chip"]
    problem.caches = [{}] * 246
    assert not measured.row(problem, [1.0], copied=1.0, run=_run())["may_stay_on_chip"]


def test_short_calls_on_a_gpu_have_a_sign(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    problem = types.SimpleNamespace(
        shape=GroupedSizes(N=6, K=2), batch=1, length=1000, dtype=jnp.bfloat16, caches=[{}] * 999
    )
    names = dict(mechanism="gqa", implementation="gpu", batch=1, length=1000)
    rows = [names | measured.row(problem, [s], copied=1.0, run=_run()) for s in (19e-6, 21e-6)]
    table = measured.table(rows, "")
    us = table.header.index("us")
    assert [row[us] for row in table.rows] == ["19.0†", "21.0"]
    assert table.notes == ["† Below 20 us a call, launching its kernels may be what is measured."]


def test_flops_are_those_of_the_costs():
    widths = dict(num_heads=18, key_dim=128, value_dim=128)
    grouped = lambda K, J, R, **keys: GroupedConfig(
        num_kv_heads=K, num_bases=J, rank=R, **(widths | keys)
    )
    configs = dict(
        mha=grouped(18, 18, 0),
        gqa=grouped(6, 6, 0),
        mqa=grouped(1, 1, 0),
        thin_keys=grouped(18, 18, 0, key_dim=32),
        lrkv=grouped(18, 1, 64),
        lrkv_no_norm=grouped(18, 1, 64, qk_norm="none"),
        lrkv_gqa=grouped(6, 1, 64),
        mla=LatentConfig(latent_dim=768, rope_key_dim=64, **widths),
    )
    for name, config in configs.items():
        flops = config.decode_flops(10_000.0).per_key
        assert shapes.SHAPES["d36"][name].flops().per_key == flops, name
    unrotated = shapes.SHAPES["d36"]["lrkv_no_rope"].flops().per_key
    assert unrotated == configs["lrkv"].decode_flops(None).per_key


@pytest.fixture
def seconds(monkeypatch):
    """Contenders that take 1 s for MHA and half for LRKV; "tpu" refuses MHA and fails on LRKV.

    Libraries take 3 s for MHA; torch has no memory for it. Returns the shapes held at each sample.
    """
    alive, held = weakref.WeakSet(), []

    class Problem(types.SimpleNamespace):
        __hash__ = object.__hash__

    def sample(name, problem, *, target, block=None):
        del target
        if name == "tpu" and problem.shape == "mha":
            raise NotImplementedError("no MHA here")
        if name == "tpu":
            raise ValueError("first line\nsecond")
        if name == "torch":
            raise MemoryError("CUDA out of memory.\nTried")
        if name == "cudnn" and problem.shape == "lrkv":
            raise NotImplementedError("MHA and GQA only")
        held.append(sorted(p.shape for p in alive))
        if name == "cudnn":
            return lambda: 3.0 * len(problem.shape) / 3
        return lambda: {"mha": 1.0, "lrkv": 0.5}[problem.shape] / (block or 1)

    def problem(shape, *, batch, length, dtype, copies):
        shape = "lrkv" if isinstance(shape, ResidualSizes) else "mha"
        sizes = dict(batch=batch, length=length, dtype=dtype)
        made = Problem(shape=shape, caches=[{}] * copies, operands=None, **sizes)
        alive.add(made)
        return made

    monkeypatch.setattr(contenders, "sample", sample)
    monkeypatch.setattr(contenders, "Problem", problem)
    monkeypatch.setattr(timing, "copy", lambda *, target: (lambda: 2.0, 100))
    row = lambda problem, seconds, **_: dict(seconds=dict(median=seconds[0]))
    monkeypatch.setattr(measured, "row", row)
    return held


def test_a_contender_that_cannot_is_a_row_that_says_why(seconds):
    rows, copied = measured.measure(_run())
    assert copied == 50
    said = [(r["mechanism"], r["implementation"], r.get("why", r.get("speedup"))) for r in rows]
    assert said == [
        ("mha", "xla", 1.0),
        ("mha", "tpu", "no MHA here"),
        ("lrkv", "xla", 2.0),
        ("lrkv", "tpu", "ValueError: first line"),
    ]
    assert {(r["batch"], r["length"]) for r in rows} == {(2, 512)}
    rows, _ = measured.measure(_run(mechanisms=("lrkv",)))
    assert "speedup" not in rows[0]  # there is no MHA beside it


def _bytes(monkeypatch, mechanisms):
    """Bytes of each one's caches at 2 x 512 tokens, float32; memory for those of `mechanisms`."""
    run = _run(mechanisms=("mha", "gqa", "lrkv"))
    need = {name: measured._ring_bytes(run, name, 2, 512) for name in run.mechanisms}
    memory = sum(need[name] for name in mechanisms) + 1
    monkeypatch.setattr(timing, "memory_bytes", lambda: memory / measured._MEMORY)
    return need


def test_what_is_held_together_is_a_mechanism_and_mha(seconds, monkeypatch):
    need = _bytes(monkeypatch, ("mha", "lrkv"))
    assert need["gqa"] <= need["lrkv"]
    rows, _ = measured.measure(_run(mechanisms=("mha", "gqa", "lrkv"), implementations=("xla",)))
    assert [r["speedup"] for r in rows] == [1.0, 1.0, 2.0]  # the fake's GQA is as slow as MHA
    assert sorted(seconds) == [["lrkv", "mha"], ["mha"], ["mha", "mha"]]


def test_beside_what_mha_does_not_fit_it_is_absent_by_name(seconds, monkeypatch):
    _bytes(monkeypatch, ("mha",))
    rows, _ = measured.measure(_run(implementations=("xla",)))
    assert seconds == [["mha"], ["lrkv"]]
    mha, lrkv = rows
    assert mha["speedup"] == 1.0 and "seconds" in lrkv and "speedup" not in lrkv
    assert lrkv["no_speedup"] == measured.NO_MHA


def test_what_does_not_fit_the_memory_is_skipped_by_name(seconds, monkeypatch):
    _bytes(monkeypatch, ("lrkv",))
    rows, _ = measured.measure(_run(implementations=("xla",)))
    assert [r["implementation"] for r in rows] == ["", "xla"]
    assert "GB do not fit: " in rows[0]["why"] and rows[0]["mechanism"] == "mha"
    assert rows[1]["no_speedup"] == measured.NO_MHA


def test_only_cudnn_holds_caches_once_more(seconds, monkeypatch):
    need = _bytes(monkeypatch, ("mha", "lrkv"))
    assert need["lrkv"] < need["mha"]
    rows, _ = measured.measure(_run(implementations=("xla", "cudnn", "torch")))
    why = {(r["mechanism"], r["implementation"]): r.get("why") for r in rows}
    assert why["mha", "xla"] is why["lrkv", "xla"] is None
    assert "its own layout's" in why["mha", "cudnn"]
    assert why["lrkv", "cudnn"] == "MHA and GQA only"
    assert why["mha", "torch"] == "MemoryError: CUDA out of memory."
    assert not contenders.copies_caches("torch", shapes.SHAPES["d36"]["mha"])
    assert contenders.copies_caches("cudnn", shapes.SHAPES["d36"]["gqa"])


def test_a_problem_that_cannot_be_built_is_a_row(seconds, monkeypatch):
    def problem(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    monkeypatch.setattr(contenders, "Problem", problem)
    rows, copied = measured.measure(_run())
    assert [r["why"] for r in rows] == ["RuntimeError: RESOURCE_EXHAUSTED: out of memory"] * 2
    assert copied == 50


def test_beside_ours_stands_the_fastest_public_mha(seconds):
    rows, _ = measured.measure(_run(implementations=("xla", "cudnn", "torch")))
    timed = [r for r in rows if "seconds" in r]
    assert [(r["implementation"], r["public_speedup"]) for r in timed] == [
        ("xla", 3.0),
        ("cudnn", 1.0),
        ("xla", 6.0),
    ]
    assert {r["public_by"] for r in timed} == {"cudnn"}
    rows, _ = measured.measure(_run(implementations=("xla", "torch")))
    assert not any("public_speedup" in r for r in rows)


def test_whose_mha_is_said_where_it_is_not_the_kernels(seconds):
    rows, _ = measured.measure(_run(implementations=("tpu", "xla")))
    timed = [r for r in rows if "seconds" in r]
    assert {(r["mha_by"], r["mha_instead_of"]) for r in timed} == {("xla", "tpu: no MHA here")}
    rows, _ = measured.measure(_run(implementations=("xla", "reference")))
    assert not any("mha_instead_of" in r for r in rows)


def test_the_table_says_whose_mha_it_is():
    names = dict(implementation="xla", batch=1, length=1024)
    row = dict(seconds=dict(median=1e-3, low=1e-3, high=1e-3), gbps=1.0, of_copy=0.5, tflops=1.0)
    row |= dict(of_datasheet=None, may_stay_on_chip=True, may_be_launches=False)
    instead = dict(speedup=2.0, mha_by="xla", mha_instead_of="gpu: no")
    rows = [
        names | row | instead | dict(mechanism="gqa", public_speedup=4.0, public_by="cudnn"),
        names | row | dict(mechanism="lrkv", no_speedup=measured.NO_MHA),
    ]
    table = measured.table(rows, "")
    gqa, lrkv = (row[-2:] for row in table.rows)
    assert table.header[-2:] == ["MHA's time / its", "public MHA's / its"]
    assert gqa == ["2.00‡", "4.00 (cudnn)"]
    assert lrkv == ["MHA does not fit beside it", ""]
    stays, instead = table.notes
    assert instead == "‡ MHA by xla, for want of gpu: no." and stays.startswith("\\* ")


def test_tuning_takes_the_fastest_and_says_how(seconds, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FILE", tmp_path / "tuned.json")
    monkeypatch.setattr(tuning, "key", lambda *_: "xla/some-B2-S512")
    (found,) = measured.tune(_run(mechanisms=("mha",), implementations=("xla", "reference")))
    entry = json.loads(tuning.FILE.read_text())["cpu"]["xla/some-B2-S512"]
    best = max(measured.BLOCKS)  # the fake is fastest with the largest
    assert entry["parameters"] == found["parameters"] == dict(block=best)
    assert (entry["source"], entry["seconds"]) == ("measured", 1 / best)
    (found,) = measured.tune(_run(mechanisms=("mha",), implementations=("tpu",)))
    assert found["why"] == "no MHA here"
    monkeypatch.setattr(measured, "BLOCKS", (0, 0))  # of which the fake makes 1, as of nothing
    tuning.FILE.unlink()
    (found,) = measured.tune(_run(mechanisms=("mha",), implementations=("xla",)))
    assert found["why"] == measured.NOTHING_FASTER and not tuning.FILE.exists()


def test_candidates_are_the_modules_own_where_it_says_so(monkeypatch):
    assert measured.candidates("reference") == []  # takes no block
    own = dict(block=(64, 128), split=(1, 2), unknown=(1,))
    module = types.ModuleType("fake")
    module.CANDIDATES = own
    function = lambda operands, cache, first_B, *, block=128, split=1: None
    function.__module__ = "fake"
    monkeypatch.setitem(sys.modules, "fake", module)
    monkeypatch.setitem(measured.IMPLEMENTATIONS, "fake", function)
    first, *others = measured.candidates("fake")
    assert first == {}  # its own
    assert others == [dict(block=b, split=s) for b, s in itertools.product((64, 128), (1, 2))]


# The command


@pytest.fixture
def command(capsys):
    def run(*options):
        profile.main([*options, "--json", "--markdown"])
        out, text = capsys.readouterr()
        return text, json.loads(out)

    return run


@pytest.mark.parametrize(
    "options, message",
    [
        (["--device=a100"], "--device: invalid choice: 'a100' (choose from 'h100', 'h200', 'v4'"),
        (
            ["--mechanisms=mha,mba"],
            "'mba' is none of mha, gqa, mqa, thin_keys,",
        ),
        (["--model=d13"], "--model: invalid choice: 'd13' (choose from 'd12', 'd36')"),
        (["--mechanisms="], "--mechanisms=: '' is none of mha"),
        (["--op=prefill"], "--op: invalid choice: 'prefill' (choose from 'decode_attention')"),
        (["--op="], "--op: invalid choice: ''"),
        (["--implementations=xlb"], "'xlb' is none of xla, "),
        (["--batch=0"], "--batch '0': must be integers of 1 or more"),
        (["--length=1k"], "--length '1k'"),
        (["--rounds="], "--rounds ''"),
        (["--blocks=512"], "must be two sizes, the smaller first"),
        (["--blocks=1024,512"], "must be two sizes, the smaller first"),
        (["--devise=v4"], "unknown option --devise; did you mean '--device'?"),
        (["--device=v5e", "--plot=x.png"], "--plot=x.png: only of what is measured"),
        (["--tune", "--plot=x.png"], "--tune --plot=x.png: only of what is measured"),
        (["--device=h100", "--tune"], "--tune --device=h100: needs the device"),
    ],
)
def test_bad_options_are_one_line(capsys, options, message):
    assert command_line.status(profile.main, options) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("kvjax: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_tpu_that_is_absent(command, monkeypatch, tmp_path):
    monkeypatch.setattr(profile, "RESULTS", tmp_path / "experiments" / "results" / "kernels")
    (tmp_path / "experiments").mkdir()

    def per_token(chip, model, mechanism, *, block=1024):
        assert (chip.name, model) == ("v5e", "d36")
        if mechanism == "mha":
            raise NotImplementedError("the kernel takes no MHA")
        if mechanism == "gqa" and block == 512:
            raise tpu_static.DoesNotCompile("block 512: no")
        return tpu_static.PerToken(3.0 + 1024 / block, dict(MXU=2.0, XLU=0.0))

    monkeypatch.setattr(tpu_static, "per_token", per_token)
    text, result = command("--device=v5e", "--mechanisms=mha,lrkv,gqa", "--save")
    assert (result["device"], result["static"]) == ("v5e", True)
    mha, lrkv, gqa = result["rows"]
    assert mha["why"] == "the kernel takes no MHA" and "the kernel takes no MHA" in text
    assert lrkv["static"] and lrkv["bytes"] == 5192
    assert (lrkv["bundles"], lrkv["bundles_in_a_block"], lrkv["bundles_per_block"]) == (4, 3, 1024)
    assert gqa["bundles"] == 4 and gqa["without_blocks"] == "block 512: no"
    assert lrkv["of_hbm"] == pytest.approx(4 / 9.528, rel=1e-3) and lrkv["bandwidth_bound"]
    assert text.startswith("static, v5e") and "yes, by 2.38x" in text
    assert "| MXU |" in text and "XLU" not in text  # units that do nothing have no column
    saved = json.loads((profile.RESULTS / "v5e_decode_attention_static.json").read_text())
    made_by = saved.pop("made_by")
    assert saved == result and made_by["packages"]["jax"] == jax.__version__


def test_a_static_entry_is_labelled_so(command, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FILE", tmp_path / "tuned.json")

    def per_token(chip, model, mechanism, *, block=128):
        if block > 1024:
            raise tpu_static.DoesNotCompile("too large")
        return tpu_static.PerToken(1 / block, {})

    blocks = [dict(block=block) for block in (512, 1024, 2048)]
    monkeypatch.setattr(measured, "candidates", lambda name: [{}, *blocks])

    monkeypatch.setattr(tpu_static, "per_token", per_token)
    command("--device=v5p", "--mechanisms=lrkv", "--tune", "--length=1024,4096")
    ((key, entry),) = json.loads(tuning.FILE.read_text())["TPU v5"].items()
    assert key.startswith("tpu/residual")
    assert key.endswith("N18-K18-J1-R64-H128-V128-B1-S1024")
    assert (entry["parameters"], entry["source"]) == (dict(block=1024), "static")


def test_a_gpu_that_is_absent(command, monkeypatch, capsys):
    def resources(shape, *, batch, length, device):
        assert (batch, length, device) == (1, 1024, "h200")
        if shape.K == 18:
            raise ValueError("too many heads")
        return dict(registers=168, spill_bytes=0, shared_bytes=224_256)

    fake = types.SimpleNamespace(resources=resources)
    monkeypatch.setitem(sys.modules, "kvjax.kernels.profile.gpu_static", fake)
    text, result = command("--device=h200", "--mechanisms=mha,gqa", "--length=1024")
    assert [r.get("registers") for r in result["rows"]] == [None, 168]
    assert "| gqa | 1 | 1,024 | 168 | 0 | 224,256 |" in text and "too many heads" in text
    monkeypatch.setitem(sys.modules, "kvjax.kernels.profile.gpu_static", None)
    assert command_line.status(profile.main, ["--device=h200"]) == 2
    assert "--device=h200: its compiler is not here" in capsys.readouterr().err


def test_the_kinds_tuned_for_are_those_of_the_datasheets():
    for name, kind in static._TPU_KINDS.items():
        device = types.SimpleNamespace(device_kind=kind, platform="tpu")
        assert datasheets.of(device).name == name


def test_runs_with_jax_alone(tmp_path):
    """On the CPU, from outside the checkout, without what training needs."""
    program = """
import sys
BLOCKED = ("grain", "tensorflow_datasets", "tensorflow", "array_record", "ml_collections",
           "matplotlib", "psutil", "tokenizers", "pyarrow", "tqdm",
           "torch", "experiments")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"{b}." for b in BLOCKED)) or name in BLOCKED:
            raise ImportError(f"blocked: {name}")
sys.meta_path.insert(0, Blocker())
from kvjax.kernels.profile import __main__ as profile, timing
timing._COPY_BYTES, timing.ON_CHIP_BYTES["cpu"] = 2**20, 1
timing.copy.__kwdefaults__["num_bytes"] = 2**20
profile.main(["--json", "--model=d12", "--mechanisms=gqa", "--length=256", "--rounds=2",
              "--milliseconds=1", "--implementations=xla,cudnn,torch"])
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=dict(
            PATH="/usr/bin",
            JAX_PLATFORMS="cpu",
            PYTHONPATH=str(ROOT),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "measured, cpu, float32" in run.stderr
    result = json.loads(run.stdout)
    by = {r["implementation"]: r for r in result["rows"]}
    assert list(by) == ["xla", "cudnn", "torch"]
    xla = by["xla"]  # on a busy machine so short a run may say that it is too short
    assert xla.get("cache_bytes") == 256 * 2 * 3 * 128 * 4 or "noise" in xla["why"]
    assert by["cudnn"]["why"] == "there is no GPU"
    assert "torch" in by["torch"]["why"].lower()


def test_a_plot_has_a_line_per_contender(tmp_path):
    pytest.importorskip("matplotlib")
    names = dict(mechanism="mha", implementation="xla", batch=1)
    rows = [dict(names, length=n, gbps=float(n)) for n in (1, 2)] + [dict(names, why="not")]
    profile.plot(rows, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def nothing_measured(monkeypatch, tmp_path):
    """Measuring and tuning find nothing, at once; results go to a folder of the test."""
    monkeypatch.setattr(profile, "RESULTS", tmp_path / "experiments" / "results" / "kernels")
    runs = []
    monkeypatch.setattr(measured, "measure", lambda run: (runs.append(run), ([], 1.0))[1])
    monkeypatch.setattr(measured, "tune", lambda run: (runs.append(run), [])[1])
    return runs


def test_the_usual_sweep_is_over_lengths_then_over_batches(command, nothing_measured):
    for options in ([], ["--batch=2"], ["--length=8,9"], ["--batch=2,3", "--length=8"]):
        command(*options)
    usual, *asked = nothing_measured
    assert usual.points[:5] == tuple((1, n) for n in (1024, 4096, 16384, 65536, 131072))
    assert usual.points[5:] == tuple((2**i, 32_768) for i in range(7))
    assert usual.mechanisms == ("mha", "gqa", "lrkv", "lrkv_no_rope", "mla")
    assert asked[0].points == tuple((2, n) for _, n in usual.points[:5])
    assert [run.points for run in asked[1:]] == [((1, 8), (1, 9)), ((2, 8), (3, 8))]


def test_a_search_is_saved_beside_the_measurements(command, nothing_measured, tmp_path):
    (tmp_path / "experiments").mkdir()
    command("--save")
    command("--save", "--tune")
    assert sorted(file.name for file in profile.RESULTS.iterdir()) == [
        "cpu_decode_attention.json",
        "cpu_decode_attention_tuned.json",
    ]


@pytest.mark.parametrize(
    "option, message",
    [
        ("--save", "run it in a checkout"),
        ("--plot=x.png", "needs matplotlib"),
        ("--plot=no/such/x.png", "no/such is not there"),
    ],
)
def test_what_could_not_be_written_ends_the_run_before_it_begins(
    nothing_measured, monkeypatch, capsys, option, message
):
    missing = None if "matplotlib" in message else types.SimpleNamespace(figure=None)
    monkeypatch.setitem(sys.modules, "matplotlib", missing)
    assert command_line.status(profile.main, [option]) == 2
    assert message in capsys.readouterr().err and not nothing_measured


def test_results_are_saved_though_the_plot_fails(nothing_measured, monkeypatch, tmp_path):
    (tmp_path / "experiments").mkdir()

    def plot(rows, file):
        raise OSError("disk")

    monkeypatch.setattr(profile, "plot", plot)
    monkeypatch.setattr(profile, "_matplotlib", lambda file: None)
    assert command_line.status(profile.main, ["--save", f"--plot={tmp_path}/x.png"]) == 2
    assert (profile.RESULTS / "cpu_decode_attention.json").exists()


def test_a_gpus_report_is_not_from_the_compilation_cache(tmp_path):
    """Counted by what a compilation leaves there, with the cache on before and after."""
    gpu_static = pytest.importorskip("kvjax.kernels.profile.gpu_static")
    options = dict(
        jax_enable_compilation_cache=True,
        jax_compilation_cache_dir=str(tmp_path),
        jax_persistent_cache_min_compile_time_secs=0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    )
    before = {name: getattr(jax.config, name) for name in options}
    fill = lambda value: jax.jit(lambda: jnp.full((3,), value)).lower().compile()
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        fill(1.0)
        left = len(list(tmp_path.iterdir()))
        assert left
        with gpu_static._compiled_anew():
            fill(2.0)
        assert len(list(tmp_path.iterdir())) == left
        fill(3.0)
        assert len(list(tmp_path.iterdir())) > left
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_without_matplotlib_a_plot_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="needs matplotlib"):
        profile.plot([], pathlib.Path("x.png"))


def test_packages_that_are_not_installed_have_no_version(monkeypatch):
    monkeypatch.setattr(provenance, "_PACKAGES", ("jax", "no-such-package"))
    made_by = provenance.provenance("nor-this-one")
    assert made_by["packages"] == {"jax": jax.__version__}
    assert made_by["command"].startswith("python ")


def test_results_are_saved_in_a_checkout_only(monkeypatch, tmp_path):
    monkeypatch.setattr(profile, "RESULTS", tmp_path / "experiments" / "results" / "kernels")
    with pytest.raises(UserError, match="run it in a checkout"):
        profile._save({}, profile.RESULTS / "x.json")
