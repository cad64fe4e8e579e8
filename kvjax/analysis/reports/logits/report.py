"""The report on logit spectra (arXiv 2604.04384): its tables, section 4.3, open questions."""

import functools

import numpy as np

from kvjax.analysis.measures import heads as heads_lib
from kvjax.analysis.page import draw
from kvjax.analysis.page.section import Figure, Section, Text
from kvjax.analysis.reports.logits import measurements, tables
from kvjax.analysis.reports.logits.measurements import CAUSAL, FIELD, PLAIN, WEIGHTS, Kind
from kvjax.analysis.reports.logits.results import COMPONENTS, SHARE, Results
from kvjax.analysis.request import Request, reference_length
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
    said = [
        f"How many components hold {SHARE:.0%} of the energy of a head's logits E on a text, and "
        f"of its weights M = W_Q W_K^T? Medians over {found.num_heads:,} heads and "
        f"{len(found.texts)} texts: M needs {found.median((WEIGHTS, 0)):g} of "
        f"{found.measured.key_dim}."
    ]
    for kind, name in ((FIELD, "E"), (CAUSAL, "E of what causal attention sees")):
        if (kind, found.at) in found.measured.energies:
            gaps = map(found.gap, ((kind, length) for length in found.lengths))
            said.append(f"{name} needs {', '.join(map(_gap_in_words, gaps))}.")
    said.append(_gap_beside_the_papers(found))
    said.append(_bound_in_words(found))
    shown = [row for row in found.perplexities() if row["tokens"] == found.at and row["rank"]]
    changed = ", ".join(f"{row['times']:.3g} times at rank {row['rank']}" for row in shown)
    said.append(f"Perplexity on {found.at:,} tokens under logits cut in all layers: {changed}.")
    return " ".join(said)


def _gap_in_words(gap: dict) -> str:
    times = "" if gap["ratio"] is None else f" ({gap['ratio']:.1f} times fewer)"
    return f"{gap['of_e']:g} at {gap['tokens']:,} tokens{times}"


def _gap_beside_the_papers(found: Results) -> str:
    """Whether E needs as many times fewer as the paper says, where the paper looks."""
    least, most = tables.PUBLISHED_GAP
    gap = found.gap((FIELD, found.at))
    paper = f"The paper has {least} to {most} times fewer, over all keys, at 256 tokens"
    if gap["ratio"] is None or gap["of_heads"] is None:
        return f"{paper}; here E is zero."
    ratio = gap["ratio"]
    where = "below that" if ratio < least else "above that" if ratio > most else "within that"
    low, high = gap["of_heads"]
    by_text = [ratio for ratio in gap["by_text"].values() if ratio is not None]
    texts = f", {min(by_text):.1f} to {max(by_text):.1f} by text" if len(by_text) > 1 else ""
    spread = f"{low:.1f} to {high:.1f} in the middle half of heads{texts}"
    return f"{paper}: at {found.at:,} this model has {ratio:.1f} ({spread}), {where}."


def _bound_in_words(found: Results) -> str:
    """Whether proposition 4.1 says anything: no two distributions differ by more than 2."""
    bounds_R = np.nanmedian(found.measured.bounds[found.at], axis=(0, 1, 2))
    worst_R = np.nanmedian(found.measured.errors[found.at, False][..., 1], axis=(0, 1, 2))
    told = [
        f"{bound:.3g} (measured: {worst:.2g}) at rank {rank}"
        for rank, bound, worst in zip(found.measured.ranks, bounds_R, worst_R, strict=True)
    ]
    empty = (
        " Above 2 it says nothing: no two distributions differ by more."
        if max(bounds_R) > 2
        else ""
    )
    return (
        f"Proposition 4.1's bound on a row's |p - p_r|_1 is {', '.join(told)} at {found.at:,} "
        f"tokens.{empty}"
    )


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
    series, bands, told = {}, {}, []
    for kind in kinds:
        held = found.curve(kind)
        low, median, high = 100 * np.quantile(held, (0.25, 0.5, 0.75), axis=(0, 1, 2))
        components = list(range(1, len(median) + 1))
        series[_named(kind)] = (components, median.tolist())
        if kind in ((WEIGHTS, 0), (FIELD, found.at)):
            bands[_named(kind)] = (low.tolist(), high.tolist())
        at = ", ".join(f"{median[r - 1]:.0f} % in {r}" for r in COMPONENTS if r <= len(median))
        told.append(f"{_named(kind)}: {at}")
    return Figure(
        "Share of the energy that components hold",
        draw.lines(
            series, x="components", y="% of the energy", bands=bands, level={"90 %": 100 * SHARE}
        ),
        f"Medians over heads and texts. {'; '.join(told)}.",
        Text(
            "The share of squared singular values in the largest ones, of the weights M and of "
            "the logits E: medians over heads and texts, with bands for the middle half of heads.",
            "The earlier a curve rises, the fewer directions of a head's channels are used. M is "
            "the same for every text; E is what one text makes of it.",
            "Table 1: at 10 components M of GPT-2 holds 33 % and E 98 %, of Mistral-7B 29 % and "
            "91 %.",
        ),
    )


