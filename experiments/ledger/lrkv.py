"""Claims of LRKV (arXiv 2601.11471 v1) and of its blog."""

from experiments.ledger import verdicts
from experiments.ledger.verdicts import AtScale
from experiments.ledger.verdicts import Cases
from experiments.ledger.verdicts import Claim
from experiments.ledger.verdicts import Computed
from experiments.ledger.verdicts import Differs
from experiments.ledger.verdicts import Tabulated
from experiments.ledger.verdicts import Undefined
from experiments.ledger.verdicts import between
from experiments.ledger.verdicts import diversity
from experiments.ledger.verdicts import orders
from experiments.ledger.verdicts import study

TITLE = "LRKV (arXiv 2601.11471)"
_TABLES = "python -m experiments.tables.paper_tables --save"
_SMALL = "python -m experiments.studies.small_caches --save"
_HEADS = "python -m experiments.studies.head_diversity --save"
_DEMO = "1.3M parameters, 2.1M tokens"
_TINY = "1.3M parameters, 1.0M tokens"


def _study(name: str) -> str:
    return f"python -m experiments.studies.language_models --study={name} --save"


def _less(first: str, second: str) -> Differs:
    """First has fewer bits per byte than second, at equal parameters."""
    return Differs(between("small_caches", first, second), -1, "+.4f", _DEMO)


def _relative_flops(config: str) -> float:
    """% of a token's training FLOPs more than MHA's, at d36."""
    return 100 * (verdicts.training_flops(config) / verdicts.training_flops("mha_2p5b") - 1)


def _six_n(config: str) -> float:
    """exaFLOPs of 6 N x 50B tokens; N: weights that multiply a token."""
    from kvjax import experiment as experiment_lib
    from kvjax.costs import formulas
    from kvjax.foundation.command_line import load_config

    model = experiment_lib.resolve(load_config(verdicts.repository(config))).model
    return 6 * sum(formulas.matrix_weights(model).values()) * 50e9 / 1e18


def _lrkv_gqa() -> float:
    """The cache of LRKV x GQA beside MHA's, at d36."""
    from kvjax import experiment as experiment_lib
    from kvjax.foundation.command_line import load_config

    config = load_config(verdicts.repository("lrkv_gqa_2p5b"))
    c = experiment_lib.resolve(config).model.mechanisms[0]
    cached = c.num_bases * c.key_dim + c.num_kv_heads * c.rank
    return cached / (c.num_heads * c.key_dim)


def _table_3() -> float:
    """R² of printed bits per byte and combined scores at 2.5B, five models."""
    import numpy as np

    bpb = (0.723, 0.725, 0.729, 0.724, 0.719)
    combined = (35.3, 35.8, 33.3, 36.9, 37.9)
    return float(np.corrcoef(bpb, combined)[0, 1] ** 2)


def _needed(groups: int) -> int:
    """The rank of residuals that heads in so many groups need, around the best of their matrices.

    Of random matrices [192, 32], which are independent: around one of them the others differ by
    a matrix of full rank, whatever the base.
    """
    import numpy as np

    w_GDH = np.random.default_rng(0).normal(size=(groups, 192, 32))
    return max(int(np.linalg.matrix_rank(w_DH - w_GDH[0])) for w_DH in w_GDH)


def _contained() -> dict[str, bool]:
    """Which mechanisms are points of LRKV at a rank below d_h = 32; MHA is r = d_h."""
    return {name: _needed(groups) < 32 for name, groups in (("MQA", 1), ("GQA-3", 3))}


def _contained_said() -> str:
    return (
        f"heads in one group need residuals of rank {_needed(1)}, in three groups of rank "
        f"{_needed(3)}, all of d_h: GQA is no point with less. LRKV x GQA contains both"
    )


def _mqa_moves() -> tuple[float, float]:
    """Effective rank of MQA's heads, % of H: plain and centred."""
    found = verdicts.read("analysis/head_diversity")["estimates"]["mqa"]
    return found["share"]["mean"], found["centred_share"]["mean"]


