"""Makes the tables of the logits report, with the rows of arXiv 2604.04384, and its data."""

from collections.abc import Mapping
import dataclasses

import numpy as np

from kvjax.analysis.measures import spectrum
from kvjax.analysis.page.section import Column, Table
from kvjax.analysis.reports.logits.measurements import LOGITS, WEIGHTS, Kind
from kvjax.analysis.reports.logits.results import COMPONENTS, Results
from kvjax.analysis.request import PAPER_LENGTH

# Table 2: channels of a head; components of M, and of E, for 80, 90, 95 and 99 % of the energy.
PUBLISHED_RANKS = {
    "GPT-2": (64, (40, 49, 55, 61), (2, 2, 4, 18)),
    "LLaMA-1B": (64, (29, 38, 44, 54), (5, 8, 13, 23)),
    "LLaMA-3B": (128, (57, 75, 88, 107), (5, 11, 18, 39)),
    "Qwen-3B": (128, (53, 70, 83, 104), (5, 11, 17, 40)),
    "Mistral-7B": (128, (50, 66, 80, 102), (5, 10, 17, 38)),
}
# Table 1: % of the energy of M, and of E, in 1, 2, 5, 10, 20 and 40 components. None: illegible in
# our copy. The numbers of components 1 and 2 are illegible, too, but agree with table 2.
PUBLISHED_SHARES = {
    "GPT-2": ((5, 10, 20, 33, 53, 81), (None, 90, 96, 98, 99, 100)),
    "LLaMA-1B": ((6, 12, 25, 42, 66, 92), (43, 63, 83, 93, 98, 100)),
    "LLaMA-3B": ((4, None, 15, 25, 42, 66), (42, 61, 81, 90, 96, 99)),
    "Qwen-3B": ((4, None, 16, 27, 45, None), (41, 60, 80, 90, 96, 99)),
    "Mistral-7B": ((4, 8, None, 29, 47, None), (46, 64, 82, 91, 96, 99)),
}
# Section 4.3: |p - p_r|_1 by rank, of the mean row and of the worst row. Medians of five models at
# 256 tokens, over all keys.
PUBLISHED_ERRORS = {
    10: ("0.31 to 0.46", "0.90 to 1.31"),
    20: ("0.18 to 0.29", "0.52 to 0.84"),
    40: ("0.05 to 0.14", "0.16 to 0.39"),
}
PUBLISHED_GAP = (5, 25)  # abstract: components of M over components of E
PAPER = "the paper"
# Columns of arrays in `data`.
ERRORS = ("mean row of |p - p_r|", "worst row", "|o - o_r| / |o|")
KEYS = ("incoherence", "condition")


def tables(results: Results) -> list[Table]:
    """Returns the report's tables."""
    always = [
        _ranks(results),
        _shares(results),
        _gaps(results),
        _errors(results),
        _geometry(results),
    ]
    return [*always, *([_perplexity(results)] if results.measured.perplexity else [])]


def _row(results: Results, kind: Kind) -> list:
    """Returns the first cells of a row on a matrix."""
    return [results.name, kind[0], kind[1] or None, results.measured.key_dim]


_BEGIN = [Column("model"), Column("matrix"), Column("tokens", ",d"), Column("channels", "d")]


def _published(rows: Mapping[str, tuple]) -> list[list]:
    """Returns the paper's rows, for M and E of each model."""
    published = []
    for name, (of_m, of_e) in rows.items():
        dim = PUBLISHED_RANKS[name][0]
        published.append([f"{name} ({PAPER})", WEIGHTS, None, dim, *of_m])
        published.append([f"{name} ({PAPER})", LOGITS, PAPER_LENGTH, dim, *of_e])
    return published


