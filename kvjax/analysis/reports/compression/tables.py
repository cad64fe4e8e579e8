"""Tables of the report on keys of low rank with the papers' rows, and its data."""

import dataclasses
from typing import Any

import numpy as np

from kvjax.analysis.measures.spread import Spread
from kvjax.analysis.page.section import Column, Table, Text
from kvjax.analysis.reports.compression import measurements
from kvjax.analysis.reports.compression.results import Results
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
    """All of the report's."""
    return [_spectra(found), _ways(found), _by_text(found), _drift(found)]


def middle_half(of: Spread, form: str = ".3g") -> str:
    """Quartiles as text."""
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
        "Components for 90 % of the energy, of what each paper speaks of",
        [
            Column("model"),
            Column("matrix"),
            Column("spoken of in"),
            Column("channels", "d"),
            Column("possible", "d"),
            Column("components", ".4g"),
            Column("middle half"),
            Column("% of the possible", ".0f"),
        ],
        rows,
        Text(
            "How many singular components hold 90 % of the squared singular values of each matrix: "
            f"medians over heads, and over texts ({found.measured.length:,} tokens) where there "
            "are any. 'Possible' is the rank of weights that are products of factors: fewer than "
            "channels by construction.",
            "Few components of many that are possible: a narrow cache could hold it. Keys are "
            "before RoPE; their mean is one direction with much energy and costs a cache nothing. "
            "E is after RoPE, over all keys.",
            f"LRKV speaks of {measurements.SPECTRUM_WEIGHTS}, thin keys cuts "
            f"{measurements.SPECTRUM_JOINT}, and logit spectra compares "
            f"{measurements.SPECTRUM_INTERACTION} with {measurements.SPECTRUM_LOGITS}, "
            "made of such keys. Only logit spectra gives numbers: table 2, at 256 tokens.",
        ),
    )


def published_by_rank() -> dict[int, tuple[float, float]]:
    """By rank of GPT-2's 768 the channels left of each head, and perplexity over its own."""
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
        "What cutting keys at rank r costs, by way",
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
        Text(
            f"Errors of logits (centred over the keys that a query sees) and of outputs, medians "
            f"over {found.num_heads:,} heads and {len(found.measured.texts_B)} rows, and "
            f"perplexity with the keys of all layers cut so: of {found.num_queries} queries, "
            "evenly, and of all tokens in the second half of rows of "
            f"{found.measured.length:,} tokens. The last column takes tokens as independent. The "
            "whole model runs with what is cut after RoPE, or by its first half, at a quarter and "
            "half of the channels only.",
            f"{_how_found(found)} 'Mean kept' is the SVD with the keys' mean left whole, as the "
            "ways from text have it: a control.",
            "Thin keys, table 5: GPT-2, WikiText-2, keys only; 2.0 % at half rank. GPT-2 has no "
            "RoPE, and 12 heads that share one SVD: r is the mean over them.",
        ),
    )


LEAST = "least squared error over all pairs of queries and keys, by second moments"


def _how_found(found: Results) -> str:
    fixed = (
        "Fixed subspaces are found on rows of all texts from after what is measured, or of the "
        "other texts alone"
        if found.measured.later
        else "Texts are too short for rows that are not measured: fixed subspaces for a text are "
        "those of the other texts, and there are none of a single text"
    )
    return (
        f"r of {found.measured.key_dim} channels are kept of each KV head. {fixed}; those 'of this "
        "context' know the whole row, also tokens that a query does not see; those 'of its first "
        "half' do not, and are left out where it has fewer than 2r tokens. Ways from text have "
        f"the {LEAST}, of the rows that they are found on. Errors are shown over the keys that "
        "queries of the second half see, and before RoPE queries are taken as independent of keys "
        "and what all keys of a row share is not left out: another subspace may do a little better."
    )


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
        Text(
            f"Perplexity on the second halves of rows of {found.measured.length:,} tokens, all "
            "together and of each text.",
            "Texts differ in how hard they are; what a cut costs is seen against the first row.",
            "Thin keys, table 5, has 24.91 of GPT-2 on WikiText-2 as it is.",
        ),
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
        Text(
            f"At rank {of.drift_rank} of {of.key_dim}: the mean squared cosine between the "
            "subspace of the first tokens and that of all, and the error that it makes of logits "
            f"in the second half of {of.drift_length:,} tokens; and the same of as many tokens "
            "spread evenly over the text.",
            f"Overlap 1 is the same subspace, {of.drift_rank / of.key_dim:.2f} what two random "
            "ones have. What spread tokens lack too is sampling, as of a text that does not "
            "change; the gap between the two is the drift (the median of gaps of heads). After "
            "RoPE positions that are not yet reached are part of it. 'Fixed' is found on text that "
            "is not measured.",
            "Logit spectra, section 5: 'a projection that shifts as the context grows'; it does "
            "not measure that.",
        ),
    )


def data(found: Results) -> dict:
    """Every number."""
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
    """Nested lists, with None for what is not there."""
    return np.where(np.isnan(numbers), None, numbers).tolist()
