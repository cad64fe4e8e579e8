"""Claims of LRKV's blog."""

import itertools

from experiments.ledger import verdicts
from experiments.ledger.verdicts import AtScale
from experiments.ledger.verdicts import Cases
from experiments.ledger.verdicts import Claim
from experiments.ledger.verdicts import Differs
from experiments.ledger.verdicts import NoResultError
from experiments.ledger.verdicts import Tabulated
from experiments.ledger.verdicts import Undefined
from kvjax.foundation.estimate import Estimate

TITLE = "LRKV's blog"
_TABLES = "python -m experiments.tables.paper_tables --save"
_RANKS = "python -m experiments.studies.language_models --study=lrkv_ranks --save"


def _rank_rows() -> list[dict]:
    rows = verdicts.read("studies/lrkv_ranks")["rows"]
    return [row for row in rows if row["cell"].startswith("lrkv_r")]


def _monotone() -> dict[str, bool]:
    rows = sorted(_rank_rows(), key=lambda row: row["cache_bytes"])
    pairs = itertools.pairwise(rows)
    return {f"{b['cell']} below {a['cell']}": b["bpb"] < a["bpb"] for a, b in pairs}


def _ranks() -> str:
    return ", ".join(f"{row['cell']} {row['bpb']:.4f}" for row in _rank_rows())


def _far_in_long_rows() -> tuple[Estimate, int]:
    """LRKV less MHA in bits per byte, where rows are longest."""
    for row in verdicts.read("long_rows")["rows"]:
        place = row["places"][-1]
        if (row["mechanism"], row["length"]) == ("lrkv", 1024) and place["difference"] is not None:
            found = Estimate(place["difference"], place["difference_half_interval"])
            return found, len(row["seeds"])
    raise NoResultError("long_rows")


CLAIMS = (
    Claim(
        "Memory",
        "caches of 45 to 53 % of MHA's at every scale, 48.4 % at 2.5B",
        "45-53 %, 48.4 %",
        Tabulated(("LRKV blog: 45-53 % at r = 0.36-0.43·d_h, 48.4 % at d36",)),
        _TABLES,
    ),
    Claim(
        "Results",
        "the best combined score at 128M, 2.5B and 6.3B",
        "18.9, 37.9, 40.2",
        AtScale("lrkv_6p3b", 50e9, models=5),
        "",
    ),
    Claim(
        "Results",
        "at 6.3B ahead of the next by +2.3 on ARC-Easy, +4.4 on ARC-Challenge, +1.8 on MMLU",
        "+2.3, +4.4, +1.8",
        AtScale("lrkv_6p3b", 50e9, models=2),
        "",
    ),
    Claim(
        "Results",
        "the lead over MLA grows with scale",
        "+0.9 at 128M, +3.3 at 6.3B",
        AtScale("mla_6p3b", 50e9, models=2),
        "",
    ),
    Claim(
        "Results",
        "the residual's rank trades cache for loss monotonically",
        "",
        Cases(_monotone, _ranks),
        _RANKS,
    ),
    Claim(
        "Long context",
        "at 8K the lead over MHA is wider",
        "",
        AtScale(
            "long_context/lrkv_8k_2p5b",
            50e9,
            models=2,
            seen=Differs(_far_in_long_rows, -1, "+.4f", "tokens 512 to 1,023 of rows of 1,024"),
        ),
        "python -m experiments.studies.long_rows --save",
    ),
    Claim(
        "Compute",
        "for long contexts decoding takes r/d_h more work",
        "0.5 at r = 64",
        Undefined(
            "only without RoPE; under RoPE exact decoding takes more (experiments/README.md, "
            "LRKV under RoPE)"
        ),
        "",
    ),
)
