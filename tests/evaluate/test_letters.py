"""Multiple choice: the letter with the largest logit among the row's letters."""

import numpy as np
import pytest

from kvjax.conversation import render
from kvjax.conversation.dialogue import NativeDialogue, TemplatedDialogue
from kvjax.conversation.questions import MultipleChoice
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.evaluate import letters
from kvjax.foundation.errors import UserError
from tests import sentencepiece_files
from tests.evaluate import oracles
from tests.evaluate.oracles import Oracle

LETTERS = "ABCD"
QUESTIONS = [
    MultipleChoice(
        f"Question {i}?", tuple(f"choice {i} {c}" for c in LETTERS), tuple(LETTERS), answer
    )
    for i, answer in enumerate("ABCDDCBACADBBDAC" * 25)
]
KEY = {oracles.prompt_text(item): LETTERS.index(item.answer) for item in QUESTIONS}
FIVE = MultipleChoice("Five?", ("a", "b", "c", "d", "e"), tuple("ABCDE"), "E")
THREE = MultipleChoice("Three?", ("a", "b", "c"), tuple("123"), "2")


def _share(letter) -> float:
    rows = letters.ask(Oracle(letter), QUESTIONS, range(len(QUESTIONS)))
    assert [row["index"] for row in rows] == list(range(len(QUESTIONS)))
    return float(np.mean([row["right"] for row in rows]))


def test_right_and_wrong_oracles():
    assert _share(lambda text, n: np.eye(n)[KEY[text]]) == 1
    assert _share(lambda text, n: np.eye(n)[(KEY[text] + 1) % n]) == 0


def test_guessing():
    rng = np.random.default_rng(0)
    share = _share(lambda text, n: rng.normal(size=n))
    assert abs(share - 0.25) < 3 * np.sqrt(0.25 * 0.75 / len(QUESTIONS))


def test_constant_answer():
    assert _share(lambda text, n: np.eye(n)[0]) == np.mean([q.answer == "A" for q in QUESTIONS])


def test_ties():
    (row,) = letters.ask(Oracle(lambda text, n: [1, 2, 2, 0]), QUESTIONS, [1])
    assert row["chosen"] == "B" and row["ties"] == 1 and row["right"]
    assert row["logits"] == [1, 2, 2, 0] and row["letters"] == "ABCD"


def test_letters_of_the_row():
    seen = []
    oracle = Oracle(lambda text, n: seen.append((text, n)) or np.eye(n)[-1])
    rows = letters.ask(oracle, [FIVE, THREE], [0, 1])
    assert [row["chosen"] for row in rows] == ["E", "3"] and [n for _, n in seen] == [5, 3]
    assert seen[1][0] == (
        "<|bos|><|user_start|>Multiple Choice question: Three?\n- a=1\n- b=2\n- c=3\n\n"
        "Respond only with the letter of the correct answer.<|user_end|><|assistant_start|>"
    )


def test_letters_of_two_tokens():
    tokenizer = tokenizer_lib.train(["abc def " * 9] * 3, 266, tokenizer_lib.CONVERSATION_SPECIALS)
    dialogue = NativeDialogue(tokenizer, "a test")
    letters.letter_ids(dialogue, "ABCD")
    with pytest.raises(UserError, match="the letter 'AB' is 2 tokens"):
        letters.letter_ids(dialogue, ["AB"])


def test_letters_are_encoded_as_the_template_writes_them():
    """Without a blank after a newline; as a text of its own if answers have a longer opening."""
    made = tokenizer_lib.from_json(sentencepiece_files.backend("metaspace").to_str(), "a test")
    names = {"tokenizer_config.json": dict(eos_token="</s>")}
    for opening, text in (("answer:\n", "a"), ("", "▁a")):
        template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}</s>{% else %}"
        template += "answer:\n{{ m.content }}{% endif %}{% endfor %}"
        template += "{% if add_generation_prompt %}" + opening + "{% endif %}"
        dialogue = TemplatedDialogue(made, template, names)
        assert letters.letter_ids(dialogue, ["a"]) == [made.vocabulary()[text]]


def test_letters_of_nanochats_format_are_those_of_training():
    made = tokenizer_lib.from_json(sentencepiece_files.backend("metaspace").to_str(), "a test")
    made = made.with_specials(tokenizer_lib.CONVERSATION_SPECIALS)
    talk = [dict(role="user", content="the cat"), dict(role="assistant", content="a")]
    trained = render.Renderer(made)(dict(messages=talk)).ids
    (letter,) = letters.letter_ids(NativeDialogue(made, "a test"), ["a"])
    assert letter in trained
