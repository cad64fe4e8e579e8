"""The README's pictures: what they are drawn from, and the files they are written to."""

import json

import pytest

from experiments.tables import figures
from kvjax.foundation import command_line
from kvjax.foundation.checkout import RESULTS


@pytest.mark.parametrize("name, channels", dict(mha=256, gqa=128, mqa=64, lrkv=192, mla=64).items())
def test_boxes_are_the_cache_entry(name, channels):
    boxes = figures.boxes(name)
    assert sum(width for *_, width in boxes) == channels
    residuals = [width for color, _, width in boxes if color == figures.RESIDUAL]
    assert residuals == ([16] * 8 if name == "lrkv" else [])


def test_every_mechanism_and_seed_is_drawn():
    comparison = json.loads((RESULTS / "tiny_comparison.json").read_text())
    (axes,) = figures.results(comparison).axes
    rows = comparison["rows"]
    assert sorted(t.get_text().replace("\n", " ") for t in axes.texts) == sorted(
        figures.NAMES[row["mechanism"]] for row in rows
    )
    for row, bars in zip(rows, axes.containers, strict=True):
        (mean,), half = bars.lines[0].get_ydata(), row["bpb_half_interval"]
        (bar,) = bars.lines[2][0].get_segments()
        assert mean == row["bpb_mean"] and bars.lines[0].get_xdata()[0] == row["cache_bytes"]
        assert bar[:, 1] == pytest.approx([mean - half, mean + half])
    seeds = [line.get_ydata() for line in axes.lines if line.get_marker() == "."]
    assert [list(values) for values in seeds] == [row["bpb"] for row in rows]


def test_files_are_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "figures", lambda: {tmp_path / "figures" / "a.svg": "<svg/>\n"})
    run = lambda *given: (command_line.status(figures.main, given), capsys.readouterr().out)
    assert run("--check") == (1, "would change: figures/a.svg\n")
    assert not (tmp_path / "figures").exists()
    assert run() == (0, "written: figures/a.svg\n")
    assert run() == (0, "nothing changes\n") == run("--check")


def test_results_that_are_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert command_line.status(figures.main, ["--check"]) == 2
    assert "python -m experiments.studies.tiny_comparison --save" in capsys.readouterr().err
