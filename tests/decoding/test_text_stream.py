"""Streamed text: never half a character, never part of a stop string."""

import hypothesis
from hypothesis import strategies as st
import pytest

from kvjax.data import tokenizer as tokenizer_lib
from kvjax.decoding.text_stream import TextStream

BYTES = tokenizer_lib.byte_tokenizer()


def pieces(data: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Returns the text emitted after each byte, and at the end."""
    stream = TextStream(BYTES, stop)
    out = []
    for token in data:
        out.append(stream.push(token))
        if stream.stopped:
            break
    return [*out, stream.close()], stream


def test_a_character_comes_with_its_last_byte():
    out, stream = pieces("a€é".encode())
    assert out == ["a", "", "", "€", "", "é", ""]
    assert stream.text == "a€é"


def test_bytes_that_are_no_character_come_as_soon_as_that_is_certain():
    out, _ = pieces(b"\xe2\x82A\xff")
    assert out == ["", "", "\ufffdA", "", "\ufffd"]


@hypothesis.given(st.binary(max_size=12))
@hypothesis.settings(max_examples=200, deadline=None)
def test_pieces_add_up_to_the_whole(data):
    out, stream = pieces(data)
    assert "".join(out) == stream.text == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("one. two. three", (".",), "one"),
        ("one. two.", (". t",), "one"),
        ("one. T", (". t",), "one. T"),  # held back, then given out
        ("never", ("x",), "never"),
        ("ends in a start", ("start of",), "ends in a start"),
        ("aaab", ("aab",), "a"),
        ("abcd", ("abcd", "bc"), "a"),  # complete first
        ("xabc", ("bc", "abc"), "x"),  # complete at once: the longest
        ("é.€", ("€",), "é."),
    ],
)
def test_text_ends_before_a_stop_string(text, stop, want):
    out, stream = pieces(text.encode(), stop)
    assert "".join(out) == stream.text == want
    assert stream.stopped == any(s in text for s in stop)


def test_the_start_of_a_stop_string_is_held_back():
    out, _ = pieces(b"a\n\nb\n", ("\n\nB",))
    assert out == ["a", "", "", "\n\nb", "", "\n"]


def test_several_characters_in_one_token():
    tokenizer = tokenizer_lib.train(["the king the king the king the"] * 50, 264)
    ids = tokenizer.encode("the king")
    assert len(ids) < 4
    stream = TextStream(tokenizer, ("kin",))
    assert "".join(stream.push(i) for i in ids) + stream.close() == "the "


@hypothesis.given(st.text("ab", max_size=10), st.lists(st.text("ab", min_size=1, max_size=3)))
@hypothesis.settings(max_examples=200, deadline=None)
def test_nothing_given_out_is_ever_part_of_a_stop_string(text, stop):
    stream = TextStream(BYTES, stop)
    emitted = "".join(stream.push(token) for token in text.encode()) + stream.close()
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert emitted == (text[: min(ends)[1]] if ends else text)
