"""Quantised entries: bytes counted by hand, rounding, and what a token's bytes depend on."""

from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as numpy_st
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.attention import named
from kvjax.cache import quantized
from kvjax.foundation.errors import UserError
from tests.attention import law

# Bytes of a token in one layer, in bfloat16, int8 and int4, at the sizes of a 2.5B model.
AT_2P5B = [
    (named.mha(18), (9216, 4752, 2448)),
    (named.gqa(18, kv_heads=6), (3072, 1584, 816)),
    (named.mqa(18), (512, 264, 136)),
    (named.projection_sharing(18, tie="kv"), (4608, 2376, 1224)),
    (named.thin_keys(18, key_dim=32), (5760, 3024, 1584)),
    (named.lrkv(18, rank=64), (5192, 2784, 1504)),
    (named.grouped(18, kv_heads=6, bases=1, rank=64), (2072, 1104, 592)),
    (named.mla(18, latent=768), (1664, 900, 516)),
    (named.gla(18, latents=2, latent=384), (1664, 904, 520)),
    (named.mlra(18, branches=4, latent=192), (1664, 912, 528)),
    (named.gta(18, kv_heads=6), (1664, 920, 536)),
    (named.mfa(10, query_rank=5, head_dim=416), (1664, 840, 424)),
]
SHORT_ROWS = [
    (named.mla_lrkv(8, latent=96, rank=8, rope_dim=32, head_dim=64), (512, 300, 252)),
    (named.tpa(8, key_rank=2, value_rank=2, head_dim=64), (576, 312, 184)),
]


@pytest.mark.parametrize(
    "mechanism, by_hand", AT_2P5B + SHORT_ROWS, ids=lambda x: getattr(x, "title", "")
)
def test_bytes_of_a_token(mechanism, by_hand):
    """A quantised cache whose arrays were wide would fail here: they are allocated and counted."""
    shape = dict(batch=2, capacity=128, dtype=jnp.dtype(jnp.bfloat16))
    for bits, wanted in zip((None, 8, 4), by_hand, strict=True):
        cache = cache_lib.allocate([mechanism], **shape, bits=bits)
        assert cache_lib.live_bytes(cache) == 2 * 128 * wanted
        assert quantized.cached_bits(cache.layers[0]) == bits
        shapes = quantized.dequantized_shapes(cache.layers[0])
        assert {name: x.shape[1:-1] for name, x in shapes.items()} == {
            name: field.shape for name, field in mechanism.entry().items()
        }


@pytest.mark.parametrize(
    "cache_dtype, message",
    [
        ("int2", "cache_dtype = 'int2': must be one of '', 'int8', 'int4'"),
        ("bfloat16", "cache_dtype = 'bfloat16': must be one of"),
        ("int4", "LRKV, rank 33 caches residual_key of 33 channels, and two share a byte: give"),
    ],
)
def test_what_cannot_be_had_is_named(cache_dtype, message):
    with pytest.raises(UserError, match=message):
        bits = quantized.bits_of(cache_dtype)
        quantized.check([named.lrkv(18, rank=32), named.lrkv(18, rank=33)], bits)
    assert quantized.bits_of("") is None


def _stored(x_BTKW, bits):
    """Quantises one field; returns its arrays as a cache's, [B, .., T]."""
    field = named.mha(x_BTKW.shape[2], head_dim=x_BTKW.shape[3])
    layer = cache_lib.allocate(
        [field], batch=1, capacity=1, dtype=jnp.dtype(jnp.float32), bits=bits
    ).layers[0]
    names = ("base_key", "base_key.scale")
    entry = quantized.quantize({"base_key": jnp.asarray(x_BTKW)}, layer)
    return {name: jnp.moveaxis(entry[name], 1, -1) for name in names}


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("shape", [(2, 1, 2, 16), (1, 2, 2, 4)], ids=str)
def test_a_number_is_off_by_half_a_scale_at_most(x64, bits, shape):
    """Also rows of zeros, subnormal rows, and rows whose elements differ by many magnitudes."""
    values = st.floats(-1e30, 1e30) | st.sampled_from((0.0, 5e-324, 1e-40, 1e-300, -1.0, 127.0))

    @settings(max_examples=200, deadline=None)
    @given(numpy_st.arrays(np.float64, shape, elements=values))
    def check(x):
        stored = _stored(x, bits)
        found = np.asarray(quantized.dequantize(stored, jnp.float64)["base_key"])
        by_hand, scales = law.read_back(stored)
        np.testing.assert_array_equal(found, by_hand["base_key"])
        exact = np.moveaxis(x, 1, -1)
        half = scales["base_key"] / 2
        tiny = np.finfo(np.float32).tiny  # a scale below it is 1
        largest = 7 if bits == 4 and shape[-1] == 16 else 127
        # float32 rounds the scale, by which the row's largest elements are then cut off.
        assert np.all(np.abs(found - exact) <= half * (1 + 1e-12) + 1e-7 * np.abs(exact))
        axes = -2 if shape[-1] == 16 else (1, 2)
        peaks = np.abs(exact).max(axis=axes, keepdims=True)
        wanted = np.where(peaks < largest * tiny, 1, peaks / largest)
        np.testing.assert_allclose(scales["base_key"], wanted, rtol=1e-6)

    check()


def test_two_channels_of_int4_share_a_byte():
    x = np.zeros((1, 1, 1, 16), np.float32)
    x[..., 0], x[..., 8], x[..., 7] = 7, -7, 3
    stored = _stored(x, 4)
    assert stored["base_key"].dtype == jnp.uint8
    halves = np.asarray(stored["base_key"])[0, 0, :, 0]
    assert halves.tolist() == [15 + 16 * 1, *[8 + 16 * 8] * 6, 11 + 16 * 8]


@pytest.mark.parametrize("bits", (8, 4))
def test_a_tokens_bytes_depend_on_that_token_alone(bits):
    x = np.random.default_rng(0).standard_normal((2, 9, 3, 32)).astype(np.float32)
    x[:, 4] *= 1e4
    whole = _stored(x, bits)
    for t in range(9):
        for name, alone in _stored(x[:, t : t + 1], bits).items():
            np.testing.assert_array_equal(alone[..., 0], whole[name][..., t])


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bits, value):
    """A damaged model's numbers do not become plausible."""
    x = np.ones((1, 2, 2, 16), np.float32)
    x[0, 1, 1, 3] = value
    found = np.asarray(quantized.dequantize(_stored(x, bits), jnp.float32)["base_key"])
    assert np.isfinite(found[..., 0]).all() and not np.isfinite(found[0, 1, 3, 1])
