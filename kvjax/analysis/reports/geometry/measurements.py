"""Measurements of norms and residuals of every layer's keys and values."""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from kvjax.analysis.measures import geometry, heads as heads_lib
from kvjax.analysis.measures.geometry import BestResiduals, PartGeometry
from kvjax.analysis.measures.logits import parallel_map
from kvjax.convert.factors import few_threads
from kvjax.convert.model import LazyModel

PARTS = ("key", "value")


@dataclasses.dataclass(frozen=True)
class PartMeasurements:
    """The keys or values of a layer; without residuals only norms."""

    total_norm_K: np.ndarray
    rank: int = 0
    best_chance: float | None = None  # overlap of best residuals of unrelated heads
    raw: PartGeometry | None = None
    canonical: PartGeometry | None = None
    own: BestResiduals | None = None
    random: tuple[PartGeometry, PartGeometry, BestResiduals] | None = (
        None  # raw, canonical and own of random factors
    )
    beside: BestResiduals | None = None
    beside_norm_K: np.ndarray | None = None


Layers = list[dict[str, PartMeasurements]]  # by part, of each layer


def of_model(model: LazyModel, beside: LazyModel | None = None, seed: int | None = None) -> Layers:
    """Measures every layer; without a seed, random factors are left out."""
    found = []
    with few_threads(model.transformer.block.d_model):
        for index, config in enumerate(model.transformer.mechanisms):
            other = {}
            if beside is not None and index < len(beside.transformer.mechanisms):
                other = geometry.totals(beside, index)
            if geometry.has_residuals(config):
                parts = geometry.of_layer(model, index)
                seeds = None if seed is None else (seed, index)
                found.append(_of_all_parts(parts, other, seeds))
                continue
            whole = geometry.totals(model, index).items()
            found.append({n: _of_whole(x, other.get(n)) for n, x in whole})
    return found


def check(model: LazyModel, beside: LazyModel | None = None) -> None:
    """Raises a UserError for heads without matrices, unless all layers have residuals."""
    mechanisms = model.transformer.mechanisms
    whole = [i for i, config in enumerate(mechanisms) if not geometry.has_residuals(config)]
    heads_lib.check(model, whole)
    if beside is not None:
        heads_lib.check(beside)


def _of_whole(total_DKH: np.ndarray, other_DKH: np.ndarray | None) -> PartMeasurements:
    beside_norm_K = None if other_DKH is None else geometry.norms(other_DKH)
    return PartMeasurements(geometry.norms(total_DKH), beside_norm_K=beside_norm_K)


def _of_all_parts(
    parts: dict[str, geometry.BaseAndResiduals], other: dict, seeds
) -> dict[str, PartMeasurements]:
    """Measures keys on one core and values on another.

    BLAS threads would wait for each other on matrices one head wide: with two threads on two shared
    cores, the keys of 18 heads of 128 in 2,304 channels took 68 s, and 2.4 s with one.
    """

    def of(name):
        return _of_parts(parts[name], other.get(name), seeds)

    return dict(zip(parts, parallel_map(of, parts), strict=True))


def _of_parts(
    parts: geometry.BaseAndResiduals, other_DKH: np.ndarray | None, seed
) -> PartMeasurements:
    D = len(parts.residual_DKH)
    raw, canonical, own = _both_forms(parts)
    beside = None
    if other_DKH is not None and other_DKH.shape == parts.residual_DKH.shape:
        bases = parts.base_DJH.shape[1]
        heads = geometry.canonical_parts(other_DKH, bases, parts.rank)
        beside = geometry.best_residuals(heads, geometry.part_geometry(heads), parts, raw.reads)
    random = None
    if seed is not None:
        *both, best = _both_forms(geometry.random_like(parts, seed))
        random = (*map(_without_directions, both), best)
    return PartMeasurements(
        geometry.norms(parts.total_DKH),
        rank=parts.rank,
        best_chance=min(parts.rank, D) / D,
        raw=_without_directions(raw),
        canonical=_without_directions(canonical),
        own=own,
        random=random,
        beside=beside,
        beside_norm_K=None if other_DKH is None else geometry.norms(other_DKH),
    )


