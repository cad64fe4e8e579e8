"""Bases and residuals, against the mechanism and against definitions."""

import dataclasses

import numpy as np
import pytest

from kvjax.analysis.measures import geometry, heads as heads_lib
from kvjax.analysis.measures.geometry import BaseAndResiduals
from kvjax.foundation.errors import UserError
from tests import quick
from tests.convert import workdirs

D, K, J, R, H = 16, 4, 2, 3, 6


def _parts(seed=0, J=J, R=R):
    rng = np.random.default_rng(seed)
    residual = np.einsum("DKR,KRH->DKH", rng.normal(size=(D, K, R)), rng.normal(size=(K, R, H)))
    return BaseAndResiduals(rng.normal(size=(D, J, H)), residual, R)


def _model(name="lrkv_gqa", **keys):
    block, mechanism, _ = workdirs.MODELS[name]
    mechanism = dataclasses.replace(mechanism, **keys)
    return workdirs.Made(workdirs.config(block, mechanism))


@pytest.mark.parametrize(
    "name", quick.only(("lrkv_gqa",), ("lrkv", "lrkv_gqa", "lrkv_bias", "mistral_lrkv"))
)
@pytest.mark.parametrize("norm", quick.only(("rms_gain",), ("none", "rms", "rms_gain")))
def test_parts_add_up_to_the_heads(name, norm):
    model = _model(name, qk_norm=norm)
    found, expected = geometry.of_layer(model, 1), geometry.totals(model, 1)
    assert list(found) == ["key", "value"]
    for part, total_DKH in expected.items():
        scale = np.abs(total_DKH).max()
        np.testing.assert_allclose(found[part].total_DKH, total_DKH, atol=1e-9 * scale)


@pytest.mark.slow
def test_parts_of_a_base_that_alone_is_rotated():
    model = _model("lrkv", rope="shared")
    found, heads = geometry.of_layer(model, 0)["key"], heads_lib.of_layer(model, 0)
    base, residual = np.split(heads.key_DKH, 2, axis=-1)
    np.testing.assert_allclose(found.base_DKH, base, atol=1e-9)
    np.testing.assert_allclose(found.residual_DKH, residual, atol=1e-9)


def test_tied_values_are_left_out():
    assert list(geometry.of_layer(_model("lrkv", tie="kv"), 0)) == ["key"]


def test_weights_that_are_not_finite_are_named():
    model = _model("lrkv")
    path = ("segments", 0, "attention", "mechanism", "expand_value")
    model.weights[path][1, 2, 0, 3] = np.inf
    with pytest.raises(UserError, match=r"layer 1 of made: weights of values .* heads \[2\]"):
        geometry.of_layer(model, 1)


