"""Scores are those of the rows that evaluations stored."""

import json

import pytest

from experiments import record
from experiments.evaluation import scores
from kvjax.foundation import command_line
from tests.conversation import workdirs


def _rows(workdir, task, verdicts, **identity):
    folder = workdir / "evaluations" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}.json").write_text(json.dumps(dict(data="x") | identity))
    lines = [json.dumps(dict(index=i, right=right)) + "\n" for i, right in enumerate(verdicts)]
    (folder / f"{task}.jsonl").write_text("".join(lines))


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    first, second = (workdirs.write(tmp_path / name) for name in ("first", "second"))
    _rows(first, "mmlu", [True, True, False, True])
    _rows(second, "mmlu", [True, False, False, False])
    _rows(first, "gsm8k", [False] * 8)
    return f"--workdirs={first},{second}"


def test_each_task_of_each_model_beside_the_first(pair, capsys):
    assert command_line.status(scores.main, [pair, "--json", "--save", "--name=two"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["workdir"], r["task"], r["right"], r["rows"]) for r in found] == [
        ("first", "mmlu", 3, 4),
        ("first", "gsm8k", 0, 8),
        ("second", "mmlu", 1, 4),
    ]
    assert "against_first" not in found[0] and found[2]["against_first"]["value"] == -0.5
    assert found[0]["score"]["low"] > 0.2 and found[1]["score"]["high"] < 0.4
    assert found[0]["cache_bytes"] > 0
    saved = json.loads((record.RESULTS / "two.json").read_text())
    assert saved["rows"] == found


def test_a_terminal_takes_it(pair, capsys):
    assert command_line.status(scores.main, [pair]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "-50.0" in out


def test_missing_and_unequal_evaluations(pair, tmp_path, capsys):
    _rows(tmp_path / "second", "mmlu", [True], data="y")
    assert command_line.status(scores.main, [pair]) == 2
    assert "mmlu was evaluated with data = 'y'" in capsys.readouterr().err
    workdirs.write(tmp_path / "third")
    assert command_line.status(scores.main, [f"--workdirs={tmp_path / 'third'}"]) == 2
    assert "third has no evaluation: python -m kvjax.evaluate" in capsys.readouterr().err
