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
from kvjax.analysis.words import describe, stages
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
        title="Attention patterns of heads",
        lead=_lead(found),
        figures=_figures(found),
        tables=tables.tables(found),
        data=found.data(),
    )


# -- lead ------------------------------------------------------------------------------------------


def _lead(found: Results) -> str:
    of = found.measured
    chance, best = of.induction_by_chance, max(x_N.max() for x_N in of.statistic("induction_N"))
    parts = [
        "Where do heads attend, and do heads of a layer do different things? On "
        f"{of.sequences} sequences of {of.length:,} tokens, of {of.num_heads:,} heads "
        f"{found.count('first_N', _MUCH):,} give more than half of their attention to the first "
        f"token, and {found.count('previous_N', _MUCH):,} to the previous one. On repeated random "
        f"tokens {found.count('induction_N', _MUCH):,} heads give more than half to the token "
        f"after the earlier occurrence of their own (most {best:.2f}; uniform: {chance:.2f})."
    ]
    if pairs := found.pairs("divergence_NN"):
        text = f"Patterns of two heads of a layer differ by {pairs.median:.2f} nats"
        text += f" in the median ({math.log(2):.2f} is the most)"
        if layers := found.layers_where_sharing_is_alike("divergence_NN"):
            same, other = (found.pairs("divergence_NN", shared) for shared in (True, False))
            text += f"; heads that share a KV head by {same.median:.2f}, others by "
            text += f"{other.median:.2f} (the former lower in {layers[0]} of {layers[1]} layers)"
        parts.append(f"{text}.")
    if relation := found.relation("divergence_NN"):
        parts.append(
            "The rank correlation of heads' weight similarity with this divergence is "
            f"{relation.median:+.2f} in the median layer ({relation.low:+.2f} to "
            f"{relation.high:+.2f} in the middle half); -1: similar weights, similar attention."
        )
    return " ".join(parts)


# -- figures ---------------------------------------------------------------------------------------


def _figures(found: Results) -> list[Figure]:
    made = [_maps(found), _roles(found), _shares(found), _breadth(found)]
    if found.has_pairs:
        made += [_divergences(found), _pairs(found)]
    return [*made, _layers(found)]


