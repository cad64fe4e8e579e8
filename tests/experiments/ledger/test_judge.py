"""Rules for any paper, and their verdicts."""

import json

import pytest

from experiments.ledger import judge
from experiments.ledger.judge import Judgement
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate

TABLE = {"rule": "table", "title": "a"}
SCALE = {"digits": "+.2f", "scale": "small"}


@pytest.mark.parametrize(
    "difference, verdict",
    [
        ((-0.5, 0.2), "reproduced"),
        ((0.5, 0.2), "contradicted"),
        ((-0.5, 0.6), "not distinguishable"),
        ((-0.5, 0.2, 2), "not measured yet"),
        ((-0.5, None, 1), "not measured yet"),
    ],
)
def test_a_difference_needs_seeds_and_an_interval(make_difference, difference, verdict):
    assert judge.sign(make_difference(*difference), -1, **SCALE).verdict == verdict


@pytest.mark.parametrize(
    "mean, half, seeds, verdict",
    [
        (0.05, 0.2, 3, "reproduced"),  # all of the interval within the margin
        (-0.29, 0.01, 3, "reproduced"),  # even if the interval excludes 0
        (0.2, 0.2, 3, "not distinguishable"),
        (0.4, 0.2, 3, "not distinguishable"),
        (-0.6, 0.2, 3, "contradicted"),
        (0.0, 0.1, 2, "not measured yet"),
    ],
)
def test_equality_needs_a_margin(make_difference, mean, half, seeds, verdict):
    found = judge.same(make_difference(mean, half, seeds), 0.3, **SCALE)
    assert found.verdict == verdict and found.ours.endswith("margin 0.3")
    assert found.ours.startswith("so far ") is (seeds < 3)


@pytest.mark.parametrize(
    "first, second, verdict",
    [
        ((0.0, 0.3), (0.1, 0.2), "reproduced"),
        ((0.0, 0.3), (0.1, 0.6), "in part"),
        ((0.0, 0.3), (-2.0, 0.6), "in part"),
        ((0.3, 0.6), (0.1, 0.6), "not distinguishable"),
        ((0.3, 0.6), (-2.0, 0.6), "contradicted"),
    ],
)
def test_several_equalities_have_one_margin(make_difference, first, second, verdict):
    found = judge.all_same(
        {"a": make_difference(*first), "b": make_difference(*second)}, 0.5, "+.1f", "points"
    )
    assert found.verdict == verdict and f"margin 0.5: a {first[0]:+.1f} ± " in found.ours


@pytest.mark.parametrize(
    "first, second, verdict",
    [
        ((-0.5, 0.2), (-0.4, 0.1), "reproduced"),
        ((-0.5, 0.2), (-0.1, 0.2), "in part"),
        ((-0.1, 0.2), (0.1, 0.2), "not distinguishable"),
        ((-0.5, 0.2), (0.5, 0.2), "in part"),
        ((-0.1, 0.2), (0.5, 0.2), "contradicted"),
    ],
)
def test_several_signs(make_difference, first, second, verdict):
    of = {"a": make_difference(*first), "b": make_difference(*second, 4)}
    found = judge.signs(of, -1, "+.1f", "small")
    assert found.verdict == verdict
    assert found.ours.endswith("(small, 3 seeds)") and f"a {first[0]:+.1f}" in found.ours
    with pytest.raises(judge.NoResultError):
        judge.signs(of | {"c": make_difference(1, 1, 2)}, -1, "+.1f", "small")


def test_figures_within_a_printed_range():
    found = judge.within({"a": 2, "b": 11, "c": 11.5}, 2, 11, ".1f")
    assert found == Judgement("in part", "2 of 3 cases; a 2.0, b 11.0, c 11.5")


def test_numbers_agree_to_their_printed_digits():
    def verdict(figure, ours):
        return judge.rounds_to(figure, ours, "").verdict

    assert verdict("0.79", 0.786) == "reproduced" and verdict("0.78", 0.786) == "contradicted"
    assert verdict("5,888", 2928) == "contradicted" and verdict("733", 733.4) == "reproduced"
    assert judge.computed("6", "100 * (1 - 650 / 689)", "x") == Judgement("reproduced", "6: x")


def test_tables_agree_wholly_in_part_or_not(results):
    def row(agrees, what):
        found = {"what": what, "unit": "%", "paper": "1", "ours": 2.0, "agrees": agrees}
        return found | {"verdict": "differs: it is 2"}

    tables = {"a": [row(True, "x"), row(True, "y")], "b": [row(True, "x"), row(False, "y")]}
    (results / "paper_tables.json").write_text(json.dumps({"tables": tables}))
    assert judge.table("a") == Judgement("reproduced", "2 of 2 figures agree")
    part = judge.table("b")
    assert part.verdict == "in part" and "y: 1 there, 2 % here: it is 2" in part.ours
    assert judge.table("b", only="y").verdict == "contradicted"


