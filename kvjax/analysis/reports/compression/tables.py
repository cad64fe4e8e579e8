"""Tables of the report on compression with the papers' rows, and its data."""

import dataclasses
from typing import Any

import numpy as np

from kvjax.analysis.measures import subspace_methods
from kvjax.analysis.measures.spread import Spread
from kvjax.analysis.measures.subspace_methods import CONTEXT
from kvjax.analysis.page.section import Column, Table
from kvjax.analysis.reports.compression import measurements
from kvjax.analysis.reports.compression.results import SMALL, Results
from kvjax.analysis.reports.logits.tables import PUBLISHED_RANKS

# Thin keys, table 5: truncated SVD of GPT-2's W_K, all heads together: rank of 768, perplexity.
PUBLISHED_SVD = {128: 57.37, 192: 31.32, 256: 27.49, 384: 25.40, 512: 25.23}
PUBLISHED_BASE, PUBLISHED_CHANNELS, PUBLISHED_HEADS = 24.91, 768, 12
MATRICES = (
    measurements.SPECTRUM_WEIGHTS,
    measurements.SPECTRUM_JOINT,
    measurements.SPECTRUM_INTERACTION,
    measurements.SPECTRUM_KEYS,
    measurements.SPECTRUM_CENTRED,
    measurements.SPECTRUM_LOGITS,
)
_OF = {
    measurements.SPECTRUM_WEIGHTS: "LRKV, section 4",
    measurements.SPECTRUM_JOINT: "thin keys, table 5",
    measurements.SPECTRUM_INTERACTION: "logit spectra, section 5",
    measurements.SPECTRUM_LOGITS: "logit spectra, table 2",
}


def tables(found: Results) -> list[Table]:
    """Returns the report's tables."""
    return [_claims(found), _spectra(found), _ways(found), _by_text(found), _drift(found)]


def finding(found: Results) -> str:
    """Returns the papers' claims with their verdicts as a sentence."""
    return "; ".join(f"{claim}: {verdict}" for claim, *_, verdict in _claims(found).rows) + "."


def _claims(found: Results) -> Table:
    weights, fixed = found.at_weights, (subspace_methods.CALIBRATED, found.at_weights)
    joint = (subspace_methods.JOINT, weights)
    svd = joint if joint in found.measured.errors else (subspace_methods.WEIGHTS, weights)
    of_svd = measurements.SPECTRUM_JOINT if svd == joint else measurements.SPECTRUM_WEIGHTS
    cost, known = found.times(svd, found.half), found.times((CONTEXT, weights), found.half)
    if 2 * found.possible(of_svd) <= found.channels(of_svd):
        thin = "by construction"
    else:
        thin = _verdict(cost.is_over(SMALL), over="contradicted", under="holds")
    of_fixed, contrast = found.times(fixed, found.half), "no text for a fixed subspace"
    verdict = "not measured"
    if of_fixed is not None:
        more = found.times(fixed, found.half, over=(CONTEXT, weights))
        contrast = f"fixed {of_fixed.percent}, of the context {known.percent}, ratio {more.percent}"
        verdict = _verdict(more.is_over(SMALL), over="holds", under="contradicted")
    m, w = measurements.SPECTRUM_INTERACTION, measurements.SPECTRUM_WEIGHTS
    rows = [
        [f"{m} is flat", "logit spectra, section 5", _needs(found, m), _holds(found.is_flat(m))],
        [f"{w} has low rank", "LRKV, section 4", _needs(found, w), _holds(not found.is_flat(w))],
        ["an SVD of W_K at half rank costs little", "thin keys, table 5", cost.percent, thin],
        ["a fixed subspace costs more than the context's", _OF[m], contrast, verdict],
    ]
    return Table(
        "The papers' claims on this model",
        [Column("claim"), Column("source"), Column("here"), Column("verdict")],
        rows,
        "Components for 90 % of the energy, and changes of perplexity with 95 % "
        f"intervals, with {found.measured.ranks[found.half]} of {found.measured.key_dim} "
        "channels kept. A flat spectrum needs more than half of its possible components; "
        f"little is at most {100 * SMALL:g} % of perplexity; undecided: the interval "
        "contains the limit. M and W_K bound any input, keys and E describe these texts: "
        "a flat M does not rule out a fixed subspace. Thin keys: half the rank costs "
        "GPT-2 2 %.",
    )


def _holds(holds: bool) -> str:
    return "holds" if holds else "contradicted"


