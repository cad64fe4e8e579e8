"""WikiText as words: lines, vocabulary and both file formats."""

import numpy as np
import pyarrow
from pyarrow import parquet
import pytest

from experiments.tasks import words
from kvjax.foundation.errors import DataError, MissingDataError

LINES = dict(
    train=[" ", " = Heading = ", " The cat <unk> the Hat ", "a cat , <unk>"],
    valid=["the dog"],
    test=["= x =", "a <unk> cat"],
)
TRAIN = ["the", "cat", "<unk>", "the", "hat", "<eos>", "a", "cat", ",", "<unk>", "<eos>"]


@pytest.fixture(params=["tokens", "parquet"])
def folder(tmp_path, request):
    for split, lines in LINES.items():
        if request.param == "tokens":
            (tmp_path / f"wiki.{split}.tokens").write_text("\n".join(lines) + "\n")
        else:
            name = dict(valid="validation").get(split, split)
            half = len(lines) // 2
            for i, few in enumerate((lines[:half], lines[half:])):
                file = tmp_path / f"{name}-{i:05d}-of-00002.parquet"
                parquet.write_table(pyarrow.table(dict(text=pyarrow.array(few, "string"))), file)
    return tmp_path


def test_words_and_ids(folder):
    assert list(words.words(LINES["train"])) == TRAIN
    corpus = words.load(folder, min_count=2)
    # Ids: <pad> 0, <unk> 1 (unused), <eos> 2, then the words <unk>, cat and the.
    assert corpus.vocabulary == {"<pad>": 0, "<unk>": 3, "<eos>": 2, "cat": 4, "the": 5}
    assert corpus.vocab_size == 6
    assert corpus.train.tolist() == [5, 4, 3, 5, 3, 2, 3, 4, 3, 3, 2]
    assert corpus.valid.tolist() == [5, 3, 2] and corpus.test.tolist() == [3, 3, 4, 2]


def test_a_text_without_unk_uses_the_special_token():
    ids, vocab_size = words.vocabulary(["a", "b", "a"], min_count=2)
    assert ids == {"<pad>": 0, "<unk>": 1, "<eos>": 2, "a": 3} and vocab_size == 4


def test_rows_and_their_labels():
    found = words.rows(np.arange(12), 4)
    assert found["x"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["y"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.slow
def test_the_embedded_books():
    corpus = words.embedded(min_count=2)
    assert len(corpus.train) > 10 * len(corpus.valid) > 0 < len(corpus.test)
    assert corpus.vocab_size == len(corpus.vocabulary) > 10_000
    assert corpus.train.max() < corpus.vocab_size


def test_missing_and_malformed_files(tmp_path):
    with pytest.raises(MissingDataError, match="is not a folder: give the folder of WikiText's"):
        words.load(tmp_path / "no", 2)
    with pytest.raises(MissingDataError, match=r"has neither wiki.train.tokens nor train-\*"):
        words.load(tmp_path, 2)
    for split in words.SPLITS:
        (tmp_path / f"wiki.{split}.tokens").write_text("= only =\n")
    with pytest.raises(DataError, match="train has no words outside headings"):
        words.load(tmp_path, 2)
    (tmp_path / "wiki.valid.tokens").write_bytes(b"the \xff")
    with pytest.raises(DataError, match="wiki.valid.tokens, byte 4: is not UTF-8"):
        words.load(tmp_path, 2)


def test_malformed_parquet_files(tmp_path):
    file = tmp_path / "train-00000-of-00001.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="is not Parquet"):
        words.load(tmp_path, 2)
    parquet.write_table(pyarrow.table(dict(line=["a"])), file)
    with pytest.raises(DataError, match="with a column 'text'"):
        words.load(tmp_path, 2)
    parquet.write_table(pyarrow.table(dict(text=["a", None])), file)
    with pytest.raises(DataError, match="row 1: has no text"):
        words.load(tmp_path, 2)