def _ranks(results: Results) -> Table:
    rows = []
    for kind in results.kinds():
        spread = results.spread(kind)
        quartiles = f"{spread.low:g} to {spread.high:g}"
        medians = [results.median(kind, share) for share in spectrum.SHARES]
        rows.append([*_row(results, kind), *medians, quartiles, spread.between_texts])
    published = {name: (of_m, of_e) for name, (_, of_m, of_e) in PUBLISHED_RANKS.items()}
    rows += [[*row, None, None] for row in _published(published)]
    shares = [Column(f"{share:.0%}", ".4g") for share in spectrum.SHARES]
    return Table(
        "Components for a share of the energy",
        [*_BEGIN, *shares, Column("90 %, middle half of heads"), Column("90 %, between texts")],
        rows,
        f"Medians over {results.num_heads:,} heads and {len(results.texts)} texts, quartiles "
        "over heads, and the standard deviation of the texts' medians. M is W_Q W_Kᵀ without RoPE, "
        "as in the paper; under RoPE, at distances of 0, 1, 2, 4, ... tokens; and its mean over "
        "all pairs of a query and an earlier or equal key. E is over all keys, as in the paper; "
        "causal E is centred over the visible keys and zero at the others. The paper: table 2.",
    )


def _shares(results: Results) -> Table:
    rows = []
    for kind in results.kinds():
        median = 100 * np.median(results.curve(kind), axis=(0, 1, 2))
        at = [float(median[min(r, len(median)) - 1]) for r in COMPONENTS]
        rows.append([*_row(results, kind), *at])
    rows += _published(PUBLISHED_SHARES)
    return Table(
        "Share of the energy, in %, by components",
        [*_BEGIN, *(Column(str(r), ".1f") for r in COMPONENTS)],
        rows,
        "Medians over heads and texts. The paper: table 1; missing cells are illegible "
        "in the available text.",
    )


def _gaps(results: Results) -> Table:
    rows = []
    for gap in results.gaps():
        numbers = [gap[name] for name in ("matrix", "tokens", "of_m", "of_e", "ratio")]
        of_heads = gap["of_heads"]
        rows.append([*numbers, of_heads and f"{of_heads[0]:.1f} to {of_heads[1]:.1f}"])
    rows += [
        [f"E of {name} ({PAPER})", PAPER_LENGTH, m[1], e[1], m[1] / e[1], None]
        for name, (_, m, e) in PUBLISHED_RANKS.items()
    ]
    return Table(
        "Ratio of components of M to those of E, for 90 % of the energy",
        [
            Column("matrix"),
            Column("tokens", ",d"),
            Column("of M", ".4g"),
            Column("of E", ".4g"),
            Column("times", ".1f"),
            Column("times, middle half of heads"),
        ],
        rows,
        "Median of M without RoPE over the median of E, and quartiles over heads of each "
        "head's ratio. The edge of causal E adds components. The paper: table 2; its "
        "abstract has 5 to 25 times.",
    )


def _errors(results: Results) -> Table:
    rows = [
        [
            "causal" if row["causal"] else "all",
            row["tokens"],
            row["rank"],
            *(row[name] for name in ("mean", "worst", "bound", "output")),
        ]
        for row in results.errors()
    ]
    rows += [
        [f"all ({PAPER})", PAPER_LENGTH, rank, mean, worst, None, None]
        for rank, (mean, worst) in PUBLISHED_ERRORS.items()
    ]
    return Table(
        "Errors of attention under logits of rank r",
        [
            Column("keys"),
            Column("tokens", ",d"),
            Column("r", "d"),
            Column("|p - p_r|, mean row", ".3f"),
            Column("worst row", ".3f"),
            Column("bound", ".4g"),
            Column("|o - o_r| / |o|", ".3f"),
        ],
        rows,
        "Medians over heads and texts: of |p - p_r|_1 (at most 2), for the mean and the worst row; "
        "of the bound of proposition 4.1, which also holds under the mask; and of the "
        "relative change of the head's outputs (Frobenius norms over a text). E is truncated "
        "over all keys, then masked. The paper: section 4.3, over all keys.",
    )


