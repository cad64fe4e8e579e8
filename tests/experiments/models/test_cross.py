"""Cross-attention: its definition with ragged lengths, special cases and invariances."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.cross import CrossAttention
from kvjax import cache as cache_lib
from kvjax.attention import GroupedConfig, MLAConfig
from kvjax.foundation.errors import UserError
from tests import quick
from tests.compiled import compiled

B, T, S, D, DM, N, H, R = 3, 4, 9, 16, 12, 4, 8, 3
LENGTHS = np.array([9, 1, 5], np.int32)
KINDS = {
    "mha": dict(num_kv_heads=N, num_bases=N, rank=0),
    "gqa": dict(num_kv_heads=2, num_bases=2, rank=0),
    "mqa": dict(num_kv_heads=1, num_bases=1, rank=0),
    "lrkv": dict(num_kv_heads=N, num_bases=1, rank=R),
    "lrkv_gqa": dict(num_kv_heads=2, num_bases=1, rank=R),
    "thin_keys": dict(num_kv_heads=N, num_bases=N, rank=0, key_dim=4),
    "kv_tied": dict(num_kv_heads=N, num_bases=N, rank=0, tie="kv"),
    "lrkv_kv_tied": dict(num_kv_heads=N, num_bases=1, rank=R, tie="kv"),
    "ranked_queries": dict(num_kv_heads=N, num_bases=1, rank=R, query_rank=5),
}
NORMS = ("rms", "rms_gain", "none")


def _config(kind, qk_norm="rms", **more):
    keys = dict(num_heads=N, key_dim=H, value_dim=H, qk_norm=qk_norm) | KINDS[kind] | more
    return GroupedConfig(**keys)


@pytest.fixture
def make(x64, randomise):
    """Returns a function from a config to the module with random float64 weights."""

    def make(config):
        return randomise(lambda: CrossAttention(config, D, DM, rngs=nnx.Rngs(0)))[0]

    return make


def _inputs(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(B, T, D)), rng.normal(size=(B, S, DM)), jnp.asarray(LENGTHS)


def _cache(module, memory, lengths, capacity=S):
    config = module.mechanism.config
    cache = cache_lib.allocate([config], batch=B, capacity=capacity, dtype=jnp.dtype(jnp.float64))
    return compiled(module.encode, jnp.asarray(memory), lengths, cache.layers[0])


def _numpy(module, x, memory, lengths):
    """Computes attention head by head and memory by memory, from the weights."""
    c, m = module.mechanism.config, module.mechanism

    def array(w):
        return np.asarray(w[...], np.float64)

    y = np.zeros((B, T, D))
    for b, length in enumerate(lengths):
        seen = memory[b, :length]
        for n in range(N):
            k, j = n * c.num_kv_heads // N, n * c.num_bases // N
            key = seen @ array(m.base_key)[:, j]
            value = None if c.ties_values else seen @ array(m.base_value)[:, j]
            if c.rank:
                key = key + seen @ array(m.latent_key)[:, k] @ array(m.expand_key)[k]
                if not c.ties_values:
                    added = seen @ array(m.latent_value)[:, k] @ array(m.expand_value)[k]
                    value = value + added
            value = key if c.ties_values else value
            source = x[b]
            if c.query_rank:
                source = source @ array(m.query_down)
                source = source / np.sqrt(np.mean(source**2, -1, keepdims=True) + c.norm_epsilon)
                if c.qk_norm == "rms_gain":
                    source = source * array(m.query_latent_norm.gain)
            query = source @ array(m.query)[:, n]
            query, key = (_normed(z, of, c) for z, of in ((query, m.query_norm), (key, m.key_norm)))
            z = query @ key.T / np.sqrt(c.key_dim)
            p = np.exp(z - z.max(-1, keepdims=True))
            y[b] += (p / p.sum(-1, keepdims=True)) @ value @ array(module.out)[n]
    return y


def _normed(z, norm, config):
    if norm is None:
        return z
    z = z / np.sqrt(np.mean(z**2, -1, keepdims=True) + config.norm_epsilon)
    return z * np.asarray(norm.gain[...]) if norm.gain is not None else z


@pytest.mark.parametrize("qk_norm", quick.only(["rms"], NORMS))
@pytest.mark.parametrize("kind", quick.only(["lrkv"], KINDS))
def test_the_law(make, kind, qk_norm):
    """NumPy, the training pass and decoding agree for all lengths."""
    module = make(_config(kind, qk_norm))
    x, memory, lengths = _inputs()
    expected = _numpy(module, x, memory, LENGTHS)
    assert np.abs(expected).max() > 0.1

    def close(found):
        return np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)

    close(jax.jit(lambda *a: module(*a))(x, memory, lengths))
    layer = _cache(module, memory, lengths)
    for implementation in ("xla", "reference"):
        how = dict(implementation=implementation)
        decode = jax.jit(lambda x, how=how: module.decode(x, layer, lengths, **how))
        close(decode(jnp.asarray(x)))
        one_by_one = [
            decode(jnp.asarray(x[:, t : t + 1])) for t in range(T)
        ]  # without a causal mask
        close(np.concatenate(one_by_one, axis=1))


@pytest.mark.parametrize("kind", ["lrkv", "mqa"])
def test_invariances(make, kind):
    """Permuting a memory's tokens, or NaN beyond its length, changes nothing."""
    module = make(_config(kind))
    x, memory, lengths = _inputs()
    run = jax.jit(lambda *arrays: module(*arrays))
    expected = run(x, memory, lengths)
    spoiled = memory.copy()
    for b, length in enumerate(LENGTHS):
        spoiled[b, length:] = np.nan
        spoiled[b, :length] = np.random.default_rng(1).permutation(memory[b, :length])
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(run(x, spoiled, lengths), expected, rtol=1e-11, atol=1e-11)
    found = compiled(module.decode, jnp.asarray(x), _cache(module, spoiled, lengths), lengths)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_an_empty_memory_gives_nothing(make):
    module = make(_config("lrkv"))
    x, memory, lengths = _inputs()
    none, layer = jnp.zeros_like(lengths), _cache(module, memory, lengths)  # entries are ignored
    decode = jax.jit(lambda *arrays: module.decode(*arrays))
    for queries in (x, x[:, :1]):
        assert np.any(decode(jnp.asarray(queries), layer, lengths))
        assert not np.any(decode(jnp.asarray(queries), layer, none))


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(num_kv_heads=N, num_bases=N, rank=0, tie="qk"), "tie = 'qk': must be 'none' or 'kv'"),
        (dict(rope="shared"), "rope = 'shared': must be 'full' in cross-attention"),
        (dict(alibi=True), "alibi = True: must be False in cross-attention"),
        (dict(position_channels=4), "position_channels = 4: must be 0 in cross-attention"),
        (dict(output_gate=True), "output_gate = True: must be False in cross-attention"),
    ],
)
def test_settings_that_are_refused(more, message):
    with pytest.raises(UserError, match=message):
        CrossAttention(_config("lrkv", **more), D, rngs=nnx.Rngs(0))


def test_a_latent_has_no_form_for_two_streams():
    config = MLAConfig(num_heads=N, key_dim=8, value_dim=8, latent_dim=8, rope_key_dim=4)
    with pytest.raises(UserError, match="by MLAConfig: must be a GroupedConfig"):
        CrossAttention(config, D, rngs=nnx.Rngs(0))


def test_kernels_take_one_query(make):
    module = make(_config("lrkv"))
    x, memory, lengths = _inputs()
    layer = _cache(module, memory, lengths)
    with pytest.raises(NotImplementedError, match="several queries over a whole memory"):
        module.decode(jnp.asarray(x), layer, lengths, implementation="tpu")
