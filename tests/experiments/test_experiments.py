"""The experiments' commands: refusals before any measurement, tables, JSON."""

import importlib
import json
import pathlib
import re
import sys
import types

import pytest

from experiments import __main__ as listing, record
from experiments.benchmarks import (
    authors_code,
    beside_transformers,
    checkpoint_memory,
    data_preparation,
    data_reading,
    decode_benchmark,
    decode_memory,
    exactness,
    generate_benchmark,
    machine,
    model_decode_benchmark,
    sandbox_cost,
    train_benchmark,
)
from experiments.conversion import records
from experiments.evaluation import agreement
from experiments.studies import cross_attention
from experiments.tables import decode_roofline, paper_tables, parameter_table
from experiments.tables.paper_figure import Figure
from kvjax.foundation import command_line
from kvjax.foundation.checkout import ROOT
from kvjax.training import loop
from tests import quick, runs
from tests.experiments import commands


@pytest.fixture(autouse=True)
def measuring_fails(monkeypatch):
    """Makes measuring fail."""

    def fail(*args, **kwargs):
        raise AssertionError("this was to be refused")

    def is_clean(*_):
        """Disables the check for uncommitted changes."""

    monkeypatch.setattr(record.provenance, "check_commit", is_clean)
    monkeypatch.delenv("COLUMNS", raising=False)
    for module, name in (
        *((module, "measure") for module in (agreement, authors_code, beside_transformers)),
        *((module, "measure") for module in (checkpoint_memory, decode_benchmark, exactness)),
        *((module, "measure") for module in (generate_benchmark, train_benchmark)),
        *((data_reading, name) for name in ("embedded", "at_scale", "from_a_store")),
        *((module, "row") for module in (parameter_table, decode_roofline)),
        (loop, "train"),
        *((decode_memory, "step_memory"), (paper_tables, "tables"), (records, "make")),
        (sandbox_cost, "human_eval"),
    ):
        monkeypatch.setattr(module, name, fail)


@pytest.fixture
def run(capsys):
    """Returns a function from a command's name and options to status, stdout and stderr."""

    def run(name, *options):
        main = importlib.import_module(commands.module(name)).main
        status = command_line.status(main, options)
        return status, *capsys.readouterr()

    return run


def refused(run, name, *options):
    """Returns the one line of a refusal."""
    status, out, err = run(name, *options)
    assert status == 2 and not out
    assert err.startswith("kvjax: ") and err.count("\n") == 1, err
    return err


def test_all_commands_are_tested_here():
    files = set((ROOT / "experiments").rglob("*.py")) - {ROOT / "experiments" / "__main__.py"}
    assert tuple(commands.ROOMS) == tuple(
        sorted(f.stem for f in files if "__main__" in f.read_text())
    )


def test_a_list_of_all_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert command_line.status(listing.main, []) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    names = re.findall(r"^  python -m (\S+) ", out, re.M)
    assert names == sorted(map(commands.module, commands.ROOMS))


@pytest.mark.parametrize("name", commands.ROOMS)
def test_help_and_unknown_options(run, name):
    status, out, err = run(name, "--help")
    assert status == 0 and not err
    assert f"python -m {commands.module(name)}" in out and "--version" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "unknown option --nope" in refused(run, name, "--nope=1")
    assert "unknown argument 'nope'" in refused(run, name, "nope")


@pytest.mark.parametrize(
    "name, options, message",
    commands.BAD,
    ids=[f"{name} {options[:40]}" for name, options, _ in commands.BAD],
)
def test_bad_values(run, name, options, message):
    assert message in refused(run, name, *options.split())


