"""Claims of LRKV on heads: their effective rank, how alike they are, how large their keys."""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from experiments.ledger.lrkv_figures import LARGE, SMALL, five
from experiments.ledger.out_of_reach import AtScale
from experiments.ledger.results import TINY, NoResultError, read
from experiments.ledger.verdicts import (
    CONTRADICTED,
    PART,
    REPRODUCED,
    SEEDS,
    UNTOLD,
    Cases,
    Claim,
    Found,
    OfItself,
    Same,
)
from kvjax.foundation.estimate import Estimate, difference

_COMMAND = "python -m experiments.studies.head_diversity --save"


def first_component() -> dict[str, bool]:
    """Whether the largest share of variance can be at most 20 %, and at least 15.

    An effective rank of n components, exp of their entropy, leaves the largest share at least 1/n;
    Table 5's centred ones, of H heads.
    """
    ranks = {"128M, LRKV": 0.830 * 6, "2.5B, MHA": 0.940 * 18}
    least = {name: 1 / rank for name, rank in ranks.items()}
    return {
        "128M: no more than 20 %": round(least["128M, LRKV"], 2) <= 0.20,
        "2.5B: no less than 15 %": most(0.940 * 18, 18) >= 0.15,
    }


def most(rank: float, heads: int) -> float:
    """The largest first share that has this effective rank: all others alike, of heads - 1."""
    shares = np.linspace(1 / (heads - 1), 0.999, 10_000)
    others = (1 - shares) / (heads - 2)
    entropy = -shares * np.log(shares) - (heads - 2) * others * np.log(others)
    return float(shares[np.exp(entropy) >= rank][-1])


def first_component_said() -> str:
    return (
        "by Table 5's centred effective ranks, means over layers: at 128M it is at least "
        f"{100 / (0.83 * 6):.0f} %, at 2.5B at most {100 * most(0.94 * 18, 18):.1f} % (MHA)"
    )


def centring() -> dict[str, bool]:
    """Which changes that section 6.3 states are those of Table 5 at 2.5B, in points."""
    text = {"MHA": -0.9, "LRKV": -0.8, "GQA": -3.7, "MQA": 4.8}
    change = lambda whole, centred: round(centred - whole, 1)
    return {name: change(*LARGE[name]) == stated for name, stated in text.items()}


def relies() -> dict[str, bool]:
    """What centring takes of LRKV's effective rank, in points, and of heads that share nothing."""
    small, large = (whole - centred for whole, centred in (SMALL["LRKV"], LARGE["LRKV"]))
    return {
        "13.2": round(small, 1) == 13.2,
        "4.8": round(large, 1) == 4.8,
        "at 128M more than of heads that share nothing": small > 100 / 6,
        "at 2.5B too": large > 100 / 18,
    }


def magnitudes() -> dict[str, bool]:
    """Whether parts of keys are larger than MHA's whole keys, in the tiny models."""
    return {name.replace("_", " "): ratio > 1 for name, ratio in norms().items()}


def norms() -> dict[str, float]:
    found, whole = heads_of("lrkv"), heads_of("mha")["key_total_norm"]["mean"]
    parts = ("key_base_norm", "key_residual_norm", "key_total_norm")
    return {name: found[name]["mean"] / whole for name in parts}


def norms_said() -> str:
    return ", ".join(f"{name.replace('_', ' ')} {x:.2f} of MHA's" for name, x in norms().items())


@dataclasses.dataclass(frozen=True)
class Rises:
    """Whether centring raises the effective rank of one mechanism's heads, and of no other's.

    In % of their number, seed by seed. Centred heads fill at most all but one of their number, so
    where more are filled already nothing could rise, and nothing is told.
    """

    mechanism: str
    others: Sequence[str]
    heads: int

    def judge(self) -> Found:
        moved = {name: self._moved(name) for name in (self.mechanism, *self.others)}
        plain = heads_of(self.mechanism)["share"]
        most = 100 * (self.heads - 1) / self.heads
        said = ", ".join(f"{name} {x.shown('+.1f')}" for name, x in moved.items())
        said += f" points; centred, {self.heads} heads fill at most {most:.0f} %"
        if plain["mean"] - plain["half_interval"] > most:
            return Found(UNTOLD, f"{said}: nothing could rise")
        mine = moved.pop(self.mechanism).sign
        if mine > 0:
            alone = not any(x.sign > 0 for x in moved.values())
            return Found(REPRODUCED if alone else PART, said)
        return Found(CONTRADICTED if mine < 0 else UNTOLD, said)

    def _moved(self, name: str) -> Estimate:
        """Centred less plain, points."""
        runs = read("analysis/head_diversity")["runs"].get(name, {})
        of = lambda measure: {seed: run["trained"][measure] for seed, run in runs.items()}
        found = difference(of("centred_share"), of("share"))
        if found is None or len(runs) < SEEDS:
            raise NoResultError(f"head_diversity of {name}")
        return found


