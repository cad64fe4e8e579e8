"""The report on LRKV's bases and residuals (arXiv 2601.11471, section 4 and figure 8).

Curves run over layers and, for runs with snapshots, also over training steps (the paper's future
work 4 and appendix C.11).
"""

from collections.abc import Mapping

import numpy as np

from kvjax.analysis.page import figures
from kvjax.analysis.page.section import Column, Figure, Section, Table
from kvjax.analysis.reports.geometry import evolution, measurements
from kvjax.analysis.reports.geometry.measurements import PARTS, Layers, mean, measured
from kvjax.analysis.request import Request
from kvjax.analysis.words import mechanism_names, stages
from kvjax.convert.model import LazyModel


def check(model: LazyModel, request: Request) -> None:
    """Raises a UserError for heads that are not linear (see `heads.layers`).

    Layers with residuals need no check, since their heads are products of LRKV's factors.
    """
    measurements.check(model, request.beside)


def section(model: LazyModel, request: Request) -> Section:
    """Measures norms of keys and values, and the geometry of residuals.

    Raises:
      UserError: weights that are not finite, or heads that are not linear (see `heads.layers`).
    """
    layers = measurements.of_model(model, request.beside, request.seed)
    moments = [(step, evolution.moment(snapshot)) for step, snapshot in request.snapshots]
    has_residuals = any(part.rank for layer in layers for part in layer.values())
    names = [name for name in PARTS if any(name in layer for layer in layers)]
    beside = request.beside.name if request.beside else None
    figures = [_norm_figure(layers, name, beside) for name in names]
    if has_residuals:
        figures += [_cosine_figure(layers), _overlap_figure(layers), _angle_figure(layers)]
        figures += [_optimal_figure(layers, name, beside) for name in names]
        figures += [_best_figure(layers, beside), _distance_figure(layers, beside)]
    return Section(
        name="geometry",
        title="Bases and residuals",
        lead=_lead(model, layers, has_residuals),
        finding=_finding(layers) if has_residuals else "",
        figures=[*figures, *(evolution.figures(moments, has_residuals) if moments else [])],
        tables=[_table(layers, name, has_residuals) for name in names],
        data=dict(
            mechanism=mechanism_names(model.transformer.mechanisms),
            beside=beside,
            layers=measurements.numbers(layers),
            snapshots=[dict(step=step) | moment for step, moment in moments],
        ),
    )


# -- figures ---------------------------------------------------------------------------------------


def _figure(
    title: str,
    layers: Layers,
    measures: Mapping[str, tuple[str, str]],
    caption: str,
    *,
    y: str,
    scale: float = 1.0,
    levels: Mapping[str, float] | None = None,
    digits: str = ".2f",
) -> Figure:
    """Returns a figure of curves over layers, with bands over heads.

    Args:
      measures: by name of a curve, ("key" or "value", one of `measurements.MEASURES`).
    """
    series, bands = {}, {}
    for label, (name, measure) in measures.items():
        by_layer = [
            (i, measured(layer[name], measure) * scale)
            for i, layer in enumerate(layers)
            if name in layer
        ]
        by_layer = [(i, x) for i, x in by_layer if x.size]
        if by_layer:
            series[label] = ([i for i, _ in by_layer], [float(x.mean()) for _, x in by_layer])
            bands[label] = (
                [float(x.min()) for _, x in by_layer],
                [float(x.max()) for _, x in by_layer],
            )
    options = dict(x="layer", y=y, bands=bands, levels=levels or {}, digits=digits)
    return figures.curves(title, series, caption, **options)


def _both_forms(measure: str) -> dict[str, tuple[str, str]]:
    """Returns `measures` of `_figure` for keys and values, as learned and canonical."""
    forms = {"": measure, ", canonical": f"canonical_{measure}"}
    return {f"{part}s{form}": (part, name) for form, name in forms.items() for part in PARTS}