def _maps(found: Results) -> Figure:
    heads = found.shown()
    maps = {head.title: np.sqrt(found.map(head)) for head in heads}
    words = "; ".join(_head_in_words(found, head) for head in heads)
    shown = min(found.measured.length, measurements.MAP_TOKENS)
    return Figure(
        "Attention maps of single heads",
        draw.heatmaps(maps, x="key", y="query", low=0, high=1, bar="√p"),
        f"Heads are named layer.head. {words}.",
        Text(
            f"Attention of single heads, named layer.head, on the first {shown} tokens of the "
            "first text; of heads with a role, those with the most of it (nearest: least "
            f"distance), and induction on {found.measured.block} random tokens, repeated.",
            "A row is a query; colours are square roots of its shares, so that a tenth is visible. "
            "Gray: masked keys. A line beside the diagonal attends by position, a column to one "
            "token, scattered dots by the text.",
            "Projection sharing, figure 4, has such maps for toy tasks; with tied queries and keys "
            "logits are symmetric about the diagonal.",
        ),
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
    most = []
    for name, x_LN in maps.items():
        layer, head = np.unravel_index(np.nanargmax(x_LN), x_LN.shape)
        most.append(f"{name}: most {x_LN[layer, head]:.2f}, head {layer}.{head}")
    return Figure(
        "Attention targets of each head",
        draw.heatmaps(maps, x="head", y="layer", low=0, high=1, bar="share"),
        f"By layer and head. {'; '.join(most)}.",
        Text(
            "Mean share of every head's attention on the previous token, on the first token and, "
            "on repeated random tokens, on the one after the earlier occurrence; and the entropy "
            "of its rows over the largest possible.",
            "1: all of it. Much attention on the first token is often attention that is not needed "
            "elsewhere. Heads of one column share nothing but their index.",
            "Not in the papers; induction is the prefix-matching score of Olsson et al. (2022).",
        ),
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
    return Figure(
        "Where attention goes, by layer",
        draw.lines(series, x="layer", y="share of attention", bands=bands),
        f"Medians over the heads of a layer. {describe(series, '.2f')}",
        Text(
            "Share of attention on the first token, on the query's own and on the previous one: "
            "medians over the heads of a layer, with quartile bands.",
            "The rest goes to other tokens.",
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
    series, bands = _curves(found, names)
    return Figure(
        "Breadth of attention, and dependence on the text",
        draw.lines(series, x="layer", y="entropy, divergence", bands=bands),
        f"Medians over the heads of a layer. {describe(series, '.2f')}",
        Text(
            "Entropy of rows over the log of the number of visible keys, and the Jensen-Shannon "
            "divergence of a head's patterns between two passages (of two texts, if there are "
            "several).",
            "Entropy 0: one key; 1: uniform. Divergence 0: the head attends by position alone; "
            f"{math.log(2):.2f}: nothing in common.",
            "Not in the papers.",
        ),
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
    return Figure(
        "How different the patterns of a layer's heads are",
        draw.lines(
            series,
            x="layer",
            y="Jensen-Shannon divergence, nats",
            bands=bands,
            level={"nothing in common": math.log(2)},
        ),
        f"Medians over pairs of heads. {describe(series, '.2f')}",
        Text(
            "Jensen-Shannon divergence between the rows of two heads of a layer, means over "
            "queries: medians over pairs with quartile bands; and over all keys but the first.",
            "0: the same attention. Heads that mostly attend to the first token look alike; the "
            "second line leaves it out.",
            "LRKV, appendix C.10, contrasts its measure of weights with this one, which depends on "
            "the text, and does not measure it.",
        ),
    )


def _pairs(found: Results) -> Figure:
    maps, words = {}, []
    for name, index in _stages(found):
        layer = found.measured.layers[index]
        maps[f"divergence, {name}"] = layer.divergence_NN / math.log(2)
        maps[f"outputs, {name}"] = 1 - layer.outputs_NN
        words.append(
            f"{name}: divergence {np.median(layer.pairs(layer.divergence_NN)):.2f} nats, CKA of "
            f"outputs {np.nanmedian(layer.pairs(layer.outputs_NN)):.2f}"
        )
    order = sorted(maps, key=lambda name: not name.startswith("divergence"))
    return Figure(
        "Heads against heads, by patterns and by outputs",
        draw.heatmaps(
            {name: maps[name] for name in order}, x="head", y="head", low=0, high=1, bar="distance"
        ),
        f"Medians over pairs. {'; '.join(words)}.",
        Text(
            "For an early, a middle and a late layer, by pairs of heads: the divergence of their "
            "patterns over the largest possible, and 1 minus the centred kernel alignment (CKA) of "
            "their outputs on the same tokens.",
            "Dark: alike; bright: different. Heads that attend alike may have different outputs, "
            "since their values differ.",
            "LRKV, appendix C.10: CKA compares activations, not operators; no numbers are given.",
        ),
    )


def _stages(found: Results) -> Sequence[tuple[str, int]]:
    """Returns early, middle and late layers with at least two heads."""
    named = stages(found.num_layers).items()
    return [(name, i) for name, i in named if found.measured.layers[i].num_heads > 1]


def _layers(found: Results) -> Figure:
    of = found.measured
    maps = {"inputs of attention": of.inputs_LL, "outputs of heads": of.outputs_LL}
    words = []
    for name, x_LL in maps.items():
        near = np.diagonal(x_LL, 1)
        if near.size:
            words.append(f"{name}: neighbours {np.nanmean(near):.2f} on average")
            words[-1] += f", the first and the last layer {x_LL[0, -1]:.2f}"
        else:
            words.append(f"{name}: there is one layer, 1 with itself")
    return Figure(
        "Layers against layers (CKA)",
        draw.heatmaps(maps, x="layer", y="layer", low=0, high=1, bar="CKA"),
        f"{'; '.join(words)}.",
        Text(
            "Centred kernel alignment (unbiased estimate) between layers, of the inputs of "
            "attention and of the outputs of all heads, on the same tokens.",
            "1: the same up to rotation and scale; 0: unrelated. Blocks are groups of layers with "
            "similar representations.",
            "Named in LRKV, appendix C.10, as a measure of activations; not measured.",
        ),
    )
