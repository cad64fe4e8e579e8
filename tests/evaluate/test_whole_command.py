"""python -m kvjax.evaluate with an oracle for a model: scores, tables, shared rows."""

import hashlib
import itertools
import json
import shutil
import types
from unittest import mock

from etils import epath
import numpy as np
import pytest

from kvjax import sandbox
from kvjax.conversation import questions
from kvjax.data import records, tokenizer as tokenizer_lib
from kvjax.decoding.answers import Answer
from kvjax.decoding.scoring import Scored
from kvjax.evaluate import __main__ as evaluate, evaluation, model as model_lib, rows as rows_lib
from kvjax.evaluate.task import TASKS
from kvjax.foundation import command_line, json_text, progress, runtime
from kvjax.workdir import checkpoint, trained
from tests import golden
from tests.conversation import workdirs
from tests.evaluate import oracles
from tests.evaluate.oracles import COUNTS

# Number of rows of each set, from the first, that the oracle answers right.
RIGHT = dict(arc_easy=3, arc_challenge=1, mmlu=6, gsm8k=2, humaneval=2, core_x=4, core_y=3)
FIVE = [name for name in COUNTS if not name.startswith("core")]
ALL = f"--tasks={','.join(FIVE)},core"
TABLE = """\
task              %  95 % interval   right  minutes
-------------  ----  -------------  ------  -------
arc_easy       60.0   23.1 to 88.2  3 of 5      1.5
arc_challenge  25.0    4.6 to 69.9  1 of 4      1.5
mmlu           75.0   40.9 to 92.9  6 of 8      1.5
gsm8k          40.0   11.8 to 76.9  2 of 5      1.5
humaneval      66.7   20.8 to 93.9  2 of 3      1.5
core_x         66.7   30.0 to 90.3  4 of 6      1.5
core_y         75.0   30.1 to 95.4  3 of 4      1.5
combined       53.3   38.0 to 67.8       -        -

ChatCORE 0.440 (0 is guessing).

CORE 0.5000, over 2 tasks.

The published CORE has 22 tasks: not comparable.

Not the whole published set: arc_easy, arc_challenge, mmlu, gsm8k, humaneval.

Answers that reached the maximum number of tokens: gsm8k 3.

Programs that were judged twice: humaneval 3.

Prompts: nanochat; calculator: nanochat; HumanEval as chat, sandbox: a box + a
lock.
"""


class Knows(oracles.Oracle):
    """An oracle that answers the first rows of each set right.

    Attributes:
      asked: names of the rows asked so far, as "mmlu 3".

    Args:
      more: number of right answers per set beyond RIGHT.
      until: number of rows after which it raises KeyboardInterrupt; -1: never.
    """

    def __init__(self, tokenizer, dialogue, batch: int, more: int, until: int):
        super().__init__(self._letter_logits, self._answer)
        self.tokenizer, self.dialogue, self.batch = tokenizer, dialogue, batch
        self._more, self._until, self.asked = more, until, []

    def _place(self, text: str) -> tuple[str, int, bool]:
        """Returns set and row of a question, and True if the oracle answers it right."""
        name = max((n for n in COUNTS if f"{n} " in text), key=len)
        place = int(text.rpartition(f"{name} ")[2].partition("?")[0])
        if len(self.asked) == self._until:
            raise KeyboardInterrupt
        self.asked.append(f"{name} {place}")
        return name, place, place < RIGHT[name] + self._more

    def _letter_logits(self, text, count):
        _, place, is_right = self._place(text)
        return np.eye(count)[(place + (not is_right)) % count]

    def _answer(self, text):
        name, place, is_right = self._place(text)
        if name == "gsm8k":
            return oracles.answer_tokens(
                f"#### {place}" if is_right else "I do not know, nor do you."
            )
        return oracles.answer_tokens("good" if is_right else "bad")

    def continuations(self, sequences):
        scored = []
        for before, after in sequences:
            _, place, is_right = self._place(self.tokenizer.decode(before))
            is_gold = self.tokenizer.decode(after).strip() == ("yes", "no")[place % 2]
            likely = is_gold == is_right
            nats = np.full(len(after), 1.0 if likely else 2.0)
            scored.append(Scored(nats, np.full(len(after), likely)))
        return scored


