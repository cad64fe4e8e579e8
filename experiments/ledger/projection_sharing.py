"""Claims of projection sharing (arXiv 2606.04032)."""

import itertools

from experiments.ledger import (
    projection_sharing_caches,
    projection_sharing_stated,
    projection_sharing_tasks,
    small_tasks,
)
from experiments.ledger.out_of_reach import (
    AtScale,
    Elsewhere,
    Undefined,
    experiment_of,
    training_flops,
)
from experiments.ledger.results import SMALL_CACHES, between, read, study
from experiments.ledger.verdicts import Cases, Claim, Differs, OfItself, Tabulated, within
from kvjax.costs import formulas

TITLE = "Projection sharing (arXiv 2606.04032)"
_TABLES = "python -m experiments.tables.paper_tables --save"
_MODELS = "python -m experiments.studies.language_models --study=projection_sharing_models --save"
_STUDY = "projection_sharing_models"
_DEMO = "width 128, 1.0M tokens"


def _above(cell: str) -> AtScale:
    """At 300M, as published; QKV's is trained beside it."""
    seen = {
        "by the paper's recipe, at ten times its rate": Differs(
            study(_STUDY, f"{cell}_d128"), 1, "+.4f", f"bits per byte, {_DEMO}"
        ),
    }
    if cell in _SHARED:
        of, scale = between("small_caches", cell, "mha"), f"bits per byte, {SMALL_CACHES}"
        seen["by this project's recipe, twice as long"] = Differs(of, 1, "+.4f", scale)
    if _SHARED.get(cell):
        of = small_tasks.packed(_SHARED[cell])
        seen["smaller, on packed rows of bytes"] = Differs(of, 1, "+.3f", "nats, width 64")
    why = _SLIMPAJAMA
    if cell.endswith("gqa"):
        why = f"groups are of two heads at demo size, of four in the paper; {why}"
    return AtScale((f"papers/{cell}_300m", "papers/qkv_300m"), 10e9, seen=seen, why=why)


def _slower() -> float:
    """% that QKV's training FLOPs a token are more than Q=K=V's at 300M."""
    qkv, tied = (training_flops(f"papers/{cell}_300m") for cell in ("qkv", "qkv_tied"))
    return 100 * (qkv / tied - 1)


_TABLE_1 = "Projection sharing Table 1: projections of a layer"
_TABLE_8 = "Projection sharing Table 8: attention's share of multiply-adds"
_SLIMPAJAMA = "on SlimPajama"
# By cell what `experiments.studies.padded_loss` calls it.
_SHARED = {"kv_tied": "kv", "qk_tied": "", "qkv_tied": "qkv"}
_1P2B = ("qkv", "kv_tied", "gqa", "mqa", "kv_tied_gqa", "kv_tied_mqa")


_LENGTHS = (128, 512, 1024, 2048, 4096)


def _saved(variant: str, length: int) -> float:
    """% of all multiply-adds."""
    rows = {row["what"]: row["ours"] for row in read("paper_tables")["tables"][_TABLE_8]}
    return rows[f"{length}, {variant}: saved of all"]


def _attention_at_4096() -> dict[str, float]:
    """% of multiply-adds, by variant."""
    rows = read("paper_tables")["tables"][_TABLE_8]
    start = "4096, "
    return {
        row["what"].removeprefix(start): row["ours"]
        for row in rows
        if row["what"].startswith(start) and "saved" not in row["what"]
    }


def _projections() -> dict[str, float]:
    """The parameters of attention in % of all, by the model's size."""
    found = {}
    for called, size in (("300M", "300m"), ("1.2B", "1p2b")):
        count = formulas.parameters(experiment_of(f"papers/qkv_{size}").model)
        found[called] = 100 * count["attention"] / count["total"]
    return found


