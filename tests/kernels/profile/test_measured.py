"""Rows of a measurement: rates, speedups, and reasons for missing figures."""

import gc
import json
import types
import weakref

import jax
import jax.numpy as jnp
import pytest

from kvjax.attention import GroupedConfig, MLAConfig
from kvjax.kernels.decode_attention import shapes, tuning
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes
from kvjax.kernels.profile import contenders, measured, timing


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_frozen():
    """A measurement often collects garbage, which takes a second with earlier tests' objects."""
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as at the start of the session


def _run(**changes):
    run = dict(mechanisms=("mha", "lrkv"), points=((2, 512),), rounds=3, target=1e-3)
    run |= dict(model="d12", implementations=("xla", "tpu"), device="h200") | changes
    return measured.Run(**run)


def _problem(shape, *, batch, length, caches):
    sizes = dict(batch=batch, length=length, dtype=jnp.dtype(jnp.bfloat16))
    return types.SimpleNamespace(
        setup=types.SimpleNamespace(shape=shape, **sizes), caches=[{}] * caches
    )


def test_a_row_is_bytes_and_flops_over_the_median():
    problem = _problem(GroupedSizes(N=6, K=2), batch=2, length=1000, caches=7)
    row = measured.row(problem, [3e-6, 1e-6, 2e-6], copied=2.048e12, run=_run())
    assert row == dict(
        cache_bytes=2 * 1000 * 2 * 256 * 2,
        seconds=dict(median=2e-6, low=1e-6, high=3e-6),
        gbps=pytest.approx(1024.0),
        of_datasheet=pytest.approx(1.024 / 4.8),
        of_copy=pytest.approx(0.5),
        tflops=pytest.approx(2000 * 2 * 6 * 256 / 2e-6 / 1e12),
        caches=7,
        may_stay_on_chip=True,
        may_be_launches=False,
    )
    assert measured.row(problem, [1.0], copied=1.0, run=_run(device=None))["of_datasheet"] is None
    assert "noise" in measured.row(problem, [2.0, -1.0, -1.0], copied=1.0, run=_run())["why"]
    problem.caches = [{}] * 245  # of 2,048,000 bytes, beside 60 MiB
    assert measured.row(problem, [1.0], copied=1.0, run=_run())["may_stay_on_chip"]
    problem.caches = [{}] * 246
    assert not measured.row(problem, [1.0], copied=1.0, run=_run())["may_stay_on_chip"]