class Box:
    """A sandbox that accepts good programs, at the second attempt."""

    layers = ("a box", "a lock")

    def judge_all(self, problems):
        self.judged = problems
        good = ["good" in problem.program for problem in problems]
        return [sandbox.Verdict(g, "" if g else "bad", 0.0, True) for g in good]


@pytest.fixture
def run(data, tmp_path, monkeypatch, capsys):
    """Returns a function of flags and of Knows: (standard output, standard error, asked rows)."""
    workdir = workdirs.write(tmp_path / "run")
    monkeypatch.setattr(runtime, "start", lambda: None)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1e6)
    box = Box()
    monkeypatch.setattr(evaluate, "_box", lambda options: box)
    clock = types.SimpleNamespace(monotonic=itertools.count(0, 90).__next__)
    monkeypatch.setattr(evaluation, "time", clock)
    monkeypatch.chdir(tmp_path)

    def command(*given, more=0, until=-1, status=0):
        models = []

        def served(generator, tokenizer, dialogue, *, batch):
            models.append(Knows(tokenizer, dialogue, batch, more, until))
            return models[0]

        monkeypatch.setattr(evaluate, "CachedModel", served)
        arguments = [f"--workdir={workdir}", f"--data={data}", "--num_tokens=10", *given]
        found = command_line.status(evaluate.main, arguments)
        out, err = capsys.readouterr()
        assert found == status, err
        return out, err, models[0].asked if models else []

    command.workdir, command.box = workdir, box
    return command


def _tasks(out: str) -> dict:
    """Returns the tasks of a result, without keys that depend on time."""
    tasks = json.loads(out)["tasks"]

    def drop(task):
        return {key: value for key, value in task.items() if not key.endswith("_now")}

    return {name: drop(task) for name, task in tasks.items()}


def test_scores_of_all_tasks_at_once_and_one_by_one(run, data):
    out, err, asked = run(ALL, "--json", "--batch=2")
    result, tasks = json.loads(out), _tasks(out)
    assert {name: task["right"] for name, task in tasks.items()} == RIGHT
    assert {name: (task["rows"], task["of"]) for name, task in tasks.items()} == {
        name: (count, count) for name, count in COUNTS.items()
    }
    assert len(asked) == sum(COUNTS.values()) + COUNTS["core_x"] + COUNTS["core_y"]
    assert TABLE in err and err.startswith(
        f"WARNING: arc_easy: {data}/arc_easy.jsonl has 5 rows, the published set has 2,376: "
    )
    own = dict(arc_easy={}, gsm8k=dict(unfinished=3, calculator="nanochat", num_tokens=10))
    own["humaneval"] = dict(retried=3, humaneval="chat", sandbox="a box + a lock", num_tokens=10)
    own["core_y"] = dict(chance=0.25)
    scores = ("rows", "of", "right", "accuracy", "interval")
    for name, expected in own.items():
        found = {key: value for key, value in tasks[name].items() if key not in scores}
        assert found == expected | dict(dialogue="nanochat", dtype="float32"), name
    kept = run.workdir / "evaluations" / "0"
    written = json_text.without_checksum(json.loads((kept / "summary.json").read_text()))
    assert written.pop("made_by") and written == result
    assert {name: task["asked_now"] for name, task in result["tasks"].items()} == COUNTS

    found, core = trained.find(run.workdir), [data / "core.yaml", data / "eval_meta_data.csv"]
    assert result["model"] == dict(
        workdir=str(run.workdir),
        step=0,
        checkpoint=checkpoint.fingerprint(found.checkpoints, 0),
        tokenizer=hashlib.sha256(found.tokenizer.to_json().encode()).hexdigest(),
    )

    def digest(*files):
        return records.digest(list(map(epath.Path, files)))

    core = digest(*core, *(data / "eval_data" / f"{name}.jsonl" for name in "xy"))
    sets = dict(result["data"])
    assert sets.pop("core") == dict(sha256=core, tasks=2)
    assert sets == {
        name: dict(
            files=[str(data / f"{name}.jsonl")],
            sha256=digest(data / f"{name}.jsonl"),
            rows=COUNTS[name],
            published=TASKS[name].rows,
        )
        for name in FIVE
    }
    same = dict(dialogue="nanochat", dtype="float32")
    talks = dict(template="", day="")
    writes = dict(num_tokens=10, ends=result["options"]["ends"], calculator="nanochat")
    judged = dict(humaneval="chat", sandbox="a box + a lock")
    assert result["options"] == same | talks | writes | judged | dict(limit=0)
    same |= {key: result["model"][key] for key in ("checkpoint", "tokenizer")}
    for name in COUNTS:
        of_task = {} if name.startswith("core") else talks
        of_task |= writes if name in ("gsm8k", "humaneval") else {}
        of_task |= judged if name == "humaneval" else {}
        sha256 = result["data"][name]["sha256"] if name in FIVE else core
        identity = json.loads((kept / f"{name}.json").read_text())
        assert identity == same | of_task | dict(data=sha256), name
    _check_rows(kept, found.tokenizer)

    for name in (*FIVE, "core"):
        out, *_ = run(f"--tasks={name}", "--json", f"--out={run.workdir}/apart")
    assert _tasks(out) == tasks
    same = ("model", "data", "combined", "chat_core", "core", "core_tasks")
    assert {key: json.loads(out)[key] for key in same} == {key: result[key] for key in same}


