"""The report on attention patterns, and on how similar they are between heads.

LRKV (arXiv 2601.11471), appendix C.10, names attention patterns and CKA as further measures of head
diversity, and C.11 asks how they relate to its own measure. Projection sharing (2606.04032), figure
4, shows attention maps.
"""

import math

import numpy as np

from kvjax.analysis.page import figures
from kvjax.analysis.page.section import Figure, Section
from kvjax.analysis.reports.behaviour import measurements, tables
from kvjax.analysis.reports.behaviour.results import Results
from kvjax.analysis.request import Request, reference_length
from kvjax.analysis.words import stages
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError
from kvjax.foundation.json_text import plain

_SHORTEST = 16  # fewest tokens of a sequence, half of which are repeated
_MUCH = 0.5  # share of attention above which a head counts as attending to something


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError if all sequences are too short, or if queries see only themselves."""
    if max(request.lengths) < _SHORTEST:
        raise UserError(
            f"lengths = {max(request.lengths)}: patterns of attention need at least {_SHORTEST} "
            "tokens: give longer lengths"
        )
    if any(kind.window == 1 for kind in model.transformer.block.layer_kinds):
        raise UserError("model.window = 1: every token attends to itself only")


def section(model: LazyModel, request: Request) -> Section:
    """Measures attention patterns and head outputs on the request's texts.

    Raises:
      UserError: weights or activations that are not finite.
    """
    length = reference_length([length for length in request.lengths if length >= _SHORTEST])
    measured = measurements.measure(model, request.texts, length, request.seed)
    return _section(Results(model.name, measured, request.heads))


def _section(results: Results) -> Section:
    return Section(
        name="behaviour",
        title="Attention patterns of heads",
        lead=_lead(results),
        finding=_finding(results),
        figures=_figures(results),
        tables=tables.tables(results),
        data=results.data(),
    )


def _lead(results: Results) -> str:
    measured = results.measured
    chance = measured.induction_by_chance
    most = max(x_N.max() for x_N in measured.statistic("induction_N"))
    first, previous, induction = (
        results.count(name, _MUCH) for name in ("first_N", "previous_N", "induction_N")
    )
    lead = (
        f"On {measured.sequences} sequences of {measured.length:,} tokens, of "
        f"{measured.num_heads:,} heads {first:,} give more than half of their attention to the "
        f"first token, and {previous:,} to the previous one. On repeated random tokens "
        f"{induction:,} heads give more than half to the token "
        f"after the query token's earlier occurrence (most {most:.2f}; uniform: {chance:.2f})."
    )
    if pairs := results.pairs("divergence_NN"):
        lead += f" Patterns of two heads of a layer differ by {pairs.median:.2f} nats in the median"
        lead += f" (at most {math.log(2):.2f})."
    return lead


def _finding(results: Results) -> str:
    first, previous, copies = (
        results.count(name, _MUCH) for name in ("first_N", "previous_N", "induction_N")
    )
    return (
        f"of {results.measured.num_heads:,} heads {first:,} look mostly at the first token, "
        f"{previous:,} at the previous one, and {copies:,} copy from earlier occurrences."
    )


# -- figures ---------------------------------------------------------------------------------------


def _figures(results: Results) -> list[Figure]:
    drawn = [_maps(results), _roles(results), _shares(results), _breadth(results)]
    if results.has_pairs:
        drawn += [_divergences(results), _pairs(results)]
    return [*drawn, _layers(results)]


def _maps(results: Results) -> Figure:
    heads = results.shown()
    maps = {head.title: np.sqrt(results.map(head)) for head in heads}
    shown = min(results.measured.length, measurements.MAP_TOKENS)
    return figures.heatmaps(
        "Attention maps of single heads",
        maps,
        f"Attention of heads, named layer.head, on the first {shown} tokens of the first text; for "
        f"induction, on {results.measured.block} repeated random tokens. By default, these are the "
        "strongest heads of each role (nearest: the smallest distance). Rows are queries, colours "
        "are square roots of attention, and gray cells are masked keys. Projection sharing, figure "
        "4, has such maps for toy tasks.",
        x="key",
        y="query",
        color_label="√p",
    )


def _roles(results: Results) -> Figure:
    shown = {
        "token before": "previous_N",
        "first token": "first_N",
        "induction": "induction_N",
        "broadness (entropy)": "entropy_N",
    }
    maps = {name: results.by_head(statistic) for name, statistic in shown.items()}
    return figures.heatmaps(
        "Attention targets of each head",
        maps,
        "Mean share of every head's attention on the previous token, on the first token and, for "
        "repeated random tokens, on the token after the earlier occurrence (prefix matching, "
        "Olsson et al. 2022). The last map is the entropy of its attention over the maximum.",
        x="head",
        y="layer",
        color_label="share",
    )


def _curves(results: Results, names: dict[str, str]) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Returns by name curves over layers: medians over heads, and bands of quartiles.

    Args:
      names: statistics by name of the curve.
    """
    series, bands = {}, {}
    layers = list(range(results.num_layers))
    for name, statistic in names.items():
        low_L, median_L, high_L = results.quartiles(statistic)
        series[name] = (layers, plain(median_L))
        bands[name] = (plain(low_L), plain(high_L))
    return series, bands


def _shares(results: Results) -> Figure:
    names = {
        "first token": "first_N",
        "own token": "itself_N",
        "token before": "previous_N",
    }
    series, bands = _curves(results, names)
    return figures.curves(
        "Attention shares, by layer",
        series,
        "Medians over the heads of a layer, with quartile bands. The rest goes to other tokens.",
        x="layer",
        y="share of attention",
        bands=bands,
        digits=".2f",
    )


def _breadth(results: Results) -> Figure:
    names = {
        "entropy (1: all keys alike)": "entropy_N",
        "by the text (nats between two passages)": "content_N",
    }
    series, bands = _curves(results, names)
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


def _kinds(results: Results) -> dict[str, bool | None]:
    """Returns by name the kinds of pairs of heads, as arguments `shared` of `Results.of_pairs`."""
    if results.shares_some:
        return {"sharing a KV head": True, "with two KV heads": False}
    return {"all pairs": None}


def _divergences(results: Results) -> Figure:
    series, bands, layers = {}, {}, list(range(results.num_layers))
    distances = {"": "divergence_NN", ", without the first token": "without_first_NN"}
    for kind, shared in _kinds(results).items():
        for suffix, distance in distances.items():
            low_L, median_L, high_L = map(plain, results.of_pairs(distance, shared))
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
        levels={"nothing in common": math.log(2)},
        digits=".2f",
    )


def _pairs(results: Results) -> Figure:
    layers = [(name, results.measured.layers[i]) for name, i in stages(results.num_layers).items()]
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
        color_label="distance",
    )


def _layers(results: Results) -> Figure:
    measured = results.measured
    maps = {"inputs of attention": measured.inputs_LL, "outputs of heads": measured.outputs_LL}
    return figures.heatmaps(
        "Similarity of layers (CKA)",
        maps,
        "Centred kernel alignment (unbiased estimate) between layers, of the inputs of "
        "attention and of the outputs of all heads, on the same tokens. 1: the same up "
        "to rotation and scale; 0: unrelated.",
        x="layer",
        y="layer",
        color_label="CKA",
    )
