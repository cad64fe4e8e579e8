"""The report on logit spectra: the measurements of arXiv 2604.04384, and its open questions."""

import functools

import numpy as np

from kvjax.analysis.measures import heads as heads_lib
from kvjax.analysis.page import figures
from kvjax.analysis.page.section import Figure, Section
from kvjax.analysis.reports.logits import measurements, tables
from kvjax.analysis.reports.logits.measurements import (
    CAUSAL_LOGITS,
    LOGITS,
    LOGITS_WITHOUT_ROPE,
    WEIGHTS,
    Kind,
)
from kvjax.analysis.reports.logits.results import SHARE, Results
from kvjax.analysis.request import Request, reference_length
from kvjax.analysis.words import before_cap
from kvjax.convert.model import LazyModel


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for heads that are not linear (see `heads.layers`)."""
    del request
    heads_lib.check(model)


def section(model: LazyModel, request: Request) -> Section:
    """Measures the spectra of logits on the request's texts, and those of weights.

    For SmolLM2-135M and two texts at 64, 256 and 1,024 tokens, this takes 110 s on two cores and
    1.6 GB.

    Raises:
      UserError: weights or activations that are not finite.
    """
    lengths = sorted({reference_length(request.lengths), max(request.lengths)})
    measured = measurements.measure(model, request.texts, request.lengths, perplexity_at=lengths)
    return _section(Results(model.name, request, measured), before_cap(model.transformer))


def _section(results: Results, note: str = "") -> Section:
    return Section(
        name="logits",
        title="Spectra of logits",
        lead=_lead(results) + note,
        finding=_finding(results),
        figures=_figures(results),
        tables=tables.tables(results),
        data=tables.data(results),
    )


def _lead(results: Results) -> str:
    least, most = tables.PUBLISHED_GAP
    length = results.reference_length
    return (
        f"{SHARE:.0%} of the energy of a head's logits E on a text is in "
        f"{results.median((LOGITS, length)):g} of {results.measured.key_dim} components, and "
        f"{SHARE:.0%} of that of its weights M = W_Q W_Kᵀ in {results.median((WEIGHTS, 0)):g} "
        f"(medians over {results.num_heads:,} heads and {len(results.texts)} texts at {length:,} "
        f"tokens). In the paper, E has {least} to {most} times fewer components than M, at 256 "
        "tokens."
    )


def _finding(results: Results) -> str:
    logits = results.median((LOGITS, results.reference_length))
    return (
        f"{100 * SHARE:g} % of the energy is in {logits:g} of "
        f"{results.measured.key_dim} components of a head's logits on a text, and in "
        f"{results.median((WEIGHTS, 0)):g} of its weights W_Q W_Kᵀ."
    )


# -- figures ---------------------------------------------------------------------------------------


def _figures(results: Results) -> list[Figure]:
    figures = [_shares(results), _by_length(results), _by_layer(results), _errors(results)]
    return [*figures, *([_perplexity(results)] if results.measured.perplexity else [])]


def _kind_name(kind: Kind) -> str:
    return f"{kind[0]}, {kind[1]:,} tokens" if kind[1] else kind[0]


def _shares(results: Results) -> Figure:
    longest = max(results.lengths)
    kinds = [(WEIGHTS, 0), *((LOGITS, length) for length in results.lengths)]
    kinds += [(CAUSAL_LOGITS, longest)] if results.is_causal else []
    series, bands = {}, {}
    for kind in kinds:
        held = results.curve(kind)
        low, median, high = 100 * np.quantile(held, (0.25, 0.5, 0.75), axis=(0, 1, 2))
        components = list(range(1, len(median) + 1))
        series[_kind_name(kind)] = (components, median.tolist())
        if kind in ((WEIGHTS, 0), (LOGITS, results.reference_length)):
            bands[_kind_name(kind)] = (low.tolist(), high.tolist())
    return figures.curves(
        "Share of the energy that components hold",
        series,
        "Share of the sum of squared singular values of M and of E that the largest ones make up: "
        "medians over heads and texts, with quartile bands over heads. A curve that rises early "
        "uses few directions. Logit spectra, table 1, at 10 components: GPT-2 33 % (M) "
        "and 98 % (E), Mistral-7B 29 % and 91 %.",
        x="components",
        y="% of the energy",
        bands=bands,
        levels={"90 %": 100 * SHARE},
        digits=".0f",
    )


def _by_length(results: Results) -> Figure:
    kinds = [
        kind
        for kind in (LOGITS, LOGITS_WITHOUT_ROPE, CAUSAL_LOGITS)
        if (kind, results.reference_length) in results.measured.energies
    ]
    series, bands = {}, {}
    for kind in kinds:
        spreads = [results.spread((kind, length)) for length in results.lengths]
        series[kind] = (list(results.lengths), [spread.median for spread in spreads])
        bands[kind] = ([spread.low for spread in spreads], [spread.high for spread in spreads])
    levels = {
        kind[0]: results.median(kind) for kind in results.kinds() if not kind[0].startswith("E")
    }
    return figures.curves(
        "Components for 90 % of the energy, by length of the text",
        series,
        "Components of E on the first tokens of each text, and of M (dashed): medians "
        "and quartiles over heads. E without RoPE shows the effect of RoPE. Causal E is zero "
        "at masked keys: this edge adds components, which a cache need not hold. Logit "
        "spectra, section 4.3: no growth from 64 to 1,024 tokens; table 2, at 256 "
        "tokens: M 38 to 75, E 2 to 11.",
        x="tokens",
        y="components",
        log_x=True,
        levels=levels,
        bands=bands,
        digits="g",
    )


def _by_layer(results: Results) -> Figure:
    length = results.reference_length
    kinds = [(WEIGHTS, 0), (LOGITS, length)]
    kinds += [(CAUSAL_LOGITS, length)] if results.is_causal else []
    series, bands = {}, {}
    for kind in kinds:
        ranks = results.ranks(kind)
        low, median, high = np.quantile(ranks, (0.25, 0.5, 0.75), axis=(1, 2))
        layers = list(range(len(ranks)))
        series[_kind_name(kind)] = (layers, median.tolist())
        bands[_kind_name(kind)] = (low.tolist(), high.tolist())
    return figures.curves(
        "Components for 90 % of the energy, by layer",
        series,
        "Medians and quartiles over each layer's heads.",
        x="layer",
        y="components",
        bands=bands,
        digits="g",
    )


def _errors(results: Results) -> Figure:
    ranks, median = results.measured.ranks, functools.partial(np.nanmedian, axis=(0, 1, 2))
    length = results.reference_length
    series = {"bound": (list(ranks), median(results.measured.bounds[length]).tolist())}
    for (tokens, causal), errors in results.measured.errors.items():
        if tokens == length:
            mean_R, worst_R, _ = median(errors).T.tolist()
            prefix = "causal: " if causal else ""
            series |= {
                f"{prefix}worst row": (list(ranks), worst_R),
                f"{prefix}mean": (list(ranks), mean_R),
            }
    return figures.curves(
        "Error of probabilities under logits of rank r",
        series,
        f"Medians over heads and texts at {length:,} tokens of |p - p_r|_1, at most 2: "
        "probabilities under E and under its best rank-r approximation, over all keys "
        "and over causally visible ones; and the bound of proposition 4.1.",
        x="rank r",
        y="sum of |p - p_r| of a row",
        log_y=True,
        levels={"most": 2.0},
    )


def _perplexity(results: Results) -> Figure:
    series = {}
    for length in dict.fromkeys(row["tokens"] for row in results.perplexities()):
        rows = [row for row in results.perplexities() if row["tokens"] == length and row["rank"]]
        name = f"{length:,} tokens"
        series[name] = ([row["rank"] for row in rows], [row["times"] for row in rows])
    return figures.curves(
        "Perplexity under logits of rank r in all layers",
        series,
        "Perplexity with every head's logits cut at rank r before the mask, over the "
        "unmodified model's. The subspace uses all tokens of a row, also later ones.",
        x="rank r",
        y="times the model's",
        log_y=True,
        levels={"the model": 1.0},
        digits=".3f",
    )
