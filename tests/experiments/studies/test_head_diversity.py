"""The head diversity study on synthetic runs: training, records and verdicts."""

import json
import types

from etils import epath
import pytest

from experiments import record
from experiments.analysis import numbers as numbers_lib
from experiments.analysis.head_tables import Run
from experiments.studies import grid, head_diversity
from experiments.studies.demo_size import STUDIES
from experiments.studies.grid import Run as GridRun
from kvjax.config import resolve
from kvjax.foundation import command_line
from tests import runs

# Shares of seed 0, not centred: in the paper's order at 2.5B except MLA. `mla` has a RoPE key
# and is not the paper's MLA.
SHARES = dict(mha=99.0, lrkv=98.0, gqa=95.0, mqa=90.0, mla_paper=99.5, mla=1.0)


def _synthetic_run(mechanism, seed=0, drift=0.0):
    """Returns synthetic runs: seeds differ more than mechanisms; paired differences vary little."""
    share = SHARES[mechanism] - 9.0 * seed + drift
    trained = dict(share=share, centred_share=0.7 * share, centred_share_of_possible=0.9 * share)
    trained |= dict(components_of_m=20.0, half_rank_by_text=1.0 + seed)
    untrained = {name: x + 0.5 for name, x in trained.items() if name != "half_rank_by_text"}
    steps = {0: untrained, 4: trained}
    return Run(bits_per_byte=2.0 + seed, trained=trained, untrained=untrained, steps=steps)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Returns a function from options to status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    drift = dict(lrkv=(0.0, 0.2, 0.1))

    def of(one, folder):
        name, seed = one.cell.name, one.seed
        return _synthetic_run(name, seed, drift.get(name, (0.0,) * 3)[seed])

    monkeypatch.setattr(head_diversity, "run", of)

    def run(*options):
        status = command_line.status(head_diversity.main, options)
        return status, *capsys.readouterr()

    return run


SIX = "--mechanisms=mha,lrkv,gqa,mqa,mla_paper,mla"


def test_tables_fit_and_every_number_is_there(run):
    status, out, err = run(SIX)
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80 and "nan" not in out
    status, out, err = run(SIX, "--json", "--markdown", "--save")
    assert status == 0 and "|---" in err
    found = json.loads(out)
    assert found["name"] == "analysis/head_diversity" and found["seeds"] == [0, 1, 2]
    saved = json.loads((record.RESULTS / "analysis" / "head_diversity.json").read_text())
    assert saved["made_by"]["packages"]["jax"] and saved["runs"] == found["runs"]
    of = found["estimates"]["lrkv"]["share"]
    assert of["mean"] == pytest.approx(98.0 - 9.0 + 0.1)
    assert of["against_mha"]["mean"] == pytest.approx(-0.9)
    assert of["against_mha"]["half_interval"] == pytest.approx(0.2484, abs=1e-4)
    assert of["half_interval"] > 20  # unpaired, the seeds dominate
    assert found["estimates"]["mha"]["share"]["against_mha"] is None


def test_the_papers_orders_against_the_runs(run):
    found = json.loads(run(SIX, "--json")[1])
    verdicts = {
        (one["scale"], one["first"], one["second"]): one["verdict"]
        for one in found["orders"]
        if one["measure"] == "share" and one["neighbours"]
    }
    assert verdicts == {
        ("128M", "lrkv", "mha"): "the other way round",
        ("128M", "mha", "gqa"): "as published",
        ("128M", "gqa", "mla_paper"): "the other way round",
        ("128M", "mla_paper", "mqa"): "as published",
        ("2.5B", "mha", "lrkv"): "as published",
        ("2.5B", "lrkv", "gqa"): "as published",
        ("2.5B", "gqa", "mla_paper"): "the other way round",
        ("2.5B", "mla_paper", "mqa"): "as published",
    }
    assert found["published"]["128M"]["share"]["lrkv"] == 96.2
    assert found["published"]["2.5B"]["centred_share"]["gqa"] == 91.7


def test_one_seed_distinguishes_nothing(run):
    status, out, _ = run("--seeds=1", "--json", "--mechanisms=mha,lrkv")
    found = json.loads(out)
    assert status == 0 and found["estimates"]["lrkv"]["share"]["half_interval"] is None
    assert {one["verdict"] for one in found["orders"]} == {"not distinguishable"}


