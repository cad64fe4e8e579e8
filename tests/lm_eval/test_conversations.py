"""Tasks of lm-evaluation-harness in a chat format."""

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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from kvjax.lm_eval import adapter

    folder = tmp_path_factory.mktemp("conversations")
    return adapter.KvjaxLM(workdirs.write(folder / "model"), batch_size=2)


def test_questions_are_rendered_as_the_model_was_trained(model, tmp_path, monkeypatch, evaluated):
    asked = []
    score = model._scorer.continuations
    monkeypatch.setattr(model._scorer, "continuations", lambda x: asked.extend(x) or score(x))
    local_tasks.add(tmp_path, "chat", ROWS, TASK)
    evaluated(model, tmp_path, ["chat"], apply_chat_template=True)
    renderer = Renderer(model._saved.tokenizer)
    encode = renderer.tokenizer.encode
    system = dict(role="system", content="Be short.")
    for row in ROWS:
        user = dict(role="user", content=row["question"])
        prompt = renderer.prompt([system, user]).ids
        for choice in row["choices"]:
            assert (prompt, encode(choice)) in [(list(a), list(b)) for a, b in asked]
    assert len(asked) == 4


def test_examples_are_turns_of_their_own(model, tmp_path, evaluated):
    local_tasks.add(tmp_path, "chat", ROWS, TASK)
    found = evaluated(model, tmp_path, ["chat"], apply_chat_template=True, num_fewshot=1)
    context = found["samples"]["chat"][1]["arguments"][0][0]
    ids = model.tok_encode(context)
    specials = Renderer(model._saved.tokenizer).specials
    assert ids.count(specials.user_start) == 2 and ids.count(specials.assistant_start) == 2
    assert ids.count(specials.bos) == 1 and ids[-1] == specials.assistant_start
