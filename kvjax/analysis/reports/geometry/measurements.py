"""Measures norms and residuals of every layer's keys and values."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from kvjax.analysis.measures import geometry, heads as heads_lib
from kvjax.analysis.measures.geometry import BestResiduals, PartGeometry
from kvjax.analysis.measures.logits import parallel_map
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel
from kvjax.foundation import json_text

PARTS = ("key", "value")
_PARTS_MEASURES = ("base_norm", "residual_norm", "cosine", "overlap")
_BEST_MEASURES = ("lost_alone", "lost_with_mean", "best_overlap", "best_distance")
# Names of arrays with a number per head, or per base for base norms. With the prefix "random_" they
# are measured on random factors, with "beside_" against another model's heads.
MEASURES = (
    "total_norm",
    *_PARTS_MEASURES,
    *(f"canonical_{name}" for name in _PARTS_MEASURES),
    *_BEST_MEASURES,
    "random_overlap",
    "random_canonical_overlap",
    *(f"random_{name}" for name in _BEST_MEASURES),
    "beside_norm",
    *(f"beside_{name}" for name in _BEST_MEASURES),
)


@dataclasses.dataclass(frozen=True)
class PartMeasurements:
    """The keys or values of a layer.

    Attributes:
      values: arrays by name, some of `MEASURES`; without residuals, only norms.
      rank: rank of the residuals; 0: no residuals.
      best_chance: expected overlap of residuals with the best residuals of unrelated heads.
      angles: `PartGeometry.angles` of parts as learned ("angles") and canonical
        ("canonical_angles").
    """

    values: Mapping[str, np.ndarray]
    rank: int = 0
    best_chance: float | None = None
    angles: Mapping[str, Sequence[np.ndarray]] = dataclasses.field(default_factory=dict)


Layers = list[dict[str, PartMeasurements]]  # for each layer, the measurements by part


def of_model(model: LazyModel, beside: LazyModel | None = None, seed: int | None = None) -> Layers:
    """Measures every layer.

    Args:
      beside: a model whose heads are measured, too, and compared with.
      seed: of the baseline of random factors; None: no baseline.
    """
    layers = []
    with few_threads(model.transformer.block.d_model):
        for index, config in enumerate(model.transformer.mechanisms):
            other = {}
            if beside is not None and index < len(beside.transformer.mechanisms):
                other = geometry.totals(beside, index)
            if geometry.has_residuals(config):
                parts = geometry.of_layer(model, index)
                seeds = None if seed is None else (seed, index)
                layers.append(_keys_and_values(parts, other, seeds))
                continue
            totals = geometry.totals(model, index).items()
            layers.append({n: PartMeasurements(_norms(x, other.get(n))) for n, x in totals})
    return layers


def check(model: LazyModel, beside: LazyModel | None = None) -> None:
    """Raises a UserError if heads of a layer without residuals, or of `beside`, are not linear."""
    mechanisms = model.transformer.mechanisms
    whole = [i for i, config in enumerate(mechanisms) if not geometry.has_residuals(config)]
    heads_lib.check(model, whole)
    if beside is not None:
        heads_lib.check(beside)


def _norms(total_DKH: np.ndarray, other_DKH: np.ndarray | None) -> dict[str, np.ndarray]:
    beside = {} if other_DKH is None else dict(beside_norm=geometry.norms(other_DKH))
    return dict(total_norm=geometry.norms(total_DKH)) | beside


def _keys_and_values(
    parts: dict[str, geometry.BaseAndResiduals], other: dict, seeds
) -> dict[str, PartMeasurements]:
    """Measures keys and values in parallel, each on one core.

    More BLAS threads would wait for each other on matrices as narrow as a head: on two shared
    cores, keys of 18 heads of 128 channels, D = 2,304, took 68 s with two threads, 2.4 s with one.
    """

    def measure_part(name):
        return _part(parts[name], other.get(name), seeds)

    return dict(zip(parts, parallel_map(measure_part, parts), strict=True))


def _part(parts: geometry.BaseAndResiduals, other_DKH: np.ndarray | None, seed) -> PartMeasurements:
    D = len(parts.residual_DKH)
    raw, canonical, own_best = _both_forms(parts)
    values = _norms(parts.total_DKH, other_DKH)
    values |= _named("", _PARTS_MEASURES, raw) | _named("canonical_", _PARTS_MEASURES, canonical)
    values |= _named("", _BEST_MEASURES, own_best)
    if seed is not None:
        learned, mean, best = _both_forms(geometry.random_like(parts, seed))
        values["random_overlap"] = learned.overlap_K
        values["random_canonical_overlap"] = mean.overlap_K
        values |= _named("random_", _BEST_MEASURES, best)
    if other_DKH is not None and other_DKH.shape == parts.residual_DKH.shape:
        heads = geometry.canonical_parts(other_DKH, parts.base_DJH.shape[1], parts.rank)
        best = geometry.best_residuals(heads, geometry.part_geometry(heads), parts, raw.reads)
        values |= _named("beside_", _BEST_MEASURES, best)
    return PartMeasurements(
        values,
        rank=parts.rank,
        best_chance=min(parts.rank, D) / D,
        angles=dict(angles=raw.angles, canonical_angles=canonical.angles),
    )


def _named(
    prefix: str, names: Sequence[str], numbers: PartGeometry | BestResiduals
) -> dict[str, np.ndarray]:
    """Returns the arrays among a named tuple's fields, by the names in `MEASURES`."""
    arrays = [x for x in numbers if isinstance(x, np.ndarray)]
    return {f"{prefix}{name}": x for name, x in zip(names, arrays, strict=True)}


def _both_forms(
    parts: geometry.BaseAndResiduals,
) -> tuple[PartGeometry, PartGeometry, BestResiduals]:
    """Returns the geometry of the parts as learned and canonical, and their best residuals."""
    raw, heads = geometry.part_geometry(parts), parts.canonical()
    canonical = geometry.part_geometry(heads)
    return raw, canonical, geometry.best_residuals(heads, canonical, parts, raw.reads)


def numbers(layers: Layers) -> list[dict]:
    """Returns every number of every layer, by part and head, JSON-able."""
    return json_text.plain(
        [{name: _part_numbers(part) for name, part in layer.items()} for layer in layers]
    )


def _part_numbers(part: PartMeasurements) -> dict:
    chance = dict(beside_best_overlap_by_chance=part.best_chance)
    arrays = {name: part.values.get(name) for name in MEASURES}
    angles = {name: part.angles.get(name) for name in ("angles", "canonical_angles")}
    return dict(rank=part.rank) | chance | arrays | angles


def measured(part: PartMeasurements, measure: str) -> np.ndarray:
    """Returns the finite values of one of `MEASURES`."""
    return _finite(part.values.get(measure))


def mean(values: Sequence[float | None] | None) -> float | None:
    """Returns the mean of the finite values, or None."""
    finite = _finite(values)
    return float(finite.mean()) if finite.size else None


def _finite(values: Sequence[float | None] | None) -> np.ndarray:
    numbers = np.asarray([] if values is None else values, np.float64)
    return numbers[np.isfinite(numbers)]
