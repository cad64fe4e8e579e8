"""Token eviction: kvpress is asked RULER's questions, and its answers are scored as RULER's."""

import json
import re
import sys

from experiments import record
from experiments.evaluation import token_eviction
from kvjax.foundation import command_line
from tests.conversation import workdirs


def test_answers_are_scored_as_ruler_scores_them(tmp_path, monkeypatch, capsys):
    """The first answer has the number that its prompt hides, the second has not."""
    workdir = workdirs.write(tmp_path / "run")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")

    def answers(options, run, questions):
        (task,) = questions["tasks"]
        assert questions["cache"] == 0.25 and questions["ends"]
        prompts = [bytes(i for i in ids if i < 256).decode() for ids in task["prompts"]]
        assert max(map(len, prompts)) <= 2048 - task["num_tokens"]
        numbers = [re.search(r"\d{7}", prompt)[0] for prompt in prompts]
        for press in questions["presses"]:
            yield dict(press=press, task=task["name"], texts=[numbers[0], ""], kept=0.25)

    monkeypatch.setattr(token_eviction, "_answers", answers)
    options = [f"--workdir={workdir}", f"--python={sys.executable}", "--ruler_lengths=2048"]
    options += ["--ruler_samples=2", "--task=niah_single_1", "--cache=0.25", "--press=knorm"]
    assert command_line.status(token_eviction.main, [*options, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["press"] == "knorm" and row["task"] == "ruler_niah_single_1_2048"
    assert (row["questions"], row["score"]["value"], row["kept"]) == (2, 0.5, 0.25)
