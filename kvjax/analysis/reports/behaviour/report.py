"""The report on attention patterns, and on how similar heads are in them.

LRKV (arXiv 2601.11471), appendix C.10, names two other measures of diversity: attention patterns
and CKA; C.11 asks how they relate to its own. Projection sharing (2606.04032), figure 4, shows
maps.
"""

import math

import numpy as np

from kvjax.analysis.page import figures
from kvjax.analysis.page.section import Figure, Section
from kvjax.analysis.reports.behaviour import measurements, tables
from kvjax.analysis.reports.behaviour.results import Results, finite
from kvjax.analysis.request import Request, reference_length
from kvjax.analysis.words import stages
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError

_SHORTEST = 16  # tokens, so that something can be repeated
_MUCH = 0.5  # share of a head's attention


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for short rows, and for queries that see no other token."""
    if max(request.lengths) < _SHORTEST:
        raise UserError(
            f"lengths = {max(request.lengths)}: patterns of attention need at least {_SHORTEST} "
            "tokens: give longer lengths"
        )
    if model.transformer.block.causal and model.transformer.block.window == 1:
        raise UserError("model.window = 1: every token attends to itself only")


def section(model: LazyModel, request: Request) -> Section:
    """Measures attention patterns and head outputs on the request's texts.

    Raises:
      UserError: weights or activations that are not finite.
    """
    length = reference_length([length for length in request.lengths if length >= _SHORTEST])
    measured = measurements.measure(model, request.texts, length, request.seed)
    return _section(Results(model.name, measured, request.heads))


def _section(found: Results) -> Section:
    return Section(
        name="behaviour",
        title="Attention patterns of heads",
        lead=_lead(found),
        finding=_finding(found),
        figures=_figures(found),
        tables=tables.tables(found),
        data=found.data(),
    )


def _lead(found: Results) -> str:
    of = found.measured
    chance, best = of.induction_by_chance, max(x_N.max() for x_N in of.statistic("induction_N"))
    lead = (
        f"On {of.sequences} sequences of {of.length:,} tokens, of {of.num_heads:,} heads "
        f"{found.count('first_N', _MUCH):,} give more than half of their attention to the first "
        f"token, and {found.count('previous_N', _MUCH):,} to the previous one. On repeated random "
        f"tokens {found.count('induction_N', _MUCH):,} heads give more than half to the token "
        f"after the earlier occurrence of their own (most {best:.2f}; uniform: {chance:.2f})."
    )
    if pairs := found.pairs("divergence_NN"):
        lead += f" Patterns of two heads of a layer differ by {pairs.median:.2f} nats in the median"
        lead += f" (at most {math.log(2):.2f})."
    return lead


def _finding(found: Results) -> str:
    first, previous, copies = (
        found.count(name, _MUCH) for name in ("first_N", "previous_N", "induction_N")
    )
    return (
        f"of {found.measured.num_heads:,} heads {first:,} look mostly at the first token, "
        f"{previous:,} at the previous one, and {copies:,} copy from earlier occurrences."
    )


# -- figures ---------------------------------------------------------------------------------------


def _figures(found: Results) -> list[Figure]:
    made = [_maps(found), _roles(found), _shares(found), _breadth(found)]
    if found.has_pairs:
        made += [_divergences(found), _pairs(found)]
    return [*made, _layers(found)]


def _maps(found: Results) -> Figure:
    heads = found.shown()
    maps = {head.title: np.sqrt(found.map(head)) for head in heads}
    shown = min(found.measured.length, measurements.MAP_TOKENS)
    return figures.heatmaps(
        "Attention maps of single heads",
        maps,
        f"Attention on the first {shown} tokens of the first text, of heads named "
        "layer.head: by default those with the most of each role (nearest: least "
        f"distance), induction on {found.measured.block} random tokens, repeated. Rows "
        "are queries, colours square roots of shares, gray cells masked keys. Projection "
        "sharing, figure 4, has such maps for toy tasks.",
        x="key",
        y="query",
        bar="√p",
    )


def _roles(found: Results) -> Figure:
    shown = {
        "token before": "previous_N",
        "first token": "first_N",
        "induction": "induction_N",
        "broadness (entropy)": "entropy_N",
    }
    maps = {name: found.by_head(statistic) for name, statistic in shown.items()}
    return figures.heatmaps(
        "Attention targets of each head",
        maps,
        "Mean share of every head's attention on the previous and on the first token "
        "and, on repeated random tokens, on the one after the earlier occurrence (prefix "
        "matching, Olsson et al. 2022); and the entropy of its rows over the largest "
        "possible.",
        x="head",
        y="layer",
        bar="share",
    )


def _curves(found: Results, names: dict[str, str]) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Returns by name each layer's median over heads, and its quartiles."""
    series, bands = {}, {}
    layers = list(range(found.num_layers))
    for name, statistic in names.items():
        low_L, median_L, high_L = found.quartiles(statistic)
        series[name] = (layers, finite(median_L))
        bands[name] = (finite(low_L), finite(high_L))
    return series, bands


