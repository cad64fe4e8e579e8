"""Scores on RULER are those of the rows that evaluations stored."""

import json

import pytest

from experiments import record
from experiments.evaluation import ruler
from kvjax.foundation import command_line
from tests.conversation import workdirs


def _rows(workdir, task, credits):
    folder = workdir / "evaluations" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}.json").write_text(json.dumps(dict(data="x")))
    rows = [dict(index=i, score=c, right=c == 1) for i, c in enumerate(credits)]
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tasks_and_their_mean_beside_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    first, second = (workdirs.write(tmp_path / name) for name in ("first", "second"))
    _rows(first, "ruler_vt_512", [1.0, 0.8, 0.6, 1.0])
    _rows(first, "ruler_fwe_512", [1.0, 1.0, 1.0, 1.0])
    _rows(second, "ruler_vt_512", [0.0, 0.2, 0.6, 0.2])
    _rows(second, "mmlu", [1.0])
    minutes = dict(tasks=dict(ruler_vt_512=dict(minutes_now=1.5)))
    (second / "evaluations" / "0" / "summary.json").write_text(json.dumps(minutes))
    arguments = [f"--workdirs={first},{second}", "--json", "--save"]
    assert command_line.status(ruler.main, arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = [(r["task"], r["workdir"], round(r["score"]["value"], 9), r["minutes"]) for r in rows]
    assert found == [
        ("ruler_512", "first", 0.925, None),
        ("ruler_512", "second", 0.25, 1.5),
        ("ruler_fwe_512", "first", 1, None),
        ("ruler_vt_512", "first", 0.85, None),
        ("ruler_vt_512", "second", 0.25, 1.5),
    ]
    assert rows[4]["against_first"]["value"] == pytest.approx(-0.6) and rows[4]["rows"] == 4
    assert json.loads((record.RESULTS / "ruler.json").read_text())["rows"] == rows
    assert command_line.status(ruler.main, [f"--workdirs={second}"]) == 0
    assert "25.0" in capsys.readouterr().out
    assert command_line.status(ruler.main, ["--workdirs="]) == 2
    (second / "evaluations" / "0" / "ruler_vt_512.jsonl").unlink()
    assert command_line.status(ruler.main, [f"--workdirs={second}"]) == 2
    assert "none has rows of RULER" in capsys.readouterr().err