def _norm_figure(layers: Layers, name: str, beside: str | None) -> Figure:
    measures = {
        "whole": "total_norm",
        "base": "base_norm",
        "residual": "residual_norm",
        "base, canonical": "canonical_base_norm",
        "residual, canonical": "canonical_residual_norm",
    } | ({f"whole, {beside}": "beside_norm"} if beside else {})
    series_measures = {label: (name, measure) for label, measure in measures.items()}
    return _figure(
        f"Norms of {name} projections",
        layers,
        series_measures,
        f"Frobenius norms of each head's {name} projection, and of its base and residual, "
        "as learned and in canonical form, where the base is the mean of its heads; "
        "bands span the heads. LRKV figure 8: whole keys at rank 64 are 4.2 (128M) and "
        "5.1 times (2.5B) as large as MHA's by its caption, 6.7 and 4.8 times by section "
        "6.3.",
        y="Frobenius norm of a head",
    )


def _cosine_figure(layers: Layers) -> Figure:
    return _figure(
        "Cosine of base and residual",
        layers,
        _both_forms("cosine"),
        "Cosine of each head's residual and base as vectors; bands span the heads. Below "
        "0: residuals cancel some of the base. Canonical residuals sum to zero over "
        "heads, so that only their band is informative. LRKV section 6.3 speaks of "
        "moderate orthogonality.",
        y="cosine",
        digits="z.3f",
    )


def _overlap_figure(layers: Layers) -> Figure:
    series_measures = _both_forms("overlap")
    series_measures["random factors"] = ("key", "random_overlap")
    series_measures["random factors, canonical"] = ("key", "random_canonical_overlap")
    return _figure(
        "Input directions that base and residual share",
        layers,
        series_measures,
        "Mean squared cosine of the principal angles between the column spaces (input "
        "directions) of base and residual; canonical: of the residual's R strongest "
        "directions. Random factors with the keys' norms give H/D, and more in canonical "
        "form, where the base contains a part of every residual. LRKV section 4 names this "
        "diagnostic.",
        y="mean squared cosine",
        digits=".3f",
    )


def _angle_figure(layers: Layers) -> Figure:
    series = {}
    for label, index in stages(len(layers)).items():
        part = layers[index].get("key")
        for form, name in (("", "angles"), (", canonical", "canonical_angles")):
            angles = [cosines for cosines in part.angles.get(name, ()) if cosines.size]
            if not angles:
                continue
            count = min(map(len, angles))
            ys = np.mean([cosines[:count] for cosines in angles], axis=0).tolist()
            series[label + form] = (list(range(1, count + 1)), ys)
    return figures.curves(
        "Principal angles between base and residual of keys",
        series,
        "Cosines of the principal angles between the column spaces of a head's base and "
        "residual, in order, means over heads.",
        x="principal angle",
        y="cosine",
    )


def _optimal_figure(layers: Layers, name: str, beside: str | None) -> Figure:
    losses = {"no base": "lost_alone", "the mean as base": "lost_with_mean"}
    measures = losses | {f"random factors, {label}": f"random_{m}" for label, m in losses.items()}
    if beside:
        measures |= {f"{beside}, {label}": f"beside_{m}" for label, m in losses.items()}
    series_measures = {label: (name, measure) for label, measure in measures.items()}
    return _figure(
        f"Loss of the best residuals of the same rank, {name}s",
        layers,
        series_measures,
        f"Share of the squared norm of each head's {name} projection lost by replacing it "
        "with the best matrix of the residuals' rank R (a truncated SVD), alone or "
        "beside the mean of the heads; bands span the heads. Random factors have the "
        "learned norms. LRKV section 6.3 announces this comparison.",
        y="% of the energy lost",
        scale=100,
        digits=".1f",
    )


def _best_figure(layers: Layers, beside: str | None) -> Figure:
    series_measures = {f"{name}s": (name, "best_overlap") for name in PARTS}
    series_measures["random factors"] = ("key", "random_best_overlap")
    chances, levels = set(), {}
    if beside:
        series_measures |= {f"{name}s, {beside}": (name, "beside_best_overlap") for name in PARTS}
        parts = [part for layer in layers for part in layer.values()]
        chances = {part.best_chance for part in parts if "beside_best_overlap" in part.values}
    if len(chances) == 1:
        levels = {f"{beside}, by chance": chances.pop()}
    return _figure(
        "Learned residuals beside the best of their rank",
        layers,
        series_measures,
        "Share of a learned residual's input directions inside those of the best rank-R "
        "residual about the mean of the heads. Random factors overlap with their own "
        "best residuals, too. With another model (by chance R/D) only heads of a common "
        "origin correspond.",
        y="mean squared cosine",
        levels=levels,
        digits=".3f",
    )


