"""Reduces each measurement of `kvjax.analysis` to one number.

A number is the mean over layers, heads or pairs of heads. Texts are the held-out parts of both
embedded books, in windows of the model's training length.
"""

from collections.abc import Callable, Iterable

import numpy as np

from kvjax.analysis import reports, texts as texts_lib
from kvjax.analysis.measures import subspace_methods
from kvjax.analysis.reports.behaviour import measurements as behaviour_measurements
from kvjax.analysis.reports.compression import (
    measurements as compression_measurements,
    results as compression_results,
)
from kvjax.analysis.reports.diversity import measurements as diversity_measurements
from kvjax.analysis.reports.geometry import measurements as geometry_measurements
from kvjax.analysis.reports.logits import (
    measurements as logit_measurements,
    results as logit_results,
)
from kvjax.analysis.request import Request
from kvjax.convert.model import LazyModel
from kvjax.foundation.errors import UserError

Numbers = dict[str, float]  # numbers by name, without those that do not apply to the model

# Attributes of `diversity.Diversity`, stored in percent.
_PERCENT = ("share", "centred_share", "centred_share_of_possible")
_GEOMETRY = ("total_norm", "base_norm", "residual_norm", "cosine", "overlap", "canonical_overlap")
_STATISTICS = ("entropy", "first", "previous", "distance", "induction", "content")


def texts(model: LazyModel) -> dict[str, np.ndarray]:
    """Returns the tokens [T] of each text."""
    return texts_lib.tokens(texts_lib.sources(texts_lib.EMBEDDED), model, model.context)


def of_model(model: LazyModel, *, trained: bool = True) -> Numbers:
    """Returns all numbers of a model.

    Args:
      trained: if False, skips the cost of reduced keys, meaningless for an untrained model.

    Raises:
      UserError: weights or activations that are not finite.
    """
    request = Request(texts(model), (model.context,))
    numbers: Numbers = {}
    for measure in (diversity, geometry, logits, behaviour, *((compression,) if trained else ())):
        numbers |= _if_there(measure, model, request)
    return {name: float(x) for name, x in numbers.items() if np.isfinite(x)}


def _if_there(
    measure: Callable[[LazyModel, Request], Numbers], model: LazyModel, request: Request
) -> Numbers:
    """Returns `measure(model, request)`; {} if the report of the same name refuses the model."""
    try:
        reports.module(measure.__name__).check(model, request)
    except UserError:
        return {}
    return measure(model, request)


def diversity(model: LazyModel, _: Request) -> Numbers:
    """Returns effective ranks of heads' bilinear forms in percent: keys, rotated keys, values."""
    measured = diversity_measurements.of_model(model.name, model)
    kinds = {"": measured.plain, "_with_rope": measured.rotated, "_of_values": measured.values}
    numbers = {}
    for suffix, layers in kinds.items():
        for name in _PERCENT if layers else ():
            numbers[name + suffix] = _mean(100 * getattr(layer, name) for layer in layers)
    numbers["mean_similarity"] = _mean(layer.mean_similarity for layer in measured.plain)
    numbers["components"] = _mean(layer.components() for layer in measured.plain)
    by_layer = {f"share_layer_{i}": 100 * layer.share for i, layer in enumerate(measured.plain)}
    return numbers | by_layer


def geometry(model: LazyModel, _: Request) -> Numbers:
    """Returns norms of keys, and the overlap of residuals with their base."""
    layers = geometry_measurements.of_model(model)
    numbers = {}
    for name in _GEOMETRY:
        heads = [geometry_measurements.measured(layer["key"], name) for layer in layers]
        if (all_heads := np.concatenate(heads)).size:
            numbers[f"key_{name}"] = float(all_heads.mean())
    return numbers


def logits(model: LazyModel, request: Request) -> Numbers:
    """Returns components for 90 % of the energy of M and E (medians), and their ratios."""
    measured = logit_measurements.measure(model, request.texts, request.lengths)
    results = logit_results.Results(model.name, request, measured)
    kinds = {
        "components_of_m": (logit_measurements.WEIGHTS, 0),
        "components_of_e": (logit_measurements.LOGITS, results.reference_length),
        "components_of_e_causal": (logit_measurements.CAUSAL_LOGITS, results.reference_length),
        "components_of_e_without_rope": (
            logit_measurements.LOGITS_WITHOUT_ROPE,
            results.reference_length,
        ),
    }
    numbers = {
        name: results.median(kind) for name, kind in kinds.items() if kind in measured.energies
    }
    for name in ("e", "e_causal"):
        numbers[f"m_over_{name}"] = numbers["components_of_m"] / numbers[f"components_of_{name}"]
    return numbers | dict(key_channels=float(measured.key_dim))


def compression(model: LazyModel, request: Request) -> Numbers:
    """Returns the increase of perplexity in percent with keys of half rank in all layers."""
    longest = max(request.lengths)
    measured = compression_measurements.measure(model, request.texts, longest, longest)
    results = compression_results.Results(model.name, request, measured)
    methods = {
        "half_rank_by_weights": subspace_methods.WEIGHTS,
        "half_rank_by_all_weights": subspace_methods.JOINT,
        "half_rank_by_text": subspace_methods.CALIBRATED,
        "half_rank_of_context": subspace_methods.CONTEXT,
    }
    times = {
        name: results.relative_perplexity((method, results.at_weights), results.half_rank)
        for name, method in methods.items()
        if (method, results.at_weights) in measured.errors
    }
    return {name: 100 * (ratio.times - 1) for name, ratio in times.items() if ratio}


def behaviour(model: LazyModel, request: Request) -> Numbers:
    """Returns divergences of heads' patterns and outputs, and statistics of their patterns."""
    measured = behaviour_measurements.measure(
        model, request.texts, max(request.lengths), request.seed
    )
    pairs = dict(divergence="divergence_NN", divergence_behind_first="without_first_NN")
    pairs["cka_of_outputs"] = "outputs_NN"
    numbers = {}
    for name, attribute in pairs.items():
        by_layer = [layer.pairs(getattr(layer, attribute)) for layer in measured.layers]
        numbers[name] = _mean(np.concatenate(by_layer))
    for name in _STATISTICS:
        numbers[name] = _mean(np.concatenate(measured.statistic(f"{name}_N")))
    return numbers


def _mean(values: Iterable[float]) -> float:
    """Returns the mean of the finite values; nan if there are none."""
    finite = np.asarray(list(values), np.float64)
    finite = finite[np.isfinite(finite)]
    return float(finite.mean()) if finite.size else float("nan")