def diversity(measure: str, mechanism: str) -> Callable[[], tuple[Estimate, int]]:
    """A function that gives a measure of a mechanism's heads less MHA's, and how many seeds."""

    def of() -> tuple[Estimate, int]:
        found = heads_of(mechanism)[measure]["against_mha"]
        seeds = len(read("analysis/head_diversity")["seeds"])
        return Estimate(found["mean"], found["half_interval"]), seeds

    return of


def heads_of(mechanism: str) -> dict:
    """What `experiments.studies.head_diversity` found of a mechanism's heads, by measure."""
    found = read("analysis/head_diversity")["estimates"]
    if not {mechanism, "mha"} <= found.keys():
        raise NoResultError(f"head_diversity of {mechanism}")
    return found[mechanism]


def orders(scale: str, measure: str) -> Cases:
    """Neighbours in an order of mechanisms that Table 5 gives: which stand so here."""

    def found() -> list[dict]:
        rows = read("analysis/head_diversity")["orders"]
        return [
            row
            for row in rows
            if row["neighbours"] and (row["scale"], row["measure"]) == (scale, measure)
        ]

    def said(row: dict) -> str:
        here = Estimate(row["here"]["mean"], row["here"]["half"])
        return f"{row['first']} over {row['second']} {here.shown('+.2f')}"

    return Cases(
        lambda: {said(row): row["verdict"] == "as published" for row in found()},
        lambda: ", ".join(map(said, found())),
    )


_THREE_COMPONENTS = "at demo size 4 heads have 3 components, whatever the mechanism"
_FOUR_COMMAND = "four heads, hardly moved from where they start: all lie at 99 % or, centred, 75 %"