def _check_rows(kept, tokenizer):
    """Compares some rows on disk, right and wrong ones, with their expected contents."""
    dialogue = oracles.DIALOGUE

    def row(name, i, **said):
        (found,) = (row for row in rows_lib.of_file(kept / f"{name}.jsonl") if row["index"] == i)
        ids = [tokenizer.bos_id, *tokenizer.encode(said.pop("core", ""))]
        if name in FIVE:
            text = said.pop("asked", f"{name} {i}?")
            ids = dialogue.prompt([dict(role="user", content=text)]).ids
        prompt = hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest()[:16]
        assert found == dict(index=i, prompt=prompt) | said, name

    item = questions.mmlu(oracles.row("mmlu", 7), "")
    chosen = dict(letters="ABCD", logits=[1, 0, 0, 0], chosen="A", answer="D", right=False)
    row("mmlu", 7, asked=questions.multiple_choice(item), **chosen)
    row("gsm8k", 1, text="#### 1", tokens=6, right=True)
    unfinished = dict(unfinished=True, right=False, reason="no marker")
    row("gsm8k", 2, text="I do not k", tokens=10, **unfinished)
    row("humaneval", 1, text="good", tokens=4, right=True, retried=True)
    row("humaneval", 2, text="bad", tokens=3, right=False, reason="bad", retried=True)
    # Random(1337) moves the second of four rows to the front.
    row("core_y", 0, core="core_y 1? yes", nats=[2, 1], chosen=1, answer=1, right=True)


def test_each_row_is_asked_once(run):
    def asked(*given, **how):
        return [int(row.split()[1]) for row in run(*given, **how)[2]]

    two = ("--tasks=mmlu", "--batch=2")
    assert asked(*two, "--share=1/3") == [1, 4, 7]
    assert asked(*two, "--share=0/3", "--limit=4") == [0, 3]
    out, err, _ = run(*two, "--share=0/3", "--json")
    (task,) = _tasks(out).values()
    assert (task["rows"], task["right"], task["of"]) == (6, 4, 8)
    assert "Incomplete: mmlu." in err and "combined" not in json.loads(out)
    assert asked(*two) == [2, 5] and asked(*two) == []

    generated = ("--tasks=gsm8k", "--batch=2")
    assert asked(*generated, until=3, status=130) == [0, 1, 2]
    assert asked(*generated) == [2, 3, 4]  # row 2 was not written
    assert _tasks(run(*generated, "--json")[0])["gsm8k"]["right"] == RIGHT["gsm8k"]
    _, err, _ = run("--tasks=gsm8k", "--calculator=dataset", status=2)
    assert "calculator = 'nanochat', but this command has 'dataset'" in err


