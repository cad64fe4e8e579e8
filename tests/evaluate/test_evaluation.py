"""Checks of a plan before a model is evaluated."""

import dataclasses

from etils import epath
import pytest

from kvjax.conversation.dialogue import NativeDialogue
from kvjax.conversation.questions import MathProblem, MultipleChoice, multiple_choice
from kvjax.evaluate import evaluation
from kvjax.evaluate.datasets import Questions
from kvjax.evaluate.evaluation import Plan
from kvjax.evaluate.generated import AnswerOptions
from kvjax.evaluate.model import ModelInfo
from kvjax.evaluate.task import TASKS
from kvjax.foundation.errors import UserError
from tests.evaluate.oracles import DIALOGUE, TOKENIZER, Oracle

SHORT = MultipleChoice("Which?", ("a", "b"), ("A", "B"), "A")
LONG = MultipleChoice("Which of these? " * 20, ("a", "b"), ("A", "B"), "B")


def _plan(name, items, **options):
    places = [f"rows.jsonl, line {i + 1}" for i in range(len(items))]
    found = Questions(TASKS[name], items, places, ("rows.jsonl",), "hash")
    return Plan({name: found}, **options)


def _model(positions=None, limit=1 << 20):
    return ModelInfo(TOKENIZER, NativeDialogue(TOKENIZER, "a test", limit), positions)


def test_a_prompt_longer_than_the_positions_is_named():
    plan = _plan("mmlu", [SHORT, LONG])
    size = len(DIALOGUE.prompt([dict(role="user", content=multiple_choice(LONG))]).ids)
    assert evaluation.check(_model(size), plan, 10_000).warnings == []
    said = f"rows.jsonl, line 2: {size} tokens; the model has {size - 1} positions"
    with pytest.raises(UserError, match=said):
        evaluation.check(_model(size - 1), plan, 10_000)
    evaluation.check(_model(size - 1), _plan("mmlu", [SHORT, LONG], limit=1), 10_000)


def test_answers_need_positions():
    plan = _plan(
        "gsm8k", [MathProblem("How many?", "#### 1")], answers=AnswerOptions(num_tokens=100)
    )
    size = len(DIALOGUE.prompt([dict(role="user", content="How many?")]).ids)
    assert evaluation.check(_model(size + 99), plan, 10_000).warnings == []
    with pytest.raises(UserError, match=f"{size} tokens and 100 to generate.*--num_tokens"):
        evaluation.check(_model(size + 98), plan, 10_000)


def test_questions_without_a_number_are_refused():
    plan = _plan("gsm8k", [MathProblem("How many?", "#### 1"), MathProblem("And now?", "18")])
    with pytest.raises(UserError, match="line 2: answer = '18': must have '#### NUMBER'"):
        evaluation.check(_model(), plan, 10_000)


def test_rows_that_other_processes_add_meanwhile_are_counted(tmp_path):
    """This process ends last; the other had not ended the first task when this one did."""
    arc, mmlu = _plan("arc_easy", [SHORT] * 4), _plan("mmlu", [SHORT] * 4)
    plan = Plan(arc.questions | mmlu.questions, share=(0, 2))
    identity = dict(checkpoint="a")
    given = dict(identities=dict.fromkeys(plan.questions, identity), defaults={}, prompts={})
    other = dataclasses.replace(arc, share=(1, 2))
    asked = []

    def letter(text, n):
        asked.append(text)
        if len(asked) == 3:  # in the second task
            with evaluation.opened(other, epath.Path(tmp_path), **given) as stores:
                evaluation.run(Oracle(lambda text, n: [1, 0]), other, stores)
        return [1, 0]

    with evaluation.opened(plan, epath.Path(tmp_path), **given) as stores:
        done = evaluation.run(Oracle(letter), plan, stores)
    assert {name: len(task.rows) for name, task in done.items()} == dict(arc_easy=4, mmlu=2)


def test_warnings_of_long_prompts():
    plan = _plan("mmlu", [SHORT, LONG, LONG])
    beyond, cut = evaluation.check(_model(limit=200), plan, 150).warnings
    assert beyond == ("mmlu: 2 of 3 prompts may exceed the training length of 150 tokens")
    assert cut == "mmlu: 2 prompts are longer than the limit, and lose their end"
