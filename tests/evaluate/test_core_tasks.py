"""CORE on a small synthetic bundle: scored tokens and scores."""

import json
import types

from etils import epath
import numpy as np
import pytest
import yaml

from kvjax.decoding.scoring import Scored
from kvjax.evaluate import core_tasks
from kvjax.foundation.errors import DataError, UserError
from tests.evaluate.oracles import TOKENIZER

ORDER = (1, 0, 3, 2, 5, 4)  # of six rows after Random(1337) has shuffled them
ROWS = {
    "choice.jsonl": [
        dict(query=f"Query {i}:", choices=["a cat", "a dog", f"a cow {i}"], gold=i % 3)
        for i in range(6)
    ],
    "schema.jsonl": [
        dict(
            context_options=[f"Tom {i} saw Ann because Tom", f"Tom {i} saw Ann because Ann"],
            continuation="was tall.",
            gold=i % 2,
        )
        for i in range(5)
    ],
    "words.jsonl": [
        dict(context=f" The word after {i} is ", continuation=f"word{i}") for i in range(5)
    ],
}
TASKS = [
    dict(
        label="choice",
        dataset_uri="choice.jsonl",
        num_fewshot=[2],
        icl_task_type="multiple_choice",
        continuation_delimiter="\nAnswer: ",
    ),
    dict(label="schema", dataset_uri="schema.jsonl", num_fewshot=[0], icl_task_type="schema"),
    dict(
        label="words", dataset_uri="words.jsonl", num_fewshot=[1], icl_task_type="language_modeling"
    ),
]


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "eval_data").mkdir()
    for name, rows in ROWS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "eval_data" / name).write_text(lines)
    (tmp_path / "core.yaml").write_text(yaml.safe_dump(dict(icl_tasks=TASKS)))
    baselines = "Eval Task,Random baseline\nchoice,33.3\nschema,50\nwords,0\n"
    (tmp_path / "eval_meta_data.csv").write_text(baselines)
    return epath.Path(tmp_path)


class Reader:
    """A model whose losses are a function of context and continuation."""

    tokenizer, positions = TOKENIZER, None

    def __init__(self, nats):
        self._nats, self.seen = nats, []

    def continuations(self, sequences):
        scored = []
        for context, continuation in sequences:
            texts = TOKENIZER.decode(context[1:]), TOKENIZER.decode(continuation)
            assert context[0] == TOKENIZER.bos_id
            self.seen.append(texts)
            nats = self._nats(*texts)
            losses = np.full(len(continuation), nats, np.float32)
            scored.append(Scored(losses, losses < 0.5))
        return scored


def _task(bundle, label):
    return next(task for task in core_tasks.read(bundle) if task.label == label)


def test_choices_are_scored_after_their_common_prefix(bundle):
    task = _task(bundle, "choice")
    model = Reader(lambda context, own: 1.0)
    (row,) = core_tasks.ask(model, task, [0])
    item = task.items[0]
    for (context, own), choice in zip(model.seen, item["choices"], strict=True):
        assert (context + own).endswith(f"{item['query']}\nAnswer: {choice}")
        assert own == choice[2:]  # all begin with "a "
    # Two shots, of other rows, each with its right answer and a blank line.
    shots = model.seen[0][0].split("\n\n")[:-1]
    assert len(shots) == 2
    for shot in shots:
        query, answer = shot.split("\nAnswer: ")
        (source,) = (r for r in ROWS["choice.jsonl"] if r["query"] == query)
        assert answer == source["choices"][source["gold"]] and source != item
    assert row["chosen"] == 0 and row["answer"] == item["gold"]  # the first of equal ones


def test_lowest_mean_loss_wins(bundle):
    task = _task(bundle, "choice")
    right = {item["query"]: item["choices"][item["gold"]] for item in ROWS["choice.jsonl"]}

    def question_of(context):
        return context.rpartition("\n\n")[2].partition("\nAnswer")[0]

    knows = Reader(lambda context, own: 0.1 if right[question_of(context)].endswith(own) else 5.0)
    rows = core_tasks.ask(knows, task, range(6))
    assert [row["right"] for row in rows] == [True] * 6
    assert all(len(row["nats"]) == 3 for row in rows)


def test_schema(bundle):
    task = _task(bundle, "schema")
    model = Reader(lambda context, own: 0.1 if "because Ann" in context else 1.0)
    rows = core_tasks.ask(model, task, range(5))
    assert {own for _, own in model.seen} == {" was tall."}
    assert [row["chosen"] for row in rows] == [1] * 5
    assert [row["right"] for row in rows] == [item["gold"] == 1 for item in task.items]