@pytest.mark.parametrize("name", ["exactness", "generate_benchmark"])
def test_without_a_trained_run_the_message_names_the_command(run, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(run, name)
    assert "runs/lrkv_tiny is no workdir of a run" in said
    assert "`make demo` trains" in said and "`python -m kvjax.main --workdir=" in said


@pytest.mark.parametrize("name", commands.SAVING)
def test_a_read_only_folder_is_refused_first(run, name, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(record, "RESULTS", tmp_path / "file" / "results")
    said = refused(run, name, "--save")
    assert f"--save: cannot write into {tmp_path}/file/results (Not a directory)" in said


def _no_wasmtime():
    """Raises as on a machine without these layers."""
    raise sandbox_cost.sandbox.SandboxError("wasmtime is not installed: " + "pip install it " * 9)


def _trained():
    """A stand-in for `trained`: any folder is a workdir."""
    return types.SimpleNamespace(find=lambda workdir: types.SimpleNamespace(workdir=pathlib.Path()))


def test_a_python_that_is_no_program(run, monkeypatch):
    monkeypatch.setattr(beside_transformers, "trained", _trained())
    said = refused(run, "beside_transformers", "--python=/dev/null")
    assert "--python=/dev/null is not a program: `make .venv-live/installed` makes one" in said


# -- what they print -------------------------------------------------------------------------------


@pytest.fixture
def printed(run, monkeypatch, tmp_path):
    """Returns a function that runs a command with made-up measurements."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    times = dict(range=(0.001, 0.003), expanding_first=0.1)

    def size(name, n):
        return dict(mechanism=name, tokens=n, cache_bytes=9216 * n, flops=9.5 * n)

    sizes = dict(logical=1.5e9, costs=1.5e9, physical=1.5e9, aliased=1.5e9, temporary=2e6)
    count = dict(parameters=1_310_720, without_embedding=2**20, attention=2**18)
    verdict = Figure("d36, LRKV, r = 64", "% of MHA", "48.4", 55.5, "1/N + r/H is not that number")
    timed = dict(tokens_per_second=17e3, slowest=16e3, fastest=18e3, gflops=150.0, count=1)
    planned = dict(text_bytes=1e9, tokens=2e8, reading=1e-9, encoding=9e-8, writing=1e-9)
    planned |= dict(parts=9, source_bytes=10**9, row_bytes=4e8, vocab_size=32_768, training=0.0)
    generated = [dict(tokens=[7] * 128, first=0.2, decode_tokens_per_second=33.0)] * 5
    asked = dict(letters=[dict(ids=[1], logits=[0.5, 0.1])], texts=[[5, 2]], ends=[2])
    asked |= dict(continuations=[dict(log_likelihood=-3.5, tokens=4)], versions=dict(torch="2.9"))
    stubs = {
        agreement: dict(
            trained=_trained(), questions_of=lambda *_: {}, measure=lambda *_: (asked, asked)
        ),
        authors_code: dict(
            clones=types.SimpleNamespace(PEERS={}),
            check_python=lambda _: None,
            measure=lambda *_: (
                [
                    dict(peer="TPA", title=f"KV-only TPA, {n}", file="model/T6.py", why="")
                    | dict(outcome="equal", rows=1e-15, cache=n * 1e-15, their_cache=1e-15)
                    for n in (1, 2)
                ],
                dict(TPA=dict(name="TPA at 1", versions=dict(torch="2"), replaced=["einops"])),
            ),
        ),
        beside_transformers: dict(
            trained=_trained(),
            measure=lambda *_: (
                dict(kvjax=generated, transformers=generated),
                dict(architecture="LlamaForCausalLM", versions=dict(torch="2.9"), threads=2),
            ),
        ),
        checkpoint_memory: dict(
            measure=lambda **_: [
                dict(written="fsdp=4", state_bytes=3e8, peak_bytes=[2e8] * 4, local_bytes=[7e7] * 4)
            ]
        ),
        data_preparation: dict(
            _tokenizer=lambda *_: "tokenizer.json",
            measure=lambda _, tokenizer, size, *__: dict(
                dict.fromkeys(("seconds", "planned_seconds", "bytes_per_second"), 1e7),
                **dict(tokens_per_second=2e6, worker_bytes=2e8, room_bytes=2e7, parts=9),
                **dict(text_bytes=size, estimate=planned),
            ),
        ),
        data_reading: dict(
            embedded=lambda _: dict(tokens_per_second=2_300_000, cores=2),
            at_scale=lambda *_: dict(rows=50_000_000, open_seconds=0.5),
            from_a_store=lambda *_: [
                dict(store="bucket", shards=64, rows_at_once=8, batches_at_once=1)
                | dict(tokens_per_second=[2e6, 1e6, 1e5])
            ],
        ),
        decode_benchmark: dict(
            measure=lambda length, *_, **__: [
                size(name, length) | times | dict(seconds=length * 1e-6, mha_seconds=length * 2e-6)
                for name in decode_benchmark.MECHANISMS
            ],
            machine=types.SimpleNamespace(
                read_rate=lambda _: 3e10, matmul_rate=lambda _: 2e11, check_fits=machine.check_fits
            ),
        ),
        decode_memory: dict(
            step_memory=lambda config, batch, length, device: (
                sizes | dict(batch=batch, length=length)
            ),
            attention_memory=lambda name, length: dict(logical=9216 * length, temporary=2e6),
            topology=types.SimpleNamespace(tpu_devices=lambda name: ["a chip"]),
            growth=lambda short, long: 0.001,
        ),
        model_decode_benchmark: dict(
            Stepper=lambda *_: types.SimpleNamespace(
                **dict.fromkeys(("weight_bytes", "all_weight_bytes"), 4_569_956_352),
                cache_bytes=lambda b, n: b * n * 186_912,
                **dict.fromkeys(("program", "weights", "cache"), lambda *_: None),
            ),
            side_by_side=types.SimpleNamespace(
                compiled=lambda lower: dict.fromkeys(lower, lambda: None)
            ),
            timing=types.SimpleNamespace(
                **dict(copy=lambda target: (lambda: 1e-3, 10**9), memory_bytes=lambda: 85e9),
                spread=model_decode_benchmark.timing.spread,
            ),
            seconds_per_step=lambda *_, **__: ([0.0123, 0.0122, 0.0124], [0.004] * 3),
        ),
        exactness: dict(
            held_out=lambda *_: types.SimpleNamespace(shape=(4, 512)),
            trained=types.SimpleNamespace(load=lambda *_: None),
            measure=lambda *_: [
                dict(
                    prefill=n,
                    step=500,
                    largest_difference=1.5e-6,
                    **dict.fromkeys(("positions", "same_token"), 2048),
                    **dict.fromkeys(("clear_positions", "same_token_where_clear"), 2000),
                )
                for n in exactness.PREFILLS
            ],
        ),
        cross_attention: dict(
            train=lambda kind, seed, steps: dict(
                **dict(steps=900 + seed if kind == "lrkv" else None, right=0.99),
                **dict(parameters=230_912, cached_bytes=400, curve={}),
            )
        ),
        paper_tables: dict(tables=lambda: {"LRKV Table 2: " + "cache " * 20: [verdict] * 3}),
        parameter_table: dict(
            row=lambda e: count | dict(config=e.name, cache_bytes=331_776, flops=1.6e10)
        ),
        decode_roofline: dict(
            row=lambda path: dict(config=path.stem, heads=18, bytes=5192, flops=178_866)
        ),
        sandbox_cost: dict(
            COMBINATIONS={"none": lambda: None, "WebAssembly": _no_wasmtime},
            human_eval=list,
            measured=lambda *_: dict(open_s=0.5, one_ms=60.0, passed=164, all_s=8.0, each_ms=49.0),
        ),
        train_benchmark: dict(
            measure=lambda runs: (
                [timed | dict(config=runs[0].name, loss=7.5, first_step_seconds=9.0)],
                [dict(config=runs[1].name, error="OutOfMemory: " + "no room " * 15)],
                2e11,
            )
        ),
    }
    for module, names in stubs.items():
        for name, stub in names.items():
            monkeypatch.setattr(module, name, stub)
    return lambda name, *options: run(name, *OPTIONS.get(name, ()), *options)


OPTIONS = {
    "agreement": [f"--python={sys.executable}"],
    "beside_transformers": [f"--python={sys.executable}"],
    "decode_benchmark": ["--lengths=1024,2048"],
}
STUBBED = tuple(name for name in commands.WITH_TABLES if name != "generate_benchmark")


_QUICK = [name for name in STUBBED if name != "claims"]  # its own tests judge all claims


@pytest.mark.parametrize("name", quick.only(_QUICK[::3], STUBBED))
def test_tables_fit_and_json_stands_alone(printed, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = 1 if name == "train_benchmark" else 0  # one run failed
    status, out, err = printed(name)
    assert status == expected, err
    assert max(map(len, out.splitlines())) <= 80
    assert "---" in out and "{" not in out
    status, out, err = printed(name, "--json", "--markdown")
    assert status == expected and "|---" in err
    assert out.count("\n") == 1 and json.loads(out)["name"].startswith(name)
    if name in commands.SAVING:
        status, _, err = printed(name, "--save")
        assert status == expected and "kvjax: written: " in err
        (file,) = record.RESULTS.glob("*.json")
        assert json.loads(file.read_text())["made_by"]["packages"]["jax"]


def test_caches_that_do_not_fit_are_refused_first(printed, monkeypatch):
    said = refused(printed, "decode_memory", "--batches=1,100000", "--mechanism=MQA")
    assert "--batches=100000: a cache of MQA, 100,000 sequences of 32,768 tokens, needs" in said
    monkeypatch.setattr(machine.runtime, "memory_per_device", lambda: 10**6)
    said = refused(printed, "decode_benchmark")
    assert "--lengths=2048: two caches of 2,048 tokens needs 0.1 GB of 0.0 GB" in said


@pytest.mark.parametrize("mfu, explained", [(1.1, True), (0.9, False)])
def test_mfu_over_100_is_explained(printed, monkeypatch, mfu, explained):
    rates = dict(mfu=mfu, of_matmul=None)
    monkeypatch.setattr(train_benchmark, "with_rates", lambda row, *_: row | rates)
    _, out, _ = printed("train_benchmark")
    assert ("MFU over 100 %: it counts attention over all T keys" in out) == explained


def test_the_longer_of_bytes_and_flops_is_the_least_time():
    """A ridge of the v5e is at 240 FLOP per byte."""
    v5e = decode_roofline.DEVICES["v5e"]

    def least_time(flops):
        return decode_roofline.seconds(dict(bytes=100, flops=flops), 1000, v5e)

    assert least_time(100) == (1000 * 100 / v5e.bandwidth, False)
    assert least_time(100_000) == (1000 * 100_000 / v5e.bf16_flops, True)


# -- on a trained run ------------------------------------------------------------------------------


@pytest.fixture
def trained_run(tmp_path, monkeypatch):
    monkeypatch.undo()
    source = runs.write_text(tmp_path / "text.txt")
    config = runs.small_config(source, str(tmp_path / "data"), num_steps=1, eval_every=1)
    config.train.update(checkpoint_every=1, sample_tokens=0)
    loop.train(config, tmp_path / "run")
    return f"--workdir={tmp_path}/run"


@pytest.mark.slow
def test_a_trained_run(run, trained_run, capsys):
    capsys.readouterr()
    status, out, err = run("exactness", trained_run, "--positions=128", "--rows=1", "--json")
    assert status == 0
    first, second = json.loads(out)["results"]
    assert (first["prefill"], second["prefill"]) == exactness.PREFILLS
    assert "128 of 128" in err
    said = refused(run, "exactness", trained_run, "--rows=1000")
    assert "--rows=1000 --positions=512: the held-out text of " in said
    status, out, err = run("quantized", trained_run, "--rows=2", "--length=300", "--json")
    result = json.loads(out)
    wide, *quantised = result["quality"]
    assert status == 0 and (wide["worse"], wide["same_token"]) == (0, 1)
    assert [row["cache"] for row in quantised] == ["int8"] * 3 + ["int4"] * 3
    assert all(abs(row["worse"]) < 0.01 for row in quantised)  # after one step
    assert all(2 * row["bytes_per_token"] < wide["bytes_per_token"] for row in quantised)
    (steps,) = result["steps"]
    assert len(steps["ms"]) == 4 and all(ms > 0 for ms in steps["ms"].values())
    small = ("--prompt_tokens=4", "--num_tokens=3", "--repeats=1")
    said = refused(run, "generate_benchmark", trained_run, "--batch=1000000000", *small)
    assert "--batch=1000000000: a cache of 1,000,000,000 sequences of 7 tokens needs" in said
    status, out, _ = run("generate_benchmark", trained_run, "--batch=2", *small, "--json")
    (row,) = json.loads(out)["rows"]
    assert status == 0 and row["batch"] == 2 and row["compilations_after_warm_up"] == 0