def _shares(found: Results) -> Figure:
    names = {
        "first token": "first_N",
        "own token": "itself_N",
        "token before": "previous_N",
    }
    series, bands = _curves(found, names)
    return figures.curves(
        "Attention shares, by layer",
        series,
        "Medians over the heads of a layer, with quartile bands. The rest goes to other tokens.",
        x="layer",
        y="share of attention",
        bands=bands,
        digits=".2f",
    )


def _breadth(found: Results) -> Figure:
    names = {
        "entropy (1: all keys alike)": "entropy_N",
        "by the text (nats between two passages)": "content_N",
    }
    series, bands = _curves(found, names)
    return figures.curves(
        "Breadth of attention, and dependence on the text",
        series,
        "Entropy of rows over the log of the number of visible keys (1: uniform), and "
        "the Jensen-Shannon divergence of a head's patterns between two passages, of two "
        "texts if there are several (0: attention by position alone; at most "
        f"{math.log(2):.2f}). Medians over heads, with quartile bands.",
        x="layer",
        y="entropy, divergence",
        bands=bands,
        digits=".2f",
    )


def _kinds(found: Results) -> dict[str, bool | None]:
    """Returns the kinds of pairs: by shared KV head, or all."""
    apart = dict.fromkeys(("sharing a KV head", "with two KV heads"))
    apart.update(zip(apart, (True, False), strict=True))
    return apart if found.shares_some else {"all pairs": None}


def _divergences(found: Results) -> Figure:
    series, bands, layers = {}, {}, list(range(found.num_layers))
    distances = {"": "divergence_NN", ", without the first token": "without_first_NN"}
    for kind, shared in _kinds(found).items():
        for suffix, distance in distances.items():
            low_L, median_L, high_L = map(finite, found.of_pairs(distance, shared))
            series[f"{kind}{suffix}"] = (layers, median_L)
            if not suffix:
                bands[kind] = (low_L, high_L)
    return figures.curves(
        "Divergence of heads' patterns, by layer",
        series,
        "Jensen-Shannon divergence between the rows of two heads of a layer, means over "
        "queries: over all keys, and over all but the first, on which many heads agree. "
        "Medians over pairs, with quartile bands. LRKV, appendix C.10, names this "
        "measure.",
        x="layer",
        y="Jensen-Shannon divergence, nats",
        bands=bands,
        level={"nothing in common": math.log(2)},
        digits=".2f",
    )


def _pairs(found: Results) -> Figure:
    layers = [(name, found.measured.layers[i]) for name, i in stages(found.num_layers).items()]
    layers = [(name, layer) for name, layer in layers if layer.num_heads > 1]
    maps = {f"divergence, {name}": layer.divergence_NN / math.log(2) for name, layer in layers}
    maps |= {f"outputs, {name}": 1 - layer.outputs_NN for name, layer in layers}
    return figures.heatmaps(
        "Distances between heads, by patterns and by outputs",
        maps,
        "Pairs of heads in an early, a middle and a late layer: the divergence of their "
        "patterns over the largest possible, and 1 minus the centred kernel alignment "
        "(CKA) of their outputs on the same tokens. LRKV, appendix C.10, names CKA.",
        x="head",
        y="head",
        bar="distance",
    )


def _layers(found: Results) -> Figure:
    of = found.measured
    maps = {"inputs of attention": of.inputs_LL, "outputs of heads": of.outputs_LL}
    return figures.heatmaps(
        "Similarity of layers (CKA)",
        maps,
        "Centred kernel alignment (unbiased estimate) between layers, of the inputs of "
        "attention and of the outputs of all heads, on the same tokens. 1: the same up "
        "to rotation and scale; 0: unrelated.",
        x="layer",
        y="layer",
        bar="CKA",
    )