def test_the_configs_are_those_of_the_study_of_mechanisms_with_snapshots():
    found = head_diversity.training_run("lrkv", 8, 3).config
    (cell,) = (cell for cell in STUDIES["mechanisms"].cells() if cell.name == "lrkv")
    expected = GridRun(cell, 3, 8).config
    assert found.train.snapshot_every == 2 and not expected.train.snapshot_every
    expected.train.snapshot_every = 2
    assert found.to_dict() == expected.to_dict()


@pytest.mark.slow
def test_measurements_are_stored_in_the_workdir(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(head_diversity.runs_lib, "is_finished", lambda run, folder: True)
    monkeypatch.setattr(
        head_diversity, "measure", lambda workdir: made.append(0) or _synthetic_run("mha")
    )
    (tmp_path / "mha_seed0_steps8").mkdir()
    one = head_diversity.training_run("mha", 8, 0)
    for _ in range(2):
        assert head_diversity.run(one, epath.Path(tmp_path)) == _synthetic_run("mha")
    assert len(made) == 1
    monkeypatch.setattr(
        head_diversity.code_lib, "code_of", lambda _: {"analysis/measures/spectrum.py": "x"}
    )
    for _ in range(2):
        assert head_diversity.run(one, epath.Path(tmp_path)) == _synthetic_run("mha")
    assert len(made) == 2


@pytest.mark.slow
def test_folders_of_other_runs_are_refused(run, tmp_path):
    """Runs of another config, or without recorded code, are refused."""
    folder = tmp_path / "runs"
    grid.begin(head_diversity.training_run("lrkv", 8, 1), epath.Path(folder / "mha_seed0_steps8"))
    status, _, err = run("--mechanisms=mha", "--steps=8", "--seeds=1", f"--runs={folder}")
    assert status == 2 and "mha_seed0_steps8 is of another config; give another" in err
    (folder / "mha_seed0_steps8" / grid.ABOUT).unlink()
    (folder / "mha_seed0_steps8" / "metrics.jsonl").write_text("")
    status, _, err = run("--mechanisms=mha", "--steps=8", "--seeds=1", f"--runs={folder}")
    assert status == 2 and "does not name the code that trained it" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--mechanisms=mha,lrkv",),
            "--mechanisms --save: head_diversity.json has gqa, mqa, mla_paper",
        ),
        ((SIX, "--seeds=2"), "--seeds --save: head_diversity.json has 3 seeds, which would be"),
        ((SIX, "--steps=4"), "--steps --save: head_diversity.json has runs of 128 steps"),
    ],
)
def test_a_saved_result_loses_nothing(run, options, said):
    assert run(SIX, "--save")[0] == 0
    file = record.RESULTS / "analysis" / "head_diversity.json"
    before = file.read_text()
    status, _, err = run(*options, "--save")
    assert status == 2 and said in " ".join(err.split()) and file.read_text() == before


@pytest.mark.slow
def test_a_run_is_trained_once_and_measured_at_its_ends(monkeypatch, tmp_path):
    config = runs.small_config(runs.write_text(tmp_path / "text.txt"), str(tmp_path / "data"))
    config.train.update(num_steps=4, snapshot_every=2)
    experiment = resolve(config)
    one = types.SimpleNamespace(name="lrkv", config=config, experiment=experiment, identity="x")

    def of_model(model, trained=True):
        return dict(trained=float(trained))

    monkeypatch.setattr(numbers_lib, "of_model", of_model)
    folder = epath.Path(tmp_path)
    found = head_diversity.run(one, folder)
    assert sorted(found.steps) == [0, 2, 4] and 0 < found.steps[0]["share"] <= 100
    assert found.trained == dict(trained=1.0) and found.untrained == dict(trained=0.0)
    assert found.bits_per_byte > 0
    monkeypatch.setattr(head_diversity.loop, "train", None)  # it is finished
    assert head_diversity.run(one, folder) == found


def test_a_saved_result_is_printed_as_it_was(run, monkeypatch):
    _, first, _ = run(SIX, "--save")
    monkeypatch.setattr(head_diversity, "run", None)  # nothing is trained
    status, again, err = run("--saved")
    assert status == 0, err
    assert again == first
    (record.RESULTS / "analysis" / "head_diversity.json").unlink()
    status, _, err = run("--saved")
    assert status == 2 and "head_diversity.json" in err and "--save writes it" in err
