"""Sinusoidal encodings against their formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.layers import sinusoid
from tests import quick
from tests.compiled import compiled

POSITIONS = np.array([0, 1, 2, 511, 4095, 65_537, 2**20 - 1], np.int32)


def _formula(s, channel, channels):
    angle = s / 10_000 ** (2 * (channel // 2) / channels)
    return math.cos(angle) if channel % 2 else math.sin(angle)


def _expected(channels):
    return [[_formula(s, i, channels) for i in range(channels)] for s in POSITIONS.tolist()]


@pytest.mark.parametrize("channels", quick.only([10, 25], [1, 2, 3, 10, 25]))
def test_the_formula(x64, channels):
    encoding = compiled(sinusoid.encoding, jnp.asarray(POSITIONS), channels=channels)
    assert encoding.dtype == jnp.float64
    # An angle of a million radians is known to 1e-10.
    np.testing.assert_allclose(encoding, _expected(channels), rtol=0, atol=2e-10)


@pytest.mark.parametrize("channels", [3, 10])
def test_float32_to_a_million_tokens(channels):
    encoding = jax.jit(sinusoid.encoding, static_argnums=1)(jnp.asarray(POSITIONS), channels)
    assert encoding.dtype == jnp.float32
    np.testing.assert_allclose(encoding, _expected(channels), rtol=0, atol=1e-6)


def test_positions_of_any_shape(x64):
    index = jnp.asarray(POSITIONS[:6].reshape(2, 3))
    encoding = compiled(sinusoid.encoding, index, channels=5)
    assert encoding.shape == (2, 3, 5)
    alone = compiled(sinusoid.encoding, index.ravel(), channels=5)
    np.testing.assert_array_equal(encoding.reshape(6, 5), alone)