def _verdict(is_over: bool | None, *, over: str, under: str) -> str:
    return "undecided" if is_over is None else over if is_over else under


def _needs(found: Results, matrix: str) -> str:
    """Returns components for 90 % of the energy, of the rank and channels of a matrix."""
    possible, channels = found.possible(matrix), found.channels(matrix)
    rank = "" if possible == channels else f" (rank {possible} of {channels} by construction)"
    return f"{found.spectrum(matrix).median:g} of {possible} components{rank}"


def middle_half(of: Spread, form: str = ".3g") -> str:
    """Returns quartiles as text."""
    return f"{of.low:{form}} to {of.high:{form}}"


def _spectra(found: Results) -> Table:
    rows = []
    for name in MATRICES:
        of = found.spectrum(name)
        if of is not None:
            dim, possible = found.channels(name), found.possible(name)
            share = 100 * of.median / max(1, possible)
            rows.append([found.name, name, _OF.get(name), dim, possible, of.median])
            rows[-1] += [middle_half(of), share]
    for model, (dim, m, e) in PUBLISHED_RANKS.items():
        for name, published in (
            (measurements.SPECTRUM_INTERACTION, m),
            (measurements.SPECTRUM_LOGITS, e),
        ):
            share = 100 * published[1] / dim
            rows.append([f"{model} (the paper)", name, _OF[name], dim, dim, published[1]])
            rows[-1] += [None, share]
    return Table(
        "Components for 90 % of the energy of each paper's matrix",
        [
            Column("model"),
            Column("matrix"),
            Column("paper"),
            Column("channels", "d"),
            Column("possible", "d"),
            Column("components", ".4g"),
            Column("middle half"),
            Column("% of the possible", ".0f"),
        ],
        rows,
        f"Medians over heads, and over texts ({found.measured.length:,} tokens). "
        "'Possible' is the rank of weights that are products of factors. Keys are before "
        "RoPE, E is after RoPE and over all keys. The paper: logit spectra, table 2, at "
        "256 tokens.",
    )


def published_by_rank() -> dict[int, tuple[float, float]]:
    """Returns by rank of GPT-2's 768: channels per head, and relative perplexity."""
    return {
        r: (r / PUBLISHED_HEADS, perplexity / PUBLISHED_BASE)
        for r, perplexity in PUBLISHED_SVD.items()
    }


def _ways(found: Results) -> Table:
    rows = []
    for row in found.rows():
        logit, output = (Spread(**row[name]) for name in ("logit", "output"))
        ppl = row["perplexity"]
        of_ppl = [ppl["times"], f"{ppl['low']:.3f} to {ppl['high']:.3f}"] if ppl else [None, None]
        of = [logit.median, middle_half(logit), output.median, middle_half(output)]
        rows.append([row["way"], row["where"], row["rank"], 100 * row["share"], *of, *of_ppl])
    for r, (of_head, times) in published_by_rank().items():
        name = f"SVD of W_K, all heads, rank {r} of {PUBLISHED_CHANNELS}: GPT-2 (thin keys)"
        share = 100 * r / PUBLISHED_CHANNELS
        rows.append([name, "no RoPE", of_head, share, None, None, None, None, times, None])
    return Table(
        "Cost of cutting keys at rank r, by method",
        [
            Column("subspace"),
            Column("cut"),
            Column("r", ".3g"),
            Column("% of channels", ".1f"),
            Column("|E - E_r| / |E|", ".3f"),
            Column("middle half"),
            Column("|o - o_r| / |o|", ".3f"),
            Column("middle half of outputs"),
            Column("perplexity, times", ".3f"),
            Column("95 %"),
        ],
        rows,
        "Errors of logits (centred over the visible keys) and of outputs: medians over "
        f"{found.num_heads:,} heads, {len(found.measured.texts_B)} rows and "
        f"{found.num_queries} queries each, with r of {found.measured.key_dim} channels "
        "kept per KV head. Perplexity with the keys of all layers cut, on the second "
        f"halves of rows of {found.measured.length:,} tokens, with intervals that treat "
        "tokens as independent; after RoPE and by the first half only at a quarter and a "
        "half of the channels. Fixed subspaces come from later rows of all texts, or of "
        "the other texts alone. 'Mean kept' is the SVD with the keys' mean kept. Methods "
        f"from text have the {LEAST}. Thin keys, table 5: GPT-2 on WikiText-2, one SVD of "
        "12 heads, r is the mean over them.",
    )


