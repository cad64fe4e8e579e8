"""Studies of small language models: cells, tables and resumption."""

import functools
import json

import pytest

from experiments.studies import grid, language_models
from experiments.studies.demo_size import STUDIES
from experiments.studies.grid import Run
from kvjax.foundation import command_line


@functools.cache
def _cells():
    """Returns the cells of each study by name."""
    return {name: study.cells() for name, study in STUDIES.items()}


def test_references_of_cells_exist():
    for name, cells in _cells().items():
        names = {cell.name for cell in cells}
        assert {cell.against for cell in cells} <= names | {""}, name
        assert any(cell.against for cell in cells)


def test_chosen_cells_include_their_references():
    def chosen(names):
        return [c.name for c in language_models.chosen(cells, names)]

    cells = STUDIES["lrkv_starts"].cells()
    assert chosen("lrkv_per_head") == ["mha", "lrkv", "mha_per_head", "lrkv_per_head"]
    assert chosen("mha") == ["mha"] and chosen("") == [cell.name for cell in cells]


def test_cells_of_a_change_have_a_pair_without_it():
    changed = 0
    for cells in _cells().values():
        by_name = {cell.name: cell for cell in cells}
        for cell in filter(lambda cell: cell.before, cells):
            plain, mha = by_name[cell.before], by_name[cell.against]
            assert plain.against == mha.against and cell.config == plain.config
            change = dict(cell.overrides.items() - plain.overrides.items())
            there = dict(mha.overrides)
            changed += 1
            assert change and {k: there[k] for k in change} == change
    assert changed == 20


def test_the_effect_of_a_change_is_taken_seed_by_seed(tmp_path):
    bpb = dict(mha=(2.0, 2.4), mha_per_head=(1.9, 2.2), lrkv=(1.9, 2.3), lrkv_per_head=(1.9, 2.1))
    cells = [cell for cell in STUDIES["lrkv_starts"].cells() if cell.name in bpb]
    kept = grid.FinishedRuns(tmp_path / "none.json", 128, mix=False, fresh=True)
    for cell in cells:
        for seed, bits in enumerate(bpb[cell.name]):
            identity = Run(cell, seed, 128).identity
            kept.put(cell.name, seed, identity, {}, {}, bpb=bits, tokens_per_second=None)
    rows = {row["cell"]: row for row in language_models.rows(cells, kept)}
    assert rows["lrkv"]["moved"] is None and rows["lrkv"]["difference"] == pytest.approx(-0.1)
    changed = rows["lrkv_per_head"]
    assert changed["before"] == "lrkv"
    assert changed["difference"] == pytest.approx(-0.05)
    assert changed["moved"] == pytest.approx(0.05)  # of seeds: 0.1 and 0.0
    assert changed["moved_half_interval"] == pytest.approx(12.706 * 0.05, rel=1e-3)
    # LRKV is 0.1 below MHA with both seeds: the smallest p-value of three differences.
    p_values = language_models.corrected(rows.values())
    assert p_values.keys() == rows.keys() - {"mha"} and p_values["lrkv"] < 1e-6
    assert p_values["mha_per_head"] == pytest.approx(2 * 0.2048, abs=1e-3)
    # If one cell has more seeds, the difference is over common seeds.
    more, apart = rows["mha_per_head"] | dict(seeds=[0, 1, 2]), rows["mha"]
    assert language_models.corrected([more, apart])["mha_per_head"] == pytest.approx(
        0.2048, abs=1e-3
    )


@pytest.mark.slow
def test_a_study_from_runs_to_rows(trained, capfd):
    trained.bpb = lambda run: 2.0 + 0.1 * run.seed - 0.01 * ("inner" in run.cell.name)
    trained.failing.add("lrkv_rising")

    def run(*options):
        asked = ("--study=lrkv_layer_ranks", "--seeds=2", "--save", *options)
        return command_line.status(language_models.main, asked)

    assert run("--json") == 1  # one model failed
    out, err = capfd.readouterr()
    found = {row["cell"]: row for row in json.loads(out)["rows"]}
    assert "lrkv_rising" not in found and "lrkv_rising_seed0_steps128, it failed" in err
    assert found["lrkv_inner"]["difference"] == pytest.approx(-0.01)
    assert found["lrkv_inner"]["difference_half_interval"] == pytest.approx(0, abs=1e-9)
    assert found["lrkv_uniform"]["difference"] is None and found["lrkv_uniform"]["seeds"] == [0, 1]
    stored = json.loads((trained.results / "studies" / "lrkv_layer_ranks.json").read_text())
    assert stored["seconds"] == 8 * 100.0 and stored["failed"]
    before = len(trained.asked)
    assert run("--runs=others") == 1
    assert [name for name in trained.asked[before:] if "rising" not in name] == []
