"""The ledger: no table or figure is left out, and verdicts follow from rules and results."""

import inspect
import re

import pytest

from experiments import claims
from experiments.ledger import judge
from experiments.record import EXPERIMENTS

# Numbered in the papers: how many tables, how many figures.
NUMBERED = {
    "lrkv": (5, 18),
    "projection_sharing": (11, 11),
    "thin_keys": (11, 0),
    "logit_spectra": (2, 0),
}
# Parts of claims that the texts make.
SAID = {
    "projection_sharing": (
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
    "thin_keys": (
        "INT4",
        "2.5 TB",
        "60 % more users",
        "fragile to quantisation",
        "when retrieval converges",
        "identical in both architectures",
    ),
    "lrkv_blog": (
        "lead over MLA grows with scale",
        "at 6.3B ahead of the next",
        "at 6.3B too it has less test loss",
    ),
    "lrkv": (
        "bits per byte predict the combined score",
        "hybrid long-context cache",
        "less training compute",
        "every milestone of training compute",
        "fewer steps are so many tokens",
        "5 of 6, MQA 4 to 5",
        "MLA lies between GQA and MQA",
    ),
    "logit_spectra": ("5,888", "largest change of a logit", "grouped query attention"),
}


@pytest.fixture(scope="module")
def ledger():
    """Judged once: it takes seconds."""
    return claims.ledger()


def test_no_table_and_no_figure_is_left_out():
    for paper, (tables, figures) in NUMBERED.items():
        places = " ".join(claim["place"] for claim in judge.claims(paper))
        wanted = [f"Table {i + 1}" for i in range(tables)]
        wanted += [f"Figure {i + 1}" for i in range(figures)]
        assert [name for name in wanted if not re.search(rf"{name}(?!\d)", places)] == []


def test_claims_of_the_texts_are_there():
    for paper, texts in SAID.items():
        says = [claim["says"] for claim in judge.claims(paper)]
        assert [text for text in texts if not any(text in one for one in says)] == []


def test_every_claim_names_a_rule_and_its_options():
    rules = [claim for paper in claims.PAPERS for claim in judge.claims(paper)]
    for claim in rules:
        assert claim["place"] and claim["says"]
        assert not (claim.get("own") and claim["command"])  # nothing was run for it
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
            assert row["verdict"] in judge.VERDICTS
            module = re.match(r"python -m ([\w.]+)", row["command"])
            if module:
                path = EXPERIMENTS.parent / module[1].replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize(
    "paper, says, old, new, failing",
    [
        ("lrkv", "fewer steps are so many", "== 9.4", "== 9.9", ["MHA"]),
        ("lrkv", "test losses in nats", "2.397 / 0.725", "2.397 / 0.727", ["2.5B, GQA"]),
        ("lrkv", "of 18 heads MHA and LRKV", "86.2", "91.0", ["MQA, uncentred"]),
        ("lrkv", "gap between mechanisms", "72.6", "90.0", ["uncentred"]),
        ("lrkv", "combined scores are means", "== 36.9", "== 37.2", ["mean of MLA"]),
        ("lrkv", "combined scores are means", "11.3 > 10.8", "10.7 > 10.8", ["first on four"]),
        ("projection_sharing", "are exponentials", "== 5.19", "== 5.29", ["MQA, validation"]),
        ("projection_sharing", "above QKV's, in %", "== 1.5", "== 2.5", ["MQA at 300M, %"]),
        ("projection_sharing", "above QKV's, in %", "== 0.053", "== 0.056", ["MQA at 1.2B"]),
        ("projection_sharing", "less than 5 %", "4.8 < 5", "5.0 < 5", ["Q-MQA at 300M"]),
        ("projection_sharing", "one order", "5.057", "5.300", ["order"]),
        ("thin_keys", "is identical in both", "4.3 - 4.3", "4.4 - 4.3", ["d/4"]),
        ("thin_keys", "perplexities beside them", "== 7.2", "== 6.2", ["Table 8, 96"]),
        ("thin_keys", "what is saved", "(1 + 512 / 768) / 2", "512 / 768", ["Table 6, 512"]),
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