def test_humaneval_completion_and_plain_text(run, data, tmp_path, monkeypatch):
    """Completes prompts of HumanEval; asks CORE of a model without special tokens."""
    given = ("--tasks=humaneval", "--humaneval=completion", "--humaneval_helpers=prompt")
    given += ("--cache_dtype=int8",)
    out, err, _ = run(*given, "--json")
    said = "HumanEval as completion, sandbox: a box + a lock, helpers from the prompt."
    assert said in " ".join(err.split())
    (task,) = _tasks(out).values()
    asked = dict(humaneval="completion", humaneval_helpers="prompt", right=2)
    assert task | asked == task and json.loads(out)["options"]["humaneval_helpers"] == "prompt"
    kept = tmp_path / "run/evaluations/0_int8"
    identity = json.loads((kept / "humaneval.json").read_text())
    asked = dict(humaneval="completion", humaneval_helpers="prompt", cache_dtype="int8")
    assert identity | asked == identity
    assert "template" not in identity
    row = oracles.row("humaneval", 2)
    problem = sandbox.Problem(f"{row['prompt']}bad", row["test"], "f")
    assert run.box.judged[-1] == problem

    def fails(problems):
        raise sandbox.SandboxError("it broke")

    monkeypatch.setattr(run.box, "judge_all", fails)
    _, err, _ = run(
        *given[:-1], f"--out={kept}", status=2
    )  # rows of one cache are not added to another's
    assert "cache_dtype = 'int8', but this command has None" in err
    _, err, _ = run("--tasks=humaneval", "--out=fails", status=2)
    assert "humaneval: the sandbox failed: it broke. Run it again" in err
    plain = workdirs.write(tmp_path / "plain", tokenizer=tokenizer_lib.byte_tokenizer())
    out, err, _ = run("--tasks=core", f"--workdir={plain}", "--json")
    assert json.loads(out)["options"]["dialogue"] == ""
    assert err.endswith(
        "Prompts: plain text.\n\nwritten: {}\n".format(plain / "evaluations/0/summary.json")
    )


def test_batches_are_padded_with_their_last_prompt(monkeypatch):
    seen = []
    monkeypatch.setattr(model_lib, "Scorer", lambda of, batch: seen.append((of, batch)))
    generator = types.SimpleNamespace(positions=77)
    model = model_lib.CachedModel(generator, "a tokenizer", "a dialogue", batch=4)
    assert model.positions == 77

    def answer(*given, **how):
        seen.append((given, how))
        return [Answer(text=p) for p in given[2]]

    monkeypatch.setattr(model_lib.answers_lib, "answers", answer)
    assert model.answers(["a", "b"], num_tokens=3) == [Answer(text="a"), Answer(text="b")]
    padded = (generator, "a dialogue", ["a", "b", "b", "b"])
    assert seen == [(generator, 4), (padded, dict(num_tokens=3))]


def test_a_quantised_cache_is_compared_with_a_wide_one(run, capsys):
    """Its rows and scores stand apart."""
    assert "Prompts: nanochat; cache in int8." in run("--tasks=mmlu", "--cache_dtype=int8")[0]
    assert "cache in" not in run("--tasks=gsm8k")[0]
    for folder, name in (("0", "gsm8k"), ("0_int8", "mmlu")):
        file = run.workdir / "evaluations" / folder / "summary.json"
        assert json.loads(file.read_text())["tasks"].keys() == {name}
    run("--tasks=mmlu")
    asked = [f"--compare={run.workdir},{run.workdir}@0_int8", "--json"]
    assert command_line.status(evaluate.main, asked) == 0
    task = json.loads(capsys.readouterr().out)["tasks"]["mmlu"]
    assert task["rows"] == 8 and task["difference"]["value"] == 0