CLAIMS = (
    Claim(
        "Table 5; Figure 6; Figure 15",
        "order of heads' effective rank at 128M, uncentred",
        "LRKV 96.2, MHA 95.4, GQA 90.5 (Figure 6: 89.5), MLA 83.9, MQA 72.6",
        AtScale(five("128m"), 100e9, seen=orders("128M", "share"), why=_FOUR_COMMAND),
        _COMMAND,
    ),
    Claim(
        "Table 5; Figure 6; Figure 14",
        "the order at 2.5B, uncentred",
        "MHA 98.9, LRKV 98.3, GQA 95.4, MLA 92.7, MQA 86.2",
        AtScale(five("2p5b"), 50e9, seen=orders("2.5B", "share"), why=_FOUR_COMMAND),
        _COMMAND,
    ),
    Claim(
        "Table 5; Figure 9; Figure 15",
        "the order at 128M, centred",
        "LRKV 83.0, MHA 82.4, GQA 79.6, MLA 78.5, MQA 78.4",
        AtScale(five("128m"), 100e9, seen=orders("128M", "centred_share"), why=_FOUR_COMMAND),
        _COMMAND,
    ),
    Claim(
        "Table 5; Figure 14",
        "the order at 2.5B, centred",
        "MHA 94.0, LRKV 93.5, GQA 91.7, MLA 91.6, MQA 91.0",
        AtScale(five("2p5b"), 50e9, seen=orders("2.5B", "centred_share"), why=_FOUR_COMMAND),
        _COMMAND,
    ),
    Claim(
        "Table 5; section 6.3",
        "LRKV keeps heads as diverse as MHA's, within 1 %",
        "0.6 and 0.5 points",
        AtScale(
            ("lrkv_2p5b", "mha_2p5b", "lrkv_128m", "mha_128m"),
            (50e9, 50e9, 100e9, 100e9),
            seen=Same(diversity("share", "lrkv"), 1, "+.2f", f"points, {TINY}"),
            why=_FOUR_COMMAND,
        ),
        _COMMAND,
    ),
    Claim(
        "section 6.3; Figure 14; Figure 15",
        "centring raises MQA's effective rank, and no other's",
        "86.2 to 91.0",
        AtScale(
            five("2p5b"), 50e9, seen=Rises("mqa", ("mha", "lrkv", "gqa", "mla_paper"), heads=4)
        ),
        _COMMAND,
    ),
    Claim(
        "section 6.3",
        "centring changes MHA's by -0.9 points, LRKV's -0.8, GQA's -3.7, MQA's +4.8",
        "-0.9, -0.8, -3.7, +4.8",
        OfItself(
            Cases(
                centring,
                lambda: "Table 5 itself and section C.6 have -4.9 for MHA and -4.8 for LRKV",
            )
        ),
        "",
    ),
    Claim(
        "Figure 7; Figure 18; section C.8",
        "heads of LRKV resemble each other as little as MHA's: mean similarity within 0.02-0.04",
        "0.02-0.04",
        AtScale(
            ("lrkv_2p5b", "mha_2p5b", "lrkv_128m", "mha_128m"),
            (50e9, 50e9, 100e9, 100e9),
            seen=Same(diversity("mean_similarity", "lrkv"), 0.04, "+.4f", TINY),
        ),
        _COMMAND,
    ),
    Claim(
        "Figure 10; Figure 11; Figure 16; Figure 17",
        "spectra of heads' Gram matrices, LRKV's beside MHA's, are nearly identical",
        "",
        AtScale(
            ("lrkv_2p5b", "mha_2p5b", "lrkv_128m", "mha_128m"),
            (50e9, 50e9, 100e9, 100e9),
            why="`python -m kvjax.analysis` draws them of any run",
        ),
        "python -m kvjax.analysis",
    ),
    Claim(
        "section C.6; section C.9",
        "centring takes more of LRKV's effective rank at 128M than at 2.5B: smaller models rely "
        "more on what heads share",
        "13.2 and 4.8 points",
        OfItself(
            Cases(
                relies,
                lambda: (
                    "centring leaves H heads H - 1 components: of any it takes up to "
                    f"{100 / 6:.1f} points of 6 heads and {100 / 18:.1f} of 18"
                ),
            )
        ),
        "",
    ),
    Claim(
        "section C.5",
        "the first principal component explains 15 to 20 %",
        "15-20 %",
        OfItself(Cases(first_component, first_component_said)),
        "",
    ),
    Claim(
        "Figure 12; Figure 13",
        "LRKV needs as many components for 90 % as MHA",
        "16-17 of 18",
        AtScale(
            ("lrkv_2p5b", "mha_2p5b"),
            50e9,
            why=_THREE_COMPONENTS,
        ),
        _COMMAND,
    ),
    Claim(
        "section C.5; Figure 12",
        "at 2.5B GQA needs 15 to 16 components for 90 %, MQA and MLA 14 to 15",
        "15-16; 14-15",
        AtScale(("gqa_2p5b", "mqa_2p5b", "mla_paper_2p5b"), 50e9, why=_THREE_COMPONENTS),
        _COMMAND,
    ),
    Claim(
        "section C.5; Figure 13",
        "at 128M MHA and LRKV need 5 of 6, MQA 4 to 5",
        "5; 4-5",
        AtScale(("mha_128m", "lrkv_128m", "mqa_128m"), 100e9, why=_THREE_COMPONENTS),
        _COMMAND,
    ),
    Claim(
        "section 6.3; section C.9; Figure 14",
        "in every layer LRKV's effective rank lies within 2 % of MHA's, deeper ones too",
        "1-2 %; above 17.5 of 18 heads at 2.5B, 5.7 to 5.9 of 6 early at 128M",
        AtScale(
            ("lrkv_2p5b", "mha_2p5b", "lrkv_128m", "mha_128m"),
            (50e9, 50e9, 100e9, 100e9),
        ),
        _COMMAND,
    ),
    Claim(
        "Table 5; Figure 6; Figure 9; section C.3; section C.9",
        "with r = 16 heads are less diverse than with r = 64 and in MHA",
        "88.8 against 96.2 and 95.4; centred 81.5 against 83.0 and 82.4",
        AtScale(("ranks/lrkv_r16_128m", "lrkv_128m", "mha_128m"), 100e9),
        "python -m kvjax.analysis",
    ),
    Claim(
        "section C.8",
        "heads that share keys and values in GQA resemble each other more than others",
        "",
        AtScale(("gqa_2p5b",), 50e9, why="`python -m kvjax.analysis` draws them of any run"),
        "python -m kvjax.analysis",
    ),
    Claim(
        "section 6.3",
        "the larger the rank, the larger LRKV's keys beside MHA's, at 128M",
        "3.1x with r = 16, 6.7x with r = 64",
        AtScale(("ranks/lrkv_r16_128m", "lrkv_128m", "mha_128m"), 100e9),
        "python -m kvjax.analysis",
    ),
    Claim(
        "Figure 8",
        "keys of LRKV, and their shared and residual parts each, are larger than MHA's",
        "4.2x and 5.1x; the text: 6.7x and 4.8x",
        AtScale(
            ("lrkv_128m", "mha_128m", "lrkv_2p5b", "mha_2p5b"),
            (100e9, 100e9, 50e9, 50e9),
            seen=Cases(magnitudes, norms_said),
        ),
        _COMMAND,
    ),
)
