"""Rotary positions: accurate to a million tokens, the same concrete and traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.layers import rope
from tests import reference

BASE = 10_000.0
POSITIONS = np.array(
    [[0, 1, 2, 1023, 1024, 1025, 2047, 4095, 65_537, 999_999, 2**20 - 1024, 2**20 - 1]], np.int32
)


def _angles(positions_BT, dim, base):
    theta = np.array([base ** (-2 * i / dim) for i in range(dim // 2)])
    return positions_BT[..., None].astype(np.float64) * theta


def _traced(positions_BT, dim, base):
    return jax.jit(rope.rotary, static_argnums=(1, 2))(positions_BT, dim, base)


@pytest.mark.parametrize("rotary", [rope.rotary, _traced], ids=["concrete", "traced"])
@pytest.mark.parametrize("dim, base", [(2, BASE), (8, BASE), (128, BASE), (64, 500_000.0)])
def test_float32_angles_to_a_million_tokens(rotary, dim, base):
    angles = _angles(POSITIONS, dim, base)
    cos, sin = rotary(POSITIONS, dim, base)
    assert cos.shape == sin.shape == (1, POSITIONS.shape[1], dim // 2)
    assert cos.dtype == sin.dtype == jnp.float32
    assert np.abs(np.asarray(cos, np.float64) - np.cos(angles)).max() < 1e-6
    assert np.abs(np.asarray(sin, np.float64) - np.sin(angles)).max() < 1e-6


@pytest.mark.parametrize("rotary", [rope.rotary, _traced], ids=["concrete", "traced"])
def test_float64_angles(x64, rotary):
    angles = _angles(POSITIONS, 8, BASE)
    cos, sin = rotary(POSITIONS, 8, BASE)
    # t·theta itself is known to 2**20 · 2**-53 = 1e-10.
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-10)
    np.testing.assert_allclose(sin, np.sin(angles), atol=2e-10)


def test_llama3_slows_down_slow_pairs(x64):
    """Llama 3.1 8B's, against the lengths of its authors' code: fast, mixed and slow pairs."""
    base = rope.Llama3(500_000.0, 8.0, 1.0, 4.0, 8192)
    slowed = rope.frequencies(128, base) / rope.frequencies(128, 500_000.0)
    np.testing.assert_allclose(slowed[:29], 1, rtol=1e-12)
    assert np.all(np.diff(slowed[28:36]) < 0)
    np.testing.assert_allclose(slowed[36:], 1 / 8, rtol=1e-12)
    expected = [reference.frequency(i, 128, base) for i in range(64)]
    np.testing.assert_allclose(rope.frequencies(128, base), expected, rtol=1e-12)
    cos, sin = _traced(POSITIONS, 128, base)
    angles = POSITIONS[..., None] * np.array(expected)
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-9)
    np.testing.assert_allclose(sin, np.sin(angles), atol=2e-9)


@pytest.mark.parametrize(
    "base",
    [
        rope.Yarn(1e6, 4.0, 1.0, 32.0, 32_768),  # Qwen 3's
        rope.Yarn(5e5, 8.0, 1.0, 32.0, 8192),  # OLMo 3's
        rope.Yarn(20.0, 4.0, 0.5, 3.0, 24),
        rope.Yarn(1e4, 4.0, 1e-9, 1e-8, 64),  # all pairs on one side of the ramp
        rope.Linear(1e6, 8.0),
    ],
)
def test_scaled_frequencies(base):
    for dim in (8, 128):
        expected = [reference.frequency(i, dim, base) for i in range(dim // 2)]
        np.testing.assert_allclose(rope.frequencies(dim, base), expected, rtol=1e-12)


@pytest.mark.parametrize("base", [BASE, rope.Llama3(500.0, 8.0, 1.0, 4.0, 64)])
def test_partial_rope_turns_some_pairs_and_leaves_the_others(x64, base):
    """GPT-NeoX's rotary_pct is this: the channels that turn do as if they were all."""
    partial = rope.Partial(base, 0.25)
    found = rope.frequencies(32, partial)
    np.testing.assert_array_equal(found[:4], rope.frequencies(8, base))
    np.testing.assert_array_equal(found[4:], 0)
    for fraction, pairs in ((0.01, 1), (1.0, 16)):
        assert rope.Partial(base, fraction).num_rotated_pairs(32) == pairs
    x = np.random.default_rng(0).standard_normal((1, POSITIONS.shape[1], 1, 32))
    y = rope.rotate(jnp.asarray(x), rope.rotary(POSITIONS, 32, partial))
    still = [i for i in range(32) if i % 16 >= 4]
    np.testing.assert_array_equal(y[..., still], x[..., still])
    np.testing.assert_allclose(
        y[:, :, 0], reference.rotate(x[:, :, 0], POSITIONS[0], partial), atol=1e-9
    )
    left, right = rope.basis(32, partial, 200, 1e-9)
    angles = np.outer(found, np.arange(200))
    np.testing.assert_allclose(
        left @ right, np.concatenate([np.cos(angles), np.sin(angles)]), atol=1e-7
    )


