"""Rules of the ledger that any claim may have: when each gives which verdict."""

import json

import pytest

from experiments.ledger import results as results_lib, verdicts
from experiments.ledger.out_of_reach import AtScale, Undefined
from experiments.ledger.verdicts import (
    Allows,
    AllSame,
    Cases,
    Chain,
    Claim,
    Computed,
    Differs,
    Found,
    OfItself,
    Same,
    Tabulated,
)
from kvjax.foundation.errors import UserError
from kvjax.foundation.estimate import Estimate


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
    ],
)
def test_a_difference_needs_seeds_and_an_interval(found, verdict):
    assert _differs(**found).verdict == verdict


@pytest.mark.parametrize(
    ("mean", "half", "seeds", "verdict"),
    [
        (0.05, 0.2, 3, "reproduced"),  # all of the interval within the margin
        (-0.29, 0.01, 3, "reproduced"),  # also where it leaves 0 out
        (0.2, 0.2, 3, "not told apart"),
        (0.4, 0.2, 3, "not told apart"),
        (-0.6, 0.2, 3, "contradicted"),
        (0.0, 0.1, 2, "not measured yet"),
    ],
)
def test_equality_needs_a_margin(mean, half, seeds, verdict):
    found = Same(lambda: (Estimate(mean, half), seeds), 0.3, "+.2f", "small").judge()
    assert found.verdict == verdict and found.ours.endswith("margin 0.3")
    assert found.ours.startswith("so far ") is (seeds < 3)


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        (Estimate(0.1, 0.2), "reproduced"),
        (Estimate(0.1, 0.6), "in part"),
        (Estimate(-2.0, 0.6), "in part"),
    ],
)
def test_several_equalities_have_one_margin(second, verdict):
    of = lambda first: dict(a=(first, 3), b=(second, 3))
    judge = lambda first: AllSame(lambda: of(first), 0.5, "+.1f", lambda: "points").judge()
    found = judge(Estimate(0.0, 0.3))
    assert found.verdict == verdict and "margin 0.5: a +0.0 ± 0.3, b" in found.ours
    if verdict != "reproduced":
        told = {0.6: "not told apart"} if second.mean > 0 else {0.6: "contradicted"}
        assert judge(Estimate(0.3, 0.6)).verdict == told[second.half]


def test_figures_within_a_printed_range():
    rule = verdicts.within(lambda: dict(a=2, b=11, c=11.5), 2, 11, ".1f")
    assert rule.judge() == Found("in part", "2 of 3 cases; a 2.0, b 11.0, c 11.5")


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
    assert Tabulated(("b",), only="y".__eq__).judge().verdict == "contradicted"


def test_what_others_figures_allow_is_borne_out_not_reproduced():
    judge = lambda published: Allows(published, lambda: 0.69, lambda: 0.89, lambda: "").judge()
    assert judge(0.786).verdict == "consistent" and judge(0.9).verdict == "inconsistent"


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ("reproduced, reproduced", "reproduced"),
        ("reproduced, contradicted", "in part"),
        ("reproduced, not told apart", "in part"),
        ("in part, in part", "in part"),
        ("in part, contradicted", "in part"),
        ("reproduced, in part", "in part"),
        ("contradicted, not told apart", "contradicted"),
        ("not told apart, not told apart", "not told apart"),
    ],
)
def test_several_cases_have_one_verdict(told, verdict):
    assert verdicts.of_all(told.split(", ")) == verdict


def test_cases_hold_all_in_part_or_not():
    judge = lambda *held: Cases(lambda: dict(enumerate(held)), lambda: "").judge().verdict
    assert judge(True, True) == "reproduced" and judge(False) == "contradicted"
    assert judge(True, False) == "in part"


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (Cases(lambda: dict(a=True, b=True), lambda: "x"), "consistent"),
        (Cases(lambda: dict(a=True, b=False), lambda: "x"), "inconsistent"),
        (Cases(lambda: dict(a=False, b=False), lambda: "x"), "inconsistent"),
        (Computed("6", lambda: 5.66), "consistent"),
        (Computed("5", lambda: 5.66), "inconsistent"),
    ],
)
def test_figures_of_the_paper_alone_reproduce_nothing(rule, verdict):
    assert OfItself(rule).judge() == Found(verdict, rule.judge().ours)
    assert OfItself(rule).judge().verdict in verdicts.VERDICTS


def test_of_cases_it_is_said_how_many_are_consistent():
    rule = OfItself(Cases(lambda: dict(a=True, b=False, c=True), lambda: "x"))
    assert rule.judge() == Found("inconsistent", "2 of 3 cases; x")


