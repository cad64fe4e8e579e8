"""The report on logit spectra: tables and section 4.3 of arXiv 2604.04384, and open questions."""

import functools

import numpy as np

from kvjax.analysis.measures import heads as heads_lib
from kvjax.analysis.page import draw
from kvjax.analysis.page.section import Figure, Section, Text
from kvjax.analysis.reports.logits import measurements, tables
from kvjax.analysis.reports.logits.measurements import CAUSAL, FIELD, PLAIN, WEIGHTS, Kind
from kvjax.analysis.reports.logits.results import COMPONENTS, SHARE, Results
from kvjax.analysis.request import Request, reference_length
from kvjax.analysis.words import describe
from kvjax.convert.model import LazyModel


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for heads without matrices (see `heads.read`)."""
    del request
    heads_lib.check(model)


def section(model: LazyModel, request: Request) -> Section:
    """Measures spectra of logits on the request's texts, and of the weights.

    SmolLM2-135M on two texts at 64, 256 and 1,024 tokens takes 110 s on two cores and 1.6 GB.

    Raises:
      UserError: a text shorter than the longest length; weights or activations that are not finite.
    """
    at = sorted({reference_length(request.lengths), max(request.lengths)})
    measured = measurements.measure(model, request.texts, request.lengths, perplexity_at=at)
    return _section(Results(model.name, request, measured))


def _section(found: Results) -> Section:
    return Section(
        name="logits",
        title="Spectra of logits",
        lead=_lead(found),
        figures=_figures(found),
        tables=tables.tables(found),
        data=tables.data(found),
    )


def _lead(found: Results) -> str:
    least, most = tables.PUBLISHED_GAP
    gaps = [gap for gap in found.gaps() if gap["tokens"] == found.at and gap["ratio"] is not None]
    ratios = "; ".join(f"{gap['matrix']} {gap['of_e']:g} ({_ratio(gap)})" for gap in gaps)
    times = ", ".join(
        f"{row['times']:.3g} times at rank {row['rank']}"
        for row in found.perplexities()
        if row["tokens"] == found.at and row["rank"]
    )
    cost = f" Perplexity under logits cut in all layers: {times}." if times else ""
    return (
        f"How many components hold {SHARE:.0%} of the energy of a head's logits E on a text, and "
        f"of its weights M = W_Q W_K^T? Medians over {found.num_heads:,} heads and "
        f"{len(found.texts)} texts at {found.at:,} tokens: M {found.median((WEIGHTS, 0)):g} of "
        f"{found.measured.key_dim}; {ratios or 'E is zero'}. The paper has {least} to {most} times "
        f"fewer for E than for M, at 256 tokens.{cost}"
    )


def _ratio(gap: dict) -> str:
    low, high = gap["of_heads"]
    return f"{gap['ratio']:.1f} times fewer; middle half of heads {low:.1f} to {high:.1f}"


# -- figures ---------------------------------------------------------------------------------------


def _figures(found: Results) -> list[Figure]:
    figures = [_curves(found), _by_length(found), _by_layer(found), _errors(found)]
    return [*figures, *([_perplexity(found)] if found.measured.perplexity else [])]


def _named(kind: Kind) -> str:
    return f"{kind[0]}, {kind[1]:,} tokens" if kind[1] else kind[0]


def _curves(found: Results) -> Figure:
    """Draws the curves that table 1 samples."""
    longest = max(found.lengths)
    kinds = [(WEIGHTS, 0), *((FIELD, length) for length in found.lengths)]
    kinds += [(CAUSAL, longest)] if found.is_causal else []
    series, bands = {}, {}
    for kind in kinds:
        held = found.curve(kind)
        low, median, high = 100 * np.quantile(held, (0.25, 0.5, 0.75), axis=(0, 1, 2))
        components = list(range(1, len(median) + 1))
        series[_named(kind)] = (components, median.tolist())
        if kind in ((WEIGHTS, 0), (FIELD, found.at)):
            bands[_named(kind)] = (low.tolist(), high.tolist())
    at = [r for r in COMPONENTS if r <= found.measured.key_dim]
    sampled = {name: (at, [ys[r - 1] for r in at]) for name, (_, ys) in series.items()}
    return Figure(
        "Share of the energy that components hold",
        draw.lines(
            series, x="components", y="% of the energy", bands=bands, level={"90 %": 100 * SHARE}
        ),
        f"Medians over heads and texts. {describe(sampled, '.0f')}",
        Text(
            "Share of squared singular values in the largest ones, of the weights M and of the "
            "logits E: medians over heads and texts, with quartile bands over heads.",
            "The earlier a curve rises, the fewer directions of a head's channels are used. M is "
            "the same for every text; E depends on the text.",
            "Table 1: at 10 components M of GPT-2 holds 33 % and E 98 %, of Mistral-7B 29 % and "
            "91 %.",
        ),
    )


def _by_length(found: Results) -> Figure:
    kinds = [kind for kind in (FIELD, PLAIN, CAUSAL) if (kind, found.at) in found.measured.energies]
    series, bands = {}, {}
    for kind in kinds:
        spreads = [found.spread((kind, length)) for length in found.lengths]
        series[kind] = (list(found.lengths), [each.median for each in spreads])
        bands[kind] = ([each.low for each in spreads], [each.high for each in spreads])
    level = {kind[0]: found.median(kind) for kind in found.kinds() if not kind[0].startswith("E")}
    levels = "".join(f" {name}: {value:g}." for name, value in level.items())
    return Figure(
        "Components for 90 % of the energy, by length of the text",
        draw.lines(series, x="tokens", y="components", log_x=True, level=level, bands=bands),
        f"By tokens. {describe(series, 'g')}{levels}",
        Text(
            "Components that hold 90 % of the energy of E on the first tokens of each text, and of "
            "M (dashed): medians and the middle half of heads.",
            "Rising lines: longer texts fill more directions. Causal E is zero at masked keys, and "
            "this edge adds components (twice as many for random low-rank logits) that a cache "
            "need not hold; the errors of attention below show its possible savings. The gap "
            "between E with and without RoPE is RoPE's share.",
            "Section 4.3: no growth in the tail from 64 to 1,024 tokens. Table 2, at 256 tokens: M "
            "38 to 75 components, E 2 to 11.",
        ),
    )


def _by_layer(found: Results) -> Figure:
    kinds = [(WEIGHTS, 0), (FIELD, found.at), *([(CAUSAL, found.at)] if found.is_causal else [])]
    series, bands = {}, {}
    for kind in kinds:
        ranks = found.ranks(kind)
        low, median, high = np.quantile(ranks, (0.25, 0.5, 0.75), axis=(1, 2))
        layers = list(range(len(ranks)))
        series[_named(kind)] = (layers, median.tolist())
        bands[_named(kind)] = (low.tolist(), high.tolist())
    return Figure(
        "Components for 90 % of the energy, by layer",
        draw.lines(series, x="layer", y="components", bands=bands),
        f"By layer. {describe(series, 'g')}",
        Text(
            "Components that hold 90 % of the energy, medians and the middle half of each layer's "
            "heads.",
            "A layer whose M is as low as its E has low-rank weights.",
            "The paper gives medians over all layers only.",
        ),
    )


def _errors(found: Results) -> Figure:
    ranks, middle = found.measured.ranks, functools.partial(np.nanmedian, axis=(0, 1, 2))
    series = {"bound": (list(ranks), middle(found.measured.bounds[found.at]).tolist())}
    for (tokens, causal), errors in found.measured.errors.items():
        if tokens == found.at:
            mean_R, worst_R, _ = middle(errors).T.tolist()
            of = "causal: " if causal else ""
            series |= {f"{of}worst row": (list(ranks), worst_R), f"{of}mean": (list(ranks), mean_R)}
    return Figure(
        "Error of probabilities under logits of rank r",
        draw.lines(
            series, x="rank r", y="sum of |p - p_r| of a row", log_y=True, level={"most": 2.0}
        ),
        f"At {found.at:,} tokens, by rank. {describe(series)}",
        Text(
            f"Medians over heads and texts at {found.at:,} tokens of |p - p_r|_1: probabilities "
            "under E and under its best rank-r approximation, over all keys and over causally "
            "visible ones; and the bound of proposition 4.1.",
            "2 is the largest distance of two distributions (dashed): a bound above it is empty.",
            "Section 4.3, at 256 tokens, means of rows 0.31 to 0.46 at r = 10, 0.18 to 0.29 at 20, "
            "0.05 to 0.14 at 40; worst rows 0.90 to 1.31, 0.52 to 0.84, 0.16 to 0.39.",
        ),
    )


def _perplexity(found: Results) -> Figure:
    series = {}
    for length in dict.fromkeys(row["tokens"] for row in found.perplexities()):
        rows = [row for row in found.perplexities() if row["tokens"] == length and row["rank"]]
        name = f"{length:,} tokens"
        series[name] = ([row["rank"] for row in rows], [row["times"] for row in rows])
    return Figure(
        "Perplexity under logits of rank r in all layers",
        draw.lines(series, x="rank r", y="times the model's", log_y=True, level={"the model": 1.0}),
        f"Times the model's own perplexity. {describe(series, '.3f')}",
        Text(
            "Perplexity with every head's logits cut at rank r before the mask, over the "
            "unmodified model's.",
            "1: no loss. The subspace uses all tokens of a row, also later ones, which a growing "
            "cache does not have.",
            "Section 5 leaves open how errors of many layers add up, and perplexity.",
        ),
    )
