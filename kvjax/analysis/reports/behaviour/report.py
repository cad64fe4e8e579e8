"""The report on attention patterns, and on how similar heads are in them.

LRKV (arXiv 2601.11471), appendix C.10, names two other measures of diversity: attention patterns
and CKA; C.11 asks how they relate to its own. Projection sharing (2606.04032), figure 4, shows
maps.
"""

from collections.abc import Sequence
import math

import numpy as np

from kvjax.analysis.page import draw
from kvjax.analysis.page.section import Figure, Section, Text
from kvjax.analysis.reports.behaviour import measurements, tables
from kvjax.analysis.reports.behaviour.results import Head, Results, finite
from kvjax.analysis.request import Request, check_texts, reference_length
from kvjax.analysis.words import stages, summarise
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError

_SHORTEST = 16  # tokens in which something can be repeated
_MUCH = 0.5  # of a head's attention, in the lead


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for short rows, and for queries that see no other token."""
    if max(request.lengths) < _SHORTEST:
        raise UserError(
            f"lengths = {max(request.lengths)}: patterns of attention need at least {_SHORTEST} "
            "tokens: give longer lengths"
        )
    if model.transformer.block.causal and model.transformer.block.window == 1:
        raise UserError("model.window = 1: every token sees itself alone, there are no patterns")


def section(model: LazyModel, request: Request) -> Section:
    """Measures attention patterns and head outputs on the request's texts.

    Raises:
      UserError: a text shorter than the longest length; weights or activations that are not finite.
    """
    check(model, request)
    check_texts(model, request.texts, request.lengths)
    length = reference_length([length for length in request.lengths if length >= _SHORTEST])
    measured = measurements.measure(model, request.texts, length, request.seed)
    return _section(Results(model.name, measured, request.heads))


def _section(found: Results) -> Section:
    return Section(
        name="behaviour",
        title="What heads do",
        lead=_lead(found),
        figures=_figures(found),
        tables=tables.tables(found),
        data=found.data(),
    )


# -- in words --------------------------------------------------------------------------------------


def _lead(found: Results) -> str:
    of = found.measured
    said = [
        f"Where do heads attend, and do heads of a layer do different things? On {of.sequences} "
        f"sequences of {of.length:,} tokens, of {of.num_heads:,} heads "
        f"{found.count('first_N', _MUCH):,} give more than half of their attention to the first "
        f"token and {found.count('previous_N', _MUCH):,} to the token before."
    ]
    said.append(_of_induction(found))
    pairs = found.pairs("divergence_NN")
    if pairs:
        said.append(
            f"Patterns of two heads of a layer differ by {pairs.median:.2f} nats in the median "
            f"(Jensen-Shannon; {math.log(2):.2f} is the most there can be)."
        )
    said += _of_sharing(found)
    relation = found.relation("divergence_NN")
    if relation is not None:
        said.append(
            "Heads whose weights W_Q W_Kᵀ are alike attend alike, if the rank correlation of "
            f"similarity and divergence is near -1: it is {relation.median:+.2f} in the median "
            f"layer ({relation.low:+.2f} to {relation.high:+.2f} in the middle half of layers)."
        )
    return " ".join(said)


def _of_induction(found: Results) -> str:
    of = found.measured
    chance = of.induction_by_chance
    best = max(float(x_N.max()) for x_N in of.statistic("induction_N"))
    return (
        f"On random tokens that are repeated, {found.count('induction_N', _MUCH):,} heads give "
        "more than half to the token that came after the earlier occurrence of their own; the most "
        f"of any head is {best:.2f}, even attention has {chance:.2f}."
    )


def _of_sharing(found: Results) -> list[str]:
    """Whether heads that read one KV head attend alike."""
    layers = found.layers_where_sharing_is_alike("divergence_NN")
    if layers is None:
        return []
    same, other = (found.pairs("divergence_NN", shared) for shared in (True, False))
    return [
        f"Heads that share a KV head differ by {same.median:.2f}, others by {other.median:.2f}; "
        f"the former is lower in {layers[0]} of {layers[1]} layers."
    ]


# -- figures ---------------------------------------------------------------------------------------


def _figures(found: Results) -> list[Figure]:
    made = [_maps(found), _roles(found), _shares(found), _breadth(found)]
    if found.has_pairs:
        made += [_divergences(found), _pairs(found)]
    return [*made, _layers(found)]


def _maps(found: Results) -> Figure:
    heads = found.shown()
    maps = {head.title: np.sqrt(found.map(head)) for head in heads}
    told = [_head_in_words(found, head) for head in heads]
    shown = min(found.measured.length, measurements.MAP_TOKENS)
    return Figure(
        "Attention maps of single heads",
        draw.heatmaps(maps, x="key", y="query", low=0, high=1, bar="√p"),
        f"Heads are called layer.head. {'; '.join(told)}.",
        Text(
            f"Attention of single heads, called layer.head, on the first {shown} tokens of the "
            f"first text. {_why(found)}",
            "A row is a query; colours are square roots of its shares, so that a tenth can be "
            "seen. Gray: a key that the query does not see. A line beside the diagonal goes by "
            "position, a column by one token, scattered dots by the text.",
            "Projection sharing, figure 4, has such maps for toy tasks; where queries and keys "
            "are tied, its logits are symmetric about the diagonal.",
        ),
    )


def _why(found: Results) -> str:
    """These heads and not others."""
    if not found.shown()[0].role:
        return "The heads are those that were asked for."
    return (
        "Each has most of something (of distance, least), no head stands twice. The one for "
        f"induction is shown on {found.measured.block} random tokens and the same again."
    )


def _head_in_words(found: Results, head: Head) -> str:
    if head.role:
        return f"{head.title}, {found.stands_out(head):.2f}"
    of = found.statistics(head)
    shares = {"first token": "first_N", "token before": "previous_N", "own token": "itself_N"}
    return f"{head.title}: " + ", ".join(f"{name} {of[x_N]:.2f}" for name, x_N in shares.items())


def _roles(found: Results) -> Figure:
    shown = {
        "token before": "previous_N",
        "first token": "first_N",
        "induction": "induction_N",
        "broadness (entropy)": "entropy_N",
    }
    maps = {name: found.by_head(statistic) for name, statistic in shown.items()}
    told = []
    for name, x_LN in maps.items():
        layer, head = np.unravel_index(np.nanargmax(x_LN), x_LN.shape)
        told.append(f"{name}: most {x_LN[layer, head]:.2f}, head {layer}.{head}")
    return Figure(
        "What each head attends to",
        draw.heatmaps(maps, x="head", y="layer", low=0, high=1, bar="share"),
        f"By layer and head. {'; '.join(told)}.",
        Text(
            "For every head the mean share of its attention on the token before, on the first "
            "token, and, on repeated random tokens, on the one after the earlier occurrence; and "
            "the entropy of its rows over the largest that there can be.",
            "1 is all of it. Much on the first token is often attention that is not needed "
            "elsewhere. Heads of one column have nothing in common but their number.",
            "Not in the papers; induction is the prefix-matching score of Olsson et al. (2022).",
        ),
    )


def _curves(
    found: Results, names: dict[str, str]
) -> tuple[dict[str, tuple], dict[str, tuple], list[str]]:
    """By name the medians of each layer, and bands of the middle half; and both in words."""
    series, bands, told = {}, {}, []
    layers = list(range(found.num_layers))
    for name, statistic in names.items():
        low_L, median_L, high_L = found.quartiles(statistic)
        series[name] = (layers, finite(median_L))
        bands[name] = (finite(low_L), finite(high_L))
        told.append(f"{name}: {summarise(finite(median_L), digits='.2f')}")
    return series, bands, told


def _shares(found: Results) -> Figure:
    names = {
        "first token": "first_N",
        "own token": "itself_N",
        "token before": "previous_N",
    }
    series, bands, told = _curves(found, names)
    return Figure(
        "Where attention goes, by layer",
        draw.lines(series, x="layer", y="share of attention", bands=bands),
        f"Medians over the heads of a layer. {'; '.join(told)}.",
        Text(
            "The share of attention on the first token, on the query's own and on the one before "
            "it: medians over the heads of a layer, with bands for the middle half.",
            "What is missing to 1 goes to the rest of the text.",
            "Not in the papers.",
        ),
    )


def _breadth(found: Results) -> Figure:
    names = {
        "entropy (1: all keys alike)": "entropy_N",
        "by the text (nats between two passages)": "content_N",
    }
    if found.measured.sequences == 1:
        names.popitem()
    series, bands, told = _curves(found, names)
    return Figure(
        "How broad attention is, and whether it goes by the text",
        draw.lines(series, x="layer", y="entropy, divergence", bands=bands),
        f"Medians over the heads of a layer. {'; '.join(told)}.",
        Text(
            "The entropy of rows over the logarithm of the keys that the query sees, and the "
            "Jensen-Shannon divergence of a head's patterns on two passages (of two texts, if "
            "there are several).",
            "Entropy 0: one key has everything; 1: all have the same. Divergence 0: the head "
            f"attends by position alone; {math.log(2):.2f}: nothing in common on two passages.",
            "Not in the papers.",
        ),
    )


def _kinds(found: Results) -> dict[str, bool | None]:
    """Which pairs of heads are told apart."""
    apart = dict.fromkeys(("sharing a KV head", "with two KV heads"))
    apart.update(zip(apart, (True, False), strict=True))
    return apart if found.shares_some else {"all pairs": None}


def _divergences(found: Results) -> Figure:
    series, bands, told, layers = {}, {}, [], list(range(found.num_layers))
    distances = {"": "divergence_NN", ", without the first token": "without_first_NN"}
    for kind, shared in _kinds(found).items():
        for suffix, distance in distances.items():
            low_L, median_L, high_L = map(finite, found.of_pairs(distance, shared))
            series[f"{kind}{suffix}"] = (layers, median_L)
            if not suffix:
                bands[kind] = (low_L, high_L)
            told.append(f"{kind}{suffix}: {summarise(median_L, digits='.2f')}")
    return Figure(
        "How different the patterns of a layer's heads are",
        draw.lines(
            series,
            x="layer",
            y="Jensen-Shannon divergence, nats",
            bands=bands,
            level={"nothing in common": math.log(2)},
        ),
        f"Medians over pairs of heads. {'; '.join(told)}.",
        Text(
            "The Jensen-Shannon divergence between the rows of two heads of a layer, means over "
            "queries: medians over pairs with bands for the middle half; and the same over all "
            "keys but the first token.",
            "0 is the same attention. Two heads that both rest on the first token are alike in "
            "that alone: the second line leaves it out.",
            "LRKV, appendix C.10, sets its measure of weights against this one of behaviour, "
            "which depends on the text, and does not measure it.",
        ),
    )


def _pairs(found: Results) -> Figure:
    maps, told = {}, []
    for name, index in _stages(found):
        layer = found.measured.layers[index]
        maps[f"divergence, {name}"] = layer.divergence_NN / math.log(2)
        maps[f"outputs, {name}"] = 1 - layer.outputs_NN
        told.append(
            f"{name}: divergence {np.median(layer.pairs(layer.divergence_NN)):.2f} nats, CKA of "
            f"outputs {np.nanmedian(layer.pairs(layer.outputs_NN)):.2f}"
        )
    order = sorted(maps, key=lambda name: not name.startswith("divergence"))
    return Figure(
        "Heads against heads, by patterns and by outputs",
        draw.heatmaps(
            {name: maps[name] for name in order}, x="head", y="head", low=0, high=1, bar="distance"
        ),
        f"Medians over pairs. {'; '.join(told)}.",
        Text(
            "For an early, a middle and a late layer, by pairs of heads: the divergence of their "
            "patterns over the most that there can be, and 1 less the centred kernel alignment "
            "(CKA) of what they put out on the same tokens.",
            "Dark is alike, bright is different. Heads that attend alike may put out different "
            "things, as their values differ.",
            "LRKV, appendix C.10: CKA compares activations, not operators; no numbers are given.",
        ),
    )


def _stages(found: Results) -> Sequence[tuple[str, int]]:
    """Layers with pairs of heads."""
    named = stages(found.num_layers).items()
    return [(name, i) for name, i in named if found.measured.layers[i].num_heads > 1]


def _layers(found: Results) -> Figure:
    of = found.measured
    maps = {"what enters attention": of.inputs_LL, "what its heads put out": of.outputs_LL}
    told = []
    for name, x_LL in maps.items():
        near = np.diagonal(x_LL, 1)
        if near.size:
            told.append(f"{name}: neighbours {np.nanmean(near):.2f} on average")
            told[-1] += f", the first and the last layer {x_LL[0, -1]:.2f}"
        else:
            told.append(f"{name}: there is one layer, 1 with itself")
    return Figure(
        "Layers against layers (CKA)",
        draw.heatmaps(maps, x="layer", y="layer", low=0, high=1, bar="CKA"),
        f"{'; '.join(told)}.",
        Text(
            "Centred kernel alignment between layers, of the inputs of attention and of the "
            "outputs of all heads together, on the same tokens; the estimate without bias.",
            "1 is the same up to rotation and size, 0 unrelated. Blocks are runs of layers that "
            "work on much the same.",
            "Named in LRKV, appendix C.10, as a measure of activations; not measured.",
        ),
    )