def _without_directions(split: PartGeometry) -> PartGeometry:
    """Drops the directions, which would take gigabytes over all layers."""
    return split._replace(reads=())


def _both_forms(
    parts: geometry.BaseAndResiduals,
) -> tuple[PartGeometry, PartGeometry, BestResiduals]:
    """Returns the geometry as learned, in canonical form, and the comparison with the best
    residuals.
    """
    raw, heads = geometry.part_geometry(parts), parts.canonical()
    canonical = geometry.part_geometry(heads)
    return raw, canonical, geometry.best_residuals(heads, canonical, parts, raw.reads)


# By head (bases: by base); None where a layer has no such part.
MEASURES: dict[str, Callable[[PartMeasurements], np.ndarray | None]] = {
    "total_norm": lambda part: part.total_norm_K,
    "base_norm": lambda part: part.raw and part.raw.base_norm_J,
    "residual_norm": lambda part: part.raw and part.raw.residual_norm_K,
    "cosine": lambda part: part.raw and part.raw.cosine_K,
    "overlap": lambda part: part.raw and part.raw.overlap_K,
    "canonical_base_norm": lambda part: part.canonical and part.canonical.base_norm_J,
    "canonical_residual_norm": lambda part: part.canonical and part.canonical.residual_norm_K,
    "canonical_cosine": lambda part: part.canonical and part.canonical.cosine_K,
    "canonical_overlap": lambda part: part.canonical and part.canonical.overlap_K,
    "lost_alone": lambda part: part.own and part.own.alone_K,
    "lost_with_mean": lambda part: part.own and part.own.with_mean_K,
    "best_overlap": lambda part: part.own and part.own.overlap_K,
    "best_distance": lambda part: part.own and part.own.distance_K,
    "random_overlap": lambda part: part.random and part.random[0].overlap_K,
    "random_canonical_overlap": lambda part: part.random and part.random[1].overlap_K,
    "random_lost_alone": lambda part: part.random and part.random[2].alone_K,
    "random_lost_with_mean": lambda part: part.random and part.random[2].with_mean_K,
    "random_best_overlap": lambda part: part.random and part.random[2].overlap_K,
    "random_best_distance": lambda part: part.random and part.random[2].distance_K,
    "beside_norm": lambda part: part.beside_norm_K,
    "beside_lost_alone": lambda part: part.beside and part.beside.alone_K,
    "beside_lost_with_mean": lambda part: part.beside and part.beside.with_mean_K,
    "beside_best_overlap": lambda part: part.beside and part.beside.overlap_K,
    "beside_best_distance": lambda part: part.beside and part.beside.distance_K,
}


def numbers(layers: Layers) -> list[dict]:
    """Returns every number of every layer, by part and head."""
    return [{name: _of_part(part) for name, part in layer.items()} for layer in layers]


def _of_part(part: PartMeasurements) -> dict:
    measured = {name: _numbers(pick(part)) for name, pick in MEASURES.items()}
    angles = {
        name: [_numbers(each) for each in split.angles] if split else None
        for name, split in dict(angles=part.raw, canonical_angles=part.canonical).items()
    }
    chance = dict(beside_best_overlap_by_chance=part.best_chance)
    return dict(rank=part.rank) | chance | measured | angles


def _numbers(values: Sequence[float] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [float(x) if np.isfinite(x) else None for x in values]


def measured(part: PartMeasurements, measure: str) -> np.ndarray:
    """Returns one of `MEASURES` of a part, for the heads that have it."""
    return _finite(MEASURES[measure](part))


def mean(values: Sequence[float | None] | None) -> float | None:
    """Returns the mean of the finite values, or None."""
    found = _finite(values)
    return float(found.mean()) if found.size else None


def _finite(values: Sequence[float | None] | None) -> np.ndarray:
    found = np.asarray([] if values is None else values, np.float64)
    return found[np.isfinite(found)]