def test_language_modeling(bundle):
    task = _task(bundle, "words")
    model = Reader(lambda context, own: 0.1 if own in (" word1", " word2") else 1.0)
    rows = core_tasks.ask(model, task, range(5))
    assert sum(row["right"] for row in rows) == 2
    for (context, own), item in zip(model.seen, task.items, strict=True):
        assert own.strip() == item["continuation"]
        shot, _, rest = context.partition("\n\n")
        assert (rest + own).strip() == f"{item['context'].strip()} {item['continuation']}"
        assert shot.startswith("The word after") and shot not in rest


def test_rows_are_shuffled_and_shots_drawn_as_nanochat_does(bundle):
    task = _task(bundle, "choice")
    assert [item["query"] for item in task.items] == [f"Query {i}:" for i in ORDER]
    assert task.places[0].endswith(f"choice.jsonl, line {ORDER[0] + 1}")


def test_long_rows_keep_their_end(bundle):
    task = _task(bundle, "words")
    model = Reader(lambda context, own: 1.0)
    model.positions = 12
    ((context, continuation),) = core_tasks.prompts(model, task, 0)
    assert len(context) + len(continuation) == 13
    assert TOKENIZER.decode(continuation).strip() == task.items[0]["continuation"]
    for encode in (
        lambda text: [len(text)] * len(text),
        lambda text: [1],
    ):  # other tokens; no answer
        model.tokenizer = types.SimpleNamespace(bos_id=0, encode=encode)
        with pytest.raises(DataError, match="line 2: the prompt's tokens are not a prefix of"):
            core_tasks.prompts(model, task, 0)


def test_bad_bundles(bundle):
    """Replaces one file at a time; None: the file is missing."""

    def yaml_of(**changed):
        return yaml.safe_dump(dict(icl_tasks=[TASKS[0] | changed]))

    def csv_of(cell):
        return f"Eval Task,Random baseline\nwords,0\nchoice,{cell}\n"

    core, baselines = "core.yaml", "eval_meta_data.csv"
    choice, words = "eval_data/choice.jsonl", "eval_data/words.jsonl"

    def row(choices, gold):
        return f'{{"query": "a", "choices": {choices}, "gold": {gold}}}\n'

    blank = '{"context": "a", "continuation": " "}'
    cases = [
        (core, None, "core.yaml is missing"),
        *((core, x, "core.yaml lists no tasks") for x in ("a: b", "[", "[" * 9999)),
        (core, "icl_tasks: []", "lists no tasks: icl_tasks is empty"),
        (core, "icl_tasks: {a: b}", "core.yaml lists no tasks"),
        (core, "icl_tasks: [{label: x}]", "core.yaml: icl_task_type = None is a NoneType"),
        (core, yaml_of(label="other"), "has no row of other"),
        (core, yaml_of(icl_task_type="x"), "choice: icl_task_type = 'x': must be one of"),
        *((core, yaml_of(num_fewshot=x), "choice: num_fewshot = ") for x in (-1, [-1], "x", [], 6)),
        (core, yaml_of(dataset_uri="x.jsonl"), "does not exist"),
        (core, yaml_of(dataset_uri="../core.yaml"), "core.yaml: must end in one of"),
        (baselines, None, "eval_meta_data.csv is missing"),
        (baselines, "a" * 140_000, "eval_meta_data.csv is not CSV in UTF-8: field larger than"),
        (baselines, "x\ny\n", "must have columns"),
        (baselines, "Eval Task,Random baseline\n", "has no row of choice"),
        *((baselines, csv_of(x), "Random baseline") for x in ("", "x")),
        (choice, None, "choice.jsonl does not exist"),
        (choice, "", "the 0 rows of"),
        (choice, '{"query": "a"}\n', "choice.jsonl, line 1: choices = None is a NoneType"),
        (choice, "\n[1]\n", "choice.jsonl, line 2 must be an object"),
        (choice, row('["a", "b"]', 2), "line 1: gold = 2: must be 0 to 1"),
        *((choice, row('["a", "b"]', x), "gold = ") for x in ('"1"', "-1", "true", "null")),
        *((choice, row(x, 0), "line 1: ") for x in ('"ab"', "[]", "[1]")),
        (words, '{"context": 1, "continuation": "a"}', "context = 1 is a int"),
        (words, blank, "line 1: continuation is blank"),
    ]
    before = {name: (bundle / name).read_text() for name, *_ in cases}
    for name, text, said in cases:
        (bundle / name).unlink() if text is None else (bundle / name).write_text(text)
        with pytest.raises(UserError) as refused:
            core_tasks.read(bundle)
        assert said in str(refused.value), (name, text, said)
        (bundle / name).write_text(before[name])
    assert len(core_tasks.read(bundle)) == len(TASKS)
