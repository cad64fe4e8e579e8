"""Similarity of projections, against definitions and random matrices."""

import numpy as np
import pytest

from kvjax.analysis.measures import projections

D, N, H = 40, 4, 6


def _draw(K=N, H=H, D=D, seed=0):
    return np.random.default_rng(seed).normal(size=(D, K, H))


def _products(left, right):
    return projections.ProjectionProducts(dict(left=left, right=right))


def test_cosine_of_whole_matrices():
    left, right = _draw(), _draw(seed=1)
    expected = np.sum(left * right) / np.sqrt(np.sum(left**2) * np.sum(right**2))
    assert projections.cosine(left, right) == pytest.approx(expected)
    assert projections.cosine(left, -3 * left) == pytest.approx(-1)


def test_kv_heads_are_repeated_for_query_heads():
    queries, keys = _draw(), _draw(K=2, seed=1)
    whole = np.stack([keys[:, 0], keys[:, 0], keys[:, 1], keys[:, 1]], axis=1)
    found = projections.cosine(queries, keys)
    assert found == pytest.approx(projections.cosine(queries, whole))
    assert found == pytest.approx(projections.cosine(keys, queries))


def test_other_widths_and_zeros_have_no_cosine():
    assert projections.cosine(_draw(), _draw(H=5)) is None
    assert projections.cosine(_draw(), 0 * _draw()) is None


def test_overlap_is_the_cosine_of_second_moments():
    left, right = _draw(), _draw(K=2, H=5, seed=1)

    def moment(w):
        return np.einsum("anh,bnh->ab", w, w)

    moments = moment(left), moment(right)
    expected = np.sum(moments[0] * moments[1]) / np.prod([np.linalg.norm(m) for m in moments])
    assert _products(left, right).overlap("left", "right") == pytest.approx(expected)
    assert _products(left, 2 * left).overlap("left", "right") == pytest.approx(1)
    assert _products(left, 0 * left).overlap("left", "right") is None
    assert _products(left, 0 * left).overlap_by_chance("left", "right") is None


def test_overlap_by_chance_is_the_mean_over_rotations():
    rng = np.random.default_rng(0)
    left, right = _draw() * np.linspace(0.1, 2, D)[:, None, None], _draw(K=2, seed=1)
    draws = []
    for _ in range(60):
        rotation = np.linalg.qr(rng.normal(size=(D, D)))[0]
        draws.append(_products(left, np.tensordot(rotation, right, 1)).overlap("left", "right"))
    expected = _products(left, right).overlap_by_chance("left", "right")
    error = np.std(draws) / np.sqrt(len(draws))
    assert abs(np.mean(draws) - expected) < 4 * error < 0.05 * expected


@pytest.mark.parametrize("shape", ((D, N, H), (8, N, H)))  # tall and wide
def test_effective_ranks(shape):
    left = np.random.default_rng(0).normal(size=shape)
    found = projections.ProjectionProducts(dict(left=left))
    singular = np.linalg.svd(left.reshape(len(left), -1), compute_uv=False)
    for power, rank in zip((1, 2), found.effective_ranks("left"), strict=True):
        share = singular**power / np.sum(singular**power)
        assert rank == pytest.approx(np.exp(-np.sum(share * np.log(share))))
    assert found.possible_rank("left") == min(shape[0], N * H)


@pytest.mark.parametrize("shape", ((300, 300), (400, 100), (100, 400)))
def test_effective_ranks_by_chance_are_those_of_a_random_matrix(shape):
    w = np.random.default_rng(0).normal(size=(shape[0], 1, shape[1]))
    found = projections.ProjectionProducts(dict(w=w)).effective_ranks("w")
    expected = projections.effective_ranks_by_chance(*shape)
    np.testing.assert_allclose(found, expected, rtol=0.01)
