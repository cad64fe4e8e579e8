"""Claims of LRKV that its text makes of its own tables and figures."""

import math
import statistics

from experiments.ledger import lrkv_figures as figures, rounded
from experiments.ledger.verdicts import Cases, Claim, OfItself

# Section 6.1, billions of tokens of 50 that LRKV saves until another's end.
_SAVED = {"MHA": "9.4", "MLA": "10.7", "GQA": "12.3", "MQA": "14.9"}
# The ranges that Figure 14's captions give, of 18 heads.
_FIGURE_14 = {
    "MHA": ((17, 18), (16, 17)),
    "LRKV": ((17, 18), (16, 17)),
    "GQA": (None, (16, 17)),
    "MLA": (None, (16, 17)),
    "MQA": ((15, 16), (16, 17)),
}


def tokens_saved() -> dict[str, bool]:
    """Whether tokens are the share of 50B that Figure 3 (b) prints."""
    shares = {name: rounded.span(f"{share}") for name, share in figures.SAVINGS.items()}
    of_50 = {name: rounded.Span(s.least / 2, s.most / 2) for name, s in shares.items()}
    return {name: rounded.span(_SAVED[name]).meets(x) for name, x in of_50.items()}


def entropies() -> dict[str, bool]:
    """Whether nats a token over bits a byte are what most pairs of Table 2 have."""
    usual = _usual()
    fit = {}
    for name, (nats, bits) in figures.TABLE_2.items():
        fit[name] = rounded.ratio(nats, bits).meets(rounded.Span(usual, usual))
    return fit


def _usual() -> float:
    return statistics.median(float(nats) / float(bits) for nats, bits in figures.TABLE_2.values())


def entropies_said() -> str:
    usual = _usual()
    off = [name for name, fits in entropies().items() if not fits]
    needed = ", ".join(f"{name} {float(figures.TABLE_2[name][0]) / usual:.3f}" for name in off)
    return (
        f"{usual / math.log(2):.2f} bytes a token, the median of its ten pairs, would make {needed}"
    )


def means() -> dict[str, bool]:
    """Whether Table 3's last column is the mean of the five before it; what is said of both."""
    found = {
        f"mean of {name}": rounded.span(last).meets(rounded.mean(scores))
        for name, (scores, last) in figures.TABLE_3.items()
    }
    best = [
        max(figures.TABLE_3, key=lambda name: float(figures.TABLE_3[name][0][i])) for i in range(5)
    ]
    found["first on four"] = best.count("LRKV") == 4
    found["2.6 points over MHA"] = round(37.9 - 35.3, 1) == 2.6
    return found


def layers() -> dict[str, bool]:
    """Whether means of Table 5 lie in the ranges of layers that Figure 14's caption has."""
    found = {}
    for name, ranges in _FIGURE_14.items():
        for how, share, of in zip(
            ("uncentred", "centred"), figures.LARGE[name], ranges, strict=True
        ):
            if of:
                found[f"{name}, {how}"] = of[0] <= share / 100 * 18 <= of[1]
    return found


def differences() -> dict[str, bool]:
    """Differences that the text states, of figures that it prints."""
    stated = {
        "0.63, LRKV behind MHA": ("98.91", "98.28", "0.63"),
        "12.66, MQA behind MHA": ("98.91", "86.25", "12.66"),
        "3.53, GQA behind MHA": ("98.91", "95.38", "3.53"),
        "12.7, MQA behind MHA": ("98.9", "86.2", "12.7"),
        "3.0, MQA behind MHA, centred": ("94.0", "91.0", "3.0"),
        "0.5, LRKV behind MHA, centred": ("94.0", "93.5", "0.5"),
        "4.8, MQA by centring": ("91.0", "86.2", "4.8"),
        "5.8, MQA by centring at 128M": ("78.4", "72.6", "5.8"),
        "4.8, LRKV by centring": ("98.3", "93.5", "4.8"),
        "4.9, MHA by centring": ("98.9", "94.0", "4.9"),
        "1.5, r = 64 over r = 16, centred": ("83.0", "81.5", "1.5"),
    }
    found = {
        name: rounded.less(more, few).meets(rounded.span(by))
        for name, (more, few, by) in stated.items()
    }
    for heads, share in (("4.36", "72.6"), ("4.70", "78.4")):
        of = rounded.span(heads)
        of_6 = rounded.Span(100 * of.least / 6, 100 * of.most / 6)
        found[f"{heads} of 6"] = of_6.meets(rounded.span(share))
    return found


