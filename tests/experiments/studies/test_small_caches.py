"""The study of small caches on synthetic runs: training, records and tables."""

import json

import pytest

from experiments import record
from experiments.studies import small_caches, small_caches_speed
from kvjax.foundation import command_line

BPB = {"mha": 2.0, "lrkv": 1.9, "gla_narrow": 2.1}
SEEDS = (0.0, 0.3, 0.5)  # a seed's offset, for all mechanisms
OWN = (0.0, 0.01, -0.01)  # a further offset of LRKV
NAMES = f"--mechanisms={','.join(BPB)}"


@pytest.fixture
def run(trained, capsys):
    """Returns a function from options to status, output and the names of the trained runs."""
    trained.bpb = lambda run: (
        BPB[run.cell.name] + SEEDS[run.seed] + OWN[run.seed] * (run.cell.name == "lrkv")
    )

    def run(*options):
        trained.asked.clear()
        status = command_line.status(small_caches.main, options)
        return status, *capsys.readouterr(), list(trained.asked)

    run.failing = trained.failing
    return run


@pytest.mark.slow
def test_every_config_is_there_and_has_mhas_parameters():
    names = (*small_caches.OWN, *small_caches.NARROW, *small_caches.WIDE)
    rivals = command_line.configs_of(small_caches.CONFIGS / "rivals.py")
    assert {f"{name}_tiny" for name in (*small_caches.NARROW, *small_caches.WIDE)} <= {
        path.name.partition(":")[2] for path in rivals
    }
    runs = small_caches.runs_of(names, 1, 8)
    counts = {small_caches.formulas.parameters(r.experiment.model)["total"] for r in runs}
    assert max(counts) / min(counts) < 1.001 and len(runs) == len(names) == 31


def test_differences_are_taken_seed_by_seed(run):
    status, out, err, trained = run(NAMES)
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80
    assert trained[:4] == [f"{n}_seed{s}_steps256" for s, n in [*((0, n) for n in BPB), (1, "mha")]]
    status, out, _, _ = run(NAMES, "--json")
    found = json.loads(out)
    assert found["name"] == "small_caches" and found["tokens"] == 256 * 8192
    rows = {row["mechanism"]: row for row in found["rows"]}
    assert list(rows) == ["mha", "lrkv", "gla_narrow"]  # the largest cache first
    assert rows["mha"]["against_mha"] is None and rows["mha"]["parameters"] == 1_310_720
    assert rows["lrkv"]["against_mha"] == pytest.approx(-0.1)
    assert rows["lrkv"]["against_mha_half_interval"] == pytest.approx(0.0248, abs=1e-4)
    assert rows["gla_narrow"]["against_mha_half_interval"] == pytest.approx(0, abs=1e-9)
    assert rows["lrkv"]["bpb_half_interval"] > 0.5  # seeds differ more than mechanisms
    assert rows["lrkv"]["cache_bytes"] == 1600 and rows["gla_narrow"]["cache_bytes"] == 512


def test_failed_runs_are_left_out_and_named(run):
    run.failing.add("lrkv")
    status, out, _, _ = run(NAMES, "--markdown")
    assert status == 1 and "`lrkv" not in out
    assert "- left out: lrkv_seed2_steps256, it failed" in out
    run.failing.update(BPB)
    status, out, _, _ = run(NAMES, "--json")
    assert status == 1 and json.loads(out)["rows"] == []


@pytest.mark.slow
def test_finished_runs_stay_in_the_table(run):
    """All finished runs stay in the result, MHA for comparison too."""
    run("--mechanisms=mha,lrkv", "--save")
    _, out, _, trained = run("--mechanisms=gla_narrow", "--save", "--json")
    assert len(trained) == 3
    rows = {row["mechanism"]: row for row in json.loads(out)["rows"]}
    assert set(rows) == set(BPB) and rows["gla_narrow"]["against_mha"] == pytest.approx(0.1)
    status, _, err, _ = run(NAMES, "--steps=8", "--save")
    assert status == 2 and "--steps = 8: " in err and "has runs of 256 steps" in err


def test_buckets_are_refused(run):
    status, _, err, _ = run("--runs=gs://bucket/x")
    assert status == 2 and "--runs = 'gs://bucket/x': must be a local folder" in err


def test_speeds_are_those_of_the_study_of_speed(run):
    row = dict(mechanism="lrkv", training_tokens_per_second=9e3, decode_tokens_per_second=321.0)
    record.RESULTS.mkdir(exist_ok=True)
    (record.RESULTS / f"{small_caches.SPEED}.json").write_text(json.dumps(dict(rows=[row])))
    _, out, _, _ = run(NAMES, "--json")
    found = {r["mechanism"]: r for r in json.loads(out)["rows"]}
    assert found["lrkv"]["training_tokens_per_second"] == 9000
    assert found["lrkv"]["decode_tokens_per_second"] == 321
    assert found["mha"]["training_tokens_per_second"] is None


def test_speed_of_training_and_decoding(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    asked = []

    def training(path, keys, steps):
        asked.append((path, keys, steps))
        return dict(seconds=[1.0, 2.0, 4.0], matmul_flops=[2e11, 1e11])

    monkeypatch.setattr(small_caches_speed.jax_training, "training_speed", training)
    monkeypatch.setattr(small_caches_speed, "decoding", lambda run: 321.0)
    options = ("--mechanisms=gta_narrow", "--steps=3", "--json")
    assert command_line.status(small_caches_speed.main, options) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row == dict(
        mechanism="gta_narrow",
        training_tokens_per_second=4096,
        slowest=2048,
        fastest=8192,
        decode_tokens_per_second=321,
        matmul_gflops=[200, 100],
    )
    ((path, keys, steps),) = asked
    (cell,) = small_caches.cells(["gta_narrow"])
    assert path.endswith("rivals.py:gta_narrow_tiny") and steps == 3
    assert f"model.mlp_dim={cell.overrides['model.mlp_dim']}" in keys


@pytest.mark.slow
def test_a_mechanism_decodes_with_new_weights(monkeypatch):
    monkeypatch.setattr(small_caches_speed, "_DECODE", dict(prompt=4, new=4, repeats=1))
    (run,) = small_caches.runs_of(["gla_narrow"], 1, 8)
    assert small_caches_speed.decoding(run) > 0
