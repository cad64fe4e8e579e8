"""Attention under logits of low rank, against the L x L matrices cut there."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.analysis.measures import activations, logits, truncation
from kvjax.analysis.measures.activations import Mask
from tests import quick
from tests.convert import workdirs

L, N, K, H, HV, SCALE = 13, 4, 2, 6, 3, 0.7
MASKS = [Mask(), Mask(window=5), Mask(causal=False)]
RANKS = (1, 3, H)


def _arrays(seed=0, length=L):
    rng = np.random.default_rng(seed)

    def draw(heads, dim):
        return rng.normal(size=(length, heads, dim)) + rng.normal(size=(heads, dim))

    return draw(N, H), draw(K, H), draw(K, HV)


def _attended(query_LNH, key_LKH, value_LKH, head, rank, mask, softcap):
    """Returns [L, L] probabilities and [L, Hv] outputs, by an SVD of L x L."""
    z_LL = SCALE * query_LNH[:, head] @ key_LKH[:, head // 2].T
    mean_L1 = z_LL.mean(axis=1, keepdims=True)
    u, s, v = np.linalg.svd(z_LL - mean_L1)
    z_LL = (u[:, :rank] * s[:rank]) @ v[:rank] + mean_L1
    z_LL = softcap * np.tanh(z_LL / softcap) if softcap else z_LL
    e_LL = np.where(mask.visible(len(z_LL)), z_LL, -np.inf)
    p_LL = np.exp(e_LL - e_LL.max(axis=1, keepdims=True))
    p_LL /= p_LL.sum(axis=1, keepdims=True)
    return p_LL, p_LL @ value_LKH[:, head // 2]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_errors_are_those_of_the_definition(mask, softcap, monkeypatch):
    """Computes a few rows at a time."""
    monkeypatch.setattr(truncation, "_BATCH_ROWS", 5)
    arrays = _arrays()
    svd = logits.centred_logits(*arrays[:2], SCALE)
    found = truncation.errors(svd, arrays[2], RANKS, mask, softcap)
    for head in range(N):
        p_LL, o_LH = _attended(*arrays, head, H, mask, softcap)
        for i, rank in enumerate(RANKS):
            cut_LL, cut_LH = _attended(*arrays, head, rank, mask, softcap)
            rows_L = np.abs(p_LL - cut_LL).sum(axis=1)
            assert found.mean_NR[head, i] == pytest.approx(rows_L.mean(), abs=1e-12)
            assert found.worst_NR[head, i] == pytest.approx(rows_L.max(), abs=1e-12)
            expected = np.linalg.norm(o_LH - cut_LH) / np.linalg.norm(o_LH)
            assert found.output_NR[head, i] == pytest.approx(expected, abs=1e-12)
    assert found.worst_NR[:, 0].min() > 0.1 and found.worst_NR[:, -1].max() < 1e-12


def test_no_values_are_no_error_of_outputs():
    query_LNH, key_LKH, value_LKH = _arrays()
    svd = logits.centred_logits(query_LNH, key_LKH, SCALE)
    found = truncation.errors(svd, 0 * value_LKH, RANKS, Mask())
    np.testing.assert_array_equal(found.output_NR, 0)


def _check_bound(layer, sequence):
    """Checks proposition 4.1 with and without the mask, on errors that are not 0."""
    row = [x[sequence] for x in (layer.query_BTNH, layer.key_BTKH, layer.value_BTKH)]
    svd = logits.centred_logits(*row[:2], layer.scale)
    ranks = (1, 2, 4)
    bound_NR = np.stack([logits.softmax_bound(svd, r) for r in ranks], axis=1)
    for mask in (Mask(causal=False), layer.mask):
        found = truncation.errors(svd, row[2], ranks, mask)
        assert (found.worst_NR <= bound_NR).all()
        assert (found.mean_NR <= found.worst_NR).all() and found.mean_NR.min() > 0


@pytest.mark.parametrize(
    "name", quick.only(["mistral_lrkv"], ["gqa", "lrkv", "mistral_lrkv", "gpt2_lrkv"])
)
def test_proposition_4_1_holds_in_models(name):
    block, mechanism, _ = workdirs.MODELS[name]
    model = workdirs.Made(workdirs.config(block, mechanism))
    rows_BT = np.random.default_rng(0).integers(0, 256, (2, 30)).astype(np.int32)
    for layer in activations.layers(model, rows_BT):
        for sequence in range(2):
            _check_bound(layer, sequence)


@pytest.mark.parametrize("seed", range(20))
def test_proposition_4_1_holds_where_it_is_tight(seed):
    """Cuts one of two components of small logits: error and bound are of similar size."""
    rng = np.random.default_rng(seed)
    sign_L = rng.choice([-1.0, 1.0], 64)
    query_LNH = rng.normal(size=(64, 1, 2))
    key_LKH = np.stack([rng.normal(size=64), 0.1 * sign_L], axis=1)[:, None]
    svd = logits.centred_logits(query_LNH, key_LKH, 0.1)
    bound = float(logits.softmax_bound(svd, 1)[0])
    worst = float(truncation.errors(svd, key_LKH, [1], Mask(False)).worst_NR[0, 0])
    assert 0.05 * bound < worst <= bound


@pytest.mark.parametrize(
    "mask, length, softcap",
    quick.only(
        [(MASKS[1], L, 1.5)], [(m, length, c) for m in MASKS for length in (L, 4) for c in (0, 1.5)]
    ),
)
def test_attention_of_rank_is_that_of_the_definition(mask, length, softcap):
    """In float32, with more tokens than channels and with fewer."""
    rows = [_arrays(seed, length) for seed in (0, 1)]
    q, k, v = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*rows, strict=True))
    for rank in RANKS:
        o_BTNH = truncation.attention_of_rank(rank)(q, k, v, SCALE, mask, softcap)
        for sequence, arrays in enumerate(rows):
            for head in range(N):
                _, expected_LH = _attended(*arrays, head, rank, mask, softcap)
                np.testing.assert_allclose(o_BTNH[sequence, :, head], expected_LH, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral_lrkv", "gpt2_lrkv"])
def test_perplexity_under_logits_of_some_rank(name):
    """At full rank it is the model's own perplexity."""
    block, mechanism, _ = workdirs.MODELS[name]
    model = workdirs.Made(workdirs.config(block, mechanism))
    rows_BT = np.random.default_rng(0).integers(0, 256, (2, 30)).astype(np.int32)

    def of(rank):
        return activations.perplexity(model, rows_BT, truncation.attention_of_rank(rank))

    expected = activations.perplexity(model, rows_BT)
    assert of(mechanism.query_dim) == pytest.approx(expected, rel=1e-4)
    assert abs(of(1) / expected - 1) > 1e-3
