"""The READMEs' figures: their data and their files."""

import json

import pytest

from experiments.record import RESULTS
from experiments.tables import figures
from kvjax.foundation import command_line


def test_every_mechanism_and_seed_is_drawn():
    comparison = json.loads((RESULTS / "studies" / "mechanisms.json").read_text())
    (axes,) = figures.results(comparison).axes
    rows = comparison["rows"]
    assert sorted(t.get_text().replace("\n", " ") for t in axes.texts) == sorted(
        figures.NAMES[row["cell"]] for row in rows
    )
    for row, bars in zip(rows, axes.containers, strict=True):
        (mean,), half = bars.lines[0].get_ydata(), row["bpb_half_interval"]
        (bar,) = bars.lines[2][0].get_segments()
        assert mean == row["bpb"] and bars.lines[0].get_xdata()[0] == row["cache_bytes"]
        assert bar[:, 1] == pytest.approx([mean - half, mean + half])
    seeds = [line.get_ydata() for line in axes.lines if line.get_marker() == "."]

    def bpb_by_seed(name):
        return [run["bpb"] for run in comparison["runs"][name].values()]

    assert [list(values) for values in seeds] == [bpb_by_seed(row["cell"]) for row in rows]


def test_files_are_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "figures", lambda: {tmp_path / "figures" / "a.svg": "<svg/>\n"})

    def run(*given):
        return (command_line.status(figures.main, given), capsys.readouterr().out)

    assert run("--check") == (1, "would change: figures/a.svg\n")
    assert not (tmp_path / "figures").exists()
    assert run() == (0, "written: figures/a.svg\n")
    assert run() == (0, "nothing changes\n") == run("--check")


def test_results_that_are_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert command_line.status(figures.main, ["--check"]) == 2
    assert "language_models --study=mechanisms --save" in capsys.readouterr().err


def _row(name, cache_bytes, bpb, seeds=3):
    of = dict(mechanism=name, cache_bytes=cache_bytes, bpb=bpb, bpb_half_interval=0.01)
    return of | dict(seeds=list(range(seeds)), parameters=1_310_720)


@pytest.mark.slow
def test_they_are_drawn_once_every_run_is_there(tmp_path, monkeypatch):
    (tmp_path / "studies").mkdir()
    comparison = (RESULTS / "studies" / "mechanisms.json").read_text()
    (tmp_path / "studies" / "mechanisms.json").write_text(comparison)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert len(figures.EVERY) == 31
    monkeypatch.setattr(figures, "EVERY", ("mha", "lrkv"))
    for seeds in (0, 2, 3):
        rows = [_row("mha", 2048, 1.9), *[_row("lrkv", 1600, 1.8, seeds)] * (seeds > 0)]
        (tmp_path / "small_caches.json").write_text(json.dumps(dict(rows=rows, tokens=2_097_152)))
        names = [path.stem for path in figures.figures()]
        assert names == ["idea", "results", *["small_caches"] * (seeds == 3), "mechanisms"]
