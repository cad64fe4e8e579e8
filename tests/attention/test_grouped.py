"""The family's limits: rank 0 is MQA, full rank is MHA."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention
from kvjax.attention.pca_init import pca_factors
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from tests import quick
from tests.compiled import compiled

B, T, D, N, H = 2, 6, 24, 4, 8


def _positions():
    return rope.positions(np.arange(T, dtype=np.int32)[None], H, 100.0)


def _input(dtype=np.float64):
    return jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)), dtype)


def _output(graph, weights):
    def run(weights):
        return nnx.merge(graph, weights)(_input(), _positions(), causal=True)

    return jax.jit(run)(jax.tree.map(jnp.asarray, weights))


def _initial(config, seed=7):
    def make():
        return nnx.to_pure_dict(nnx.state(Attention(config, D, rngs=nnx.Rngs(seed))))

    return jax.jit(make)()


def test_rank_0_is_mqa_bit_for_bit(make_mechanism, randomise):
    """From the same seed, LRKV without residuals has MQA's weights, output and cache."""
    mqa, lrkv = make_mechanism("mqa"), make_mechanism("lrkv", rank=0)
    a, b = _initial(mqa), _initial(lrkv)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert mqa.entry() == lrkv.entry()
    outputs = []
    for config in (mqa, lrkv):
        module, _ = randomise(lambda c=config: Attention(c, D, rngs=nnx.Rngs(0)), dtype=np.float32)
        outputs.append(compiled(module, _input(np.float32), _positions(), causal=True))
    np.testing.assert_array_equal(*outputs)
    assert np.all(np.abs(outputs[0]).max(-1) > 0)


@pytest.mark.slow
@pytest.mark.parametrize("num_bases", [1, 2])
def test_zero_residuals_start_as_shared_heads(x64, make_mechanism, num_bases):
    """B = 0 makes LRKV the MQA (or, with 2 bases, GQA) of the same seed, until B is trained."""
    keys = dict(num_bases=num_bases, num_kv_heads=N, residual_init="zeros")
    config = make_mechanism("lrkv", **keys)
    shared = make_mechanism("gqa", num_kv_heads=num_bases, num_bases=num_bases)
    out = np.random.default_rng(1).standard_normal((N, H, D))
    weights, shared_weights = _initial(config) | {"out": out}, _initial(shared) | {"out": out}
    w = weights["mechanism"]
    assert np.all(np.asarray(w["expand_key"]) == 0)
    assert np.all(np.asarray(w["expand_value"]) == 0)
    assert np.all(np.asarray(w["latent_key"]) != 0)  # or no gradient would ever reach B
    graph, _ = nnx.split(nnx.eval_shape(lambda: Attention(config, D, rngs=nnx.Rngs(0))))
    shared_graph, _ = nnx.split(nnx.eval_shape(lambda: Attention(shared, D, rngs=nnx.Rngs(0))))
    y, expected = _output(graph, weights), _output(shared_graph, shared_weights)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)
    weights["mechanism"]["expand_key"] = jnp.ones_like(w["expand_key"])
    assert np.abs(_output(graph, weights) - expected).max() > 1e-3


def test_linear_residual_init_scales_by_fan_in(make_mechanism):
    w = _initial(make_mechanism("lrkv", rank=8, key_dim=64, value_dim=64))["mechanism"]
    for name in ("expand_key", "expand_value"):
        values = np.asarray(w[name])  # [4, 8, 64]: in 8, out 64
        assert abs(values.std() * np.sqrt(8) - 1) < 6 / np.sqrt(2 * values.size)
    assert not np.array_equal(w["expand_key"], w["expand_value"])