@pytest.mark.parametrize(
    "verdicts, verdict",
    [
        ("reproduced, reproduced", "reproduced"),
        ("reproduced, contradicted", "in part"),
        ("reproduced, not distinguishable", "in part"),
        ("in part, in part", "in part"),
        ("in part, contradicted", "in part"),
        ("reproduced, in part", "in part"),
        ("contradicted, not distinguishable", "contradicted"),
        ("not distinguishable, not distinguishable", "not distinguishable"),
    ],
)
def test_several_cases_have_one_verdict(verdicts, verdict):
    assert judge.combined(verdicts.split(", ")) == verdict


@pytest.mark.parametrize(
    "holds, verdict, own",
    [
        ({"a": "1 == 1", "b": "1 < 2"}, "reproduced", "consistent"),
        ({"a": "1 == 1", "b": "2 < 1"}, "in part", "inconsistent"),
        ({"a": "2 == 1"}, "contradicted", "inconsistent"),
    ],
)
def test_figures_of_the_paper_alone_reproduce_nothing(holds, verdict, own):
    claim = {"rule": "arithmetic", "holds": holds, "why": "x"}
    found = judge.judge(claim)
    assert found.verdict == verdict and found.ours.endswith("cases; x")
    assert judge.judge(claim | {"own": True}) == Judgement(own, found.ours)


def test_a_figure_that_is_printed_twice():
    assert judge.twice("0.726", "0.73").verdict == "reproduced"
    assert judge.twice("0.726", "0.729").ours == "0 of 1 cases; 0.726 here, 0.729 there"


def test_claims_at_scale_state_the_cost_of_settling_them(results, make_difference):
    seen = {"rule": "sign", "of": make_difference(-0.5, 0.2), "sign": -1} | SCALE
    two = ("lrkv_2p5b", "mha_2p5b")
    found = judge.at_scale(two, 50e9, seen=seen, why="for a reason")
    assert found.verdict == "out of reach"
    assert found.ours.startswith("at demo size as claimed, -0.50 ± 0.20 (small, 3 seeds); for a ")
    # 17.2 and 18.2 GFLOP a token: 1.8e21 of 16 x 459e12 x 0.4 FLOP/s
    assert "`lrkv_2p5b`, `mha_2p5b` of configs/, 50B tokens each: 6.4" in found.ours
    assert "days a seed on 16 v5p chips" in found.ours
    small = judge.at_scale(("mha_128m", "mha_2p5b"), (1e9, 2e9), seen=TABLE)
    assert small.ours.startswith("at demo size not measured yet; would take")
    assert "1B and 2B tokens each: 3." in small.ours and "hours a seed" in small.ours
    both = judge.at_scale(two, 50e9, seen={"one way": seen, "another": TABLE})
    said = "at demo size one way: as claimed, -0.50 ± 0.20 (small, 3 seeds); another: not measured"
    assert both.ours.startswith(said)
    needed = judge.elsewhere("their data", seen, "in others")
    assert needed.ours == "in others as claimed, -0.50 ± 0.20 (small, 3 seeds); needs their data"


def test_a_missing_or_damaged_result(results):
    for claim in (TABLE, TABLE | {"own": True}):
        assert judge.judge(claim) == Judgement("not measured yet", "")
    assert (
        judge.undefined("unclear")
        == Judgement("undefined", "unclear")
        == judge.undefined("unclear", TABLE)
    )
    with pytest.raises(judge.NoResultError):
        judge.cases({}, "")
    (results / "small_caches.json").write_text('{"runs": ')
    with pytest.raises(UserError, match=r"small_caches.json.*is not JSON.*make it anew"):
        judge.read("small_caches")


def test_studies_are_read_by_cell(results):
    none = {"cell": "mha", "difference": None, "difference_half_interval": None, "seeds": [0, 1, 2]}
    lrkv = {"cell": "lrkv", "difference": -0.01, "difference_half_interval": 0.002}
    (results / "studies").mkdir()
    rows = [none, lrkv | {"seeds": [0, 1, 2]}]
    (results / "studies" / "s.json").write_text(json.dumps({"rows": rows}))
    assert judge.study("s", "lrkv") == (Estimate(-0.01, 0.002), 3)
    for missing in (("s", "mha"), ("s", "mla"), ("t", "lrkv")):
        with pytest.raises(judge.NoResultError):
            judge.study(*missing)
    runs = {"a": {"0": {"bpb": 2.0}, "1": {"bpb": 2.2}}, "b": {"1": {"bpb": 2.1}}}
    (results / "s.json").write_text(json.dumps({"runs": runs}))
    found, seeds = judge.between("s", "a", "b")
    assert found.mean == pytest.approx(0.1) and found.half is None and seeds == 1
