"""Makes the tables of the report on compression, with the papers' rows, and its data."""

import dataclasses

from kvjax.analysis.measures import subspace_methods
from kvjax.analysis.measures.spread import Spread
from kvjax.analysis.measures.subspace_methods import CONTEXT
from kvjax.analysis.page.section import Column, Table
from kvjax.analysis.reports.compression import measurements
from kvjax.analysis.reports.compression.results import SMALL, Results
from kvjax.analysis.reports.logits.tables import PUBLISHED_RANKS
from kvjax.foundation import json_text

# Thin keys, table 5: perplexity by rank (of 768), for a truncated SVD of all heads of GPT-2's W_K.
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
_SOURCES = {
    measurements.SPECTRUM_WEIGHTS: "LRKV, section 4",
    measurements.SPECTRUM_JOINT: "thin keys, table 5",
    measurements.SPECTRUM_INTERACTION: "logit spectra, section 5",
    measurements.SPECTRUM_LOGITS: "logit spectra, table 2",
}


def tables(results: Results) -> list[Table]:
    """Returns the report's tables."""
    return [
        _claims(results),
        _spectra(results),
        _methods(results),
        _by_text(results),
        _drift(results),
    ]


def finding(results: Results) -> str:
    """Returns a sentence with the papers' claims and their verdicts."""
    return "; ".join(f"{claim}: {verdict}" for claim, *_, verdict in _claims(results).rows) + "."


def _claims(results: Results) -> Table:
    weights, fixed = results.at_weights, (subspace_methods.CALIBRATED, results.at_weights)
    joint = (subspace_methods.JOINT, weights)
    svd = joint if joint in results.measured.errors else (subspace_methods.WEIGHTS, weights)
    svd_matrix = measurements.SPECTRUM_JOINT if svd == joint else measurements.SPECTRUM_WEIGHTS
    svd_cost = results.relative_perplexity(svd, results.half_rank)
    context_cost = results.relative_perplexity((CONTEXT, weights), results.half_rank)
    if 2 * results.possible(svd_matrix) <= results.channels(svd_matrix):
        svd_verdict = "by construction"
    else:
        svd_verdict = _verdict(svd_cost.is_over(SMALL), over="contradicted", under="holds")
    fixed_cost = results.relative_perplexity(fixed, results.half_rank)
    contrast, verdict = "no text for a fixed subspace", "not measured"
    if fixed_cost is not None:
        fixed_over_context = results.relative_perplexity(
            fixed, results.half_rank, over=(CONTEXT, weights)
        )
        contrast = f"fixed {fixed_cost.percent}, of the context {context_cost.percent}, "
        contrast += f"ratio {fixed_over_context.percent}"
        verdict = _verdict(fixed_over_context.is_over(SMALL), over="holds", under="contradicted")
    m, w = measurements.SPECTRUM_INTERACTION, measurements.SPECTRUM_WEIGHTS
    rows = [
        [
            f"{m} is flat",
            "logit spectra, section 5",
            _components_needed(results, m),
            _holds(results.is_flat(m)),
        ],
        [
            f"{w} has low rank",
            "LRKV, section 4",
            _components_needed(results, w),
            _holds(not results.is_flat(w)),
        ],
        [
            "an SVD of W_K at half rank costs little",
            "thin keys, table 5",
            svd_cost.percent,
            svd_verdict,
        ],
        ["a fixed subspace costs more than the context's", _SOURCES[m], contrast, verdict],
    ]
    return Table(
        "The papers' claims on this model",
        [Column("claim"), Column("source"), Column("here"), Column("verdict")],
        rows,
        "Components for 90 % of the energy, and changes of perplexity with 95 % "
        f"intervals, with {results.measured.ranks[results.half_rank]} of "
        f"{results.measured.key_dim} channels kept. A spectrum is flat if it needs more than half "
        f"of its possible components. A cost is little up to {100 * SMALL:g} % of perplexity, and "
        "undecided if its interval contains this limit. M and W_K are the same for any input, but "
        "keys and E are of these texts, so a flat M does not rule out a fixed subspace. Thin keys: "
        "half the rank costs GPT-2 2 %.",
    )


