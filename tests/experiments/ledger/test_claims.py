"""The ledger: no table or figure is left out, and verdicts follow from rules and results."""

import json
import re

import pytest

from experiments import claims
from experiments import record
from experiments.ledger import lrkv
from experiments.ledger import projection_sharing
from experiments.ledger import thin_keys
from experiments.ledger import verdicts
from experiments.ledger.verdicts import AtScale
from experiments.ledger.verdicts import Cases
from experiments.ledger.verdicts import Claim
from experiments.ledger.verdicts import Computed
from experiments.ledger.verdicts import Differs
from experiments.ledger.verdicts import Found
from experiments.ledger.verdicts import Tabulated
from experiments.ledger.verdicts import Undefined
from kvjax.foundation.checkout import EXPERIMENTS
from kvjax.foundation.estimate import Estimate

# Numbered in the papers: how many tables, how many figures.
NUMBERED = {
    lrkv.TITLE: (5, 18),
    projection_sharing.TITLE: (11, 11),
    thin_keys.TITLE: (11, 0),
    "Logit spectra (arXiv 2604.04384)": (2, 0),
}


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
        ("60 % more users", "Thin"),
        ("fragile to quantisation", "Thin"),
        ("lead over MLA grows with scale", "blog"),
        ("at 6.3B ahead of the next", "blog"),
        ("bits per byte predict the combined score", "LRKV"),
        ("hybrid long-context cache", "LRKV"),
        ("5,888", "Logit"),
    ],
)
def test_claims_of_the_texts_are_there(words):
    text, paper = words
    there = [c for title, some in claims.PAPERS.items() if paper in title for c in some]
    assert any(text in claim.says for claim in there)


def test_the_file_is_what_the_results_say():
    stored = (EXPERIMENTS / claims.FILE).read_text("utf-8")
    assert stored == claims.written(claims.ledger()), (
        "run `python -m experiments.claims --write` where results have changed"
    )


def test_every_verdict_is_explained_and_commands_are_there():
    for rows in claims.ledger().values():
        for row in rows:
            assert row["verdict"] in verdicts.VERDICTS and row["says"]
            module = re.match(r"python -m ([\w.]+)", row["command"])
            if module:
                path = EXPERIMENTS.parent / module[1].replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def _differs(mean, half, seeds=3, sign=-1):
    rule = Differs(lambda: (Estimate(mean, half), seeds), sign, "+.2f", "small")
    return rule.judge()


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (dict(mean=-0.5, half=0.2), "reproduced"),
        (dict(mean=0.5, half=0.2), "contradicted"),
        (dict(mean=-0.5, half=0.6), "not told apart"),
        (dict(mean=-0.5, half=0.2, seeds=2), "not measured yet"),
        (dict(mean=-0.5, half=None, seeds=1), "not measured yet"),
        (dict(mean=0.1, half=0.2, sign=0), "reproduced"),
        (dict(mean=0.3, half=0.2, sign=0), "contradicted"),
    ],
)
def test_a_difference_needs_seeds_and_an_interval(found, verdict):
    assert _differs(**found).verdict == verdict


def test_numbers_agree_to_their_printed_digits():
    judge = lambda published, ours: Computed(published, lambda: ours).judge().verdict
    assert judge("0.79", 0.786) == "reproduced" and judge("0.78", 0.786) == "contradicted"
    assert judge("5,888", 2928) == "contradicted" and judge("733", 733.4) == "reproduced"


def test_tables_agree_wholly_in_part_or_not(results):
    row = lambda agrees, what: dict(
        what=what, unit="%", paper="1", ours=2.0, agrees=agrees, verdict="differs: it is 2"
    )
    tables = dict(a=[row(True, "x"), row(True, "y")], b=[row(True, "x"), row(False, "y")])
    (results / "paper_tables.json").write_text(json.dumps(dict(tables=tables)))
    assert Tabulated(("a",)).judge() == Found("reproduced", "2 of 2 figures agree")
    part = Tabulated(("b",)).judge()
    assert part.verdict == "in part" and "y: 1 there, 2 % here: it is 2" in part.ours
    assert Tabulated(("b",), only="y").judge().verdict == "contradicted"


def test_cases_hold_all_in_part_or_not():
    judge = lambda *held: Cases(lambda: dict(enumerate(held)), lambda: "").judge().verdict
    assert judge(True, True) == "reproduced" and judge(False) == "contradicted"
    assert judge(True, False) == "in part"


def test_what_is_too_large_says_what_would_settle_it(results):
    seen = Differs(lambda: (Estimate(-0.5, 0.2), 3), -1, "+.2f", "small")
    found = AtScale("lrkv_2p5b", 50e9, seen=seen).judge()
    assert found.verdict == "out of reach"
    assert found.ours.startswith("at demo size reproduced: -0.50 ± 0.20 (small, 3 seeds); would")
    # 2 models, 17.2 GFLOP a token: 3.5e21 of 16 x 459e12 x 0.4 FLOP/s
    assert "50B tokens each: 6.2 days on 16 v5p chips" in found.ours
    missing = AtScale("lrkv_2p5b", 50e9, seen=Tabulated(("a",))).judge()
    assert missing.ours.startswith("at demo size not measured yet; would take")


def test_without_a_result_nothing_is_said(results):
    claim = Claim("Table 1", "something", "1", Tabulated(("a",)))
    assert claim.judge() == Found("not measured yet", "")
    assert Undefined("nobody knows").judge() == Found("undefined", "nobody knows")


def test_studies_are_read_by_cell(results):
    rows = [
        dict(cell="mha", difference=None, difference_half_interval=None, seeds=[0, 1, 2]),
        dict(cell="lrkv", difference=-0.01, difference_half_interval=0.002, seeds=[0, 1, 2]),
    ]
    (results / "studies").mkdir()
    (results / "studies" / "s.json").write_text(json.dumps(dict(rows=rows)))
    assert verdicts.study("s", "lrkv")() == (Estimate(-0.01, 0.002), 3)
    for missing in (("s", "mha"), ("s", "mla"), ("t", "lrkv")):
        with pytest.raises(verdicts.NoResultError):
            verdicts.study(*missing)()
    runs = dict(a={"0": dict(bpb=2.0), "1": dict(bpb=2.2)}, b={"1": dict(bpb=2.1)})
    (results / "s.json").write_text(json.dumps(dict(runs=runs)))
    found, seeds = verdicts.between("s", "a", "b")()
    assert found.mean == pytest.approx(0.1) and found.half is None and seeds == 1
