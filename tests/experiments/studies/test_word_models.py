"""Models of words: the paper's parameter counts, training, and rows of the result."""

import dataclasses
import math
import types

import numpy as np
import pytest

from experiments.studies import word_models
from experiments.tasks.words import Corpus
from kvjax.costs import formulas
from kvjax.foundation import command_line


@pytest.mark.parametrize(
    "channels, published",
    {8: 24_672, 16: 49_344, 32: 98_688, 64: 197_376, 128: 394_752, 256: 789_504}.items(),
)
def test_parameters_of_queries_and_keys_are_the_papers(channels, published):
    def total_parameters(n):
        return formulas.parameters(word_models.transformer(n, 100))["total"]

    assert total_parameters(256) - total_parameters(channels) == 789_504 - published
    run = dict(perplexity=2.0, validation={"8": 3.0, "16": 2.5}, identity="its own")
    runs = {f"d{channels}_e1": {0: run}}
    about = dict(settings=dict(channels=channels), identity="its own")
    cells = [types.SimpleNamespace(name=f"d{channels}_e1", **about)]
    (row,) = word_models.rows("wikitext2", cells, types.SimpleNamespace(runs=runs))
    assert row["query_and_key_parameters"] == published and row["published"] > 120


@pytest.fixture
def small(monkeypatch):
    """Sets a model of two heads that is quick to train, and repeated words."""
    for name, value in dict(WIDTH=16, HEADS=2, LAYERS=1, MLP=16, LENGTH=8).items():
        monkeypatch.setattr(word_models, name, value)
    text = np.tile(np.arange(3, 9, dtype=np.int32), 3200)
    corpus = Corpus(text, text[:200], text[:100], {}, 9, "digest")
    return word_models.Trainer("embedded", corpus, 20)


@pytest.mark.slow
def test_a_model_learns_what_follows(small):
    found = small.train(16, seed=0)
    assert found["perplexity"] < 4  # of six words, and 9 at the start
    assert found["step"] in found["validation"] and len(found["validation"]) == 20
    best = min(found["validation"].values())
    assert found["validation"][found["step"]] == best < math.inf


def test_cells_say_what_decides_them(small):
    first = word_models.cell(small, 16)
    other = dataclasses.replace(small.corpus, digest="another")
    second = word_models.cell(word_models.Trainer("embedded", other, 20), 16)
    assert first.identity != second.identity and first.name == second.name == "d16_e20"


def test_a_folder_is_of_wikitext(capsys):
    status = command_line.status(word_models.main, ["--set=embedded", "--folder=x"])
    assert status == 2 and "--folder: applies to WikiText" in capsys.readouterr().err


def test_figures_stand_beside_the_papers_split():
    """The paper gives validation perplexities of WikiText-103, test perplexities of WikiText-2."""
    run = dict(perplexity=2.0, validation={"8": 3.0, "16": 2.5}, identity="its own")
    one = types.SimpleNamespace(name="d64_e1", settings=dict(channels=64), identity="its own")
    kept = types.SimpleNamespace(runs={"d64_e1": {0: run}})
    for name, published in (("wikitext103", "37.22 (validation)"), ("wikitext2", "122.24 (test)")):
        (row,) = word_models.rows(name, [one], kept)
        *_, test, validation, shown = word_models._cells(row)
        assert (test, validation, shown) == ("2.00", "2.50", published)
