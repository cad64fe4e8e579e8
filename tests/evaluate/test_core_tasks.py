"""CORE on a made-up bundle: which tokens are scored, and what that comes to."""

import json

from etils import epath
import numpy as np
import pytest
import yaml

from kvjax.decoding.scoring import Scored
from kvjax.evaluate import core_tasks
from kvjax.foundation.errors import DataError
from kvjax.foundation.errors import MissingDataError
from tests.evaluate.oracles import TOKENIZER

_CHOICE = '{"query": "a", "choices": %s, "gold": %s}\n'
ORDER = (1, 0, 3, 2, 5, 4)  # of six rows that Random(1337) shuffles
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
    """A model that finds some texts likely: those of a function of context and continuation."""

    tokenizer, positions = TOKENIZER, None

    def __init__(self, nats):
        self._nats, self.seen = nats, []

    def continuations(self, asked):
        found = []
        for context, continuation in asked:
            texts = TOKENIZER.decode(context[1:]), TOKENIZER.decode(continuation)
            assert context[0] == TOKENIZER.bos_id
            self.seen.append(texts)
            nats = self._nats(*texts)
            each = np.full(len(continuation), nats, np.float32)
            found.append(Scored(each, each < 0.5))
        return found


def _task(bundle, label):
    return next(task for task in core_tasks.read(bundle) if task.label == label)


def test_choices_are_scored_from_where_they_differ(bundle):
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


def test_the_fewest_mean_nats_win(bundle):
    task = _task(bundle, "choice")
    right = {item["query"]: item["choices"][item["gold"]] for item in ROWS["choice.jsonl"]}
    asked = lambda context: context.rpartition("\n\n")[2].partition("\nAnswer")[0]
    knows = Reader(lambda context, own: 0.1 if right[asked(context)].endswith(own) else 5.0)
    rows = core_tasks.ask(knows, task, range(6))
    assert [row["right"] for row in rows] == [True] * 6
    assert all(len(row["nats"]) == 3 for row in rows)


def test_a_schema_scores_what_both_end_with(bundle):
    task = _task(bundle, "schema")
    model = Reader(lambda context, own: 0.1 if "because Ann" in context else 1.0)
    rows = core_tasks.ask(model, task, range(5))
    assert {own for _, own in model.seen} == {" was tall."}
    assert [row["chosen"] for row in rows] == [1] * 5
    assert [row["right"] for row in rows] == [item["gold"] == 1 for item in task.items]


def test_a_word_is_right_if_all_of_it_is_likeliest(bundle):
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


def test_what_is_longer_than_the_positions_keeps_its_end(bundle):
    task = _task(bundle, "words")
    model = Reader(lambda context, own: 1.0)
    model.positions = 12
    ((context, continuation),) = core_tasks.prompts(model, task, 0)
    assert len(context) + len(continuation) == 13
    assert TOKENIZER.decode(continuation).strip() == task.items[0]["continuation"]


@pytest.mark.parametrize("name", ["core.yaml", "eval_meta_data.csv", "eval_data/choice.jsonl"])
def test_a_part_of_the_bundle_that_is_missing_is_named(bundle, name):
    (bundle / name).unlink()
    with pytest.raises(MissingDataError, match=name.rpartition("/")[2]):
        core_tasks.read(bundle)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("core.yaml", "a: b", "core.yaml lists no tasks"),
        ("core.yaml", "icl_tasks: [{label: x}]", "each of icl_tasks needs"),
        ("core.yaml", "[", "core.yaml lists no tasks"),
        ("eval_meta_data.csv", "x\n", "has no row of choice"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\nchoice,x\n", "must have columns"),
        ("eval_data/choice.jsonl", '{"query": "a"}\n', "choice.jsonl, line 1: lacks choices, gold"),
        ("eval_data/choice.jsonl", "", "has 0 rows"),
        ("eval_data/choice.jsonl", _CHOICE % ('["a", "b"]', "2"), "gold = 2: must be 0 to 1"),
        ("eval_data/choice.jsonl", _CHOICE % ('["a", "b"]', '"1"'), "gold = '1': must be 0 to 1"),
        ("eval_data/choice.jsonl", _CHOICE % ('"ab"', "0"), "choices must be a list of texts"),
        ("eval_data/words.jsonl", '{"context": 1, "continuation": "a"}\n', "context must be text"),
    ],
)
def test_a_bundle_that_is_none_is_refused_with_the_place(bundle, name, text, said):
    (bundle / name).write_text(text)
    with pytest.raises(DataError, match=said):
        core_tasks.read(bundle)