def test_scalings_with_equal_numbers_are_different():
    """They are keys of caches of angles and of compiled programs."""
    numbers = (1e4, 8.0, 1.0, 4.0, 8192)
    llama3, yarn = rope.Llama3(*numbers), rope.Yarn(*numbers)
    assert llama3 != yarn and len({llama3, yarn}) == 2 and yarn == rope.Yarn(*numbers)
    index_BT = np.arange(3000, 3004)[None]
    tables = [rope.positions(index_BT, 64, base).rotary.cos for base in (llama3, yarn)]
    assert np.abs(tables[0] - tables[1]).max() > 0.1


def test_positions_may_differ_by_row():
    positions = np.array([[0, 5, 9], [7, 1024, 3]], np.int32)
    concrete, traced = rope.rotary(positions, 8, BASE), _traced(positions, 8, BASE)
    for a, b, f in zip(concrete, traced, (np.cos, np.sin), strict=True):
        assert a.shape == b.shape == (2, 3, 4)
        np.testing.assert_allclose(a, b, atol=3e-7)
        np.testing.assert_allclose(a, f(_angles(positions, 8, BASE)), atol=1e-6)


def test_rotate_is_the_reference(x64):
    x = np.random.default_rng(0).standard_normal((2, POSITIONS.shape[1], 3, 8))
    y = rope.rotate(jnp.asarray(x), rope.rotary(POSITIONS, 8, BASE))
    for head in range(3):
        expected = reference.rotate(x[:, :, head], POSITIONS[0], BASE)
        np.testing.assert_allclose(y[:, :, head], expected, atol=1e-9)


def test_bfloat16_is_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 12, 1, 8)), jnp.bfloat16)
    y = rope.rotate(x, rope.rotary(POSITIONS, 8, BASE))
    assert y.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        exact = rope.rotate(jnp.asarray(np.asarray(x, np.float64)), rope.rotary(POSITIONS, 8, BASE))
        exact = np.asarray(exact)
    # One rounding of the result, relative to it.
    assert np.all(np.abs(np.asarray(y, np.float64) - exact) <= 2**-8 * np.abs(exact) + 1e-5)


def test_tables_reach_the_last_position_and_no_further():
    assert rope.MAX_POSITION == 2**20
    with pytest.raises(IndexError):
        rope.rotary(np.array([[2**20]], np.int32), 8, BASE)


def test_positions_carry_angles_where_there_is_rope(x64):
    index = np.array([[0, 5, 9], [7, 1024, 3]], np.int32)
    with_angles, without = rope.positions(index, 8, BASE), rope.positions(index, 8, None)
    np.testing.assert_array_equal(with_angles.index, index)
    np.testing.assert_array_equal(without.index, index)
    assert without.rotary is None
    for a, b in zip(with_angles.rotary, rope.rotary(index, 8, BASE), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "dim, base, length, tolerance, rank",
    [
        (128, BASE, 512, 1e-8, 57),
        (128, BASE, 2048, 1e-8, 76),
        (128, BASE, 512, 2.0**-26, 57),
        (64, 500_000.0, 512, 2.0**-55, 64),
        (8, BASE, 3, 2.0**-55, 3),
    ],
)
def test_basis_is_the_table(dim, base, length, tolerance, rank):
    """The product is cos t·theta over sin t·theta, to the tolerance, at a rank below H."""
    left, right = rope.basis(dim, base, length, tolerance)
    P = left.shape[1]
    assert left.shape == (dim, P)
    assert right.shape == (P, length)
    assert P <= rank
    angles = _angles(np.arange(length)[None], dim, base)[0].T
    table = np.concatenate([np.cos(angles), np.sin(angles)])
    # At most `dim` singular values are dropped, each below the tolerance.
    largest = np.linalg.norm(table, 2)
    bound = largest * (dim**0.5 * tolerance + 1e-14)
    assert np.linalg.norm(left @ right - table) < bound
    assert np.linalg.norm(left[:, :-1] @ right[:-1] - table) > tolerance * largest
