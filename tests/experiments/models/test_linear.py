"""Linear attention: three equal forms, a state of constant size, tied and not."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import linear
from experiments.models.linear import LinearAttention, LinearConfig
from kvjax.foundation.errors import UserError
from tests import quick
from tests.compiled import compiled

B, T, N, H, V = 2, 23, 3, 4, 5
DECAYS = (1.0, 0.9)


def _rows(tied=False):
    rng = np.random.default_rng(0)
    z, k, v = (rng.normal(size=(B, T, N, dim)) for dim in (H, H, V))
    if tied:
        return linear.feature_map(z), linear.feature_map(z), jnp.asarray(z)
    return linear.feature_map(z), linear.feature_map(k), jnp.asarray(v)


def _by_hand(q, k, v, decay):
    """Computes equation 6 token by token in NumPy."""
    y = np.zeros((B, T, N, v.shape[-1]))
    for b, n in np.ndindex(B, N):
        memory, weight = np.zeros((H, v.shape[-1])), np.zeros(H)
        for t in range(T):
            memory = decay * memory + np.outer(k[b, t, n], v[b, t, n])
            weight = decay * weight + k[b, t, n]
            y[b, t, n] = q[b, t, n] @ memory / (q[b, t, n] @ weight)
    return y


@pytest.mark.parametrize("tied", quick.only([True], [False, True]))
@pytest.mark.parametrize("decay", quick.only([0.9], DECAYS))
def test_three_forms_are_one_function(x64, decay, tied):
    q, k, v = _rows(tied)
    expected = _by_hand(*map(np.asarray, (q, k, v)), decay)
    config = LinearConfig(num_heads=N, key_dim=H, value_dim=v.shape[-1], decay=decay)
    start = config.start(B, jnp.float64)

    def same(y):
        return np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)

    same(jax.jit(linear.parallel)(q, k, v, decay))
    y, last = jax.jit(linear.recurrent)(q, k, v, decay, start)
    same(y)
    for chunk in (1, 5, 8, T, 64):  # some chunks do not divide the length
        y, behind = jax.jit(functools.partial(linear.chunked, chunk=chunk))(q, k, v, decay, start)
        same(y)
        for one, other in zip(behind, last, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10)


@pytest.mark.parametrize("tie", quick.only(["none"], ["none", "qkv"]))
def test_the_module_in_chunks_and_token_by_token(x64, tie):
    value_dim = V if tie == "none" else H
    config = LinearConfig(num_heads=N, key_dim=H, value_dim=value_dim, tie=tie, decay=0.95)
    layer = LinearAttention(config, 16, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    state = nnx.state(layer)
    nnx.update(layer, jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape)), state))
    assert hasattr(layer, "query") == (tie == "none")
    x = jnp.asarray(rng.normal(size=(B, T, 16)))

    def run(x, chunk):
        return compiled(layer, x, config.start(B, jnp.float64), chunk=chunk)

    (y, behind), (z, after) = (run(x, chunk) for chunk in (8, 1))
    np.testing.assert_allclose(y, z, rtol=1e-10)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), behind, after)
    w = {name: np.asarray(value) for name, value in nnx.to_pure_dict(nnx.state(layer)).items()}

    def projected(name):
        return np.einsum("btd,dnh->btnh", x, w[name if tie == "none" else "key"])

    def features(z):
        return np.where(z > 0, z + 1, np.exp(np.minimum(z, 0)))

    read = _by_hand(
        features(projected("query")), features(projected("key")), projected("value"), 0.95
    )
    np.testing.assert_allclose(y, np.einsum("btnv,nvd->btd", read, w["out"]), rtol=1e-10)
    assert config.start(B).weight.dtype == config.start(B).memory.dtype == jnp.float32


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(decay=0.0), "config.attention.decay = 0.0: must be above 0"),
        (dict(decay=1.5), "config.attention.decay = 1.5"),
        (dict(tie="kv"), "config.attention.tie = 'kv': must be one of"),
        (dict(tie="qkv", value_dim=8), "needs value_dim = 8 equal to key_dim = 4"),
        (dict(num_heads=0), "config.attention.num_heads = 0"),
    ],
)
def test_what_cannot_be(keys, said):
    with pytest.raises(UserError, match=said):
        LinearConfig(**dict(num_heads=2, key_dim=4, value_dim=4) | keys)


@pytest.mark.parametrize("x", [-80.0, -17.5, -1.0, 0.0, 2.0])
def test_features_are_positive_in_float32(x):
    """The feature map is exp(x) below 0, without cancellation in float32."""
    expected = x + 1 if x > 0 else np.exp(x)
    found, slope = jax.value_and_grad(linear.feature_map)(jnp.float32(x))
    assert float(found) == pytest.approx(expected, rel=1e-5) and found > 0
    assert float(slope) == pytest.approx(min(1.0, np.exp(x)), rel=1e-5)
