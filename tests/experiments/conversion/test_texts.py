"""Texts of the conversion studies, and their rows."""

import numpy as np
import pytest

from experiments.conversion import texts
from kvjax.data import config as config_lib, sources
from kvjax.foundation.errors import UserError


def test_held_out_text_is_the_products():
    training, validation = texts.training_text(), texts.validation_text()
    assert len(training) > 80 and all(training) and all(validation)
    held_out = "".join(validation)
    assert 398_000 < len(held_out.encode()) <= 400_000  # of two books, whole lines
    pieces = sources.pieces(config_lib.DataConfig(source="embedded"), "validation")
    assert held_out == "".join(piece.text for piece in pieces)
    assert validation[-1].endswith("Amen.\n") and "THE TEMPEST" not in held_out
    assert training[0] not in held_out and not set(training) & set(validation)


def test_rows_are_the_documents_end_to_end_behind_a_prefix():
    def encode(text):
        return [ord(c) for c in text]

    rows_RT = texts.rows(encode, ["abcd", "ef", "gh"], length=3, prefix=(7, 8))
    assert rows_RT.dtype == np.int32
    assert [row.tolist() for row in rows_RT] == [[7, 8, *b"abc"], [7, 8, *b"def"]]
    assert texts.rows(encode, ["abcd"], length=4).tolist() == [[*b"abcd"]]
    with pytest.raises(UserError, match="a text of 4 tokens fills no row of 5"):
        texts.rows(encode, ["abcd"], length=5)
