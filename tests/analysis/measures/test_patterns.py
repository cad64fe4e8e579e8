"""Attention patterns: statistics and divergences, against their definitions."""

import math

import numpy as np
import pytest
from scipy.spatial import distance

from kvjax.analysis.measures import patterns
from kvjax.analysis.measures.activations import Mask, softmax

T, N = 12, 4
MASKS = [Mask(), Mask(window=5), Mask(causal=False)]


def _patterns(mask, seed=0, scale=2.0):
    z_NTT = scale * np.random.default_rng(seed).normal(size=(N, T, T))
    return softmax(z_NTT, mask.visible(T))


def _even(mask):
    visible_TT = mask.visible(T)
    return np.broadcast_to(visible_TT / visible_TT.sum(axis=1, keepdims=True), (1, T, T))


def _one_key(mask, key_of):
    """Returns [1, T, T], all attention of each query on one key."""
    p_1TT = np.zeros((1, T, T))
    for t in range(T):
        p_1TT[0, t, key_of(t)] = 1
    assert (p_1TT[0][~mask.visible(T)] == 0).all()
    return p_1TT


@pytest.mark.parametrize("mask", MASKS)
def test_statistics_are_those_of_the_definition(mask):
    p_NTT, visible_TT = _patterns(mask), mask.visible(T)
    found = patterns.statistics(p_NTT, visible_TT)
    rows = [t for t in range(T) if visible_TT[t].sum() > 1]
    for n in range(N):
        entropies = [-sum(p * math.log(p) for p in p_NTT[n, t] if p > 0) for t in rows]
        most = [math.log(visible_TT[t].sum()) for t in rows]
        behind = [t for t in rows if t > 0]
        expected = dict(
            entropy_N=np.mean(np.divide(entropies, most)),
            keys_N=np.mean(np.exp(entropies)),
            first_N=np.mean([p_NTT[n, t, 0] for t in behind if visible_TT[t, 0]]),
            itself_N=np.mean([p_NTT[n, t, t] for t in rows]),
            previous_N=np.mean([p_NTT[n, t, t - 1] for t in behind]),
            distance_N=np.mean([sum(abs(t - s) * p_NTT[n, t, s] for s in range(T)) for t in rows]),
        )
        for name, value in expected.items():
            assert getattr(found, name)[n] == pytest.approx(value), name


@pytest.mark.parametrize("mask", MASKS)
def test_divergences_are_those_of_the_definition(mask):
    """Compares with the square of SciPy's distance."""
    p_NTT, visible_TT = _patterns(mask), mask.visible(T)
    rows_T = patterns.sees_several_keys(visible_TT)
    found_NN = patterns.divergences(p_NTT, visible_TT)
    for i in range(N):
        for j in range(N):
            apart_T = distance.jensenshannon(p_NTT[i], p_NTT[j], axis=1) ** 2
            assert found_NN[i, j] == pytest.approx(np.nan_to_num(apart_T)[rows_T].mean(), abs=1e-7)
    np.testing.assert_array_equal(found_NN, found_NN.T)
    assert (np.diagonal(found_NN) == 0).all() and found_NN.max() < math.log(2)
    other_NTT = _patterns(mask, seed=1)
    found_N = patterns.divergence(p_NTT, other_NTT, visible_TT)
    for n in range(N):
        apart_T = distance.jensenshannon(p_NTT[n], other_NTT[n], axis=1) ** 2
        assert found_N[n] == pytest.approx(np.nan_to_num(apart_T)[rows_T].mean(), abs=1e-7)


@pytest.mark.parametrize("mask", MASKS)
def test_without_the_first_token(mask):
    """Renormalises over the other keys; uniform if nothing is left."""
    p_NTT, visible_TT = _patterns(mask), mask.visible(T)
    left_NTT, others_TT = patterns.without_first(p_NTT, visible_TT)
    assert not others_TT[:, 0].any() and (others_TT[:, 1:] == visible_TT[:, 1:]).all()
    rows_T = others_TT.any(axis=1)
    np.testing.assert_allclose(left_NTT.sum(axis=2)[:, rows_T], 1)
    t = T - 1
    np.testing.assert_allclose(
        left_NTT[:, t, 1:], p_NTT[:, t, 1:] / (1 - p_NTT[:, t, :1]), rtol=1e-9
    )
    if not mask.window:
        even_NTT, _ = patterns.without_first(_one_key(mask, lambda t: 0), visible_TT)
        count = int(others_TT[t].sum())
        np.testing.assert_allclose(even_NTT[0, t, 1 : 1 + count], 1 / count)


def test_repeated_tokens_and_induction():
    """The score is 1 for attention on the token after the earlier occurrence."""
    tokens_A, block = np.arange(100, 160), T // 2
    rows_BT = patterns.repeated(tokens_A, block, 3, seed=5)
    assert rows_BT.shape == (3, T) and rows_BT.dtype == np.int32
    for row_T in rows_BT:
        assert len(set(row_T[:block].tolist())) == block and set(row_T.tolist()) <= set(tokens_A)
        np.testing.assert_array_equal(row_T[:block], row_T[block:])
    assert (rows_BT[0] != rows_BT[1]).any()
    np.testing.assert_array_equal(rows_BT, patterns.repeated(tokens_A, block, 3, seed=5))
    behind = _one_key(Mask(), lambda t: max(t - block + 1, 0))
    assert patterns.induction(behind, block)[0] == 1
    assert patterns.induction(_one_key(Mask(), lambda t: max(t - block, 0)), block)[0] == 0
    for mask in MASKS[::2]:
        chance = patterns.induction_by_chance(mask.visible(T), block)
        assert patterns.induction(_even(mask), block)[0] == pytest.approx(chance)


def test_queries_of_one_visible_key_are_ignored():
    visible_TT, p_NTT = Mask().visible(T), _patterns(Mask())
    before = patterns.divergences(p_NTT, visible_TT)
    sees_several_T = patterns.sees_several_keys(visible_TT)
    assert not sees_several_T[0] and sees_several_T[1:].all()
    p_NTT[1, 0] = 0
    np.testing.assert_array_equal(patterns.divergences(p_NTT, visible_TT), before)