def test_a_summary_has_scores_of_one_cache(run, tmp_path):
    """Also in a folder that evaluations of several share."""
    run("--tasks=mmlu", f"--out={tmp_path / 'out'}")
    given = ("--tasks=gsm8k", f"--out={tmp_path / 'out'}", "--cache_dtype=int8", "--json")
    assert _tasks(run(*given)[0]).keys() == {"gsm8k"}


def test_prompts_over_another_cache_have_the_same_date(run, monkeypatch):
    run("--tasks=mmlu")
    path = run.workdir / "evaluations/0/mmlu.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(day="2026-01-02")))
    dialogue = mock.Mock(wraps=evaluate._dialogue)
    monkeypatch.setattr(evaluate, "_dialogue", dialogue)
    run("--tasks=gsm8k", "--cache_dtype=int8")
    assert dialogue.call_args.args[3] == "2026-01-02"


def test_summary_drops_tasks_of_other_models(run, tmp_path):
    """But not those of the same one before its folder was moved."""
    run("--tasks=mmlu")
    path = run.workdir / "evaluations" / "0" / "summary.json"
    before = json_text.without_checksum(json.loads(path.read_text()))
    before["model"]["workdir"] = "/elsewhere"
    path.write_text(json.dumps(before))
    assert _tasks(run("--tasks=arc_easy", "--json")[0]).keys() == {"arc_easy", "mmlu"}
    before["model"]["checkpoint"] = "another"
    path.write_text(json.dumps(before))
    assert _tasks(run("--tasks=gsm8k", "--json")[0]).keys() == {"gsm8k"}
    path.write_text("[half")
    assert _tasks(run("--tasks=arc_easy", "--json")[0]).keys() == {"arc_easy"}


def test_compare(run, tmp_path, capsys):
    run(ALL)
    other = tmp_path / "other"
    run(ALL, f"--out={other}", more=1)
    sides = "--compare=run,other"
    assert command_line.status(evaluate.main, [sides, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    for name, count in COUNTS.items():
        assert found["tasks"][name]["difference"]["value"] == pytest.approx(-1 / count)
    means = [np.mean([(RIGHT[n] + more) / COUNTS[n] for n in FIVE]) for more in (0, 1)]
    combined, core = found["tasks"]["combined"], found["tasks"]["core"]
    assert [combined["one"], combined["other"]] == pytest.approx(means)
    assert [core["one"], core["other"]] == pytest.approx([0.5, 5 / 6])
    assert command_line.status(evaluate.main, ["--compare=run+run@0+run, other+other+other"]) == 0
    seeds = capsys.readouterr().out
    golden.check_text(f"{err}\n{seeds}\n{json.dumps(found)}", "evaluate/compared", 1e-6)
    for given, said in {
        "run": "give two workdirs, as runs/a,runs/b",
        "run,": "give two workdirs",
        "run@7,other": "run@7 has no evaluation of that step; there are evaluations of steps [0]: ",
        "x@7,other": "x@7 has no evaluation of that step: python -m kvjax.evaluate --workdir=x\n",
        "run,x": "--compare: x has no evaluation: python -m kvjax.evaluate --workdir=x\n",
    }.items():
        assert command_line.status(evaluate.main, [f"--compare={given}"]) == 2
        assert said in capsys.readouterr().err

    kept = json.loads((other / "mmlu.json").read_text())
    (other / "mmlu.json").write_text(json.dumps(kept | dict(data="other")))
    assert command_line.status(evaluate.main, [sides]) == 2
    assert "mmlu was evaluated with data = " in capsys.readouterr()[1]
    shutil.rmtree(other)
    assert command_line.status(evaluate.main, [sides]) == 2
    assert "has no evaluation" in capsys.readouterr()[1]
