"""Measures bases, residuals and head diversity in a run's snapshots (LRKV future work 4, C.11)."""

from collections.abc import Mapping

from kvjax.analysis.measures import diversity, heads as heads_lib, spectrum
from kvjax.analysis.page import figures as figures_lib
from kvjax.analysis.page.section import Figure
from kvjax.analysis.reports.diversity import measurements as diversity_measurements
from kvjax.analysis.reports.geometry import measurements as geometry_measurements
from kvjax.analysis.reports.geometry.measurements import MEASURES, PARTS, mean
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError

_LEADING = 3  # number of eigenvalues that are shown over steps


def moment(model: LazyModel) -> dict:
    """Returns a snapshot's means over layers and heads by name, and the spectra of every layer."""
    layers = geometry_measurements.of_model(model)
    numbers = {}
    for name in PARTS:
        for measure in MEASURES:
            means = [mean(layer[name].values.get(measure)) for layer in layers if name in layer]
            numbers[f"{name}_{measure}"] = mean([x for x in means if x is not None])
    spectra = []
    if _compares_heads(model):
        with few_threads(model.transformer.block.d_model):
            spectra = [diversity.of_layer(heads) for heads in heads_lib.layers(model)]
    for measure in ("share", "centred_share", "centred_share_of_possible"):
        numbers[measure] = mean([getattr(layer_diversity, measure) for layer_diversity in spectra])
    for measure in ("uncentred", "centred"):
        numbers[measure] = [
            getattr(layer_diversity, f"{measure}_N").tolist() for layer_diversity in spectra
        ]
    return numbers


def _compares_heads(model: LazyModel) -> bool:
    """Returns True if every layer has at least two heads, all of them linear."""
    try:
        diversity_measurements.check(model)
    except UserError:
        return False
    return True


def figures(evolution: list[tuple[int, dict]], has_residuals: bool) -> list[Figure]:
    """Returns figures with curves over the steps of a run.

    Args:
      evolution: (step, `moment` of its snapshot), steps ascending.
      has_residuals: True if heads have a base and a residual.
    """
    steps = [step for step, _ in evolution]

    def over_steps(title: str, keys: Mapping[str, str], caption: str, y: str) -> Figure:
        series = {
            label: (steps, [moment[key] for _, moment in evolution]) for label, key in keys.items()
        }
        return figures_lib.curves(title, series, caption, x="step", y=y)

    def series_of(*measures):
        return {
            f"{name}s, {measure.replace('_', ' ')}": f"{name}_{measure}"
            for name in PARTS
            for measure in measures
        }

    norms = ("total_norm", *(("base_norm", "residual_norm") if has_residuals else ()))
    curves = [
        over_steps(
            "Norms over training",
            series_of(*norms),
            "Norms of keys and values, and of their parts, at every snapshot: future work 4 of "
            "LRKV.",
            "Frobenius norm of a head",
        )
    ]
    if has_residuals:
        curves.append(
            over_steps(
                "Base and residual over training",
                series_of("cosine", "overlap", "canonical_overlap"),
                "Cosine of base and residual, and the share of the residual's input directions "
                "inside the base's, as learned and canonical: future work 4 of LRKV.",
                "cosine or its square",
            )
        )
    if any(moment["centred"] for _, moment in evolution):
        leading = {}
        for i in range(_LEADING):
            for kind in ("uncentred", "centred"):
                shares = [spectrum.fractions(moment[kind])[:, i : i + 1] for _, moment in evolution]
                means = [float(x.mean()) if x.size else None for x in shares]
                leading[f"{kind} {i + 1}"] = (steps, means)
        ranks = {
            "not centred, share of N": "share",
            "centred, share of N - 1": "centred_share_of_possible",
        }
        curves += [
            over_steps(
                "Effective rank of heads over training",
                ranks,
                "Effective number of directions of the heads' forms at every snapshot; random "
                "weights start near 1. LRKV analyses final checkpoints (C.11).",
                "share of heads",
            ),
            figures_lib.curves(
                "Leading eigenvalues over training",
                leading,
                f"The {_LEADING} largest eigenvalues of the heads' similarity over their sum, "
                "before and after centring. A growing first value: heads come to share a form.",
                x="step",
                y="share of the sum",
            ),
        ]
    return curves
