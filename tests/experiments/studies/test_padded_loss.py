"""Padding in the loss: rows in both forms, evaluations, rows of the result."""

import math

import numpy as np
import pytest

from experiments.studies import padded_loss
from experiments.tasks import text

DOCUMENTS = [np.frombuffer(x, np.uint8) for x in (b"abc", b"defghijk", b"lm")]


def test_a_document_is_a_padded_row():
    rows = text.padded(DOCUMENTS, 5)
    assert [bytes(row.astype(np.uint8)) for row in rows["x"]] == [b"abc\0\0", b"defgh", b"lm\0\0\0"]
    assert [bytes(row.astype(np.uint8)) for row in rows["y"]] == [
        b"bc\0\0\0",
        b"efghi",
        b"m\0\0\0\0",
    ]
    # The first EOS marks a document's end; the truncated part is in no row.
    np.testing.assert_array_equal(rows["real"].sum(axis=1), [3, 5, 2])


def test_packed_rows_lose_nothing_but_the_streams_end():
    rows = text.packed(DOCUMENTS, 5)
    stream = b"abc\0defghijk\0lm\0"
    assert bytes(rows["x"].ravel().astype(np.uint8)) == stream[:15]
    assert bytes(rows["y"].ravel().astype(np.uint8)) == stream[1:16]
    assert rows["real"].all()


def test_the_books_have_no_eos_and_their_share_of_text_is_the_papers():
    assert not (text.corpus("train") == text.EOS).any()
    # The paper's, by its loss and its texts' lengths.
    assert padded_loss.share_of_text("train") == pytest.approx(0.54, abs=0.05)
    assert padded_loss.share_of_text("validation") == pytest.approx(0.54, abs=0.1)
    held_out = padded_loss.held_out()
    counts = {name: sum(b["counts"].sum() for b in held_out[name]) for name in held_out}
    assert counts["text"] < counts["counted"] and counts["counted"] % padded_loss.LENGTH == 0


@pytest.mark.slow
def test_padding_is_learned_at_once_and_lowers_the_mean(monkeypatch):
    monkeypatch.setattr(padded_loss, "LENGTH", 32)
    monkeypatch.setattr(padded_loss, "LAYERS", 1)
    few = {
        form: lambda documents, T, make=make: make(documents[:600], T)
        for form, make in padded_loss.FORMS.items()
    }
    monkeypatch.setattr(padded_loss, "FORMS", few)
    caches = padded_loss.rows_of, padded_loss.held_out, padded_loss._learner
    for cache in caches:
        cache.cache_clear()
    found = padded_loss.train("none", "padded", 150, seed=0)
    rows = padded_loss.rows_of("validation", "padded")["real"]
    for cache in caches:
        cache.cache_clear()
    assert found["text"] < math.log(256) - 1
    share = rows.mean()
    padding = (found["counted"] - share * found["text"]) / (1 - share)
    assert 0 < padding < 0.25 * found["text"] and found["counted"] < found["text"]
