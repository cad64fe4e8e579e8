"""The report on head diversity: figures 6, 7 and 9 to 18 of LRKV (arXiv 2601.11471)."""

from collections.abc import Sequence

import numpy as np

from kvjax.analysis.measures import spectrum
from kvjax.analysis.measures.diversity import Diversity
from kvjax.analysis.page import figures
from kvjax.analysis.page.section import Column, Figure, Section, Table
from kvjax.analysis.reports.diversity import measurements
from kvjax.analysis.reports.diversity.measurements import ModelDiversity
from kvjax.analysis.request import Request
from kvjax.analysis.words import stages
from kvjax.convert.model import LazyModel

_SHARE = 0.9  # share of the variance that the counted components hold
# LRKV table 5: mechanism, scale, heads, effective ranks in % of heads (not centred, centred).
PUBLISHED = (
    ("MHA", "128M", 6, 95.4, 82.4),
    ("LRKV, rank 64", "128M", 6, 96.2, 83.0),
    ("LRKV, rank 16", "128M", 6, 88.8, 81.5),
    ("GQA, 3 KV heads (estimated by the paper)", "128M", 6, 90.5, 79.6),
    ("MQA", "128M", 6, 72.6, 78.4),
    ("MLA", "128M", 6, 83.9, 78.5),
    ("MHA", "2.5B", 18, 98.9, 94.0),
    ("LRKV, rank 64", "2.5B", 18, 98.3, 93.5),
    ("GQA, 6 KV heads", "2.5B", 18, 95.4, 91.7),
    ("MQA", "2.5B", 18, 86.2, 91.0),
    ("MLA", "2.5B", 18, 92.7, 91.6),
)


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for layers of one head, or heads that are not linear (`heads.layers`)."""
    for each in _models(model, request).values():
        measurements.check(each)


def section(model: LazyModel, request: Request) -> Section:
    """Compares the heads of each layer by their bilinear forms.

    Raises:
      UserError: weights that are not finite.
    """
    compared = _models(model, request).items()
    models = [measurements.of_model(label, each) for label, each in compared]
    return Section(
        name="diversity",
        title="Diversity of heads",
        lead=_lead(models),
        finding=_finding(models),
        figures=[*_rank_figures(models), *_layer_figures(models), _value_figure(models)],
        tables=[_published_table(models), *map(_layer_table, models)],
        data=dict(
            models={each.label: measurements.numbers(each) for each in models},
            published=_published_data(),
        ),
    )


def _models(model: LazyModel, request: Request) -> dict[str, LazyModel]:
    """Returns the models to compare, by label."""
    beside = request.beside
    return {model.name: model} | ({f"{beside.name} (beside)": beside} if beside else {})


# -- figures ---------------------------------------------------------------------------------------


def _percent(layers: Sequence[Diversity], name: str) -> list[float]:
    return [100 * getattr(layer, name) for layer in layers]


def _prefixes(models: list[ModelDiversity]) -> list[tuple[str, ModelDiversity]]:
    """Returns each model, with a prefix for the names of its curves."""
    return [(f"{model.label}: " if len(models) > 1 else "", model) for model in models]


def _heads(model: ModelDiversity) -> str:
    return f"{' or '.join(map(str, model.num_heads))} heads"


def _rank_figures(models: list[ModelDiversity]) -> list[Figure]:
    """Returns figures 6, 9, 14 and 15 of the paper."""
    plain, centred, ranks = {}, {}, {}
    for prefix, model in _prefixes(models):
        plain[f"{prefix}without positions"] = _percent(model.plain, "share")
        centred[f"{prefix}% of N - 1"] = _percent(model.plain, "centred_share_of_possible")
        centred[f"{prefix}% of N"] = _percent(model.plain, "centred_share")
        ranks[f"{prefix}not centred"] = [layer.rank for layer in model.plain]
        ranks[f"{prefix}centred"] = [layer.centred_rank for layer in model.plain]
        if model.rotated:
            plain[f"{prefix}with RoPE"] = _percent(model.rotated, "share")
            name = f"{prefix}with RoPE, % of N - 1"
            centred[name] = _percent(model.rotated, "centred_share_of_possible")
    counts = {N for model in models for N in model.num_heads}
    (N,) = counts if len(counts) == 1 else (None,)  # None if layers differ: levels are left out
    return [
        figures.curves(
            "Effective rank of heads, not centred",
            figures.over_layers(plain),
            "exp of the entropy of the eigenvalues of the similarity matrix of a layer's "
            "forms W_Q W_Kᵀ, in percent of N. With RoPE: similarities averaged over relative "
            "positions up to the training context. Independent random weights give nearly "
            "100 % with any mechanism. LRKV figure 6 and table 5 (below).",
            x="layer",
            y="% of N heads",
            digits=".1f",
        ),
        figures.curves(
            "Effective rank of heads, centred (principal components)",
            figures.over_layers(centred),
            "Effective rank after normalising a layer's forms and subtracting their mean. "
            "N heads have at most N - 1 components about their mean, so "
            "that the share of N cannot reach 100 %. LRKV figure 9 and table 5 (below).",
            x="layer",
            y="% of heads",
            levels={"most possible of N": 100 * (N - 1) / N} if N else {},
            digits=".1f",
        ),
        figures.curves(
            "Both effective ranks, layer by layer",
            figures.over_layers(ranks),
            "Effective ranks before and after centring. If only the rank before centring is "
            "low, heads share one common form and differ around it. LRKV figures 14 and 15: "
            "for MQA with 6 heads 4.36 and 4.70; with 18 heads MHA and LRKV have 17 to 18 "
            "before centring.",
            x="layer",
            y="effective rank",
            levels={"N": N, "N - 1": N - 1} if N else {},
            digits=".2f",
        ),
    ]


def _layer_figures(models: list[ModelDiversity]) -> list[Figure]:
    """Returns figures 7, 10 to 13, and 16 to 18 of the paper, for three layers."""
    layers = {
        f"{prefix}{name}": model.plain[index]
        for prefix, model in _prefixes(models)
        for name, index in stages(model.num_layers).items()
    }

    def numbered(ys, first=1):
        return (list(range(first, first + len(ys))), list(map(float, ys)))

    centred = {name: numbered(layer.centred_N[:-1]) for name, layer in layers.items()}
    uncentred = {name: numbered(layer.uncentred_N) for name, layer in layers.items()}
    held = {
        name: numbered(100 * spectrum.cumulative(layer.centred_N[:-1]))
        for name, layer in layers.items()
    }

    matrices = {name: layer.similarity_NN for name, layer in layers.items()}
    return [
        figures.heatmaps(
            "Similarity of heads",
            matrices,
            "Inner products of the heads' forms over both norms, in an early, a middle and a "
            "late layer; a row of zeros is a head that does nothing. LRKV figures 7 and 18: "
            "low off the diagonal for MHA and LRKV, higher for MQA; the mean of LRKV lies "
            "within 0.02 to 0.04 of that of MHA (appendix C.8).",
            x="head",
            y="head",
            low=-1,
            color_label="similarity",
        ),
        figures.curves(
            "Variance of principal components",
            centred,
            "Eigenvalues of the centred similarity matrix, in an early, a middle and a late "
            "layer. Flat: heads differ in as many ways as possible. LRKV figures 10 and 11: "
            "LRKV's curves are close to those of MHA.",
            x="component",
            y="eigenvalue, centred",
        ),
        figures.curves(
            "Eigenvalues of similarity, not centred",
            uncentred,
            "Eigenvalues of the similarity matrix as it is; they sum to the number of heads. "
            "A first value well above the others is a form common to all heads. LRKV figures "
            "16 and 17: MQA's is the highest.",
            x="component",
            y="eigenvalue",
        ),
        figures.curves(
            "Share of the variance that components hold",
            held,
            "Share of the variance between heads held by the first components. LRKV figures "
            "12 and 13, components for 90 % (dashed): with 18 heads 16 to 17 for MHA and "
            "LRKV, 15 to 16 for GQA, 14 to 15 for MQA and MLA; with 6 heads about 5, for MQA "
            "4 to 5.",
            x="components",
            y="% of variance",
            levels={"90 %": 90},
        ),
    ]


def _value_figure(models: list[ModelDiversity]) -> Figure:
    series = {}
    for prefix, model in _prefixes(models):
        series[f"{prefix}not centred, % of N"] = _percent(model.values, "share")
        name = f"{prefix}centred, % of N - 1"
        series[name] = _percent(model.values, "centred_share_of_possible")
    return figures.curves(
        "Effective rank of heads' values and outputs (not in the paper)",
        figures.over_layers(series),
        "Both ranks of the forms W_V W_O, from a head's input to its output, which are "
        "independent of positions.",
        x="layer",
        y="% of heads",
        digits=".1f",
    )


# -- tables and numbers ----------------------------------------------------------------------------


def _published_table(models: list[ModelDiversity]) -> Table:
    rows = []
    for model in models:
        N = model.num_heads[0] if len(model.num_heads) == 1 else _heads(model)
        kinds = {"": model.plain} | ({", with RoPE": model.rotated} if model.rotated else {})
        for suffix, layers in kinds.items():
            means = [
                float(np.mean(_percent(layers, name)))
                for name in ("share", "centred_share", "centred_share_of_possible")
            ]
            rows.append([f"{model.label}{suffix}", model.mechanism, "here", N, *means])
    rows += [
        ["LRKV, table 5", name, scale, N, plain, centred, centred * N / (N - 1)]
        for name, scale, N, plain, centred in PUBLISHED
    ]
    return Table(
        "Means over layers, beside the paper's",
        [
            Column("source"),
            Column("mechanism"),
            Column("scale"),
            Column("N", "d"),
            Column("not centred, % of N", ".1f"),
            Column("centred, % of N", ".1f"),
            Column("centred, % of N - 1", ".1f"),
        ],
        rows,
        "Effective ranks, means over all layers. Models differ in size, data and number "
        "of heads: compare the order of mechanisms within one scale. The paper: LRKV "
        "table 5, whose GQA row at 128M is an estimate; its last column is computed from "
        "the one before. Centring lowers MHA and LRKV by 0.9 and 0.8 points at 2.5B by "
        "its text, and by 4.9 and 4.8 by its table.",
    )


def _layer_table(model: ModelDiversity) -> Table:
    columns = [
        Column("layer", "d"),
        Column("rank, not centred"),
        Column("% of N", ".1f"),
        Column("rank, centred"),
        Column("centred, % of N", ".1f"),
        Column("centred, % of N - 1", ".1f"),
        Column("components for 90 %", "d"),
        Column("first component, %", ".1f"),
        Column("mean similarity", ".3f"),
        Column("with RoPE, % of N", ".1f"),
        Column("with RoPE, centred, % of N - 1", ".1f"),
        Column("heads whose form is zero"),
    ]
    rows = []
    for index, layer in enumerate(model.plain):
        rotated = model.rotated[index] if model.rotated else None
        row = [index, layer.rank, 100 * layer.share, layer.centred_rank, 100 * layer.centred_share]
        row += [100 * layer.centred_share_of_possible, layer.components(_SHARE)]
        row += [100 * float(spectrum.cumulative(layer.centred_N)[0]), layer.mean_similarity]
        row += [100 * rotated.share if rotated else None]
        row += [100 * rotated.centred_share_of_possible if rotated else None]
        rows.append([*row, ", ".join(map(str, layer.nothing)) or None])
    return Table(
        f"Layers of {model.label}",
        columns,
        rows,
        f"Layers of {model.label} ({model.mechanism}). Components are principal components of "
        "the heads' forms.",
    )


def _lead(models: list[ModelDiversity]) -> str:
    parts = [
        "Effective number of directions of the forms W_Q W_Kᵀ of a layer's heads, means over "
        "layers; no text is involved."
    ]
    for model in models:
        share = np.mean(_percent(model.plain, "share"))
        possible = np.mean(_percent(model.plain, "centred_share_of_possible"))
        parts.append(
            f"{model.label} ({model.mechanism}, {_heads(model)} in {model.num_layers} layers): "
            f"{share:.1f} % of N, centred {possible:.1f} % of N - 1."
        )
    return " ".join(parts)


def _finding(models: list[ModelDiversity]) -> str:
    shares = [f"{model.label} {np.mean(_percent(model.plain, 'share')):.1f} %" for model in models]
    return f"effective rank of a layer's heads over their number, on average: {', '.join(shares)}."


def _published_data() -> list[dict]:
    keys = ("mechanism", "scale", "heads", "uncentred_percent", "centred_percent")
    return [dict(zip(keys, row, strict=True)) for row in PUBLISHED]
