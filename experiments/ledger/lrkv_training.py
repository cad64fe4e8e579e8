"""Claims of LRKV on what training takes: steps, FLOPs, what is reached for them."""

import statistics

from experiments.ledger import lrkv_figures as figures
from experiments.ledger.out_of_reach import AtScale
from experiments.ledger.verdicts import Cases, Claim, Computed, OfItself, within

_STEPS_TIMES_FLOPS = (
    "Figure 3 (b) counts steps, which Figure 4's FLOPs per token turn into "
    + ", ".join(f"{x:.1f} ({name})" for name, x in figures.flops_saved().items())
    + " %; Figure 4 itself has 6 %"
)

CLAIMS = (
    Claim(
        "Figure 3 (b)",
        "LRKV reaches others' ends with fewer steps: another's decayed end against its own middle",
        "18.7, 21.4, 24.5, 29.7 %, mean 23.6 %",
        AtScale(figures.five("2p5b"), 50e9),
        "python -m kvjax.compare runs/mha runs/lrkv",
    ),
    Claim(
        "Figure 3 (b); section 6.1",
        "the four savings lie between 18 and 30 %, with a mean of 23.6 %",
        "18-30 %, mean 23.6 %",
        OfItself(
            Cases(
                lambda: {
                    "18 to 30": all(18 <= x <= 30 for x in figures.SAVINGS.values()),
                    "mean": round(statistics.mean(figures.SAVINGS.values()), 1) == 23.6,
                },
                lambda: "of the figure's own four",
            )
        ),
        "",
    ),
    Claim(
        "abstract",
        "the quality of others with up to 20 to 25 % less training compute, in cumulative FLOPs",
        "20-25 %",
        AtScale(figures.five("2p5b"), 50e9, why=_STEPS_TIMES_FLOPS),
        "python -m kvjax.compare runs/mha runs/lrkv",
    ),
    Claim(
        "Figure 4",
        "better quality with 6 % less compute: .720 at 650 exaFLOPs, MQA .729 at 689",
        "6 %",
        OfItself(
            Computed(
                "6", lambda: 100 * (1 - 650 / 689), "by the two figures; of MQA's whole training"
            )
        ),
        "",
    ),
    Claim(
        "Figure 4",
        "at every milestone of training compute LRKV has less loss than all others",
        ".720 at 650 exaFLOPs; MQA .729 at 689",
        AtScale(figures.five("2p5b"), 50e9),
        "python -m kvjax.compare runs/mha runs/lrkv",
    ),
    Claim(
        "section 6.1",
        "whole trainings of the baselines take 689 to 710 exaFLOPs",
        "689-710",
        OfItself(within(figures.budgets, 689, 710, ".0f")),
        "",
    ),
    Claim(
        "Figure 4",
        "MQA's takes 689 exaFLOPs",
        "689",
        Computed(
            "689",
            lambda: figures.six_n("mqa_2p5b"),
            "6 x weights x 50B tokens, without input embedding and attention; for MHA this is 733, "
            "which is 689 over .94",
        ),
        "python -m kvjax.compare",
    ),
    Claim(
        "Figure 4",
        "LRKV takes 0.8 % more FLOPs per token than baselines, MHA among them",
        "+0.8 %",
        Cases(figures.lrkv_flops, figures.lrkv_flops_said),
        "python -m kvjax.costs --config=configs/lrkv_2p5b.py --all",
    ),
    Claim(
        "Figure 4",
        "MQA takes 6 % fewer",
        "-6 %",
        Computed(
            "-6", lambda: figures.relative_flops("mqa_2p5b"), "from shapes, attention included"
        ),
        "python -m kvjax.costs --config=configs/lrkv_2p5b.py --all",
    ),
    Claim(
        "Figure 4",
        "GQA takes 3.2 % fewer",
        "-3.2 %",
        Computed(
            "-3.2", lambda: figures.relative_flops("gqa_2p5b"), "from shapes, attention included"
        ),
        "python -m kvjax.costs --config=configs/lrkv_2p5b.py --all",
    ),
    Claim(
        "Figure 4",
        "MLA takes 3.7 % fewer",
        "-3.7 %",
        Computed(
            "-3.7",
            lambda: figures.relative_flops("mla_paper_2p5b"),
            "from shapes, attention included",
        ),
        "python -m kvjax.costs --config=configs/lrkv_2p5b.py --all",
    ),
    Claim(
        "section 6.1",
        "with equal compute it outperforms all methods by 0.5 to 1.0 % of bits per byte",
        "0.5-1.0 %",
        OfItself(within(figures.ahead, 0.5, 1.0, ".2f")),
        "",
    ),
)
