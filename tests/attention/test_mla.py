"""What the two latent mechanisms do with position and norm."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.layers import rope
from tests.compiled import compiled

B, T, D = 2, 6, 16


def _parts(make_mechanism, randomise, name, **keys):
    config = make_mechanism(name, **keys)
    module, weights = randomise(lambda: config.build(D, rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)))
    positions = rope.positions(np.arange(T, dtype=np.int32)[None], config.rope_dim, 100.0)
    q, raw = module.project(x, positions)
    return config, module, weights, x, positions, q, raw


@pytest.mark.parametrize("qk_norm", ["none", "rms"])
def test_absorbed_decoding_is_exact(x64, make_mechanism, randomise, qk_norm):
    """MLA is MQA over the entry: key [latent, rope_key] of C + P, value the key's first C."""
    config, module, w, _, positions, q, raw = _parts(
        make_mechanism, randomise, "mla", qk_norm=qk_norm
    )

    def both(raw):
        return (module.encode(raw, positions), *module.keys_values(raw, positions))

    entry, k, v = compiled(both, raw)
    H, C = config.key_dim, config.latent_dim
    absorbed = np.einsum("btnh,cnh->btnc", q[..., :H], w["up_key"])
    query = np.concatenate([absorbed, q[..., H:]], -1)
    key = np.concatenate([entry["latent"], entry["rope_key"]], -1)
    logits = np.einsum("btnc,bsc->bnts", query, key)
    np.testing.assert_allclose(logits, np.einsum("btnh,bsnh->bnts", q, k), rtol=1e-10, atol=1e-10)
    p = np.random.default_rng(1).dirichlet(np.ones(T), (B, config.num_heads, T))
    output = np.einsum("bnts,bsc->btnc", p, key[..., :C])
    np.testing.assert_allclose(
        np.einsum("btnc,cnh->btnh", output, w["up_value"]),
        np.einsum("bnts,bsnh->btnh", p, v),
        rtol=1e-10,
        atol=1e-10,
    )


def test_a_query_in_bfloat16_is_folded_without_rounding(make_mechanism, randomise):
    """Its logits are then as exact as those of the keys that the fold stands for."""
    config, module, *_ = _parts(make_mechanism, randomise, "mla")
    module = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), module)
    shape = B, T, config.num_heads, config.query_dim
    q = jnp.asarray(np.random.default_rng(2).standard_normal(shape), jnp.bfloat16)
    o = compiled(lambda q: module.decode_inputs(q, 100.0), q)
    content, up_key = (np.asarray(x, np.float64) for x in (q, module.up_key[...]))
    folded = np.einsum("btnh,cnh->btnc", content[..., : config.key_dim], up_key)
    assert o.query.dtype == jnp.float32
    np.testing.assert_allclose(o.query, folded, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(o.rope_query, q[..., config.key_dim :])


def test_latent_is_normed_whatever_qk_norm_is(x64, make_mechanism, randomise):
    for qk_norm in ("none", "rms"):
        *_, raw = _parts(make_mechanism, randomise, "mla", qk_norm=qk_norm)
        rms = np.sqrt(np.mean(np.square(raw["latent"]), -1))
        np.testing.assert_allclose(rms, 1, rtol=1e-4)


def test_only_the_rope_key_knows_the_position(x64, make_mechanism, randomise):
    config, module, _, x, _, _, raw = _parts(make_mechanism, randomise, "mla")
    shifted = rope.positions(np.arange(T, dtype=np.int32)[None] + 5, config.rope_dim, 100.0)
    _, moved = module.project(x, shifted)
    np.testing.assert_array_equal(moved["latent"], raw["latent"])
    assert np.abs(moved["rope_key"] - raw["rope_key"]).min() > 0


def test_paper_entry_has_no_position(x64, make_mechanism, randomise):
    """`mla_paper` caches x W_down as it is; norm and rotation come after the rebuilding."""
    config, module, w, x, positions, _, raw = _parts(make_mechanism, randomise, "mla_paper")
    entry = module.encode(raw, positions)
    np.testing.assert_allclose(entry["latent"], np.asarray(x) @ w["down"], rtol=1e-12)
    k, _ = module.keys_values(raw, positions)
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(k), -1)), 1, rtol=1e-4)
    assert k.shape[2] == config.num_heads
