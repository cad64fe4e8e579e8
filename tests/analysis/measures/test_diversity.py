"""Diversity of heads, against definitions by whole forms."""

import numpy as np
import pytest

from kvjax.analysis.measures import diversity, heads as heads_lib
from kvjax.analysis.measures.heads import Heads
from kvjax.foundation.errors import UserError
from kvjax.layers import rope

D, N, H = 12, 4, 6


def _heads(K=N, rotated=slice(0, 0), D=D, seed=0):
    rng = np.random.default_rng(seed)
    frequencies = rope.frequencies(rotated.stop - rotated.start, 50.0)

    def draw(*shape):
        return rng.normal(size=shape)

    weights = draw(D, N, H), draw(D, K, H), draw(D, K, H), draw(N, H, D)
    return Heads(*weights, rotated, frequencies)


def _rotations(count, seed=1):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(count, H, H)))[0]


def _rotated(w_DNH, rotations_NHH):
    return np.einsum("DNH,NHG->DNG", w_DNH, rotations_NHH)


def _gram(left_DNH, right_DNH):
    return diversity.FormProducts(left_DNH, right_DNH).gram()


def _of_forms(forms_NDD):
    return np.einsum("iab,jab->ij", forms_NDD, forms_NDD)


@pytest.mark.parametrize("K", (4, 2, 1))
def test_inner_products_are_those_of_whole_forms(K):
    heads = _heads(K)
    keys_DNH = np.repeat(heads.key_DKH, N // K, axis=1)
    forms = np.einsum("DNH,ENH->NDE", heads.query_DNH, keys_DNH)
    found = _gram(heads.query_DNH, heads.key_DKH)
    np.testing.assert_allclose(found, _of_forms(forms), rtol=1e-12)

    values_DNH = np.repeat(heads.value_DKH, N // K, axis=1)
    circuits = np.einsum("DNH,NHE->NDE", values_DNH, heads.out_NHD)
    found = diversity.of_layer(heads, "value").gram_NN
    np.testing.assert_allclose(found, _of_forms(circuits), rtol=1e-12)


@pytest.mark.parametrize("rotated", (slice(0, 0), slice(0, 6), slice(0, 4), slice(2, 6)))
@pytest.mark.parametrize("K", (4, 2))
def test_means_over_distances_are_the_means_of_sums(rotated, K):
    heads = _heads(K, rotated)
    keys_DNH, rotated_DNH, total = np.repeat(heads.key_DKH, N // K, axis=1), heads.query_DNH, 0
    for _ in range(7):
        total = total + _of_forms(np.einsum("DNH,ENH->NDE", rotated_DNH, keys_DNH))
        rotated_DNH = heads_lib.rotate_one_token(rotated_DNH, heads.rotated, heads.frequencies_F)

    def mean_gram(n):
        return diversity.of_layer(heads, num_distances=n).gram_NN

    np.testing.assert_allclose(mean_gram(7), total / 7, rtol=1e-11)
    np.testing.assert_allclose(mean_gram(1), mean_gram(0), rtol=1e-11)


def test_plain_and_rotated_are_those_of_each_layer():
    heads = _heads(rotated=slice(0, 6))
    plain, rotated = diversity.plain_and_rotated(heads, "key", 7)
    assert plain.rank == diversity.of_layer(heads).rank
    assert rotated.rank == diversity.of_layer(heads, num_distances=7).rank != plain.rank
    assert diversity.plain_and_rotated(_heads(), "key", 7)[1] is None
    assert diversity.plain_and_rotated(heads, "value", 7)[1] is None


def test_equal_frequencies():
    heads = _heads(rotated=slice(0, 6))
    same = np.full(3, 0.7)
    products = diversity.FormProducts(heads.query_DNH, heads.key_DKH)
    found = products.mean_gram(heads.rotated, same, 5)
    rotated_DNH, total = heads.query_DNH, 0
    for _ in range(5):
        total = total + _gram(rotated_DNH, heads.key_DKH)
        rotated_DNH = heads_lib.rotate_one_token(rotated_DNH, heads.rotated, same)
    np.testing.assert_allclose(found, total / 5, rtol=1e-11)


def test_orthogonal_heads_have_all_ranks():
    blocks = np.zeros((N * H, N, H))
    for i in range(N):
        blocks[i * H : (i + 1) * H, i] = np.eye(H) * (i + 1)  # of different norms
    found = diversity.of_gram(_gram(blocks, blocks))
    np.testing.assert_allclose(found.similarity_NN, np.eye(N), atol=1e-15)
    assert found.rank == pytest.approx(N) and found.share == pytest.approx(1)
    assert found.centred_rank == pytest.approx(N - 1)
    assert found.centred_share == pytest.approx((N - 1) / N)
    assert found.centred_share_of_possible == pytest.approx(1)
    assert found.components() == N - 1 and found.components(0.6) == 2
    assert found.mean_similarity == pytest.approx(0)


def test_equal_heads_have_one_direction():
    """Heads have rotations and norms of their own."""
    heads, rotations = _heads(), _rotations(N)
    sizes = np.array([1.0, 2.0, 0.5, 3.0])[:, None, None]

    def copies_of_first(w_DNH):
        return np.repeat(w_DNH[:, :1], N, axis=1)

    query, key = (
        _rotated(copies_of_first(heads.query_DNH), rotations * sizes),
        _rotated(copies_of_first(heads.key_DKH), rotations),
    )
    found = diversity.of_gram(_gram(query, key))
    np.testing.assert_allclose(found.similarity_NN, np.ones((N, N)), rtol=1e-12)
    assert found.rank == pytest.approx(1) and found.centred_rank == 0
    assert found.components() == 0 and found.mean_similarity == pytest.approx(1)
    raw = diversity.centred(found.gram_NN)
    assert np.linalg.matrix_rank(raw) == 1  # sizes differ along one direction


def test_centred_matrices():
    """Equals the inner products of the forms minus their mean."""
    heads = _heads()
    found = diversity.of_layer(heads)
    matrix = diversity.centred(found.similarity_NN)
    forms = np.einsum("DNH,ENH->NDE", heads.query_DNH, heads.key_DKH)
    forms /= np.linalg.norm(forms, axis=(1, 2))[:, None, None]
    np.testing.assert_allclose(matrix, _of_forms(forms - forms.mean(axis=0)), atol=1e-13)


def test_zero_heads_add_no_diversity():
    heads = _heads()
    heads.query_DNH[:, 2] = 0
    found = diversity.of_layer(heads)
    assert found.nothing == (2,)
    np.testing.assert_array_equal(found.similarity_NN[2], 0)
    rest = [0, 1, 3]
    alone = diversity.of_gram(_gram(heads.query_DNH[:, rest], heads.key_DKH[:, rest]))
    assert found.rank == pytest.approx(alone.rank) and alone.nothing == ()
    assert found.centred_rank == pytest.approx(alone.centred_rank)
    assert len(found.uncentred_N) == len(found.centred_N) == N and found.share < alone.share

    heads.query_DNH[:] = 0
    nothing = diversity.of_layer(heads)
    assert nothing.rank == nothing.centred_rank == 0 and nothing.nothing == (0, 1, 2, 3)


def test_one_head_is_refused():
    diversity.check(2)
    with pytest.raises(UserError, match="num_heads = 1: diversity .* needs at least two"):
        diversity.check(1)
