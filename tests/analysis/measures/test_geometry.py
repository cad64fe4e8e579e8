"""Bases and residuals, against what the mechanism computes and against known geometry."""

import dataclasses

import numpy as np
import pytest

from kvjax.analysis.measures import geometry, heads as heads_lib
from kvjax.analysis.measures.geometry import BaseAndResiduals
from kvjax.convert import model as model_lib
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


def test_values_that_are_the_keys_are_not_there_twice():
    assert list(geometry.of_layer(_model("lrkv", tie="kv"), 0)) == ["key"]


def test_weights_that_are_not_finite_are_named():
    model = _model("lrkv")
    path = ("segments", 0, "attention", "mechanism", "expand_value")
    model.weights[path][1, 2, 0, 3] = np.inf
    with pytest.raises(UserError, match=r"layer 1 of made: weights of values .* heads \[2\]"):
        geometry.of_layer(model, 1)


def test_the_canonical_gauge_is_that_of_the_heads():
    """It keeps the heads, and moving what residuals share into the base does not change it."""
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


def test_heads_alike_have_no_residual_in_the_canonical_gauge():
    """Not their rounding, which would have directions."""
    total = np.repeat(_parts().base_DJH[:, :1], 3, axis=1) * 0.1
    mean = geometry.canonical_parts(total, 1, R)
    np.testing.assert_array_equal(mean.residual_DKH, 0)
    assert np.isnan(geometry.part_geometry(mean).overlap_K).all()


def test_random_parts_have_the_norms_and_the_rank_of_those_they_stand_beside():
    parts = _parts()._replace(residual_DKH=_parts().residual_DKH * np.arange(1, K + 1)[:, None])
    found = geometry.random_like(parts, 0)
    for name in ("base_DJH", "residual_DKH"):
        like = geometry.norms(getattr(parts, name))
        np.testing.assert_allclose(geometry.norms(getattr(found, name)), like)
    np.testing.assert_allclose(geometry.lost(found.residual_DKH, R), 0, atol=1e-9)
    assert np.abs(geometry.cosines(found.total_DKH, parts.total_DKH)).max() < 0.5


def test_split_against_its_definition():
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


def test_split_takes_the_strongest_directions_in_the_canonical_gauge():
    mean = _parts().canonical()
    found = geometry.part_geometry(mean)
    for k in range(K):
        left, _, _ = np.linalg.svd(mean.residual_DKH[:, k], full_matrices=False)
        base = mean.base_DJH[:, k * J // K]
        expected = np.trace(left[:, :R].T @ base @ np.linalg.pinv(base) @ left[:, :R]) / R
        assert found.overlap_K[k] == pytest.approx(expected)
        assert found.reads[k].shape == (D, R) and len(found.angles[k]) == R


def test_parts_of_other_channels_and_of_the_same():
    parts = _parts(J=1)
    base, residual = np.zeros((D, 1, H)), np.zeros((D, K, H))
    base[:H, 0] = np.eye(H)
    residual[H : H + R] = np.random.default_rng(0).normal(size=(R, K, H))
    apart = geometry.part_geometry(BaseAndResiduals(base, residual, R))
    np.testing.assert_allclose(apart.overlap_K, 0, atol=1e-15)
    np.testing.assert_allclose(apart.cosine_K, 0, atol=1e-15)
    mixed = np.einsum("DH,KHG->DKG", base[:, 0], np.random.default_rng(0).normal(size=(K, H, H)))
    best = BaseAndResiduals(base, mixed, R)
    np.testing.assert_allclose(geometry.part_geometry(best).overlap_K, 1)
    inside = geometry.part_geometry(
        parts._replace(residual_DKH=np.repeat(-2 * parts.base_DJH, K, 1))
    )
    np.testing.assert_allclose(inside.cosine_K, -1)


def test_overlap_by_chance():
    """H/D on average, over random residuals."""
    found = [geometry.part_geometry(_parts(seed)).overlap_K.mean() for seed in range(150)]
    assert abs(np.mean(found) - H / D) < 4 * np.std(found) / np.sqrt(len(found)) < 0.05


def test_residuals_of_nothing():
    parts = _parts()
    found = geometry.part_geometry(parts._replace(residual_DKH=0 * parts.residual_DKH))
    assert np.isnan(found.cosine_K).all() and np.isnan(found.overlap_K).all()
    assert (found.residual_norm_K == 0).all() and all(a.size == 0 for a in found.angles)
    nothing = geometry.part_geometry(parts._replace(base_DJH=0 * parts.base_DJH))
    assert np.isnan(nothing.cosine_K).all()
    np.testing.assert_array_equal(nothing.overlap_K, 0)


@pytest.mark.parametrize("rank", (0, 1, 3, H, H + 2))
def test_what_the_best_matrix_of_a_rank_leaves(rank):
    """That of a truncated SVD, and no other matrix of the rank leaves less."""
    w = _parts().total_DKH
    found = geometry.lost(w, rank)
    rng = np.random.default_rng(0)
    for k in range(K):
        values = np.linalg.svd(w[:, k], compute_uv=False)
        np.testing.assert_allclose(found[k], np.sum(values[rank:] ** 2), atol=1e-11)
        for _ in range(20):
            columns = np.linalg.qr(rng.normal(size=(D, min(rank, D))))[0]
            left = w[:, k] - columns @ (columns.T @ w[:, k])
            assert np.sum(left**2) >= found[k] * (1 - 1e-12)


def _optimal(total_DKH, learned):
    heads = geometry.canonical_parts(total_DKH, learned.base_DJH.shape[1], learned.rank)
    return geometry.best_residuals(
        heads, geometry.part_geometry(heads), learned, geometry.part_geometry(learned).reads
    )


def test_optimal_residuals():
    """With the mean as the base, R directions of each head are lost nothing of if they are enough.

    Residuals of a base whose own rank is R/2 differ from their mean by rank R.
    """
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
    """The truncated SVD of what differs from the mean, and the learned residual as it is."""
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


@pytest.mark.slow
def test_unrelated_residuals_as_large_as_the_best():
    """Their distance is sqrt(2) on average, as `Optimal` says."""
    squares = []
    for seed in range(150):
        one, other = _parts(seed), _parts(seed + 1000)
        heads = geometry.canonical_parts(other.total_DKH, J, R)
        best = [
            r @ r.T @ heads.residual_DKH[:, k]
            for k, r in enumerate(geometry.part_geometry(heads).reads)
        ]
        size = geometry.norms(np.stack(best, axis=1)) / geometry.norms(one.residual_DKH)
        one = one._replace(residual_DKH=one.residual_DKH * size[:, None])
        squares.append(np.mean(_optimal(other.total_DKH, one).distance_K ** 2))
    assert abs(np.mean(squares) - 2) < 4 * np.std(squares) / np.sqrt(len(squares)) < 0.1


def test_which_mechanisms_have_residuals():
    def of(name):
        return workdirs.MODELS[name][1]

    assert geometry.has_residuals(of("lrkv")) and geometry.has_residuals(of("lrkv_gqa"))
    for other in (of("mha"), of("mqa"), of("thin_keys"), workdirs.mla()):
        assert not geometry.has_residuals(other)
    read = model_lib.read_layer(_model("lrkv"), 0)["attention"]["mechanism"]
    assert geometry.read(read, of("lrkv"))["key"].rank == 3
