"""transformers and kvjax give a conversation the same ids; run by `make test-live`."""

import json
import subprocess

import pytest

from experiments.conversion import smollm2
from kvjax.conversation import template
from kvjax.convert import published
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.checkout import ROOT

PYTHON = ROOT / ".venv-live/bin/python"  # with transformers
THEIRS = """
import json, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
found = []
for messages, opens in json.load(sys.stdin):
    options = dict(add_generation_prompt=opens, continue_final_message=opens is None)
    options |= dict(tokenize=True, return_dict=False)
    found.append(tokenizer.apply_chat_template(messages, **options))
print(json.dumps(found))
"""
TEXTS = (
    "What is 12 * 7?",
    "  two lines\n\n  and blanks \t ",
    "",
    "caf\u00e9 \u2603 \U0001f600 \u4f60\u597d",
    "def f(x):\n    return {'a': x}  # 100 %",
    "x" * 3000,
)


@pytest.fixture(scope="module")
def model():
    return published.open(smollm2.packaged())


def test_ids_are_those_of_transformers(model, tmp_path):
    (tmp_path / "tokenizer.json").write_text(model.tokenizer_json)
    (tmp_path / "chat_template.jinja").write_text(model.chat_template)
    for name, said in model.token_files.items():
        (tmp_path / name).write_text(json.dumps(said))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def user(text):
        return dict(role="user", content=text)

    def says(text):
        return dict(role="assistant", content=text)

    asked = [([user(text)], opens) for text in TEXTS for opens in (True, False)]
    asked += [([user(a), says(b), user(a)], True) for a in TEXTS for b in TEXTS]
    asked += [([dict(role="system", content=text), user("Hi")], True) for text in TEXTS]
    asked += [([user("Hi"), says(f"{text}Answer: ")], None) for text in TEXTS]
    given = subprocess.run(
        [PYTHON, "-c", THEIRS, tmp_path],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(given.stdout)
    tokenizer = tokenizer_lib.from_json(model.tokenizer_json, "SmolLM2")
    made = template.Template(tokenizer, model.chat_template, model.token_files)
    for (messages, opens), expected in zip(asked, theirs, strict=True):
        options = dict(add_generation_prompt=bool(opens), go_on=opens is None)
        assert made.encode(made.render(messages, **options)) == expected, (messages, opens)
    print(f"{len(asked)} conversations, {sum(map(len, theirs))} tokens, none differs")
