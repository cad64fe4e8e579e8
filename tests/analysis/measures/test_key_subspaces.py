"""Subspaces of keys, against definitions by whole matrices."""

import numpy as np
import pytest

from kvjax.analysis.measures import (
    activations,
    heads as heads_lib,
    key_drift,
    key_subspaces,
    subspace_methods,
)
from kvjax.analysis.measures.activations import Layer, Mask
from kvjax.analysis.measures.key_subspaces import Rope
from tests.convert import workdirs

B, T, N, K, H, SCALE = 2, 24, 4, 2, 6, 0.7
ROPE = Rope(2, (1.0, 0.3))  # channels 2 to 5
ALL = Mask(causal=False)


def _orthogonal(rng, n=H):
    return np.linalg.qr(rng.normal(size=(n, n)))[0]


def _arrays(seed=0, rank=H):
    """Returns queries, keys of a rank plus a mean, values."""
    rng = np.random.default_rng(seed)
    scale_H = 2.0 ** -np.arange(H)
    query_BTNH = rng.normal(size=(B, T, N, H)) * scale_H @ _orthogonal(rng)
    inner_BTKR = rng.normal(size=(B, T, K, rank))
    key_BTKH = inner_BTKR @ rng.normal(size=(rank, H)) + rng.normal(size=(K, H))
    return query_BTNH, key_BTKH, rng.normal(size=(B, T, K, 3))


def _layer(query_BTNH, key_BTKH, value_BTKH, mask=ALL, input_BTD=None):
    return Layer(query_BTNH, key_BTKH, value_BTKH, query_BTNH, key_BTKH, input_BTD, SCALE, mask)


def _of(query_BTNH, key_BTKH, each_row=True):
    return key_subspaces.of_text(key_subspaces.moments(query_BTNH, K), key_BTKH, each_row=each_row)


