"""The ledger: no table or figure is left out, and verdicts follow from rules and results."""

import inspect
import re

import pytest

from experiments import claims
from experiments.ledger import judge
from experiments.record import EXPERIMENTS

# By paper: the numbers of its tables and figures.
NUMBERED = {
    "lrkv": (5, 18),
    "projection_sharing": (11, 11),
    "thin_keys": (11, 0),
    "logit_spectra": (2, 0),
}


@pytest.fixture(scope="module")
def ledger():
    """Returns the judged ledger, once for all tests: it takes seconds."""
    return claims.ledger()


def test_no_table_and_no_figure_is_left_out():
    for paper, (tables, figures) in NUMBERED.items():
        places = " ".join(claim["place"] for claim in judge.claims(paper))
        wanted = [f"Table {i + 1}" for i in range(tables)]
        wanted += [f"Figure {i + 1}" for i in range(figures)]
        assert [name for name in wanted if not re.search(rf"{name}(?!\d)", places)] == []


def test_every_claim_names_a_rule_and_its_options():
    rules = [claim for paper in claims.PAPERS for claim in judge.claims(paper)]
    for claim in rules:
        assert claim["place"] and claim["says"]
        assert not (claim.get("own") and claim["command"])  # it needs no run
    names = set()
    for one in rules:  # which grows
        options = {k: x for k, x in one.items() if k not in ("rule", "own", *judge._FIELDS)}
        names.add(one["rule"])
        for option in options.values():
            values = [option, *option.values()] if isinstance(option, dict) else []
            rules += [x for x in values if isinstance(x, dict) and "rule" in x]
        inspect.signature(judge.RULES[one["rule"]]).bind(**options)
    assert names == judge.RULES.keys()


@pytest.mark.slow
@pytest.mark.whole
def test_the_file_follows_from_the_results(ledger):
    stored = (EXPERIMENTS / claims.FILE).read_text("utf-8")
    assert stored == claims.written(ledger), (
        "run `python -m experiments.claims --write` where results have changed"
    )


@pytest.mark.slow
@pytest.mark.whole
def test_every_verdict_is_explained_and_commands_are_there(ledger):
    for rows in ledger.values():
        for row in rows:
            assert row["verdict"] in judge.VERDICTS
            module = re.match(r"python -m ([\w.]+)", row["command"])
            if module:
                path = EXPERIMENTS.parent / module[1].replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize(
    "paper, says, old, new, failing",
    [
        ("lrkv", "the steps that LRKV saves", "== 9.4", "== 9.9", ["MHA"]),
        ("lrkv", "combined scores are means", "== 36.9", "== 37.2", ["mean of MLA"]),
        ("projection_sharing", "are exponentials", "== 5.19", "== 5.29", ["MQA, validation"]),
        ("projection_sharing", "over QKV's, in %", "== 0.053", "== 0.056", ["MQA at 1.2B"]),
        ("thin_keys", "is identical in both", "4.3 - 4.3", "4.4 - 4.3", ["d/4"]),
        ("logit_spectra", "5 times (LLaMA-1B)", "70 / 11", "60 / 11", ["Qwen-3B (128)"]),
    ],
)
def test_another_printed_figure_would_not_fit(paper, says, old, new, failing):
    (claim,) = [one for one in judge.claims(paper) if says in one["says"]]
    holds = claim["holds"]

    def failing_of(holds):
        return [n for n, x in holds.items() if not judge.printed.holds(x)]

    changed = {name: text.replace(old, new) for name, text in holds.items()}
    assert changed != holds
    assert [name for name in failing_of(changed) if name not in failing_of(holds)] == failing