def _distance_figure(layers: Layers, beside: str | None) -> Figure:
    series_measures = {f"{name}s": (name, "best_distance") for name in PARTS}
    series_measures["random factors"] = ("key", "random_best_distance")
    if beside:
        series_measures |= {f"{name}s, {beside}": (name, "beside_best_distance") for name in PARTS}
    return _figure(
        "Distance of learned residuals from the best of their rank",
        layers,
        series_measures,
        "Frobenius norm of the difference between a head's learned residual and the best "
        "rank-R residual about the mean of the heads (a truncated SVD), over the best's "
        "norm. A part common to all residuals counts, though it could belong to the "
        "base. LRKV section 6.3 announces this comparison.",
        y="distance over the best's norm",
    )


# -- table and words -------------------------------------------------------------------------------


def _table(layers: Layers, name: str, has_residuals: bool) -> Table:
    shown = {"total_norm": ("norm", ".2f")}
    if any(name in layer and "beside_norm" in layer[name].values for layer in layers):
        shown |= {"beside_norm": ("norm, beside", ".2f")}
    if has_residuals:
        shown |= {
            "base_norm": ("base", ".2f"),
            "residual_norm": ("residual", ".2f"),
            "canonical_base_norm": ("base, canonical", ".2f"),
            "canonical_residual_norm": ("residual, canonical", ".2f"),
            "cosine": ("cosine", "z.3f"),
            "canonical_cosine": ("cosine, canonical", "z.3f"),
            "overlap": ("overlap", ".3f"),
            "canonical_overlap": ("overlap, canonical", ".3f"),
            "lost_alone": ("lost without base", ".3f"),
            "lost_with_mean": ("lost with the mean", ".3f"),
            "best_overlap": ("overlap with the best", ".3f"),
            "best_distance": ("distance from the best", ".2f"),
        }
    spread = {"total_norm", "residual_norm", "cosine", "canonical_cosine"} & set(shown)
    columns, rows = [Column("layer", "d"), *([Column("rank", "d")] if has_residuals else [])], []
    for measure, (title, digits) in shown.items():
        columns.append(Column(title, digits))
        if measure in spread:
            columns.append(Column(f"{title}, ± over heads", digits))
    for index, layer in enumerate(layers):
        part = layer.get(name)
        if part is None:
            continue
        row = [index, *([part.rank] if has_residuals else [])]
        for measure in shown:
            values = measured(part, measure)
            row.append(mean(values))
            if measure in spread:
                row.append(float(values.std()) if values.size else None)
        rows.append(row)
    return Table(
        f"{name.capitalize()} projections by layer",
        columns,
        rows,
        "Means and standard deviations over heads: Frobenius norms of a head's D x H "
        "matrix; overlaps as mean squared cosines of principal angles; losses as shares "
        "of the squared norm; distances relative to the best residual's norm.",
    )


def _finding(layers: Layers) -> str:
    names = ("base_norm", "residual_norm")
    base, residual = (mean(np.concatenate([measured(x["key"], n) for x in layers])) for n in names)
    if not base or residual is None:
        return ""
    return f"residuals of keys are {residual / base:.2f} times as large as their base, as learned."


def _lead(model: LazyModel, layers: Layers, has_residuals: bool) -> str:
    name = f"{model.name} ({mechanism_names(model.transformer.mechanisms)})"
    if not has_residuals:
        return f"{name} has no residuals: norms of whole keys and values."
    names = ("base_norm", "residual_norm", "overlap")
    means = (mean(np.concatenate([measured(layer["key"], x) for layer in layers])) for x in names)
    base, residual, overlap = ("none" if x is None else f"{x:.3g}" for x in means)
    return (
        f"Each head of {name} has a shared base and a low-rank residual, shown as learned and with "
        "the mean of the heads as the base (canonical: sums of weights only, if RoPE rotates the "
        f"base alone). Keys as learned: mean norm {base} (base) and {residual} (residual), overlap "
        f"of their input directions {overlap}. A model of another shape is compared by norms only."
    )