@pytest.mark.parametrize("J", quick.only([2], [1, 2]))
def test_pca_factors_are_the_nearest_to_whole_heads(x64, J):
    """Bases are means of groups, residuals the first components of the rest."""
    whole = np.random.default_rng(0).standard_normal((24, 4, 8))
    of_group = whole.reshape(24, J, 4 // J, 8)
    centred = np.moveaxis((of_group - of_group.mean(2, keepdims=True)).reshape(24, 4, 8), 1, 0)
    singular = np.linalg.svd(centred, compute_uv=False)  # [heads, components]
    for R in (1, 3, 8):
        base, latent, expand = jax.jit(pca_factors, static_argnums=(1, 2))(whole, J, R)
        assert base.shape == (24, J, 8) and latent.shape == (24, 4, R) and expand.shape == (4, R, 8)
        rebuilt = np.repeat(base, 4 // J, axis=1) + np.einsum("dkr,krh->dkh", latent, expand)
        np.testing.assert_allclose(
            np.sum((whole - rebuilt) ** 2), np.sum(singular[:, R:] ** 2), atol=1e-9
        )
    np.testing.assert_allclose(rebuilt, whole, atol=1e-12)  # R = H


@pytest.mark.parametrize("tie", ["none", "kv"])
def test_pca_init_has_the_scale_of_mhas_heads(make_mechanism, tie):
    """At full rank, base plus residual has MHA's scale; other weights are unchanged."""
    keys = dict(rank=H, key_dim=H, value_dim=H, num_kv_heads=N, tie=tie)
    weights = _initial(make_mechanism("lrkv", **keys, residual_init="pca"))["mechanism"]
    plain = _initial(make_mechanism("lrkv", **keys))["mechanism"]
    np.testing.assert_array_equal(weights["query"], plain["query"])
    assert set(weights) == set(plain)
    for kind in ("key",) if tie == "kv" else ("key", "value"):
        residual = np.einsum("dkr,krh->dkh", weights[f"latent_{kind}"], weights[f"expand_{kind}"])
        np.testing.assert_allclose(residual.sum(axis=1), 0, atol=1e-5)  # the base is their mean
        whole = np.asarray(weights[f"base_{kind}"]) + residual
        assert np.std(whole) == pytest.approx(D**-0.5, rel=0.1)
        assert np.std(weights[f"base_{kind}"]) == pytest.approx(np.std(whole) / N**0.5, rel=0.2)

    with pytest.raises(UserError, match="rank = 30: must be at most config.model.d_model = 24"):
        _initial(make_mechanism("lrkv", rank=30, key_dim=32, value_dim=32, residual_init="pca"))


@pytest.mark.slow
def test_equal_seeds_share_common_weights(make_mechanism):
    mqa, lrkv = _initial(make_mechanism("mqa")), _initial(make_mechanism("lrkv"))
    common = mqa["mechanism"]
    assert set(common) == {"query", "base_key", "base_value"}
    for name in common:
        np.testing.assert_array_equal(common[name], lrkv["mechanism"][name])
    new = set(lrkv["mechanism"]) - set(common)
    assert new == {"latent_key", "latent_value", "expand_key", "expand_value"}
    ranks = [_initial(make_mechanism("lrkv", rank=rank)) for rank in (2, 5)]
    for name in common:
        np.testing.assert_array_equal(*(r["mechanism"][name] for r in ranks))


@pytest.mark.parametrize("num_bases", quick.only([2], [1, 2]))
@pytest.mark.parametrize("qk_norm", quick.only(["rms_gain"], ["none", "rms_gain"]))
def test_full_rank_residuals_reproduce_mha(x64, make_mechanism, randomise, num_bases, qk_norm):
    """With R = H, U_h B_h = W_h - W_base has a solution for any W_h: LRKV contains MHA."""
    mha = make_mechanism("mha", qk_norm=qk_norm)
    lrkv = make_mechanism("lrkv", rank=H, num_bases=num_bases, qk_norm=qk_norm)
    mha_module, mha_weights = randomise(lambda: Attention(mha, D, rngs=nnx.Rngs(0)), seed=1)
    _, weights = randomise(lambda: Attention(lrkv, D, rngs=nnx.Rngs(0)), seed=2)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Attention(lrkv, D, rngs=nnx.Rngs(0))))
    w, m = weights["mechanism"], mha_weights["mechanism"]
    for kind in ("key", "value"):
        for h in range(N):
            residual = m[f"base_{kind}"][:, h] - w[f"base_{kind}"][:, h * num_bases // N]
            u, s, vt = np.linalg.svd(residual, full_matrices=False)
            w[f"latent_{kind}"][:, h] = u * np.sqrt(s)
            w[f"expand_{kind}"][h] = np.sqrt(s)[:, None] * vt
    w["query"], weights["out"] = m["query"], mha_weights["out"]
    for norm in ("query_norm", "key_norm"):
        if norm in m:
            w[norm] = m[norm]
    expected = _output(nnx.split(mha_module)[0], mha_weights)
    np.testing.assert_allclose(_output(graph, weights), expected, rtol=1e-10, atol=1e-10)
    w["expand_key"][0, 0] += 0.1
    assert np.abs(_output(graph, weights) - expected).max() > 1e-4