def _geometry(results: Results) -> Table:
    names = ("tokens", "beta", "of_vectors", "beta_most", "incoherence", "incoherence_most")
    names += ("condition", "condition_most")
    rows = [[row[name] for name in names] for row in results.geometry()]
    rows.append([PAPER_LENGTH, f"2.5 to 5.6 ({PAPER})", None, 14.0, *[None] * 4])
    columns = ["beta", "of vectors", "beta, most", "mu of keys", "mu, most"]
    columns += ["condition of keys", "condition, most"]
    return Table(
        "Localisation of directions on tokens",
        [Column("tokens", ",d"), *(Column(name, ".3g") for name in columns)],
        rows,
        "beta is sqrt(L) times the largest entry of E's right singular vectors (median over heads, "
        "over single vectors, and maximum): 1 if all tokens count alike, sqrt(L) if only one "
        "counts. mu is L / r times the largest squared row of the left singular vectors of keys, "
        "as attention uses them. Medians over heads and texts. The paper: section 4.3; "
        "section 4.2 calls mu of order 1 without a definition.",
    )


def _perplexity(results: Results) -> Table:
    rows = [
        [row["tokens"], row["rank"] or "unmodified", row["perplexity"], row["times"]]
        + [row["by_text"][name] for name in results.texts]
        for row in results.perplexities()
    ]
    numbers = [Column("perplexity", ".3f"), Column("times", ".3f")]
    return Table(
        "Perplexity under logits of rank r",
        [Column("tokens", ",d"), Column("r", "d"), *numbers]
        + [Column(name, ".3f") for name in results.texts],
        rows,
        "Perplexity with the logits of all heads in all layers truncated to rank r, by tokens per "
        "row. Truncation uses all tokens of a row, also later ones.",
    )


def rounded(x: np.ndarray) -> list:
    """Returns nested lists of numbers of six digits, with None for non-finite ones."""
    if x.ndim:
        return [rounded(each) for each in x]
    return float(f"{x:.6g}") if np.isfinite(x) else None


def data(results: Results) -> dict:
    """Returns every number, JSON-able.

    Nested lists of single heads are [layers][texts][heads], followed by [ranks] or [columns].
    """
    summaries, heads = [], {}
    for kind in results.kinds():
        about = dict(matrix=kind[0], tokens=kind[1] or None)
        shares = {
            f"{share:.0%}": dataclasses.asdict(results.spread(kind, share))
            for share in spectrum.SHARES
        }
        median = np.median(results.curve(kind), axis=(0, 1, 2)).tolist()
        summaries.append(about | dict(components=shares, cumulative=median))
        heads[f"{kind[0]}, {kind[1]} tokens" if kind[1] else kind[0]] = {
            f"{share:.0%}": results.ranks(kind, share).tolist() for share in spectrum.SHARES
        }
    return dict(
        model=results.name,
        channels=results.measured.key_dim,
        num_heads=results.num_heads,
        texts=list(results.texts),
        lengths=list(results.lengths),
        spectra=summaries,
        gaps=results.gaps(),
        attention=results.errors(),
        geometry=results.geometry(),
        perplexity=list(results.perplexities()),
        components_of_heads=heads,
        attention_of_heads=[
            dict(tokens=tokens, causal=causal, ranks=results.measured.ranks, columns=ERRORS)
            | dict(values=rounded(errors), bounds=rounded(results.measured.bounds[tokens]))
            for (tokens, causal), errors in results.measured.errors.items()
        ],
        geometry_of_heads=[
            dict(tokens=length, beta=rounded(results.betas(length)))
            | dict(columns=KEYS, keys=rounded(results.measured.keys[length]))
            for length in results.lengths
        ],
        published=dict(
            ranks=PUBLISHED_RANKS, cumulative=PUBLISHED_SHARES, attention=PUBLISHED_ERRORS
        ),
    )