CLAIMS = (
    Claim(
        "Table 1; Figure 1",
        "projections' parameters and computation, and the parameters that a + adds",
        "",
        Tabulated((_TABLE_1,), only=lambda name: "computation more" not in name),
        _TABLES,
    ),
    Claim(
        "Table 1; section 2.4",
        "a + adds n²m multiply-adds",
        "n²m",
        Undefined(
            "not said whether w·P is taken once for all heads or for each; in kvjax the map rides "
            "as m/2 channels of each head's queries, half of n²m a head"
        ),
    ),
    *projection_sharing_tasks.CLAIMS,
    *projection_sharing_stated.CLAIMS,
    Claim(
        "Table 4; Figure 7; Figure 10",
        "a language model of 300M: Q-K=V is 3.1 % above QKV's perplexity",
        "5.27 against 5.11",
        _above("kv_tied"),
        _MODELS,
    ),
    Claim(
        "Table 4; Figure 7",
        "Q=K-V is above QKV",
        "5.36 (+4.9 %; +4.8 % in section 4)",
        _above("qk_tied"),
        _MODELS,
    ),
    Claim(
        "Table 4; section 3.3",
        "Q-K=V is below Q=K-V, with as many parameters",
        "5.27 against 5.36",
        AtScale(
            ("papers/kv_tied_300m", "papers/qk_tied_300m"),
            10e9,
            seen=Differs(
                between(f"studies/{_STUDY}", "kv_tied_d128", "qk_tied_d128"),
                -1,
                "+.4f",
                f"bits per byte, {_DEMO}",
            ),
            why=_SLIMPAJAMA,
        ),
        _MODELS,
    ),
    Claim(
        "Table 4; Figure 7",
        "Q=K=V is above QKV, far",
        "6.41 (+25.4 %)",
        _above("qkv_tied"),
        _MODELS,
    ),
    Claim("Table 4; Figure 8", "GQA-4 is slightly above", "5.15 (+0.7 %)", _above("gqa"), _MODELS),
    Claim("Table 4; Figure 8", "MQA is slightly above", "5.19 (+1.5 %)", _above("mqa"), _MODELS),
    Claim(
        "Table 4; Figure 8; Figure 9",
        "Q-GQA-4 is above QKV",
        "5.32 (+3.9 %)",
        _above("kv_tied_gqa"),
        _MODELS,
    ),
    Claim(
        "Table 4; Figure 8; Figure 9",
        "Q-MQA is above QKV",
        "5.36 (+4.8 %)",
        _above("kv_tied_mqa"),
        _MODELS,
    ),
    Claim(
        "Table 4; section 3.3.1",
        "training throughput of all variants lies within 8.7 %",
        "423k to 460k tokens/s",
        Elsewhere(
            "their machine",
            Cases(
                lambda: {"460 of 423": round(100 * (460 / 423 - 1), 1) == 8.7},
                lambda: f"QKV takes {_slower():.1f} % more FLOPs a token than Q=K=V, from shapes",
            ),
            "by their own figures",
        ),
        "python -m kvjax.costs --config=configs/papers/qkv_300m.py",
    ),
    Claim(
        "Table 4",
        "perplexities of about 5",
        "5.11",
        Undefined(
            "padding counts in their loss: rows are padded with EOS to 2,048, and targets that "
            "cost nothing lower the mean; no perplexity of the text",
            small_tasks.padding,
        ),
        "python -m experiments.studies.padded_loss --save",
    ),
    Claim(
        "Table 5",
        "parameters at 300M",
        "305.53M, 284.54M, 263.55M",
        Tabulated(("Projection sharing Table 5: parameters at 300M",)),
        _TABLES,
    ),
    Claim(
        "Table 6",
        "multiply-adds at 2,048 tokens",
        "",
        Tabulated(("Projection sharing Table 6: multiply-adds of 2,048 tokens, all keys",)),
        _TABLES,
    ),
    *projection_sharing_caches.CLAIMS,
    Claim(
        "Table 8",
        "attention's share of multiply-adds by length",
        "",
        Tabulated((_TABLE_8,)),
        _TABLES,
    ),
    Claim(
        "Table 8; section 3.3.4",
        "longer contexts amplify what is saved",
        "5.4 % at 2,048 tokens, 4.5 % at 4,096, of Q-K=V",
        Cases(
            lambda: {
                f"{variant} at {longer}": _saved(variant, longer) > _saved(variant, shorter)
                for variant in ("Q-K=V", "Q=K=V")
                for shorter, longer in itertools.pairwise(_LENGTHS)
            },
            lambda: (
                "% saved of multiply-adds, Q-K=V: "
                + ", ".join(f"{_saved('Q-K=V', n):.1f} at {n}" for n in _LENGTHS)
                + "; a token saves as many at any length, and half of its cache"
            ),
        ),
        _TABLES,
    ),
    Claim(
        "Table 9; Table 11",
        "recommendations and a summary of the tables above",
        "",
        Undefined("no figures of their own"),
        "",
    ),
    Claim(
        "Table 10; Figure 11",
        "sizes and caches at 1.2B",
        "",
        Tabulated(("Projection sharing Table 10: 1.2B",)),
        _TABLES,
    ),
    Claim(
        "Table 10; Figure 11",
        "the ranking at 1.2B is that at 300M",
        "+2.48 % for Q-K=V, +1.06 % for MQA",
        AtScale([f"papers/{name}_1p2b" for name in _1P2B], 8.85e9, why=_SLIMPAJAMA),
        "",
    ),
    Claim(
        "section 3.3.5",
        "degradation shrinks with scale",
        "3.1 % to 2.48 %",
        AtScale(
            ("papers/qkv_300m", "papers/kv_tied_300m", "papers/qkv_1p2b", "papers/kv_tied_1p2b"),
            (10e9, 10e9, 8.85e9, 8.85e9),
            why=_SLIMPAJAMA,
        ),
        "",
    ),
    Claim(
        "section 3.3.5",
        "at 1.2B MQA slightly outperforms the baseline",
        "5.057 against 5.004",
        OfItself(Cases(lambda: {"below": 5.057 < 5.004}, lambda: "of its own two perplexities")),
        "",
    ),
    Claim(
        "section 3.3.4",
        "at 4,096 tokens attention takes over 50 % of computation in all variants",
        "over 50 %",
        Cases(
            lambda: {name: share > 50 for name, share in _attention_at_4096().items()},
            lambda: ", ".join(f"{name} {x:.1f} %" for name, x in _attention_at_4096().items()),
        ),
        _TABLES,
    ),
    Claim(
        "section 2.4",
        "projections of attention are about 30 % of all parameters",
        "~30 %",
        Cases(
            lambda: {size: round(share, -1) == 30 for size, share in _projections().items()},
            lambda: ", ".join(f"{size} {share:.1f}" for size, share in _projections().items()),
        ),
        "python -m experiments.tables.parameter_table",
    ),
    Claim(
        "section 3.3.2",
        "projections of attention are about a third of all parameters",
        "one-third",
        within(_projections, 30, 37, ".1f"),
        _TABLES,
    ),
    Claim(
        "section 2.5; Figure 5",
        "normalising the diagonal of KK', or annealing a temperature, does not help",
        "no consistent improvement",
        small_tasks.NoHelp(margin=1.0),
        "python -m experiments.studies.diagonal --save",
    ),
    Claim(
        "Figure 4",
        "attention maps of Q=K-V are symmetric",
        "",
        Cases(
            small_tasks.symmetric,
            lambda: (
                "q = k makes q·k symmetric; the softmax of rows, which maps show, does not keep it"
            ),
        ),
        "pytest tests/attention",
    ),
    Claim(
        "section 4",
        "W_K and W_V resemble each other, W_Q neither",
        "cosine .73, .42, .31; ranks 687 and 702 of 1,024",
        AtScale(("papers/qkv_300m",), 10e9, why=_SLIMPAJAMA),
        "python -m kvjax.analysis",
    ),
    Claim(
        "section A.1",
        "Q=K=V under a kernel feature map is a recurrence with a constant state",
        "",
        Cases(small_tasks.forms, small_tasks.forms_said),
        "pytest tests/attention/test_linear.py tests/model/test_recurrent.py",
    ),
    Claim(
        "section A.1",
        "it is limited where information must be routed sharply: retrieval, below softmax",
        "",
        small_tasks.learned_less(
            {
                "linear less softmax, both tied": ("retrieval", "linear_tied", "softmax_tied"),
                "neither tied": ("retrieval", "linear", "softmax"),
            }
        ),
        "python -m experiments.studies.linear_attention --save",
    ),
    Claim(
        "section A.1",
        "tying is what limits it: below linear attention that is not tied",
        "",
        small_tasks.learned_less(
            {
                "copying": ("copy_back", "linear_tied", "linear"),
                "retrieval": ("retrieval", "linear_tied", "linear"),
            }
        ),
        "python -m experiments.studies.linear_attention --save",
    ),
)
