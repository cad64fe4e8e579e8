"""The report on the similarity of W_Q, W_K and W_V, as in projection sharing, section 4."""

import numpy as np

from kvjax.analysis.measures import heads as heads_lib, projections
from kvjax.analysis.measures.heads import Heads
from kvjax.analysis.measures.projections import NAMES, PAIRS
from kvjax.analysis.page import figures
from kvjax.analysis.page.section import Cell, Column, Figure, Section, Table
from kvjax.analysis.request import Request
from kvjax.analysis.words import mechanism_names
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel

# Projection sharing (arXiv 2606.04032), section 4: cosines and effective ranks, means over the
# layers of a trained QKV model of width 1,024.
PUBLISHED = {("key", "value"): 0.73, ("query", "key"): 0.42, ("query", "value"): 0.31}
PUBLISHED_RANKS, PUBLISHED_POSSIBLE = {"key": 687, "value": 702}, 1024
_Layer = dict[str, dict]  # by measure, then by pair or projection


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for heads that are not linear (see `heads.layers`)."""
    del request
    heads_lib.check(model)


def section(model: LazyModel, request: Request) -> Section:
    """Measures similarity and effective ranks of the projections of each layer.

    Raises:
      UserError: weights that are not finite, or heads that are not linear (see `heads.layers`).
    """
    del request
    with few_threads(model.transformer.block.d_model):
        layers = [_measure(heads) for heads in heads_lib.layers(model)]
    names = mechanism_names(model.transformer.mechanisms)
    has_cosines = any(x is not None for layer in layers for x in layer["cosine"].values())
    return Section(
        name="projections",
        title="Similarity of query, key and value projections",
        lead=_lead(model.name, names, layers),
        finding=_finding(layers),
        figures=[
            *([_cosine_figure(layers)] if has_cosines else []),
            _overlap_figure(layers),
            *map(lambda kind: _rank_figure(layers, kind), ("by_values", "by_squares")),
        ],
        tables=[_mean_table(layers), _layer_table(layers)],
        data=dict(mechanism=names, layers=list(map(_plain, layers)), published=_published()),
    )


def _measure(heads: Heads) -> _Layer:
    """Returns cosines and overlaps by pair, and effective ranks over the largest ones by name."""
    weights = projections.of_heads(heads)
    products = projections.ProjectionProducts(weights)
    possible = {name: products.possible_rank(name) for name in NAMES}
    ranks = {name: products.effective_ranks(name) for name in NAMES}
    columns = {name: w.shape[1] * w.shape[2] for name, w in weights.items()}
    D = len(heads.query_DNH)
    chance_ranks = {n: projections.effective_ranks_by_chance(D, columns[n]) for n in NAMES}

    def shares(ranks, i):
        return {name: ranks[name][i] / possible[name] for name in NAMES}

    cosine = {(a, b): projections.cosine(weights[a], weights[b]) for a, b in PAIRS}
    chance = {
        (a, b): None if cosine[a, b] is None else (D * max(columns[a], columns[b])) ** -0.5
        for a, b in PAIRS
    }
    return dict(
        cosine=cosine,
        cosine_by_chance=chance,
        overlap={pair: products.overlap(*pair) for pair in PAIRS},
        overlap_by_chance={pair: products.overlap_by_chance(*pair) for pair in PAIRS},
        by_values=shares(ranks, 0),
        by_squares=shares(ranks, 1),
        by_values_by_chance=shares(chance_ranks, 0),
        by_squares_by_chance=shares(chance_ranks, 1),
        possible=possible,
    )


def _label(pair: tuple[str, str]) -> str:
    return f"{pair[0]} and {pair[1]}"


def _by_layer(layers: list[_Layer], kind: str, key) -> list[float | None]:
    return [layer[kind][key] for layer in layers]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _cosine_figure(layers: list[_Layer]) -> Figure:
    series = {_label(pair): _by_layer(layers, "cosine", pair) for pair in PAIRS}
    return figures.curves(
        "Cosine of the projections",
        figures.over_layers(series),
        "Cosines of W_Q, W_K and W_V of each layer as vectors; keys and values are "
        "repeated for the query heads that share them. Not invariant: rotating values "
        "and outputs together changes these cosines and leaves the model unchanged. "
        "Projection sharing, section 4 (below).",
        x="layer",
        y="cosine",
        digits="z.3f",
    )


def _overlap_figure(layers: list[_Layer]) -> Figure:
    series = {_label(pair): _by_layer(layers, "overlap", pair) for pair in PAIRS}
    series |= {
        f"{_label(pair)}, by chance": _by_layer(layers, "overlap_by_chance", pair) for pair in PAIRS
    }
    return figures.curves(
        "Input directions that projections share",
        figures.over_layers(series),
        "|W_aᵀ W_b|² over |W_aᵀ W_a| |W_bᵀ W_b|, linear CKA without centring: 1 if two "
        "projections read the same input directions with the same strength. Invariant to "
        "rotations of channels. By chance: the mean over random directions with the same "
        "singular values.",
        x="layer",
        y="overlap",
        digits=".3f",
    )


def _rank_figure(layers: list[_Layer], kind: str) -> Figure:
    numbers = dict(by_values="singular values", by_squares="squares of singular values")[kind]

    def percent(kind, name):
        return [100 * x for x in _by_layer(layers, kind, name)]

    series = {name: percent(kind, name) for name in NAMES}
    by_chance: dict[tuple[float, ...], list[str]] = {}
    for name in NAMES:
        by_chance.setdefault(tuple(percent(f"{kind}_by_chance", name)), []).append(name)
    series |= {f"by chance, {' and '.join(names)}": list(x) for x, names in by_chance.items()}
    return figures.curves(
        f"Effective ranks of projections, by {numbers}",
        figures.over_layers(series),
        f"exp of the entropy of the {numbers} of each projection, over the largest possible. "
        "By chance: a matrix of independent normal numbers. Projection sharing, section "
        "4, has 67.1 % (keys) and 68.6 % (values), either of singular values or of their "
        "squares.",
        x="layer",
        y="% of the largest possible",
        digits=".1f",
    )


def _mean_table(layers: list[_Layer]) -> Table:
    rows: list[list[Cell]] = []
    for pair in PAIRS:
        measured = [_mean(_by_layer(layers, kind, pair)) for kind in ("cosine", "cosine_by_chance")]
        rows.append([f"cosine, {_label(pair)}", *measured, PUBLISHED[pair]])
    for pair in PAIRS:
        measured = [
            _mean(_by_layer(layers, kind, pair)) for kind in ("overlap", "overlap_by_chance")
        ]
        rows.append([f"overlap, {_label(pair)}", *measured, None])
    for kind, numbers in (("by_values", "singular values"), ("by_squares", "squares")):
        for name in NAMES:
            measured = [_mean(_by_layer(layers, k, name)) for k in (kind, f"{kind}_by_chance")]
            paper = PUBLISHED_RANKS[name] / PUBLISHED_POSSIBLE if name in PUBLISHED_RANKS else None
            rows.append([f"effective rank by {numbers}, {name}", *measured, paper])
    return Table(
        "Means over layers, beside the paper's",
        [
            Column("measure"),
            Column("here", ".3f"),
            Column("by chance", ".3f"),
            Column("paper", ".3f"),
        ],
        rows,
        "Effective ranks are shares of the largest possible. By chance: the typical size of a "
        "random cosine, the mean overlap of random directions, the effective rank of random "
        "weights. The paper: projection sharing, section 4, on another model. Its "
        "effective ranks, 687 (keys) and 702 (values) of 1,024, may be of singular "
        "values or of their squares.",
    )


def _layer_table(layers: list[_Layer]) -> Table:
    columns = [Column("layer", "d"), *(Column(f"cosine, {_label(p)}", "z.3f") for p in PAIRS)]
    columns += [Column(f"overlap, {_label(p)}", ".3f") for p in PAIRS]
    columns += [Column(f"{name}, rank by values, %", ".1f") for name in NAMES]
    columns += [Column(f"{name}, rank by squares, %", ".1f") for name in NAMES]
    rows = []
    for index, layer in enumerate(layers):
        row = [index, *layer["cosine"].values(), *layer["overlap"].values()]
        for kind in (layer["by_values"], layer["by_squares"]):
            row += [100 * kind[name] for name in NAMES]
        rows.append(row)
    return Table(
        "Projections by layer",
        columns,
        rows,
        "A dash: different head widths have no cosine.",
    )


def _lead(name: str, mechanisms: str, layers: list[_Layer]) -> str:
    measured = {
        kind: _mean(_by_layer(layers, kind, ("key", "value")))
        for kind in ("cosine", "overlap", "overlap_by_chance")
    }
    shown = {kind: "none" if x is None else f"{x:z.3f}" for kind, x in measured.items()}
    return (
        f"Similarity of the projections of {name} ({mechanisms}). Keys and values, means over "
        f"layers: cosine {shown['cosine']}, overlap {shown['overlap']} (by chance "
        f"{shown['overlap_by_chance']}). Overlaps are invariant to rotations of channels, cosines "
        "are not."
    )


def _finding(layers: list[_Layer]) -> str:
    overlap, chance = (
        _mean(_by_layer(layers, kind, ("key", "value")))
        for kind in ("overlap", "overlap_by_chance")
    )
    if overlap is None or chance is None:
        return ""
    return f"projections of keys and values overlap by {overlap:.3f}, {chance:.3f} by chance."


def _plain(layer: _Layer) -> dict:
    def text_key(key):
        return "_".join(key) if isinstance(key, tuple) else key

    return {
        name: {text_key(key): value for key, value in numbers.items()}
        for name, numbers in layer.items()
    }


def _published() -> dict:
    cosines = {"_".join(pair): value for pair, value in PUBLISHED.items()}
    return dict(cosine=cosines, effective_rank=PUBLISHED_RANKS, possible=PUBLISHED_POSSIBLE)