def narrows() -> dict[str, bool]:
    """Whether mechanisms lie nearer to each other at 2.5B, in % of heads."""
    width = lambda table, i: max(x[i] for x in table.values()) - min(x[i] for x in table.values())
    return {
        how: width(figures.LARGE, i) < width(figures.SMALL, i)
        for i, how in enumerate(("uncentred", "centred"))
    }


def steps() -> dict[str, bool]:
    """Whether 190K steps of 16 sequences of 2,048 tokens are what was trained on."""
    return {
        size: round(_tokens() / 1e9) == billions for size, billions in (("128M", 100), ("2.5B", 50))
    }


def _tokens() -> int:
    return 190_000 * 16 * 2048


CLAIMS = (
    Claim(
        "Figure 3 (b); section 6.1",
        "its fewer steps are so many tokens of 50B",
        "9.4 (MHA), 10.7 (MLA), 12.3 (GQA), 14.9B (MQA)",
        OfItself(Cases(tokens_saved, lambda: "of Figure 3's shares, as they are rounded")),
    ),
    Claim(
        "Table 2; section 6.1",
        "test losses in nats a token and in bits a byte",
        "2.893 and .872 (LRKV at 128M); 9 rows more",
        OfItself(Cases(entropies, entropies_said)),
    ),
    Claim(
        "Figure 2; section A",
        "190K steps of 16 sequences of 2,048 tokens are 100B tokens at 128M, 50B at 2.5B",
        "190K; 16; 100B and 50B",
        OfItself(Cases(steps, lambda: f"{_tokens() / 1e9:.1f}B tokens at either size")),
    ),
    Claim(
        "Table 3; section 6.2",
        "combined scores are means of five; LRKV is first on four, 2.6 points above MHA",
        "35.3, 35.8, 33.3, 36.9, 37.9; four of five; 2.6",
        OfItself(Cases(means, lambda: "of Table 3's own columns")),
    ),
    Claim(
        "section 5; Table 3",
        "MLA's latent at 2.5B",
        "768; Table 3: 384",
        rounded.twice("768", "384"),
    ),
    Claim(
        "section 5",
        "mid-training has 460K, 100K and 8K examples, 568K in all",
        "568K",
        OfItself(Cases(lambda: {"568K": 460 + 100 + 8 == 568}, lambda: "of the three sets")),
    ),
    Claim(
        "section 6.3",
        "MQA's bits per byte at 2.5B",
        ".726; Table 2: .729",
        rounded.twice("0.726", "0.729"),
    ),
    Claim(
        "Figure 6; section 6.3; section C.2; section C.6; section C.9; Figure 15",
        "differences between effective ranks, and 4.36 and 4.70 of 6 heads",
        "0.63, 12.66, 3.53, 12.7, 3.0, 0.5, 4.8, 5.8, 4.8, 4.9, 1.5; 72.6 and 78.4 %",
        OfItself(Cases(differences, lambda: "of the effective ranks that it prints, as rounded")),
    ),
    Claim(
        "Figure 6; Table 5",
        "GQA's effective rank at 128M, which was estimated",
        "89.50; Table 5: 90.5",
        rounded.twice("89.50", "90.5"),
    ),
    Claim(
        "Figure 14",
        "of 18 heads MHA and LRKV have 17 to 18, MQA 15 to 16; all have 16 to 17 when centred",
        "17-18; 15-16; 16-17",
        OfItself(Cases(layers, lambda: "of Table 5's means over layers")),
    ),
    Claim(
        "Figure 15",
        "the gap between mechanisms narrows from 128M to 2.5B",
        "",
        OfItself(
            Cases(
                narrows,
                lambda: (
                    "of Table 5's shares, GQA at 128M, which was estimated, and r = 16 left out"
                ),
            )
        ),
    ),
    Claim(
        "section C.9",
        "MLA lies between GQA and MQA at 2.5B, centred, and below MQA at 128M",
        "91.7, 91.6, 91.0; 78.5 and 78.4",
        OfItself(
            Cases(
                lambda: {
                    "2.5B": figures.LARGE["GQA"][1]
                    > figures.LARGE["MLA"][1]
                    > figures.LARGE["MQA"][1],
                    "128M": figures.SMALL["MLA"][1] < figures.SMALL["MQA"][1],
                },
                lambda: "78.5 is above 78.4",
            )
        ),
    ),
    Claim(
        "Figure 8; section 6.3",
        "how many times LRKV's keys are as large as MHA's, with r = 64",
        "4.2 and 5.1 (figure); 6.7 and 4.8 (text)",
        OfItself(
            Cases(
                lambda: {"128M": rounded.same("4.2", "6.7"), "2.5B": rounded.same("5.1", "4.8")},
                lambda: "figure and text differ",
            )
        ),
    ),
)