def test_a_rule_that_reads_results_is_no_paper_of_itself(results):
    claim = Claim("Table 1", "", "", OfItself(Tabulated(("a",))))
    assert claim.judge() == Found("not measured yet", "")


def test_what_is_too_large_says_what_would_settle_it(results):
    seen = Differs(lambda: (Estimate(-0.5, 0.2), 3), -1, "+.2f", "small")
    two = ("lrkv_2p5b", "mha_2p5b")
    found = AtScale(two, 50e9, seen=seen, why="for a reason").judge()
    assert found.verdict == "out of reach"
    assert found.ours.startswith("at demo size as claimed, -0.50 ± 0.20 (small, 3 seeds); for a ")
    # 17.2 and 18.2 GFLOP a token: 1.8e21 of 16 x 459e12 x 0.4 FLOP/s
    assert "`lrkv_2p5b`, `mha_2p5b` of configs/, 50B tokens each: 6.4" in found.ours
    assert "days a seed on 16 v5p chips" in found.ours
    small = AtScale(("mha_128m", "mha_2p5b"), (1e9, 2e9), seen=Tabulated(("a",))).judge()
    assert small.ours.startswith("at demo size not measured yet; would take")
    assert "1B and 2B tokens each: 3." in small.ours and "hours a seed" in small.ours
    both = AtScale(two, 50e9, seen={"one way": seen, "another": Tabulated(("a",))}).judge()
    said = "at demo size one way: as claimed, -0.50 ± 0.20 (small, 3 seeds); another: not measured"
    assert both.ours.startswith(said)


@pytest.mark.parametrize(
    "first, second, verdict",
    [
        ((-0.5, 0.2), (-0.4, 0.1), "reproduced"),
        ((-0.5, 0.2), (-0.1, 0.2), "in part"),
        ((-0.1, 0.2), (0.1, 0.2), "not told apart"),
        ((-0.5, 0.2), (0.5, 0.2), "in part"),
        ((-0.1, 0.2), (0.5, 0.2), "contradicted"),
    ],
)
def test_a_chain_holds_where_every_link_is_told(first, second, verdict):
    links = {"a": (Estimate(*first), 3), "b": (Estimate(*second), 4)}
    found = Chain(lambda: links, -1, "+.1f", "small").judge()
    assert found.verdict == verdict
    assert found.ours.endswith("(small, 3 seeds)") and f"a {first[0]:+.1f}" in found.ours
    few = Claim("Table 1", "", "", Chain(lambda: links | {"c": (Estimate(1, 1), 2)}, -1, "", ""))
    assert few.judge().verdict == "not measured yet"


def test_a_damaged_result_is_named(results):
    (results / "small_caches.json").write_text('{"runs": ')
    with pytest.raises(UserError, match=r"small_caches.json.*is not JSON.*make it anew"):
        results_lib.read("small_caches")


def test_without_a_result_nothing_is_said(results):
    claim = Claim("Table 1", "something", "1", Tabulated(("a",)))
    assert claim.judge() == Found("not measured yet", "")
    assert Undefined("nobody knows").judge() == Found("undefined", "nobody knows")
    seen = Undefined("nobody knows", lambda: "here 2").judge()
    assert seen == Found("undefined", "nobody knows; here 2")
    missing = Undefined("nobody knows", lambda: results_lib.read("no_such_result"))
    assert missing.judge() == Found("undefined", "nobody knows")


def test_studies_are_read_by_cell(results):
    rows = [
        dict(cell="mha", difference=None, difference_half_interval=None, seeds=[0, 1, 2]),
        dict(cell="lrkv", difference=-0.01, difference_half_interval=0.002, seeds=[0, 1, 2]),
    ]
    (results / "studies").mkdir()
    (results / "studies" / "s.json").write_text(json.dumps(dict(rows=rows)))
    assert results_lib.study("s", "lrkv")() == (Estimate(-0.01, 0.002), 3)
    for missing in (("s", "mha"), ("s", "mla"), ("t", "lrkv")):
        with pytest.raises(results_lib.NoResultError):
            results_lib.study(*missing)()
    runs = dict(a={"0": dict(bpb=2.0), "1": dict(bpb=2.2)}, b={"1": dict(bpb=2.1)})
    (results / "s.json").write_text(json.dumps(dict(runs=runs)))
    found, seeds = results_lib.between("s", "a", "b")()
    assert found.mean == pytest.approx(0.1) and found.half is None and seeds == 1
