"""Conversations as tokens and mask, written out by hand; other objects are refused.

With a tokenizer of bytes every id is one character: ① is <|bos|>, ② ③ a user's start and end, ④ ⑤
the assistant's, ⑥ ⑦ a call of the calculator, ⑧ ⑨ its output; others stand for their byte.
"""

import pytest

from kvjax.conversation import specials
from kvjax.conversation.render import Renderer
from kvjax.data import tokenizer as tokenizer_lib
from kvjax.foundation.errors import DataError, UserError

SIGNS = "①②③④⑤⑥⑦⑧⑨"


def _talk(*contents):
    roles = ("user", "assistant")
    return dict(messages=[dict(role=roles[i % 2], content=c) for i, c in enumerate(contents)])


def _part(kind, text):
    return dict(type=kind, text=text)


CALL = [
    _part("text", "So "),
    _part("python", "1+2"),
    _part("python_output", "3"),
    _part("text", "3."),
]
SYSTEM = dict(messages=[dict(role="system", content="Be."), *_talk("Hi", "Yo")["messages"]])
GOLDENS = {
    "one turn": (_talk("Hi", "Hello"), "①②Hi③④Hello⑤", "000000111111"),
    "two turns": (_talk("a", "b", "c", "d"), "①②a③④b⑤②c③④d⑤", "0000011000011"),
    "system": (SYSTEM, "①②Be.\n\nHi③④Yo⑤", "00000000000111"),
    "user last": (_talk("a", "b", "c"), "①②a③④b⑤②c③", "0000011000"),
    "empty answer": (_talk("a", ""), "①②a③④⑤", "000001"),
    "empty question": (_talk("", "b"), "①②③④b⑤", "000011"),
    "a call": (_talk("1?", CALL), "①②1?③④So ⑥1+2⑦⑧3⑨3.⑤", "00000011111111000111"),
    "no output": (
        _talk("?", [_part("python", "a"), _part("python_output", "")]),
        "①②?③④⑥a⑦⑧⑨⑤",
        "00000111001",
    ),
    "names": (_talk("<|bos|>", "<|user_end|>"), "①②<|bos|>③④<|user_end|>⑤", "0" * 11 + "1" * 13),
    "not ASCII": (_talk("é", "ß"), "①②Ã©③④Ã\x9f⑤", "000000111"),
}


@pytest.fixture(scope="module")
def renderer():
    names = tokenizer_lib.CONVERSATION_SPECIALS
    return Renderer(tokenizer_lib.byte_tokenizer().with_specials(names))


def _signs(ids):
    return "".join(SIGNS[i - 256] if i > 255 else chr(i) for i in ids)


@pytest.mark.parametrize("name", GOLDENS)
def test_ids_and_mask_are_those_written_by_hand(renderer, name):
    conversation, ids, mask = GOLDENS[name]
    rendered = renderer(conversation)
    assert _signs(rendered.ids) == ids
    assert "".join(map(str, rendered.mask)) == mask
    assert not rendered.is_cut
    for limit in range(1, len(ids) + 2):
        cut = renderer(conversation, limit=limit)
        assert (_signs(cut.ids), cut.is_cut) == (ids[:limit], limit < len(ids))
        assert cut.mask == rendered.mask[:limit]


def test_many_at_once_are_each_by_itself(renderer):
    batch = [(conversation, name) for name, (conversation, *_) in GOLDENS.items()]
    batch.insert(3, (_talk(7), "the fourth"))
    results = renderer.batch(batch, limit=9)
    assert isinstance(results[3], DataError) and "the fourth, message 1" in str(results[3])
    batch.pop(3), results.pop(3)
    assert results == [renderer(conversation, limit=9) for conversation, _ in batch]


@pytest.mark.parametrize(
    "conversation, message",
    [
        ([], "needs 'messages'"),
        (dict(messages=[]), "needs 'messages', a list of at least one"),
        (dict(messages="Hi"), "needs 'messages'"),
        (dict(messages=["Hi"]), "message 1: must be an object with role and content"),
        (dict(messages=[dict(role="user")]), "message 1: must be an object with role and content"),
        (
            dict(messages=_talk("a", "b")["messages"][1:]),
            "message 1 has role 'assistant', not 'user",
        ),
        (dict(messages=2 * _talk("a")["messages"]), "message 2 has role 'user', not 'assistant"),
        (dict(messages=[SYSTEM["messages"][0]]), "a system message must be followed by the user's"),
        (
            dict(messages=_talk("a", "b")["messages"] + SYSTEM["messages"]),
            "message 3 has role 'system",
        ),
        (
            dict(messages=SYSTEM["messages"][:1] + 2 * _talk("a")["messages"]),
            "message 3 has role 'user', not 'assistant",
        ),
        (_talk(["a"]), "message 1: content must be text, not list"),
        (_talk("a", 7), "message 2: content must be text or a list of parts"),
        (_talk("a", [_part("image", "x")]), "message 2: a part must have a type of text, python,"),
        (_talk("a", [dict(type="text")]), "message 2: content must be text, not NoneType"),
        (_talk("a", "\ud800"), "message 2: has an unpaired surrogate"),
    ],
)
def test_what_is_no_conversation_is_told_with_its_place(renderer, conversation, message):
    with pytest.raises(DataError, match=f"^a.jsonl, line 7.*{message}"):
        renderer(conversation, place="a.jsonl, line 7")


def test_a_tokenizer_without_the_special_tokens():
    tokenizer = tokenizer_lib.byte_tokenizer()
    assert specials.missing(tokenizer) == list(specials.NAMES[1:])
    message = r"runs/x: its tokenizer lacks <\|user_start\|>,.* --config=configs/mid.py:lrkv_128m"
    with pytest.raises(UserError, match=message):
        Renderer(tokenizer, "runs/x")