def _holds(holds: bool) -> str:
    return "holds" if holds else "contradicted"


def _verdict(is_over: bool | None, *, over: str, under: str) -> str:
    return "undecided" if is_over is None else over if is_over else under


def _components_needed(results: Results, matrix: str) -> str:
    """Returns a phrase on how many components of a matrix hold 90 % of the energy."""
    possible, channels = results.possible(matrix), results.channels(matrix)
    rank = "" if possible == channels else f" (rank {possible} of {channels} by construction)"
    return f"{results.spectrum(matrix).median:g} of {possible} components{rank}"


def middle_half(spread: Spread, form: str = ".3g") -> str:
    """Returns quartiles as text."""
    return f"{spread.low:{form}} to {spread.high:{form}}"


def _spectra(results: Results) -> Table:
    rows = []
    for name in MATRICES:
        components = results.spectrum(name)
        if components is not None:
            dim, possible = results.channels(name), results.possible(name)
            share = 100 * components.median / max(1, possible)
            rows.append([results.name, name, _SOURCES.get(name), dim, possible, components.median])
            rows[-1] += [middle_half(components), share]
    for model, (dim, m, e) in PUBLISHED_RANKS.items():
        for name, published in (
            (measurements.SPECTRUM_INTERACTION, m),
            (measurements.SPECTRUM_LOGITS, e),
        ):
            share = 100 * published[1] / dim
            rows.append([f"{model} (the paper)", name, _SOURCES[name], dim, dim, published[1]])
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
        f"Medians over heads, and over texts ({results.measured.length:,} tokens). "
        "'Possible' is the rank of weights that are products of factors. Keys are before "
        "RoPE, E is after RoPE and over all keys. The paper: logit spectra, table 2, at "
        "256 tokens.",
    )


def published_by_rank() -> dict[int, tuple[float, float]]:
    """Returns channels per head and relative perplexity, by rank of GPT-2's 768 channels."""
    return {
        r: (r / PUBLISHED_HEADS, perplexity / PUBLISHED_BASE)
        for r, perplexity in PUBLISHED_SVD.items()
    }


def _methods(results: Results) -> Table:
    rows = []
    for row in results.rows():
        logit, output = row["logit"], row["output"]
        ppl = row["perplexity"]
        perplexity = (
            [ppl["times"], f"{ppl['low']:.3f} to {ppl['high']:.3f}"] if ppl else [None, None]
        )
        errors = [logit.median, middle_half(logit), output.median, middle_half(output)]
        rows.append(
            [row["way"], row["where"], row["rank"], 100 * row["share"], *errors, *perplexity]
        )
    for r, (channels_per_head, times) in published_by_rank().items():
        name = f"SVD of W_K, all heads, rank {r} of {PUBLISHED_CHANNELS}: GPT-2 (thin keys)"
        share = 100 * r / PUBLISHED_CHANNELS
        rows.append(
            [name, "no RoPE", channels_per_head, share, None, None, None, None, times, None]
        )
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
        "Errors of logits (centred over the visible keys) and of outputs are medians over "
        f"{results.num_heads:,} heads, {len(results.measured.texts_B)} rows and "
        f"{results.num_queries} queries each, with r of {results.measured.key_dim} channels "
        "kept per KV head. Perplexity is measured with the keys of all layers cut, on the second "
        f"halves of rows of {results.measured.length:,} tokens; its intervals treat tokens as "
        "independent. Keys cut after RoPE, and subspaces of the first half, are measured so at a "
        "quarter and a half of the channels only. Fixed subspaces come from later rows of all "
        "texts, or of the other texts alone. 'Mean kept' is the SVD with the keys' mean kept. "
        f"Subspaces from text minimise {MINIMISED}. Thin keys, table 5: GPT-2 on WikiText-2, with "
        "one SVD of 12 heads; r is the mean over them.",
    )


