"""Tables of the report on behaviour."""

from kvjax.analysis.page.section import Cell, Column, Table
from kvjax.analysis.reports.behaviour.results import Head, Results
from kvjax.foundation.json_text import plain

_EACH = 3  # heads shown of each role
_STATISTICS = {
    "first token": "first_N",
    "token before": "previous_N",
    "own token": "itself_N",
    "entropy": "entropy_N",
    "keys": "keys_N",
    "distance": "distance_N",
    "between passages": "content_N",
    "induction": "induction_N",
}
_FORMATS = {"keys": ".1f", "distance": ".1f"}
_KINDS = {"all pairs": None, "sharing a KV head": True, "with two KV heads": False}
_DISTANCES = {
    "divergence of patterns, nats": "divergence_NN",
    "the same without the first token": "without_first_NN",
    "CKA of outputs": "outputs_NN",
}


def tables(results: Results) -> list[Table]:
    """Returns the report's tables."""
    pairs = [_pairs(results)] if results.has_pairs else []
    return [_heads(results), *pairs, _layers(results)]


def _columns(names: dict[str, str]) -> list[Column]:
    return [Column(name, _FORMATS.get(name, ".2f")) for name in names]


def _heads(results: Results) -> Table:
    rows = [_head(results, head) for head in results.chosen(_EACH)]
    return Table(
        "Heads that stand out",
        [Column("for"), Column("head"), *_columns(_STATISTICS)],
        rows,
        f"The {_EACH} heads with the largest value of each statistic (smallest distance), named "
        "layer.head; means over queries and texts. Entropy is divided by its maximum. Keys is the "
        "number of equally weighted keys with this entropy. Distance is in tokens. Between "
        "passages is a divergence in nats. Induction is the attention on the token after a "
        "repeated token's earlier occurrence.",
    )


def _head(results: Results, head: Head) -> list[Cell]:
    statistics = results.statistics(head)
    return [head.role, head.name, *(plain(statistics[name]) for name in _STATISTICS.values())]


def _pairs(results: Results) -> Table:
    rows = []
    for name, distance in _DISTANCES.items():
        for kind, shared in _KINDS.items():
            quartiles = results.pairs(distance, shared)
            if quartiles is not None and (shared is None or results.shares_some):
                rows.append(
                    [name, kind, quartiles.count, quartiles.low, quartiles.median, quartiles.high]
                )
    return Table(
        "Distances between the heads of a layer",
        [Column("measure"), Column("pairs"), Column("count", ",d")]
        + [Column(name) for name in ("lower quartile", "median", "upper quartile")],
        rows,
        "Over all pairs of heads within layers. Jensen-Shannon divergence: 0 alike, 0.69 "
        "nothing in common. Centred kernel alignment (CKA): 1 alike, 0 unrelated.",
    )


def _layers(results: Results) -> Table:
    medians = {
        name: plain(results.quartiles(statistic)[1]) for name, statistic in _STATISTICS.items()
    }
    pairs = {name: plain(results.of_pairs(x_NN)[1]) for name, x_NN in _DISTANCES.items()}
    relations = {name: results.relation(x_NN) for name, x_NN in _DISTANCES.items()}
    columns = [Column("layer", "d"), *_columns(_STATISTICS)]
    columns += [Column(f"{name}, pairs" if "pairs" not in name else name) for name in pairs]
    columns += [Column(f"weights and {name}", "+.2f") for name in relations]
    rows = [
        [i, *(x[i] for x in medians.values()), *(x[i] for x in pairs.values())]
        + [relation.by_layer[i] if relation else None for relation in relations.values()]
        for i in range(results.num_layers)
    ]
    return Table(
        "Layers",
        columns,
        rows,
        "Medians over the heads of each layer, and over their pairs. The last columns are "
        "Spearman's rank correlation, over pairs, of the similarity of two heads' weights W_Q W_Kᵀ "
        "(without positions) with each distance. If weights determined behaviour, it would be -1 "
        "with divergences and +1 with CKA. LRKV, appendix C.11, asks for this relation.",
    )