def test_short_calls_on_a_gpu_have_a_sign(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    problem = _problem(GroupedSizes(N=6, K=2), batch=1, length=1000, caches=999)
    names = dict(mechanism="gqa", implementation="gpu", batch=1, length=1000)
    rows = [names | measured.row(problem, [s], copied=1.0, run=_run()) for s in (19e-6, 21e-6)]
    table = measured.table(rows, "")
    us = table.header.index("us")
    assert [row[us] for row in table.rows] == ["19.0†", "21.0"]
    assert table.notes == ["† Below 20 us per call, kernel launches may dominate the time."]


def test_flops_are_those_of_the_costs():
    widths = dict(num_heads=18, key_dim=128, value_dim=128)

    def grouped(K, J, R, **keys):
        return GroupedConfig(num_kv_heads=K, num_bases=J, rank=R, **(widths | keys))

    configs = dict(
        mha=grouped(18, 18, 0),
        gqa=grouped(6, 6, 0),
        mqa=grouped(1, 1, 0),
        thin_keys=grouped(18, 18, 0, key_dim=32),
        lrkv=grouped(18, 1, 64),
        lrkv_no_norm=grouped(18, 1, 64, qk_norm="none"),
        lrkv_gqa=grouped(6, 1, 64),
        mla=MLAConfig(latent_dim=768, rope_key_dim=64, **widths),
    )
    for name, config in configs.items():
        flops = config.decode_flops(10_000.0).per_key
        assert shapes.SHAPES["d36"][name].flops().per_key == flops, name
    unrotated = shapes.SHAPES["d36"]["lrkv_no_rope"].flops().per_key
    assert unrotated == configs["lrkv"].decode_flops(None).per_key


@pytest.fixture
def seconds(monkeypatch):
    """Contenders that take 1 s for MHA and 0.5 s for LRKV; "tpu" refuses MHA and fails on LRKV.

    Libraries take 3 s for MHA; torch is out of memory. Returns the problems alive at each sample.
    """
    alive, held = weakref.WeakSet(), []

    class Problem(types.SimpleNamespace):
        __hash__ = object.__hash__

    def program(name, setup, **parameters):
        lrkv = isinstance(setup.shape, ResidualSizes)
        if name == "tpu" and not lrkv:
            raise NotImplementedError("no MHA here")
        if name == "cudnn" and lrkv:
            raise NotImplementedError("MHA and GQA only")
        compiled = types.SimpleNamespace(compile=lambda: parameters)
        return types.SimpleNamespace(lower=lambda: compiled), ()

    def sample(name, problem, program, *, target):
        del target
        if name == "tpu":
            raise ValueError("first line\nsecond")
        if name == "torch":
            raise MemoryError("CUDA out of memory.\nTried")
        held.append(sorted(p.shape for p in alive))
        if name == "cudnn":
            return lambda: 3.0 * len(problem.shape) / 3
        return lambda: {"mha": 1.0, "lrkv": 0.5}[problem.shape] / (program.get("tile_kv") or 1)

    def problem(setup):
        shape = "lrkv" if isinstance(setup.shape, ResidualSizes) else "mha"
        new = Problem(setup=setup, shape=shape, caches=[{}] * setup.copies, inputs=None)
        alive.add(new)
        return new

    monkeypatch.setattr(contenders, "program", program)
    monkeypatch.setattr(contenders, "sample", sample)
    monkeypatch.setattr(contenders, "Problem", problem)
    monkeypatch.setattr(timing, "copy", lambda *, target: (lambda: 2.0, 100))
    monkeypatch.setattr(timing, "memory_bytes", lambda: 2**40)  # whatever else runs
    monkeypatch.setattr(
        measured, "row", lambda problem, seconds, **_: dict(seconds=dict(median=seconds[0]))
    )
    return held


def test_a_contender_that_fails_has_a_row_with_the_reason(seconds):
    rows, copied = measured.measure(_run())
    assert copied == 50
    outcomes = [(r["mechanism"], r["implementation"], r.get("why", r.get("speedup"))) for r in rows]
    assert outcomes == [
        ("mha", "xla", 1.0),
        ("mha", "tpu", "no MHA here"),
        ("lrkv", "xla", 2.0),
        ("lrkv", "tpu", "ValueError: first line"),
    ]
    assert {(r["batch"], r["length"]) for r in rows} == {(2, 512)}
    rows, _ = measured.measure(_run(mechanisms=("lrkv",)))
    assert "speedup" not in rows[0]  # there is no MHA beside it


def _bytes(monkeypatch, mechanisms):
    """Returns each mechanism's cache bytes at 2 x 512 tokens, float32; limits the memory."""
    run = _run(mechanisms=("mha", "gqa", "lrkv"))
    need = {name: measured._ring_bytes(run, name, 2, 512) for name in run.mechanisms}
    memory = sum(need[name] for name in mechanisms) + 1
    monkeypatch.setattr(timing, "memory_bytes", lambda: memory / measured._MEMORY)
    return need


def test_caches_in_memory_are_of_one_mechanism_and_mha(seconds, monkeypatch):
    need = _bytes(monkeypatch, ("mha", "lrkv"))
    assert need["gqa"] <= need["lrkv"]
    rows, _ = measured.measure(_run(mechanisms=("mha", "gqa", "lrkv"), implementations=("xla",)))
    assert [r["speedup"] for r in rows] == [1.0, 1.0, 2.0]  # the fake's GQA is as slow as MHA
    assert sorted(seconds) == [["lrkv", "mha"], ["mha"], ["mha", "mha"]]


def test_a_refusal_keeps_no_caches(seconds):
    """The error of a refusal lives as long as the programs of a point do."""
    run = _run(mechanisms=("mha", "lrkv"), implementations=("cudnn", "xla"), points=((2, 512),) * 2)
    measured.measure(run)
    assert seconds == [["mha"], ["mha"], ["lrkv", "mha"]] * 2


def test_mha_that_does_not_fit_beside_a_mechanism_is_named(seconds, monkeypatch):
    _bytes(monkeypatch, ("mha",))
    rows, _ = measured.measure(_run(implementations=("xla",)))
    assert seconds == [["mha"], ["lrkv"]]
    mha, lrkv = rows
    assert mha["speedup"] == 1.0 and "seconds" in lrkv and "speedup" not in lrkv
    assert lrkv["no_speedup"] == measured.NO_MHA


def test_a_mechanism_that_does_not_fit_is_skipped_with_a_reason(seconds, monkeypatch):
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


def test_public_speedup_is_over_the_fastest_library(seconds):
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


def test_rows_name_the_implementation_of_mha(seconds):
    rows, _ = measured.measure(_run(implementations=("tpu", "xla")))
    timed = [r for r in rows if "seconds" in r]
    assert {(r["mha_by"], r["mha_instead_of"]) for r in timed} == {("xla", "tpu: no MHA here")}
    rows, _ = measured.measure(_run(implementations=("xla", "reference")))
    assert not any("mha_instead_of" in r for r in rows)


def test_the_table_names_the_implementation_of_mha():
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
    assert instead == "‡ MHA by xla, instead of gpu: no." and stays.startswith("\\* ")


def test_tuning_takes_the_fastest_and_says_how(seconds, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FILE", tmp_path / "tuned.json")
    tuning.FILE.write_text("{}")
    monkeypatch.setattr(tuning, "key", lambda *_: "xla/some-B2-S512")
    (row,) = measured.tune(_run(mechanisms=("mha",), implementations=("xla", "reference")))
    entry = json.loads(tuning.FILE.read_text())["cpu"]["xla/some-B2-S512"]
    best = max(measured.TILES)  # the fake is fastest with the largest
    assert entry["parameters"] == row["parameters"] == dict(tile_kv=best)
    assert (entry["source"], entry["seconds"]) == ("measured", 1 / best)
    (row,) = measured.tune(_run(mechanisms=("mha",), implementations=("tpu",)))
    assert row["why"] == "no MHA here"
    with monkeypatch.context() as small:
        _bytes(small, ())
        reported = []
        run = _run(mechanisms=("mha",), implementations=("xla",))
        (row,) = measured.tune(run, reported.append)
        assert row.pop("why").endswith(" GB do not fit: 0.0 GB are left") and reported == [row]
        assert row == dict(mechanism="mha", implementation="", batch=2, length=512)
    monkeypatch.setattr(measured, "TILES", (0, 0))  # in the fake, 0 is as fast as the default
    tuning.FILE.write_text("{}")
    (row,) = measured.tune(_run(mechanisms=("mha",), implementations=("xla",)))
    assert row["why"] == measured.NOTHING_FASTER and tuning.FILE.read_text() == "{}"


def test_candidates_by_kernel_and_shape():
    def candidates(name, mechanism="mha"):
        shape = shapes.SHAPES["d36"][mechanism]
        problem = shapes.abstract(shape, batch=1, length=1024, dtype=jnp.bfloat16)
        return measured.candidates(name, *problem)

    assert candidates("reference") == []  # takes no tile size
    assert candidates("xla") == [{}, *(dict(tile_kv=n) for n in measured.TILES)]
    first, *others = candidates("tpu")
    assert first == {} and len(others) == len({tuple(o.values()) for o in others}) == 16
    assert others[1] == dict(tile_kv=512, score_tile=256, splits=2)
    # Under RoPE a longer split has no basis of rank 64.
    assert candidates("gpu", "lrkv") == [{}, *(dict(split=n) for n in (256, 512, 1024))]
    assert len(candidates("gpu")) == 7