LEAST = "least squared error over all pairs of queries and keys, by second moments"


def _by_text(found: Results) -> Table:
    base, each = found.perplexity(None)
    rows = [["the model", None, None, base, *each.values()]]
    for row in found.rows():
        if row["perplexity"]:
            of = row["perplexity"]
            rows.append([row["way"], row["where"], row["rank"], of["perplexity"]])
            rows[-1] += of["by_text"].values()
    return Table(
        "Perplexity with keys of rank r",
        [Column("subspace"), Column("cut"), Column("r", "d"), Column("all texts", ".2f")]
        + [Column(name, ".2f") for name in found.texts],
        rows,
        f"Perplexity on the second halves of rows of {found.measured.length:,} tokens. "
        "Thin keys, table 5: the unmodified GPT-2 has 24.91 on WikiText-2.",
    )


def _drift(found: Results) -> Table:
    of, rows = found.measured, []
    for where in found.places():
        later, (first, spread) = found.later(where), found.overlaps(where)
        for t, tokens in enumerate(of.drift_at):
            rows.append([where, f"{tokens:,}"])
            for overlap, error in ((first[t], later.first[t]), (spread[t], later.spread[t])):
                rows[-1] += [overlap.median, middle_half(overlap), error.median, middle_half(error)]
            rows[-1].append(found.drifts(where)[t].median)
        for name, one in ((f"all {of.drift_length:,}", later.whole), ("fixed", later.fixed)):
            if one is not None:
                rows.append([where, name, None, None, one.median, middle_half(one), *[None] * 5])
    return Table(
        "Drift of the subspace of a text's first tokens",
        [
            Column("cut"),
            Column("tokens"),
            Column("first: overlap with all", ".3f"),
            Column("middle half of overlaps"),
            Column("first: |E - E_r| / |E| later", ".3f"),
            Column("middle half of errors"),
            Column("spread: overlap with all", ".3f"),
            Column("middle half of overlaps, spread"),
            Column("spread: |E - E_r| / |E| later", ".3f"),
            Column("middle half of errors, spread"),
            Column("drift of overlap", ".3f"),
        ],
        rows,
        f"At rank {of.drift_rank} of {of.key_dim}: mean squared cosine between the "
        f"subspaces of the first and of all tokens ({of.drift_rank / of.key_dim:.2f} for "
        f"two random ones), and its logit error in the second half of {of.drift_length:,} "
        "tokens; and of equally many tokens spread over the text. Drift is the gap "
        "between the two, the median over heads. 'Fixed' comes from text that is not "
        "measured.",
    )


def data(found: Results) -> dict:
    """Returns every number."""
    of = found.measured
    return dict(
        model=found.name,
        channels=of.key_dim,
        num_heads=found.num_heads,
        texts=list(found.texts),
        tokens=of.length,
        rows=len(of.texts_B),
        fixed_from_later_text=of.later,
        perplexity=dict(zip(("all", "by_text"), found.perplexity(None), strict=True)),
        ways=list(found.rows()),
        spectra={
            name: dict(
                channels=found.channels(name),
                possible=found.possible(name),
                **dataclasses.asdict(found.spectrum(name)),
                of_heads=_there(of.spectra[name][..., 0]),
            )
            for name in MATRICES
            if name in of.spectra
        },
        drift=dict(
            rank=of.drift_rank,
            tokens=list(of.drift_at),
            of=of.drift_length,
            by_place={where: _drift_data(found, where) for where in found.places()},
        ),
        errors_of_heads={
            f"{name}, {where}": _there(errors) for (name, where), errors in of.errors.items()
        },
        published=dict(thin_keys_table_5=PUBLISHED_SVD, perplexity=PUBLISHED_BASE),
    )


def _drift_data(found: Results, where: str) -> dict:
    def spreads(many):
        return [dataclasses.asdict(one) for one in many]

    first, even = found.overlaps(where)
    return dict(
        overlap=dict(first=spreads(first), spread=spreads(even)),
        drift_of_overlap=spreads(found.drifts(where)),
        later_error=dataclasses.asdict(found.later(where)),
        overlap_of_heads=_there(found.measured.overlap[where]),
        later_error_of_heads=_there(found.measured.drift_error[where]),
    )


def _there(numbers: np.ndarray) -> Any:
    """Returns nested lists, with None for nan."""
    return np.where(np.isnan(numbers), None, numbers).tolist()
