"""The normalised diagonal of K Kᵀ and the attention temperature, against explicit formulas."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.diagonal import DiagonalConfig
from kvjax.attention import Attention
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.model.config import BlockConfig, TransformerConfig
from tests import quick, reference
from tests.compiled import compiled

B, T, D = 2, 5, 12


@pytest.fixture
def build(make_mechanism, randomise):
    def build(name="qk_tied", *, normalised=False, **keys):
        config = make_mechanism(name, **keys)
        if normalised:
            config = DiagonalConfig(**dataclasses.asdict(config))
        return config, *randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)))

    return build


def _input():
    return np.random.default_rng(0).standard_normal((B, T, D))


def _softmax(z):
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("base", quick.only([100.0], [None, 100.0]))
@pytest.mark.parametrize("name", ["qk_tied", "qkv_tied"])
def test_what_a_token_makes_of_itself_is_divided_by_its_mean(x64, build, name, base):
    plain = build(name, qk_norm="none")
    config, module, weights = build(name, normalised=True, qk_norm="none")
    x = _input()
    positions = rope.positions(np.arange(T)[None], config.rope_dim, base)
    given = (plain[0], weights["mechanism"], x, np.arange(T), base)
    _, _, values = reference.queries_keys_values(*given)
    heads = []
    for z_BTS, v_BSV in zip(reference.attention_maps(*given), values, strict=True):
        own_BT = np.einsum("btt->bt", z_BTS) / config.scale
        for b in range(B):
            np.fill_diagonal(z_BTS[b], config.scale * own_BT[b] / own_BT[b].mean())
        heads.append(_softmax(z_BTS) @ v_BSV)

    def run(module):
        return compiled(module, x, positions, causal=False)

    query, _ = jax.eval_shape(module.mechanism.project, x, positions)
    assert query.shape[-1] == config.key_dim + T
    expected = np.einsum("btnh,nhd->btd", np.stack(heads, axis=2), weights["out"])
    y = run(module)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)
    assert np.abs(y - run(plain[1])).max() > 0.01


def test_a_row_of_zeros_is_no_nan(build):
    _, module, _ = build(normalised=True, qk_norm="none")
    positions = rope.positions(np.arange(T)[None], 4, None)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda x: jnp.sum(module(x, positions, causal=False)))
    )(jnp.zeros((B, T, D)))
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_a_row_is_one_text(build):
    _, module, _ = build(normalised=True)
    positions = rope.positions(np.arange(T)[None], 4, None)
    segments = jnp.zeros((B, T), jnp.int32)
    with pytest.raises(ValueError, match="segment_ids_BS: this attention depends on all tokens"):
        module(jnp.zeros((B, T, D)), positions, causal=False, segment_ids_BS=segments)


@pytest.mark.parametrize("name", quick.only(["lrkv"], ["lrkv", "mla", "qk_tied_plus", "tpa"]))
def test_a_temperature_divides_logits(x64, build, name):
    config, module, _ = build(name)
    x, positions = jnp.asarray(_input()), rope.positions(np.arange(T)[None], config.rope_dim, 100.0)
    given = dict(causal=True)

    def run(t):
        return compiled(lambda x, t: module(x, positions, temperature=t, **given), x, t)

    hot = run(jnp.asarray(2.0))
    whole = [np.asarray(part) for part in _parts(module, x, positions)]
    z_BNTS = config.scale / 2 * np.einsum("btnh,bsnh->bnts", *whole[:2])
    z_BNTS = np.where(np.tri(T, dtype=bool), z_BNTS, -np.inf)
    o_BTNV = jnp.einsum("bnts,bsnv->btnv", _softmax(z_BNTS), whole[2])
    np.testing.assert_allclose(hot, module.project_out(o_BTNV, x, positions), atol=1e-10)
    assert np.abs(hot - compiled(lambda x: module(x, positions, **given), x)).max() > 1e-4


def _parts(module, x, positions):
    """Returns queries, keys and values, each of all query heads."""
    q_BTNH, raw = module.mechanism.project(x, positions)
    k_BTKH, v_BTKV = module.mechanism.keys_values(raw, positions)
    share = q_BTNH.shape[2] // k_BTKH.shape[2]
    return q_BTNH, jnp.repeat(k_BTKH, share, axis=2), jnp.repeat(v_BTKV, share, axis=2)


@pytest.mark.parametrize(
    ("name", "refused"),
    [("kv_tied", "tie = 'kv': must"), ("mha", "tie = 'none': must"), ("qk_tied_plus", "channels")],
)
def test_only_where_queries_are_keys(build, name, refused):
    with pytest.raises(UserError, match=refused):
        build(name, normalised=True)
    with pytest.raises(UserError, match="alibi = True: must be False where the diagonal"):
        build("qk_tied", normalised=True, alibi=True)


def test_a_mean_over_the_row_needs_a_bidirectional_model(make_mechanism):
    mechanism = DiagonalConfig(**dataclasses.asdict(make_mechanism("qkv_tied")))

    def model(causal):
        block = BlockConfig(num_layers=1, d_model=16, mlp_dim=32, causal=causal)
        return TransformerConfig(block=block, mechanisms=(mechanism,), vocab_size=32)

    assert model(causal=False).mechanisms[0].needs_whole_rows
    with pytest.raises(UserError, match="attention of layer 0 needs whole rows"):
        model(causal=True)