def _mqa_said() -> str:
    plain, centred = _mqa_moves()
    return f"MQA {plain:.1f} to {centred:.1f} % of 4 heads, of which centred ones fill at most 75"


CLAIMS = (
    Claim(
        "Figure 1; Equation 5",
        "LRKV caches 2(d_h + H·r) elements per token and layer",
        "2,560 at d36",
        Tabulated(("LRKV eq. 5: 2(d_h + Hr) per token and layer",)),
        _TABLES,
    ),
    Claim(
        "Equation 6",
        "its cache is 1/H + r/d_h of MHA's",
        "55.56 % at d36",
        Tabulated(("LRKV eq. 6: 1/H + r/d_h",)),
        _TABLES,
    ),
    Claim(
        "Equation 7",
        "it has 2·d·d_h + 2Hr(d + d_h) weights for keys and values",
        "6,193,152 at d36",
        Tabulated(("LRKV eq. 7: 2·d·d_h + 2Hr(d + d_h)",)),
        _TABLES,
    ),
    Claim(
        "Equation 3; section 3",
        "q·K = q·K_shared + (q·B)·R holds with any positional encoding",
        "",
        Undefined(
            "under RoPE it does not: the rotation stands between B and R. kvjax decodes exactly "
            "at a cost of its own (experiments/README.md, LRKV under RoPE)"
        ),
        "pytest tests/attention/test_law.py",
    ),
    Claim(
        "Table 1",
        "ranks that each mechanism's projections are bound to",
        "",
        Tabulated(("LRKV Table 1: rank constraints, in random weights, D = 192, d_h = 32",)),
        _TABLES,
    ),
    Claim(
        "Table 2; Figure 3 (a)",
        "caches, % of MHA's; LRKV 52.6 % at both scales, a reduction of 2.3x",
        "52.6 %, 2.3x",
        Tabulated(("LRKV Table 2: cache",)),
        _TABLES,
    ),
    Claim(
        "Table 2; Figure 2",
        "at 128M LRKV, r = 64, has the least bits per byte, below MHA",
        ".875 against .878",
        AtScale("lrkv_128m", 100e9, seen=_less("lrkv", "mha")),
        _SMALL,
    ),
    Claim(
        "Table 2; Figure 2",
        "at 2.5B too",
        ".719 against .723",
        AtScale("lrkv_2p5b", 50e9, seen=_less("lrkv", "mha")),
        _SMALL,
    ),
    Claim(
        "Table 2",
        "LRKV is below MLA",
        ".719 against .724",
        AtScale("mla_2p5b", 50e9, seen=_less("lrkv", "mla")),
        _SMALL,
    ),
    Claim(
        "Table 2",
        "LRKV is below GQA",
        ".719 against .725",
        AtScale("gqa_2p5b", 50e9, seen=_less("lrkv", "gqa")),
        _SMALL,
    ),
    Claim(
        "Table 2",
        "LRKV is below MQA",
        ".719 against .729",
        AtScale("mqa_2p5b", 50e9, seen=_less("lrkv", "mqa")),
        _SMALL,
    ),
    Claim(
        "Table 2",
        "MQA is above MHA",
        ".729 against .723",
        AtScale(
            "mqa_2p5b", 50e9, seen=Differs(between("small_caches", "mqa", "mha"), 1, "+.4f", _DEMO)
        ),
        _SMALL,
    ),
    Claim(
        "Table 2; section 6.2",
        "too small a rank (r = d_h/8) is above MHA",
        ".881 against .878 at 128M",
        AtScale(
            "ranks/lrkv_r16_128m",
            100e9,
            seen=Differs(study("lrkv_ranks", "lrkv_r4"), 1, "+.4f", _TINY),
        ),
        _study("lrkv_ranks"),
    ),
    Claim(
        "section 6.2",
        "r = d_h/2 is what it takes to beat MHA",
        "r = 64 of 128",
        AtScale(
            "lrkv_128m", 100e9, seen=Differs(study("lrkv_ranks", "lrkv_r16"), -1, "+.4f", _TINY)
        ),
        _study("lrkv_ranks"),
    ),
    Claim(
        "Figure 3 (b)",
        "LRKV reaches MHA's end with fewer steps, another's decayed end against its own middle",
        "18.7 % fewer",
        AtScale("lrkv_2p5b", 50e9),
        "python -m kvjax.compare runs/mha runs/lrkv",
    ),
    Claim(
        "Figure 4",
        "MHA's training takes 733 exaFLOPs",
        "733",
        Computed(
            "733",
            lambda: _six_n("mha_2p5b"),
            "6 x 2.444B weights x 50B tokens, without input embedding and attention",
        ),
        "python -m kvjax.compare",
    ),
    Claim(
        "Figure 4",
        "MQA's takes 689 exaFLOPs",
        "689",
        Computed("689", lambda: _six_n("mqa_2p5b"), "by the rule that gives MHA 733"),
        "python -m kvjax.compare",
    ),
    Claim(
        "Figure 4",
        "LRKV takes 0.8 % more FLOPs per token than MHA",
        "+0.8 %",
        Computed("0.8", lambda: _relative_flops("lrkv_2p5b"), "from shapes, attention included"),
        "python -m kvjax.costs --config=configs/lrkv_2p5b.py --all",
    ),
    Claim(
        "Figure 4",
        "MQA takes 6 % fewer",
        "-6 %",
        Computed("-6", lambda: _relative_flops("mqa_2p5b"), "from shapes, attention included"),
        "python -m kvjax.costs --config=configs/lrkv_2p5b.py --all",
    ),
    Claim(
        "Figure 4",
        "GQA takes 3.2 % fewer",
        "-3.2 %",
        Computed("-3.2", lambda: _relative_flops("gqa_2p5b"), "from shapes, attention included"),
        "python -m kvjax.costs --config=configs/lrkv_2p5b.py --all",
    ),
    Claim(
        "Figure 4",
        "MLA takes 3.7 % fewer",
        "-3.7 %",
        Computed(
            "-3.7", lambda: _relative_flops("mla_paper_2p5b"), "from shapes, attention included"
        ),
        "python -m kvjax.costs --config=configs/lrkv_2p5b.py --all",
    ),
    Claim(
        "Table 3",
        "after mid-training LRKV has the best mean of five benchmarks at 2.5B",
        "37.9 against 36.9 (MLA)",
        AtScale("lrkv_2p5b", 50e9, models=5),
        "python -m kvjax.evaluate",
    ),
    Claim(
        "Figure 5",
        "bits per byte predict the combined score",
        "R² = .786",
        Computed("0.786", _table_3, "from the five printed pairs (R²)"),
        "",
    ),
    Claim(
        "Table 5; Figure 6; Figure 15",
        "order of heads' effective rank at 128M, uncentred",
        "LRKV 96.2, MHA 95.4, GQA 90.5, MLA 83.9, MQA 72.6",
        AtScale("mha_128m", 100e9, models=5, seen=orders("128M", "share")),
        _HEADS,
    ),
    Claim(
        "Table 5; Figure 6; Figure 14",
        "the order at 2.5B, uncentred",
        "MHA 98.9, LRKV 98.3, GQA 95.4, MLA 92.7, MQA 86.2",
        AtScale("mha_2p5b", 50e9, models=5, seen=orders("2.5B", "share")),
        _HEADS,
    ),
    Claim(
        "Table 5; Figure 9; Figure 15",
        "the order at 128M, centred",
        "LRKV 83.0, MHA 82.4, GQA 79.6, MLA 78.5, MQA 78.4",
        AtScale("mha_128m", 100e9, models=5, seen=orders("128M", "centred_share")),
        _HEADS,
    ),
    Claim(
        "Table 5; Figure 14",
        "the order at 2.5B, centred",
        "MHA 94.0, LRKV 93.5, GQA 91.7, MLA 91.6, MQA 91.0",
        AtScale("mha_2p5b", 50e9, models=5, seen=orders("2.5B", "centred_share")),
        _HEADS,
    ),
    Claim(
        "Table 5; section 6.3",
        "LRKV keeps heads as diverse as MHA's, within 1 %",
        "0.6 and 0.5 points",
        AtScale(
            "lrkv_2p5b",
            50e9,
            seen=Cases(
                lambda: {
                    key: abs(diversity(key, "lrkv")()[0].mean) < 1
                    for key in ("share", "centred_share")
                },
                lambda: ", ".join(
                    f"{key} {diversity(key, 'lrkv')()[0].shown('+.2f')}"
                    for key in ("share", "centred_share")
                ),
            ),
        ),
        _HEADS,
    ),
    Claim(
        "section 6.3; Figure 14; Figure 15",
        "centring raises MQA's effective rank, and no other's",
        "86.2 to 91.0",
        AtScale(
            "mqa_2p5b",
            50e9,
            models=1,
            seen=Cases(
                lambda: {"MQA rises": _mqa_moves()[1] > _mqa_moves()[0]},
                _mqa_said,
            ),
        ),
        _HEADS,
    ),
    Claim(
        "section 6.3",
        "centring lowers MHA's by 0.9 points and LRKV's by 0.8",
        "-0.9, -0.8",
        Computed("0.9", lambda: 98.9 - 94.0, "from Table 5 itself (MHA, 2.5B)"),
        "",
    ),
    Claim(
        "Figure 7; Figure 18",
        "heads of LRKV resemble each other as little as MHA's",
        "",
        AtScale(
            "lrkv_2p5b", 50e9, seen=Differs(diversity("mean_similarity", "lrkv"), 0, "+.4f", _TINY)
        ),
        _HEADS,
    ),
    Claim(
        "Figure 10; Figure 11; Figure 16; Figure 17",
        "the first principal component explains 15 to 20 %",
        "15-20 %",
        Computed(
            "15", lambda: 100 / 5, "6 heads have 5 centred components: the first has at least 20 %"
        ),
        "",
    ),
    Claim(
        "Figure 12; Figure 13",
        "LRKV needs as many components for 90 % as MHA",
        "16-17 of 18",
        AtScale("lrkv_2p5b", 50e9, seen=Differs(diversity("components", "lrkv"), 0, "+.2f", _TINY)),
        _HEADS,
    ),
    Claim(
        "Figure 8",
        "keys of LRKV are larger than MHA's",
        "4.2x and 5.1x; the text: 6.7x and 4.8x",
        Undefined(
            "caption and text give other numbers for the same models; ours: `python -m "
            "kvjax.analysis --reports=geometry`"
        ),
        "",
    ),
    Claim(
        "Table 4",
        "cache per token",
        "",
        Tabulated(("LRKV Table 4: cache per token and layer",)),
        _TABLES,
    ),
    Claim(
        "Table 4",
        "work beyond MHA's when decoding",
        "",
        Tabulated(("LRKV Table 4: work beyond MHA's attention (its O(·): 2 per multiply-add)",)),
        _TABLES,
    ),
    Claim(
        "section 2",
        "a hybrid long-context cache keeps recent keys exactly and rebuilds distant ones from "
        "residuals",
        "",
        Undefined("no definition, no experiment"),
        "",
    ),
    Claim(
        "section 3",
        "LRKV contains MQA and GQA, at ranks between 0 and d_h",
        "",
        Cases(_contained, _contained_said),
        "pytest tests/attention",
    ),
    Claim(
        "section 7",
        "with groups of 3 the cache is 0.17 of MHA's",
        "0.17",
        Computed(
            "0.17",
            _lrkv_gqa,
            "2(J·H + K·R) of 2·N·H in configs/lrkv_gqa_2p5b.py; 0.33 x 0.53 counts the base once "
            "per group and not the residuals of each head",
        ),
        _TABLES,
    ),
)