def _lost(query_TNH, key_TKH, cut_TKH):
    """Returns [K] squared errors of centred logits, summed over a KV head's queries."""
    lost_K = np.zeros(K)
    for n in range(N):
        z_TT = query_TNH[:, n] @ (cut_TKH - key_TKH)[:, n * K // N].T
        lost_K[n * K // N] += ((z_TT - z_TT.mean(axis=1, keepdims=True)) ** 2).sum()
    return lost_K


@pytest.mark.parametrize("r", [1, 2, 4])
def test_subspaces_of_a_text_are_its_truncated_svd(r):
    """Loses what the truncated SVD of the logits loses, and less than random subspaces."""
    query_BTNH, key_BTKH, _ = _arrays()
    query_TNH, key_TKH = query_BTNH[0], key_BTKH[0]
    found = _of(query_BTNH[:1], key_BTKH[:1])
    lost_K = _lost(query_TNH, key_TKH, found.cut(key_TKH, r))
    for k in range(K):
        query_XH = query_TNH[:, 2 * k : 2 * k + 2].reshape(-1, H)
        z_XT = query_XH @ key_TKH[:, k].T
        energies = np.linalg.svd(z_XT - z_XT.mean(axis=1, keepdims=True), compute_uv=False) ** 2
        assert lost_K[k] == pytest.approx(energies[r:].sum(), rel=1e-6)
    rng = np.random.default_rng(1)
    for _ in range(50):
        q_KHH = np.stack([_orthogonal(rng) for _ in range(K)])
        other = key_subspaces.Subspaces(found.center_JC, q_KHH, q_KHH.swapaxes(1, 2))
        assert (_lost(query_TNH, key_TKH, other.cut(key_TKH, r)) > lost_K).all()


def test_centring_by_row_is_best_for_centred_logits():
    """Centring all rows together is best for logits as they are."""
    query_BTNH, key_BTKH, _ = _arrays()
    key_BTKH[1] += 10 * np.random.default_rng(5).normal(size=(K, H))
    each, together = (_of(query_BTNH, key_BTKH, each_row=flag) for flag in (True, False))
    np.testing.assert_allclose(each.center_JC, key_BTKH.mean(axis=(0, 1)))

    def lost(of):
        return sum(_lost(q, k, of.cut(k, 2)) for q, k in zip(query_BTNH, key_BTKH, strict=True))

    assert (lost(each) < 0.9 * lost(together)).all()

    def whole(of):
        return sum(
            ((q[:, 2 * k : 2 * k + 2] @ (of.cut(x, 2) - x)[:, k].T) ** 2).sum()
            for q, x in zip(query_BTNH, key_BTKH, strict=True)
            for k in range(K)
        )

    assert whole(together) < whole(each)


@pytest.mark.parametrize("s", [3])
def test_keys_of_some_rank_keep_their_subspace(s):
    """Keys of rank s: the first tokens' subspace equals that of all tokens and loses nothing."""
    query_BTNH, key_BTKH, _ = _arrays(rank=s)
    few, whole = (_of(query_BTNH[:1, :t], key_BTKH[:1, :t]) for t in (8, T))
    np.testing.assert_allclose(key_subspaces.overlap(few.first(s), whole.first(s)), 1, atol=1e-9)
    centred_TKH = key_BTKH[0] - key_BTKH[0].mean(axis=0)
    written_KSH = few.first(s).write_JRC
    for k in range(K):
        left_TH = centred_TKH[:, k] @ np.linalg.pinv(written_KSH[k]) @ written_KSH[k]
        np.testing.assert_allclose(left_TH, centred_TKH[:, k], atol=1e-9)
    for r in (s, s + 1, H):
        assert _lost(query_BTNH[0], key_BTKH[0], few.cut(key_BTKH[0], r)).max() < 1e-16 * T**2
    if s > 1:
        assert _lost(query_BTNH[0], key_BTKH[0], few.cut(key_BTKH[0], s - 1)).min() > 1e-3
    other = _of(query_BTNH[:1, :8], _arrays(3, rank=s)[1][:1, :8])
    assert key_subspaces.overlap(few.first(s), other.first(s)).max() < 0.95


def test_overlap():
    """Is 1 in any basis of one subspace, 0 if orthogonal, a squared cosine at one angle."""
    eye, rng = np.eye(H), np.random.default_rng(0)

    def of(*rows):
        return key_subspaces.Subspaces(
            np.zeros((1, H)), np.stack(rows, axis=1)[None], np.stack(rows)[None]
        )

    mixed = rng.normal(size=(2, 2)) @ eye[:2]
    assert key_subspaces.overlap(of(*eye[:2]), of(*mixed))[0] == pytest.approx(1)
    assert key_subspaces.overlap(of(*eye[:2]), of(*eye[2:4]))[0] == pytest.approx(0)
    tilted = np.cos(0.3) * eye[0] + np.sin(0.3) * eye[4]
    angle = key_subspaces.overlap(of(eye[0], eye[1]), of(tilted, eye[2]))[0]
    assert angle == pytest.approx(np.cos(0.3) ** 2 / 2)


def test_rotated_moments_are_means_over_visible_pairs():
    query_BTNH = _arrays()[0][0, :, :, None].swapaxes(1, 2).reshape(T, N, H)
    plain_KHH = key_subspaces.moments(query_BTNH[None], K)
    for mask in (Mask(), Mask(window=3), ALL):
        found_KHH = key_subspaces.rotated_moments(plain_KHH, ROPE, mask, 7)
        expected_KHH, visible = np.zeros((K, H, H)), np.argwhere(mask.visible(7))
        for t, s in visible:
            rotation_HH = _rotation(t - s)
            expected_KHH += rotation_HH @ plain_KHH @ rotation_HH.T / len(visible)
        np.testing.assert_allclose(found_KHH, expected_KHH, atol=1e-12)
    nothing = Rope(0, ())
    same_KHH = key_subspaces.rotated_moments(plain_KHH, nothing, Mask(), 7)
    np.testing.assert_allclose(same_KHH, plain_KHH, atol=1e-12)


def _rotation(distance):
    """Returns [H, H], RoPE by a number of tokens."""
    rotation_HH = np.eye(H)
    for f, angle in enumerate(np.array(ROPE.frequencies) * distance):
        pair = np.ix_([2 + f, 4 + f], [2 + f, 4 + f])
        rotation_HH[pair] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return rotation_HH


def test_keys_are_rotated_by_their_positions():
    x_TKH = _arrays()[1][0]
    expected = np.stack([x_KH @ _rotation(t).T for t, x_KH in enumerate(x_TKH)])
    np.testing.assert_allclose(key_subspaces.rotate_by_position(x_TKH, ROPE), expected, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mha", "lrkv", "mistral_lrkv", "qwen2_thin", "gpt2_lrkv", "mla"],
)
def test_rotated_keys_and_biases_are_those_of_attention(name):
    """Includes mechanisms that rotate some channels only."""
    if name == "mla":
        block, mechanism = "nanochat", workdirs.mla()
    else:
        block, mechanism, _ = workdirs.MODELS[name]
    model = workdirs.Made(workdirs.config(block, mechanism))
    rows_BT = np.random.default_rng(0).integers(0, 256, (2, 12)).astype(np.int32)
    layers = zip(heads_lib.layers(model), activations.layers(model, rows_BT), strict=True)
    for i, (heads, layer) in enumerate(layers):
        if len(heads.frequencies_F):
            found = key_subspaces.rotate_by_position(
                layer.plain_key_BTKH[0], key_subspaces.rope_of(heads)
            )
            np.testing.assert_allclose(found, layer.key_BTKH[0], atol=1e-4)
        bias_KH = key_subspaces.bias(layer, heads)
        base_bias = model.weights.get(("segments", 0, "attention", "mechanism", "base_key_bias"))
        if name == "gpt2_lrkv":
            latent = ("segments", 0, "attention", "mechanism")
            latent_bias = model.weights[*latent, "latent_key_bias"][i]
            expand = model.weights[*latent, "expand_key"][i]
            expected = base_bias[i] + np.einsum("KR,KRH->KH", latent_bias, expand)
            np.testing.assert_allclose(bias_KH, expected, atol=1e-4)
        elif name != "qwen2_thin":
            assert np.abs(bias_KH).max() < 1e-4
        else:
            assert np.abs(bias_KH).max() > 0.1


def test_subspaces_of_weights():
    """Truncates the SVD of each head's weights, or of all heads' together."""
    rng = np.random.default_rng(0)
    key_DKH, bias_KH, x_TD = rng.normal(size=(9, K, H)), rng.normal(size=(K, H)), np.eye(9)
    key_TKH = np.tensordot(x_TD, key_DKH, 1) + bias_KH
    for r in (1, 3, H):
        cut = key_subspaces.of_weights(key_DKH, bias_KH).cut(key_TKH, r) - bias_KH
        for k in range(K):
            u, s, v = np.linalg.svd(key_DKH[:, k], full_matrices=False)
            np.testing.assert_allclose(cut[:, k], (u[:, :r] * s[:r]) @ v[:r], atol=1e-12)
    together = key_subspaces.of_weights(key_DKH, bias_KH, together=True)
    u, s, v = np.linalg.svd(key_DKH.reshape(9, -1), full_matrices=False)
    cut = (together.cut(key_TKH, 5) - bias_KH).reshape(9, -1)
    np.testing.assert_allclose(cut, (u[:, :5] * s[:5]) @ v[:5], atol=1e-12)
    wide = key_subspaces.of_weights(key_DKH[:4], bias_KH)  # fewer inputs than channels
    np.testing.assert_allclose(wide.cut(key_TKH[:4], 4), key_TKH[:4], atol=1e-12)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=5), ALL])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_errors_are_those_of_the_definition(mask, softcap):
    query_BTNH, key_BTKH, value_BTKH = _arrays()
    layer, queries = _layer(query_BTNH, key_BTKH, value_BTKH, mask), slice(9, None, 2)
    layer = layer._replace(softcap=softcap)
    subspaces = _of(query_BTNH, key_BTKH)
    cuts = [subspaces.cut(key_BTKH[1], r) for r in (1, 3, H)]
    found = key_subspaces.errors(layer, 1, cuts, queries)
    visible_TT = mask.visible(T)[queries]
    for n in range(N):
        made = []
        for key_TKH in (key_BTKH[1], *cuts):
            z_TT = SCALE * query_BTNH[1, queries, n] @ key_TKH[:, n // 2].T
            z_TT = softcap * np.tanh(z_TT / softcap) if softcap else z_TT
            z_TT = np.where(visible_TT, z_TT, np.nan)
            e_TT = np.nan_to_num(z_TT - np.nanmean(z_TT, axis=1, keepdims=True))
            p_TT = np.where(visible_TT, np.exp(e_TT), 0)
            made.append((e_TT, p_TT / p_TT.sum(axis=1, keepdims=True) @ value_BTKH[1, :, n // 2]))
        for a in range(3):
            for actual, j in ((found.logit_NA, 0), (found.output_NA, 1)):
                expected = np.linalg.norm(made[a + 1][j] - made[0][j]) / np.linalg.norm(made[0][j])
                assert actual[n, a] == pytest.approx(expected, abs=1e-12)
    assert found.logit_NA[:, 0].min() > 0.1 and found.logit_NA[:, 2].max() < 1e-12
    still = key_subspaces.errors(layer._replace(value_BTKH=0 * value_BTKH), 1, cuts, queries)
    np.testing.assert_array_equal(still.output_NA, 0)


def test_full_rank_loses_nothing_on_any_text():
    """Holds for subspaces of low-rank keys, and of a single token."""
    query_BTNH, key_BTKH, _ = _arrays()
    for of in (
        _of(*(x[:1, :2] for x in _arrays(1, rank=1)[:2])),
        _of(0 * query_BTNH[:, :1], key_BTKH[:, :1]),
    ):
        np.testing.assert_allclose(of.cut(key_BTKH[0], H), key_BTKH[0], atol=1e-9)


def _process(seed, T, H, change_HH=None, heads=3):
    """Returns a row of independent queries and keys, channels falling as 1/i.

    Args:
      change_HH: map of the second half's keys.
    """
    rng, scale_H = np.random.default_rng(seed), 1 / np.arange(1, H + 1)
    query_TNH = rng.normal(size=(T, heads, H)) * scale_H @ _orthogonal(rng, H)
    key_TKH = rng.normal(size=(T, heads, H)) * scale_H
    if change_HH is not None:
        key_TKH[T // 2 :] = key_TKH[T // 2 :] @ change_HH
    value_TKH = np.ones((T, heads, 1))
    return _layer(query_TNH[None], key_TKH[None], value_TKH[None], Mask())


def test_directions_without_keys_are_ordered_by_queries():
    """The keys of two tokens determine one direction."""
    query_BTNH, key_BTKH, _ = _arrays(rank=1)
    key_BTKH = np.concatenate([key_BTKH[:1, :1], key_BTKH[:1, 1:2]], axis=1)  # one direction
    found = _of(query_BTNH, key_BTKH)
    weighs_KHH = key_subspaces.moments(query_BTNH, K)
    known_KH = key_BTKH[0, 1] - key_BTKH[0, 0]
    for k in range(K):
        values_R, vectors_HR = np.linalg.eigh(weighs_KHH[k])
        root_HH = (vectors_HR * np.sqrt(values_R)) @ vectors_HR.T
        first_H = root_HH @ known_KH[k] / np.linalg.norm(root_HH @ known_KH[k])
        rest_HH = np.eye(H) - np.outer(first_H, first_H)
        next_H = np.linalg.eigh(rest_HH @ weighs_KHH[k] @ rest_HH)[1][:, -1]
        u_HR = np.linalg.solve(root_HH, found.read_JCR[k])
        assert abs(first_H @ u_HR[:, 0]) == pytest.approx(1, abs=1e-6)
        assert abs(next_H @ u_HR[:, 1]) == pytest.approx(1, abs=1e-6)


def test_drift_is_distinguished_from_sampling():
    """A stationary process has no drift, although few tokens determine its subspace badly."""
    T, H, r, nothing, where = 256, 16, 4, Rope(0, ()), subspace_methods.ANYWHERE
    at = key_drift.prefix_lengths(T, r)
    change_HH = np.roll(np.eye(H), H // 2, axis=0)

    def measured(change_HH):
        overlaps, errors = [], []
        for seed in range(6):
            layer = _process(seed, T, H, change_HH)
            grown = key_drift.prefix_subspaces(layer, nothing, 0, where, at, r)
            overlaps.append(key_drift.overlaps(grown))
            both = [*grown.first, *grown.evenly_spaced]
            errors.append(key_drift.later_errors(layer, nothing, 0, where, both, r))
        errors_T = np.mean(errors, axis=(0, 1)).reshape(2, len(at))
        return np.mean(overlaps, axis=(0, 1)).T, errors_T

    (first_T, spread_T), (error_T, control_T) = measured(None)
    assert at == (8, 16, 32, 64, 128) and first_T[0] < 0.75 and error_T[0] > 1.5 * error_T[-1]
    assert np.abs(spread_T - first_T).max() < 0.03
    np.testing.assert_allclose(error_T, control_T, rtol=0.06)
    (first_T, spread_T), (error_T, control_T) = measured(change_HH)
    assert (spread_T - first_T).min() > 0.1 and (error_T / control_T).min() > 1.1
