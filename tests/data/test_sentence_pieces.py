"""SentencePiece tokenizers encode and decode as the library does, at once and in a stream."""

import json

from hypothesis import given, settings, strategies as st
import pytest
import tokenizers

from kvjax.data import tokenizer as tokenizer_lib
from kvjax.decoding.text_stream import TextStream
from tests import sentencepiece_files
from tests.sentencepiece_files import HARD, KINDS, SPECIALS


@pytest.fixture(scope="module")
def by_kind():
    """The library's tokenizer and kvjax's, by kind."""
    pairs = {}
    for kind in KINDS:
        text = sentencepiece_files.backend(kind).to_str()
        pairs[kind] = tokenizers.Tokenizer.from_str(text), tokenizer_lib.from_json(text, kind)
    return pairs


def decoded(kind, text):
    """Returns what a text is decoded to: Metaspace puts no blank before a leading one."""
    return text[kind in ("metaspace", "always") and text.startswith(" ") :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", HARD)
def test_ids_are_those_of_the_library(by_kind, kind, text):
    """Names of special tokens in a text stay text."""
    library, tokenizer = by_kind[kind]
    ids = tokenizer.encode(text)
    assert {tokenizer.special(name) for name in SPECIALS}.isdisjoint(ids) or (
        kind == "unigram" and tokenizer.special("<unk>") in ids
    )
    assert tokenizer.encode_batch([text, "a"])[0].tolist() == ids
    if not any(name in text for name in SPECIALS):
        assert ids == library.encode(text, add_special_tokens=False).ids
    if kind != "unigram":
        assert tokenizer.decode(ids) == decoded(kind, text)
        following = tokenizer.encode(text, "inside")
        assert tokenizer.decode(following, is_continued=True) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_names_between_texts(by_kind, kind):
    """Texts around control tokens are encoded as the library encodes a whole rendering."""
    library, tokenizer = by_kind[kind]
    ids = [tokenizer.special("<s>"), *tokenizer.encode("the cat", "control")]
    ids += [tokenizer.special("</s>"), *tokenizer.encode(" of", "control")]
    assert ids == library.encode("<s>the cat</s> of", add_special_tokens=False).ids


def _piece(tokenizer):
    return st.sampled_from(sorted(tokenizer.vocabulary().values()))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_text_of_every_prefix(by_kind, kind, data):
    """For any ids, also wrong bytes and ids without a token."""
    library, tokenizer = by_kind[kind]
    some = [tokenizer.special("<s>"), tokenizer.vocab_size + 3, tokenizer.vocabulary()["▁"]]
    byte_ids = [tokenizer.vocabulary().get(f"<0x{b:02X}>", 0) for b in (0xE2, 0x82, 0xAC, 0x0A)]
    ids = data.draw(st.lists(_piece(tokenizer) | st.sampled_from(some + byte_ids), max_size=10))
    for n in range(len(ids) + 1):
        for is_continued in (False, True):
            stream = TextStream(tokenizer, is_continued=is_continued)
            emitted = ""
            for token in ids[:n]:
                emitted += stream.push(token)
            want = library.decode(ids[:n], skip_special_tokens=False)
            if is_continued:
                want = library.decode([1, *ids[:n]], skip_special_tokens=False)[len("<s>") :]
            assert want.startswith(emitted)
            assert emitted + stream.close() == want


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("text", HARD)
def test_bytes_of_tokens_are_the_text_s(by_kind, kind, text):
    _, tokenizer = by_kind[kind]
    ids = tokenizer.encode(text)
    dropped = tokenizer.dropped_bytes()
    assert (dropped is None) == (kind == "gemma")
    first = 0 if dropped is None or not ids else dropped[ids[0]]
    assert tokenizer.token_bytes()[ids].sum() - first == len(decoded(kind, text).encode())
    assert not tokenizer.token_bytes()[tokenizer.bos_id]


@pytest.mark.parametrize("kind", KINDS)
def test_more_control_tokens(by_kind, kind):
    """Texts are encoded as before, and never as a control token, through a file and back."""
    _, before = by_kind[kind]
    assert before.encode("the <|x|>")
    grown = before.controlled(["<|x|>"])
    assert grown.special("<|x|>") == before.vocab_size
    assert grown.encode("the <|x|>") == before.encode("the <|x|>")
    assert grown.decode([*grown.encode("the"), grown.special("<|x|>")]) == "the<|x|>"
    again = tokenizer_lib.from_json(grown.to_json(), "a name")
    assert again.vocabulary() == grown.vocabulary() and again.bos_id == before.bos_id


def test_other_tokenizers_are_refused(by_kind):
    library, _ = by_kind["llama2"]
    definition = json.loads(library.to_str())
    pieces = dict(type="WordPiece", prefix="", cleanup=True)
    for change in (dict(decoder=None), dict(decoder=pieces)):
        with pytest.raises(ValueError, match="must be byte-level .* or SentencePiece's"):
            tokenizer_lib.from_json(json.dumps(definition | change), "a name")
