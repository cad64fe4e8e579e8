"""Spectra by thin factors, against the whole matrices."""

import numpy as np
import pytest

from kvjax.analysis.measures import heads as heads_lib, logits, spectrum
from kvjax.analysis.measures.activations import Mask

N, K, H, SCALE = 4, 2, 5, 0.3
MASKS = [Mask(), Mask(window=4), Mask(causal=False)]


def _keys(length=12, seed=0):
    """Returns queries and keys, the keys far from centred."""
    rng = np.random.default_rng(seed)
    query_LNH = rng.normal(size=(length, N, H)) + rng.normal(size=(N, H))
    key_LKH = rng.normal(size=(length, K, H)) + 3 * rng.normal(size=(K, H))
    return query_LNH, key_LKH


def _matrices(query_LNH, key_LKH):
    """Returns [N, L, L] logits minus the mean of their row."""
    key_LNH = np.repeat(key_LKH, N // K, axis=1)
    z_NLL = SCALE * np.einsum("LNH,MNH->NLM", query_LNH, key_LNH)
    return z_NLL - z_NLL.mean(axis=2, keepdims=True)


def _softmax(z, visible):
    p = np.where(visible, np.exp(z - z.max(axis=-1, keepdims=True)), 0)
    return p / p.sum(axis=-1, keepdims=True)


@pytest.fixture(params=[12, 5, 3])
def arrays(request):
    """Queries and keys of more tokens than channels, of equally many, and of fewer."""
    return _keys(request.param)


def test_field_is_the_svd_of_the_matrix(arrays):
    found, e_NLL = logits.centred_logits(*arrays, SCALE), _matrices(*arrays)
    L = e_NLL.shape[1]
    assert found.values_NR.shape == (N, min(L, H))
    energies_NR = logits.energies(*arrays, SCALE)
    np.testing.assert_allclose(energies_NR, found.energies_NR, atol=1e-12 * energies_NR.max())
    values_NL = np.linalg.svd(e_NLL, compute_uv=False)
    rank = min(L - 1, H)
    np.testing.assert_allclose(found.values_NR[:, :rank], values_NL[:, :rank], rtol=1e-10)
    assert (found.values_NR[:, rank:] < 1e-12).all() and (values_NL[:, rank:] < 1e-12).all()
    eye = np.eye(found.values_NR.shape[1])
    for vectors_NLR in (found.left_NLR, found.right_NLR):
        gram_NRR = vectors_NLR.swapaxes(1, 2) @ vectors_NLR
        np.testing.assert_allclose(gram_NRR, np.broadcast_to(eye, gram_NRR.shape), atol=1e-12)
    for head in range(N):
        whole_LL = found.truncated(head)
        np.testing.assert_allclose(whole_LL, e_NLL[head], atol=1e-12)
        np.testing.assert_allclose(whole_LL.sum(axis=1), 0, atol=1e-12)
        for r in range(1, rank):
            u, s, v = np.linalg.svd(e_NLL[head])
            np.testing.assert_allclose(
                found.truncated(head, r), (u[:, :r] * s[:r]) @ v[:r], atol=1e-11
            )


def test_a_known_spectrum():
    """Singular values 4, 2, 1 and 1 hold shares of .73, .91, .95 and 1 of the energy."""
    rng = np.random.default_rng(1)
    left_LR = np.linalg.qr(rng.normal(size=(9, 4)))[0]
    right_LR = np.linalg.qr(np.column_stack([np.ones(9), rng.normal(size=(9, 4))]))[0][:, 1:]
    found = logits.centred_logits((left_LR * [4, 2, 1, 1])[:, None], right_LR[:, None] + 7, 0.5)
    np.testing.assert_allclose(found.values_NR, [[2, 1, 0.5, 0.5]], atol=1e-12)
    ranks = [
        int(spectrum.energy_rank(found.energies_NR, share)[0]) for share in (0.7, 0.8, 0.95, 0.99)
    ]
    assert ranks == [1, 2, 3, 4]
    np.testing.assert_allclose(
        spectrum.cumulative(found.energies_NR)[0], np.array([16, 20, 21, 22]) / 22, atol=1e-12
    )


@pytest.mark.parametrize("mask", MASKS)
def test_masked_field(mask):
    """Rows have the softmax of the visible logits, mean 0, and zeros elsewhere."""
    query_LNH, key_LKH = _keys()
    visible_LL = mask.visible(12)
    energies_NL = logits.masked_energies(query_LNH, key_LKH, SCALE, mask)
    for head in range(N):
        q_LH, k_LH = query_LNH[:, head], key_LKH[:, head // 2]
        e_LL = logits.masked_centred_logits(q_LH, k_LH, SCALE, mask)
        np.testing.assert_array_equal(e_LL[~visible_LL], 0)
        np.testing.assert_allclose(e_LL.sum(axis=1), 0, atol=1e-12)
        expected_LL = _softmax(SCALE * q_LH @ k_LH.T, visible_LL)
        np.testing.assert_allclose(_softmax(e_LL, visible_LL), expected_LL, atol=1e-12)
        values_L = np.linalg.svd(e_LL, compute_uv=False)
        np.testing.assert_allclose(energies_NL[head], values_L**2, atol=1e-10 * values_L[0] ** 2)
    if not mask.causal:
        e_NLL = _matrices(query_LNH, key_LKH)
        np.testing.assert_allclose(e_LL, e_NLL[-1], atol=1e-12)


def _heads(rotated=slice(2, 6), d_model=9):
    rng = np.random.default_rng(3)

    def draw(heads):
        return rng.normal(size=(d_model, heads, 6))

    pairs = (rotated.stop - rotated.start) // 2
    return heads_lib.Heads(
        draw(N),
        draw(K),
        draw(K),
        draw(N).transpose(1, 2, 0),
        rotated,
        np.array([1.0, 0.2])[:pairs],
    )


def _interactions(heads, distance):
    """Returns [N, D, D] forms, queries rotated one token at a time."""
    query_DNH = heads.query_DNH
    for _ in range(distance):
        query_DNH = heads_lib.rotate_one_token(query_DNH, heads.rotated, heads.frequencies_F)
    return np.einsum("DNH,ENH->NDE", query_DNH, np.repeat(heads.key_DKH, N // K, axis=1))


@pytest.mark.parametrize("d_model", [9, 4])
def test_interaction_is_that_of_the_weights(d_model):
    """Energies are those of D x D matrices: without RoPE, at a distance, and over all pairs."""
    heads = _heads(d_model=d_model)
    found = logits.Interaction(heads)

    def check(energies_NH, m_NDD):
        expected_ND = np.linalg.svd(m_NDD, compute_uv=False)[:, : min(6, d_model)] ** 2
        np.testing.assert_allclose(energies_NH, expected_ND, atol=1e-9 * expected_ND.max())

    by_distance = [_interactions(heads, distance) for distance in range(4)]
    check(found.energies(), by_distance[0])
    check(found.energies_at(3), by_distance[3])
    pairs = [by_distance[i - j] for i in range(4) for j in range(i + 1)]
    check(found.energies_averaged(4), np.mean(pairs, axis=0))
    assert not np.allclose(found.energies_at(3), found.energies())
    mean_energy_N = np.mean([(m_NDD**2).sum(axis=(1, 2)) for m_NDD in pairs], axis=0)
    assert (found.energies_averaged(4).sum(axis=1) < mean_energy_N).all()


def test_interaction_without_rope_is_equal_at_all_distances():
    heads = _heads(rotated=slice(0, 0))
    found = logits.Interaction(heads)
    np.testing.assert_array_equal(found.energies_at(5), found.energies())
    np.testing.assert_allclose(found.energies_averaged(7), found.energies(), rtol=1e-12)


def test_delocalisation_of_known_vectors():
    """A single different key has beta near sqrt(L), alternating ones 1."""
    rng = np.random.default_rng(5)
    query_LNH = rng.normal(size=(16, 1, 1))
    single, alternating = np.zeros((16, 1, 1)), np.ones((16, 1, 1))
    single[3], alternating[::2] = 1, -1

    def beta(key_LKH):
        return float(logits.beta(logits.centred_logits(query_LNH, key_LKH, 1.0))[0])

    assert beta(single) == pytest.approx(4 * np.sqrt(15 / 16))  # the vector is centred
    assert beta(alternating) == pytest.approx(1)
    assert beta(0 * single) == 0
    query_LNH, key_LKH = _keys()
    key_LKH[..., -1] = 2 * key_LKH[..., 0]  # removes a direction
    found = logits.centred_logits(query_LNH, key_LKH, 1.0)
    spread_NR = logits.delocalisation(found)
    np.testing.assert_array_equal(np.isnan(spread_NR), np.tile(np.arange(H) == H - 1, (N, 1)))
    np.testing.assert_array_equal(logits.beta(found), np.nanmax(spread_NR, axis=1))
    assert (1 <= logits.beta(found)).all() and (logits.beta(found) <= np.sqrt(12)).all()


def test_softmax_bound_is_that_of_the_definition():
    found = logits.centred_logits(*_keys(), SCALE)
    for head, e_LL in enumerate(_matrices(*_keys())):
        _, values_L, right_LL = np.linalg.svd(e_LL)
        beta = np.sqrt(12) * np.abs(right_LL[:H]).max()
        assert logits.beta(found)[head] == pytest.approx(beta)
        for rank in range(H + 1):
            expected = beta / np.sqrt(12) * values_L[rank:H].sum()
            assert logits.softmax_bound(found, rank)[head] == pytest.approx(expected)


def test_geometry_of_known_keys():
    hadamard = np.array([[1, 1], [1, -1]])
    even_LH = np.kron(hadamard, np.kron(hadamard, hadamard))[:, :3] * np.array([4, 2, 1])
    alone_LH = np.vstack([np.eye(3)[0], np.kron(np.ones((7, 1)), np.eye(3)[1:2])])
    found = logits.key_geometry(np.stack([even_LH, alone_LH, even_LH * [1, 1, 0]], axis=1))
    np.testing.assert_allclose(found.incoherence_K, [1, 8 / 2, 1])  # of rank 3, 2 and 2
    np.testing.assert_allclose(found.condition_K, [4, np.sqrt(7), 2])
    rng = np.random.default_rng(6)
    few_LKH = rng.normal(size=(4, K, H))
    np.testing.assert_allclose(logits.key_geometry(few_LKH).incoherence_K, 1)
    values_KR = np.linalg.svd(few_LKH.swapaxes(0, 1), compute_uv=False)
    expected_K = values_KR[:, 0] / values_KR[:, -1]
    np.testing.assert_allclose(logits.key_geometry(few_LKH).condition_K, expected_K)