MINIMISED = "the squared error of logits over all pairs of queries and keys, by second moments"


def _by_text(results: Results) -> Table:
    model_perplexity, by_text = results.perplexity(None)
    rows = [["the model", None, None, model_perplexity, *by_text.values()]]
    for row in results.rows():
        if row["perplexity"]:
            perplexity = row["perplexity"]
            rows.append([row["way"], row["where"], row["rank"], perplexity["perplexity"]])
            rows[-1] += perplexity["by_text"].values()
    return Table(
        "Perplexity with keys of rank r",
        [Column("subspace"), Column("cut"), Column("r", "d"), Column("all texts", ".2f")]
        + [Column(name, ".2f") for name in results.texts],
        rows,
        f"Perplexity on the second halves of rows of {results.measured.length:,} tokens. "
        "Thin keys, table 5: the unmodified GPT-2 has 24.91 on WikiText-2.",
    )


def _drift(results: Results) -> Table:
    measured, rows = results.measured, []
    for where in results.places():
        later, (first, spread) = results.later(where), results.overlaps(where)
        for t, tokens in enumerate(measured.drift_at):
            rows.append([where, f"{tokens:,}"])
            for overlap, error in ((first[t], later.first[t]), (spread[t], later.spread[t])):
                rows[-1] += [overlap.median, middle_half(overlap), error.median, middle_half(error)]
            rows[-1].append(results.drifts(where)[t].median)
        for name, error_spread in (
            (f"all {measured.drift_length:,}", later.whole),
            ("fixed", later.fixed),
        ):
            if error_spread is not None:
                rows.append(
                    [
                        where,
                        name,
                        None,
                        None,
                        error_spread.median,
                        middle_half(error_spread),
                        *[None] * 5,
                    ]
                )
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
        f"At rank {measured.drift_rank} of {measured.key_dim}. First: the overlap (mean squared "
        "cosine) of the first tokens' subspace with that of all tokens "
        f"({measured.drift_rank / measured.key_dim:.2f} for two random ones), and the error of "
        f"logits in the second half of {measured.drift_length:,} tokens with keys in this "
        "subspace. Spread: the same for equally many tokens spread over the text. Drift is the "
        "difference of the two overlaps, the median over heads. 'Fixed' comes from text that is "
        "not measured.",
    )


def data(results: Results) -> dict:
    """Returns every number, JSON-able."""
    measured = results.measured
    numbers = dict(
        model=results.name,
        channels=measured.key_dim,
        num_heads=results.num_heads,
        texts=list(results.texts),
        tokens=measured.length,
        rows=len(measured.texts_B),
        fixed_from_later_text=measured.later,
        perplexity=dict(zip(("all", "by_text"), results.perplexity(None), strict=True)),
        ways=list(results.rows()),
        spectra={
            name: dict(
                channels=results.channels(name),
                possible=results.possible(name),
                **dataclasses.asdict(results.spectrum(name)),
                of_heads=measured.spectra[name][..., 0],
            )
            for name in MATRICES
            if name in measured.spectra
        },
        drift=dict(
            rank=measured.drift_rank,
            tokens=list(measured.drift_at),
            of=measured.drift_length,
            by_place={where: _drift_data(results, where) for where in results.places()},
        ),
        errors_of_heads={
            f"{name}, {where}": errors for (name, where), errors in measured.errors.items()
        },
        published=dict(thin_keys_table_5=PUBLISHED_SVD, perplexity=PUBLISHED_BASE),
    )
    return json_text.plain(numbers)


def _drift_data(results: Results, where: str) -> dict:
    first, even = results.overlaps(where)
    return dict(
        overlap=dict(first=first, spread=even),
        drift_of_overlap=results.drifts(where),
        later_error=results.later(where),
        overlap_of_heads=results.measured.overlap[where],
        later_error_of_heads=results.measured.drift_error[where],
    )
