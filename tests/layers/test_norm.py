"""RMSNorm and LayerNorm against NumPy."""

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.layers.norm import Norm, inverse_rms

EPSILON = 1e-2  # large enough that its place in the formula shows


def _expected(x, kind, gain, bias):
    if kind == "layer":
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(
            x.var(-1, keepdims=True) + EPSILON
        ) * gain + bias
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * gain + bias


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 4, 6)])
def test_norm(x64, kind, gain, bias, shape):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) + 0.7
    norm = Norm(6, kind=kind, gain=gain, bias=bias, epsilon=EPSILON, rngs=nnx.Rngs(0))
    g, b = rng.uniform(0.5, 1.5, 6), rng.uniform(0.5, 1.5, 6)
    assert (norm.gain is not None) == gain
    assert (norm.bias is not None) == bias
    if gain:
        np.testing.assert_array_equal(norm.gain[...], np.ones(6))
        norm.gain.set_value(jnp.asarray(g))
    if bias:
        np.testing.assert_array_equal(norm.bias[...], np.zeros(6))
        norm.bias.set_value(jnp.asarray(b))
    expected = _expected(x, kind, g if gain else 1.0, b if bias else 0.0)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_bfloat16_is_normed_in_float32(kind):
    """One rounding to bfloat16, at the end: 300² is not summed in bfloat16."""
    x = jnp.asarray(np.linspace(250, 310, 512)[None], jnp.bfloat16)
    norm = Norm(512, kind=kind, gain=False, bias=False, epsilon=EPSILON, rngs=nnx.Rngs(0))
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    expected = _expected(np.asarray(x, np.float64), kind, 1.0, 0.0)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-4)


def test_inverse_rms_is_float32_or_wider(x64):
    x = np.random.default_rng(0).standard_normal((2, 3, 5))
    expected = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    y = inverse_rms(jnp.asarray(x), EPSILON)
    assert y.dtype == jnp.float64
    np.testing.assert_allclose(y, expected, rtol=1e-14)
    assert inverse_rms(jnp.asarray(x, jnp.bfloat16), EPSILON).dtype == jnp.float32
