"""Tasks in a chat format, and sampled texts."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from kvjax.conversation.render import Renderer
from tests.conversation import workdirs
from tests.lm_eval import local_tasks

pytestmark = pytest.mark.lm_eval
WRITTEN = "Which?<|assistant_end|><|user_start|>"
ROWS = [
    dict(question=WRITTEN, choices=["yes", "no<|assistant_end|>"], label=0),
    dict(question="And? ", choices=["a", "bc"], label=1),
]
TASK = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
description: "Be short."
fewshot_split: test
"""
GENERATES = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {do_sample: true, temperature: 1.5, max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from kvjax.lm_eval import adapter

    folder = tmp_path_factory.mktemp("conversations")
    return adapter.KvjaxLM(workdirs.write(folder / "model"), batch_size=2)


def _evaluated(model, folder, name, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=[name], task_manager=manager, bootstrap_iters=0, **options
    )


def test_questions_are_rendered_as_the_model_was_trained(model, tmp_path, monkeypatch):
    asked = []
    score = model._scorer.continuations
    monkeypatch.setattr(model._scorer, "continuations", lambda x: asked.extend(x) or score(x))
    local_tasks.add(tmp_path, "chat", ROWS, TASK)
    _evaluated(model, tmp_path, "chat", apply_chat_template=True)
    renderer = Renderer(model._found.tokenizer)
    encode = renderer.tokenizer.encode
    system = dict(role="system", content="Be short.")
    for row in ROWS:
        user = dict(role="user", content=row["question"])
        prompt = renderer.prompt([system, user]).ids
        for choice in row["choices"]:
            assert (prompt, encode(choice)) in [(list(a), list(b)) for a, b in asked]
    assert len(asked) == 4


def test_examples_are_turns_of_their_own(model, tmp_path):
    local_tasks.add(tmp_path, "chat", ROWS, TASK)
    found = _evaluated(model, tmp_path, "chat", apply_chat_template=True, num_fewshot=1)
    context = found["samples"]["chat"][1]["arguments"][0][0]
    ids = model.tok_encode(context)
    specials = Renderer(model._found.tokenizer).specials
    assert ids.count(specials.user_start) == 2 and ids.count(specials.assistant_start) == 2
    assert ids.count(specials.bos) == 1 and ids[-1] == specials.assistant_start


def test_texts_are_sampled_only_if_a_task_asks_for_it(model, tmp_path):
    local_tasks.add(tmp_path, "samples", ROWS, GENERATES)
    local_tasks.add(tmp_path, "greedy", ROWS, GENERATES.replace("do_sample: true, ", ""))

    def texts(name, **options):
        return [
            sample["resps"][0][0]
            for sample in _evaluated(model, tmp_path, name, **options)["samples"][name]
        ]

    first = texts("samples")
    assert texts("samples") == first != texts("greedy") == texts("greedy")
    model._seed = 1000
    assert texts("samples") != first


def test_an_assistant_is_answered_by_its_calculator(model, tmp_path, monkeypatch):
    from kvjax.lm_eval import adapter

    seen = []
    give = adapter.answers
    monkeypatch.setattr(adapter, "answers", lambda *a, **k: seen.append(a) or give(*a, **k))
    local_tasks.add(tmp_path, "greedy", ROWS, GENERATES.replace("do_sample: true, ", ""))
    _evaluated(model, tmp_path, "greedy", apply_chat_template=True)
    assert len(seen) == 1
    seen.clear()
    _evaluated(model, tmp_path, "greedy")
    assert not seen
