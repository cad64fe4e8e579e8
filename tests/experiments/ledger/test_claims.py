"""The ledger: no table or figure is left out, and verdicts follow from rules and results."""

import re

import pytest

from experiments import claims
from experiments.ledger import lrkv
from experiments.ledger import projection_sharing
from experiments.ledger import thin_keys
from experiments.ledger import verdicts
from kvjax.foundation.checkout import EXPERIMENTS

# Numbered in the papers: how many tables, how many figures.
NUMBERED = {
    lrkv.TITLE: (5, 18),
    projection_sharing.TITLE: (11, 11),
    thin_keys.TITLE: (11, 0),
    "Logit spectra (arXiv 2604.04384)": (2, 0),
}


@pytest.fixture(scope="module")
def ledger():
    """Judged once: it takes seconds."""
    return claims.ledger()


@pytest.mark.parametrize("paper", NUMBERED)
def test_no_table_and_no_figure_is_left_out(paper):
    said = " ".join(place for claim in claims.PAPERS[paper] for place in claim.places)
    tables, figures = NUMBERED[paper]
    wanted = [f"Table {i + 1}" for i in range(tables)]
    wanted += [f"Figure {i + 1}" for i in range(figures)]
    assert [name for name in wanted if not re.search(rf"{name}(?!\d)", said)] == []


@pytest.mark.parametrize(
    "words",
    [
        ("15 users", "Projection"),
        ("7 GPUs", "Projection"),
        ("4 GPUs", "Projection"),
        ("twice the throughput", "Projection"),
        ("INT4", "Thin"),
        ("2.5 TB", "Thin"),
        ("60 % more users", "Thin"),
        ("fragile to quantisation", "Thin"),
        ("lead over MLA grows with scale", "blog"),
        ("at 6.3B ahead of the next", "blog"),
        ("bits per byte predict the combined score", "LRKV"),
        ("hybrid long-context cache", "LRKV"),
        ("less training compute", "LRKV"),
        ("every milestone of training compute", "LRKV"),
        ("training throughput", "Projection"),
        ("5,888", "Logit"),
        ("largest change of a logit", "Logit"),
        ("grouped query attention", "Logit"),
        ("40, 35 and 32 minutes", "Projection"),
        ("$14k and $8k", "Projection"),
        ("189 GB", "Projection"),
        ("longer contexts amplify", "Projection"),
        ("when retrieval converges", "Thin"),
        ("identical in both architectures", "Thin"),
        ("at 6.3B too it has less test loss", "blog"),
        ("fewer steps are so many tokens", "LRKV"),
        ("5 of 6, MQA 4 to 5", "LRKV"),
        ("MLA lies between GQA and MQA", "LRKV"),
    ],
)
def test_claims_of_the_texts_are_there(words):
    text, paper = words
    there = [c for title, some in claims.PAPERS.items() if paper in title for c in some]
    assert any(text in claim.says for claim in there)


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
