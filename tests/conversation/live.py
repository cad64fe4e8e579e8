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
REFERENCE = """
import json, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = []
for messages, opens in json.load(sys.stdin):
    options = dict(add_generation_prompt=opens, continue_final_message=opens is None)
    options |= dict(tokenize=True, return_dict=False)
    ids.append(tokenizer.apply_chat_template(messages, **options))
print(json.dumps(ids))
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
    for name, content in model.token_files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def user(text):
        return dict(role="user", content=text)

    def assistant(text):
        return dict(role="assistant", content=text)

    # (messages, opens): True: an answer follows; False: none; None: the last message continues.
    cases = [([user(text)], opens) for text in TEXTS for opens in (True, False)]
    cases += [([user(a), assistant(b), user(a)], True) for a in TEXTS for b in TEXTS]
    cases += [([dict(role="system", content=text), user("Hi")], True) for text in TEXTS]
    cases += [([user("Hi"), assistant(f"{text}Answer: ")], None) for text in TEXTS]
    process = subprocess.run(
        [PYTHON, "-c", REFERENCE, tmp_path],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    expected_ids = json.loads(process.stdout)
    tokenizer = tokenizer_lib.from_json(model.tokenizer_json, "SmolLM2")
    chat = template.Template(tokenizer, model.chat_template, model.token_files)
    for (messages, opens), expected in zip(cases, expected_ids, strict=True):
        options = dict(add_generation_prompt=bool(opens), continue_final_message=opens is None)
        assert chat.encode(chat.render(messages, **options)) == expected, (messages, opens)
    print(f"{len(cases)} conversations, {sum(map(len, expected_ids))} tokens, none differs")