def test_canonical_parts_depend_on_heads_alone():
    """Moving a common part of the residuals into the base does not change them."""
    parts = _parts()
    mean = parts.canonical()
    np.testing.assert_allclose(mean.total_DKH, parts.total_DKH, atol=1e-13)
    np.testing.assert_allclose(
        mean.residual_DKH.reshape(D, J, K // J, H).sum(axis=2), 0, atol=1e-13
    )
    moved = np.random.default_rng(1).normal(size=(D, J, H))
    other = BaseAndResiduals(
        parts.base_DJH + moved, parts.residual_DKH - np.repeat(moved, K // J, axis=1), R
    )
    for one, same in zip(mean[:2], other.canonical()[:2], strict=True):
        np.testing.assert_allclose(same, one, atol=1e-13)
    raw, shifted = geometry.part_geometry(parts), geometry.part_geometry(other)
    assert np.abs(raw.base_norm_J - shifted.base_norm_J).max() > 0.1


def test_equal_heads_have_zero_canonical_residuals():
    """Rounding, which would have directions, is zero too."""
    total = np.repeat(_parts().base_DJH[:, :1], 3, axis=1) * 0.1
    mean = geometry.canonical_parts(total, 1, R)
    np.testing.assert_array_equal(mean.residual_DKH, 0)
    assert np.isnan(geometry.part_geometry(mean).overlap_K).all()


def test_random_parts_have_the_norms_and_the_rank_of_learned_ones():
    parts = _parts()._replace(residual_DKH=_parts().residual_DKH * np.arange(1, K + 1)[:, None])
    found = geometry.random_like(parts, 0)
    for name in ("base_DJH", "residual_DKH"):
        like = geometry.norms(getattr(parts, name))
        np.testing.assert_allclose(geometry.norms(getattr(found, name)), like)
    np.testing.assert_allclose(geometry.lost(found.residual_DKH, R), 0, atol=1e-9)
    assert np.abs(geometry.cosines(found.total_DKH, parts.total_DKH)).max() < 0.5


def test_part_geometry_of_learned_parts():
    parts = _parts()
    found = geometry.part_geometry(parts)
    for k in range(K):
        base, residual = parts.base_DJH[:, k * J // K], parts.residual_DKH[:, k]
        assert found.base_norm_J[k * J // K] == pytest.approx(np.linalg.norm(base))
        assert found.residual_norm_K[k] == pytest.approx(np.linalg.norm(residual))
        cosine = np.sum(base * residual) / np.linalg.norm(base) / np.linalg.norm(residual)
        assert found.cosine_K[k] == pytest.approx(cosine)

        def onto(w):
            return w @ np.linalg.pinv(w)

        overlap = np.trace(onto(base) @ onto(residual)) / R
        assert found.overlap_K[k] == pytest.approx(overlap)
        assert len(found.angles[k]) == R and (np.diff(found.angles[k]) <= 0).all()


def test_part_geometry_of_canonical_parts_has_the_strongest_directions():
    mean = _parts().canonical()
    found = geometry.part_geometry(mean)
    for k in range(K):
        left, _, _ = np.linalg.svd(mean.residual_DKH[:, k], full_matrices=False)
        base = mean.base_DJH[:, k * J // K]
        expected = np.trace(left[:, :R].T @ base @ np.linalg.pinv(base) @ left[:, :R]) / R
        assert found.overlap_K[k] == pytest.approx(expected)
        assert found.reads[k].shape == (D, R) and len(found.angles[k]) == R


def test_zero_parts():
    parts = _parts()
    found = geometry.part_geometry(parts._replace(residual_DKH=0 * parts.residual_DKH))
    assert np.isnan(found.cosine_K).all() and np.isnan(found.overlap_K).all()
    assert (found.residual_norm_K == 0).all() and all(a.size == 0 for a in found.angles)
    nothing = geometry.part_geometry(parts._replace(base_DJH=0 * parts.base_DJH))
    assert np.isnan(nothing.cosine_K).all()
    np.testing.assert_array_equal(nothing.overlap_K, 0)


@pytest.mark.parametrize("rank", (0, 1, 3, H, H + 2))
def test_lost_is_the_tail_of_the_svd(rank):
    w = _parts().total_DKH
    found = geometry.lost(w, rank)
    for k in range(K):
        values = np.linalg.svd(w[:, k], compute_uv=False)
        np.testing.assert_allclose(found[k], np.sum(values[rank:] ** 2), atol=1e-11)


def _optimal(total_DKH, learned):
    heads = geometry.canonical_parts(total_DKH, learned.base_DJH.shape[1], learned.rank)
    return geometry.best_residuals(
        heads, geometry.part_geometry(heads), learned, geometry.part_geometry(learned).reads
    )


def test_optimal_residuals():
    """Residuals of rank R/2 of one base differ from their mean by rank R, and lose nothing."""
    rng = np.random.default_rng(0)
    low = np.einsum("DKR,KRH->DKH", rng.normal(size=(D, 2, 1)), rng.normal(size=(2, 1, H)))
    learned = BaseAndResiduals(rng.normal(size=(D, 1, H)), low, 2)
    found = _optimal(learned.total_DKH, learned)
    np.testing.assert_allclose(found.with_mean_K, 0, atol=1e-12)
    np.testing.assert_allclose(found.overlap_K, 1)  # one direction each, in the span of both
    energy = geometry.norms(learned.total_DKH) ** 2
    np.testing.assert_allclose(found.alone_K, geometry.lost(learned.total_DKH, 2) / energy)
    assert (found.alone_K > 0.05).all()

    less = _parts(J=1)
    found = _optimal(less.total_DKH, less)
    mean = less.total_DKH - less.total_DKH.mean(axis=1, keepdims=True)
    expected = geometry.lost(mean, R) / geometry.norms(less.total_DKH) ** 2
    np.testing.assert_allclose(found.with_mean_K, expected)
    assert (found.with_mean_K > 0).all() and (found.overlap_K < 1).all()


def test_distance_from_the_best_residual():
    """Compares learned residuals with the truncated SVD of the differences from the mean."""
    parts = _parts(J=1)
    found = _optimal(parts.total_DKH, parts).distance_K
    centred = parts.total_DKH - parts.total_DKH.mean(axis=1, keepdims=True)
    best = np.empty_like(centred)
    for k in range(K):
        left, values, right = np.linalg.svd(centred[:, k], full_matrices=False)
        best[:, k] = left[:, :R] * values[:R] @ right[:R]
        expected = np.linalg.norm(parts.residual_DKH[:, k] - best[:, k])
        assert found[k] == pytest.approx(expected / np.linalg.norm(best[:, k]))
    assert (found > 0.1).all()
    base = (parts.total_DKH - best).mean(axis=1, keepdims=True)
    same = BaseAndResiduals(base, best, R)
    np.testing.assert_allclose(_optimal(parts.total_DKH, same).distance_K, 0, atol=1e-12)
    nothing = parts._replace(residual_DKH=0 * best)
    np.testing.assert_allclose(_optimal(parts.total_DKH, nothing).distance_K, 1)
    assert np.isnan(_optimal(nothing.total_DKH, nothing).distance_K).all()


def test_mechanisms_with_residuals():
    found = {name: geometry.has_residuals(workdirs.MODELS[name][1]) for name in ("lrkv", "mha")}
    assert found == dict(lrkv=True, mha=False) and not geometry.has_residuals(workdirs.mla())