def _by_length(found: Results) -> Figure:
    kinds = [kind for kind in (FIELD, PLAIN, CAUSAL) if (kind, found.at) in found.measured.energies]
    series, bands, told = {}, {}, []
    for kind in kinds:
        spreads = [found.spread((kind, length)) for length in found.lengths]
        series[kind] = (list(found.lengths), [each.median for each in spreads])
        bands[kind] = ([each.low for each in spreads], [each.high for each in spreads])
        told.append(f"{kind}: " + ", ".join(f"{each.median:g}" for each in spreads))
    level = {kind[0]: found.median(kind) for kind in found.kinds() if not kind[0].startswith("E")}
    told += [f"{name}: {value:g}" for name, value in level.items()]
    lengths = ", ".join(f"{length:,}" for length in found.lengths)
    return Figure(
        "Components for 90 % of the energy, by length of the text",
        draw.lines(series, x="tokens", y="components", log_x=True, level=level, bands=bands),
        f"At {lengths} tokens. {'; '.join(told)}.",
        Text(
            "Components that hold 90 % of E's energy on the first tokens of each text, and of M's "
            "(dashed), medians and the middle half of heads.",
            "Lines that rise mean that a longer text fills more directions. The causal E is zero "
            "where a query sees no key, and that edge takes components of its own (of random "
            "logits of low rank it doubles them), which a cache need not hold: errors of "
            "attention, below, say what it could save. RoPE's part is what lies between E and E "
            "without it.",
            "Section 4.3: at 64 to 1,024 tokens there is no growth in the tail. Table 2, at 256 "
            "tokens: M 38 to 75 components, E 2 to 11.",
        ),
    )


def _by_layer(found: Results) -> Figure:
    kinds = [(WEIGHTS, 0), (FIELD, found.at), *([(CAUSAL, found.at)] if found.is_causal else [])]
    series, bands, told = {}, {}, []
    for kind in kinds:
        ranks = found.ranks(kind)
        low, median, high = np.quantile(ranks, (0.25, 0.5, 0.75), axis=(1, 2))
        layers = list(range(len(ranks)))
        series[_named(kind)] = (layers, median.tolist())
        bands[_named(kind)] = (low.tolist(), high.tolist())
        told.append(f"{_named(kind)}: {', '.join(f'{x:g}' for x in median)}")
    return Figure(
        "Components for 90 % of the energy, by layer",
        draw.lines(series, x="layer", y="components", bands=bands),
        f"By layer, from the first. {'; '.join(told)}.",
        Text(
            "The same of each layer's heads, medians and the middle half.",
            "A layer whose M is as low as its E has weights of low rank themselves.",
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

    def numbers(ys):
        return ", ".join(f"{y:.3g}" for y in ys)

    told = "; ".join(f"{name}: {numbers(ys)}" for name, (_, ys) in series.items())
    return Figure(
        "How far probabilities move when logits are cut",
        draw.lines(
            series, x="rank r", y="sum of |p - p_r| of a row", log_y=True, level={"most": 2.0}
        ),
        f"At {found.at:,} tokens, for ranks {', '.join(map(str, ranks))}. {told}.",
        Text(
            f"Medians over heads and texts at {found.at:,} tokens of |p - p_r|_1: probabilities "
            "of E against those of its best approximation of rank r, over all keys and over those "
            "that a causal model sees; and the bound of proposition 4.1.",
            "2 is the most by which two distributions differ (dashed). A bound above it promises "
            "nothing, however small what is measured.",
            "Section 4.3, at 256 tokens, means of rows 0.31 to 0.46 at r = 10, 0.18 to 0.29 at 20, "
            "0.05 to 0.14 at 40; worst rows 0.90 to 1.31, 0.52 to 0.84, 0.16 to 0.39.",
        ),
    )


def _perplexity(found: Results) -> Figure:
    series, told = {}, []
    for length in dict.fromkeys(row["tokens"] for row in found.perplexities()):
        rows = [row for row in found.perplexities() if row["tokens"] == length and row["rank"]]
        name = f"{length:,} tokens"
        series[name] = ([row["rank"] for row in rows], [row["times"] for row in rows])
        told.append(f"{name}: " + ", ".join(f"{row['times']:.3f} at {row['rank']}" for row in rows))
    return Figure(
        "Perplexity under logits of rank r in all layers",
        draw.lines(series, x="rank r", y="times the model's", log_y=True, level={"the model": 1.0}),
        f"Times the model's own perplexity. {'; '.join(told)}.",
        Text(
            "The model's perplexity when every head's logits are cut at rank r before the mask, "
            "over that of the model as it is.",
            "1 is no loss. The subspace is that of each row's logits and knows all of its tokens, "
            "also those that a query does not see: a cache, which grows, cannot know it.",
            "Left open there (section 5): how errors of many layers add up, and perplexity.",
        ),
    )
