"""The ledger: no table or figure is left out, and verdicts follow from rules and results."""

import re

import pytest

from experiments import claims
from experiments.ledger import lrkv, projection_sharing, thin_keys, verdicts
from kvjax.foundation.checkout import EXPERIMENTS

# Numbered in the papers: how many tables, how many figures.
NUMBERED = {
    lrkv.TITLE: (5, 18),
    projection_sharing.TITLE: (11, 11),
    thin_keys.TITLE: (11, 0),
    "Logit spectra (arXiv 2604.04384)": (2, 0),
}


# Words of claims that the texts make, by a word of the paper's title.
SAID = {
    "Projection": (
        "15 users",
        "7 GPUs",
        "4 GPUs",
        "twice the throughput",
        "training throughput",
        "40, 35 and 32 minutes",
        "$14k and $8k",
        "189 GB",
        "longer contexts amplify",
    ),
    "Thin": (
        "INT4",
        "2.5 TB",
        "60 % more users",
        "fragile to quantisation",
        "when retrieval converges",
        "identical in both architectures",
    ),
    "blog": (
        "lead over MLA grows with scale",
        "at 6.3B ahead of the next",
        "at 6.3B too it has less test loss",
    ),
    "LRKV": (
        "bits per byte predict the combined score",
        "hybrid long-context cache",
        "less training compute",
        "every milestone of training compute",
        "fewer steps are so many tokens",
        "5 of 6, MQA 4 to 5",
        "MLA lies between GQA and MQA",
    ),
    "Logit": (
        "5,888",
        "largest change of a logit",
        "grouped query attention",
    ),
}


@pytest.fixture(scope="module")
def ledger():
    """Judged once: it takes seconds."""
    return claims.ledger()


def test_no_table_and_no_figure_is_left_out():
    for paper, (tables, figures) in NUMBERED.items():
        said = " ".join(place for claim in claims.PAPERS[paper] for place in claim.places)
        wanted = [f"Table {i + 1}" for i in range(tables)]
        wanted += [f"Figure {i + 1}" for i in range(figures)]
        assert [name for name in wanted if not re.search(rf"{name}(?!\d)", said)] == []


def test_claims_of_the_texts_are_there():
    for paper, texts in SAID.items():
        there = [c.says for title, some in claims.PAPERS.items() if paper in title for c in some]
        assert [text for text in texts if not any(text in says for says in there)] == []


@pytest.mark.slow
@pytest.mark.whole
def test_the_file_is_what_the_results_say(ledger):
    stored = (EXPERIMENTS / claims.FILE).read_text("utf-8")
    assert stored == claims.written(ledger), (
        "run `python -m experiments.claims --write` where results have changed"
    )


@pytest.mark.slow
@pytest.mark.whole
def test_every_verdict_is_explained_and_commands_are_there(ledger):
    for rows in ledger.values():
        for row in rows:
            assert row["verdict"] in verdicts.VERDICTS and row["says"]
            own = row["verdict"] in (verdicts.CONSISTENT, verdicts.INCONSISTENT)
            assert not (own and row["command"])  # nothing was run for it
            module = re.match(r"python -m ([\w.]+)", row["command"])
            if module:
                path = EXPERIMENTS.parent / module[1].replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
