"""Axes, initialisation and linear maps."""

import dataclasses
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.layers.weight import Axes, InitRngs, linear, weight

SIZES = dict(D=96, N=4, K=3, H=16, R=5, M=400, V=50)


@pytest.mark.parametrize(
    "text, batch, reduction, output",
    [
        ("D -> N H", "", "D", "N H"),
        ("N H -> D", "", "N H", "D"),
        ("K: R -> H", "K", "R", "H"),
        ("V D", "", "", "V D"),
        ("D", "", "", "D"),
    ],
)
def test_axes_parse(text, batch, reduction, output):
    axes = Axes.parse(text)
    assert axes == Axes(*(tuple(part.split()) for part in (batch, reduction, output)))
    assert axes.names == tuple(f"{batch} {reduction} {output}".split())
    assert axes.is_matrix == ("->" in text)


@pytest.mark.parametrize(
    "text, per_head",
    [
        ("D -> N H", "N: D -> H"),
        ("D -> K R", "K: D -> R"),
        ("D -> J H", "J: D -> H"),
        ("N H -> D", "N: H -> D"),
        ("K: R -> H", "K: R -> H"),
        ("D -> M", "D -> M"),
        ("C -> N H", "N: C -> H"),
    ],
)
def test_per_head_moves_head_axes_to_the_batch(text, per_head):
    assert Axes.parse(text).per_head() == Axes.parse(per_head)


@pytest.mark.parametrize(
    "text, shape",
    [("D -> N H", (96, 4, 16)), ("K: R -> H", (3, 5, 16)), ("N H -> D", (4, 16, 96)), ("H", (16,))],
)
def test_shape_and_axes_are_kept(text, shape):
    parameter = weight(text, nnx.Rngs(0), init="normal", **SIZES)
    assert parameter.shape == shape
    assert parameter.axes == text
    assert parameter.dtype == jnp.float32


@pytest.mark.parametrize(
    "text, fan_in, fan_out",
    [
        ("D -> M", 96, 400),  # wide: 1/sqrt(in)
        ("M -> D", 400, 96),  # narrow: sqrt(out/in)/sqrt(in)
        ("D -> N H", 96, 64),
        ("N M -> D", 1600, 96),  # every reduced axis counts as in
        ("N: D -> M", 96, 400),  # batch axes count as neither
        ("N: M -> D", 400, 96),
    ],
)
def test_linear_init_std(text, fan_in, fan_out):
    values = np.asarray(weight(text, nnx.Rngs(3), **SIZES)[...], np.float64).ravel()
    std = min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in)
    # Six standard errors of the sample's std and mean; the nearest wrong rule is 20 % off.
    assert abs(values.std() / std - 1) < 6 / math.sqrt(2 * values.size)
    assert abs(values.mean()) < 6 * std / math.sqrt(values.size)
    kurtosis = np.mean(((values - values.mean()) / values.std()) ** 4)
    assert abs(kurtosis - 3) < 6 * math.sqrt(24 / values.size)  # a uniform has 1.8


def test_other_inits():
    normal = np.asarray(weight("M D", nnx.Rngs(0), init="normal", **SIZES)[...])
    assert abs(normal.std() - 1) < 6 / math.sqrt(2 * normal.size)
    assert np.all(np.asarray(weight("D", nnx.Rngs(0), init="zeros", **SIZES)[...]) == 0)
    assert np.all(np.asarray(weight("D", nnx.Rngs(0), init="ones", **SIZES)[...]) == 1)
    with pytest.raises(ValueError, match="init='xavier'.*'output', 'normal', 'zeros'"):
        weight("D", nnx.Rngs(0), init="xavier", **SIZES)


def test_draws_say_how_matrices_and_outputs_start():
    """A vector, or a start of its own, is as it was."""

    def std(*args, **options):
        return float(np.std(np.asarray(weight(*args, **options, **SIZES)[...])))

    narrow = InitRngs(jax.random.key(0), matrix_std=0.02)
    for axes in ("D -> M", "M -> D"):
        assert std(axes, narrow) == pytest.approx(0.02, rel=0.05)
        assert std(axes, narrow, init="output") == 0
        assert std(axes, dataclasses.replace(narrow, zero_outputs=False), init="output") > 0.019
    assert std("M D", narrow, init="normal") == pytest.approx(1, rel=0.05)
    assert std("D -> M", narrow, init=0.5) == pytest.approx(0.5, rel=0.05)
    both = InitRngs(jax.random.key(3)), nnx.Rngs(3)
    for axes in ("D -> M", "M -> D"):  # key after key
        own, usual = (weight(axes, rngs, **SIZES)[...] for rngs in both)
        np.testing.assert_array_equal(own, usual)


def test_to_the_bit_as_ever():
    """A seed's weights stay what they were. XLA rounds the product otherwise where it is in one
    program with the normal numbers, as in training."""

    def own(key):
        return weight("M D", InitRngs(key), init=0.02, **SIZES)[...]

    def expected(key):
        return 0.02 * jax.random.normal(nnx.Rngs(key).params(), (SIZES["M"], SIZES["D"]))

    key, keys = jax.random.key(7), jax.random.split(jax.random.key(7), 2)
    np.testing.assert_array_equal(own(key), expected(key))
    alone, mapped = jax.jit, lambda function: jax.jit(jax.vmap(function))
    np.testing.assert_array_equal(alone(own)(key), alone(expected)(key))
    np.testing.assert_array_equal(mapped(own)(keys), mapped(expected)(keys))


@pytest.mark.parametrize("init", ["zeros", "ones"])
def test_constant_inits_draw_no_random_numbers(init):
    """A bias or zero head must not shift the weights drawn after it."""
    rngs = nnx.Rngs(5)
    weight("D", rngs, init=init, **SIZES)
    after = weight("D -> H", rngs, **SIZES)[...]
    np.testing.assert_array_equal(after, weight("D -> H", nnx.Rngs(5), **SIZES)[...])


@pytest.mark.parametrize(
    "x_shape, w_shape",
    [
        ((5, 6), (6, 3)),  # in >= out: one order of the weight gradient
        ((5, 6), (6, 6)),
        ((5, 6), (6, 11)),  # out > in: the other
        ((2, 5, 6), (6, 2, 4)),
        ((2, 5, 6), (6, 2, 2)),
        ((2, 3, 4, 7), (7, 2, 2, 3)),
        ((2, 3, 4, 7), (7, 3)),
        ((6,), (6, 3)),
    ],
)
def test_linear_and_its_gradients_are_tensordot(x64, x_shape, w_shape):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(x_shape), rng.standard_normal(w_shape)
    dy = rng.standard_normal(x_shape[:-1] + w_shape[1:])
    y, pullback = jax.vjp(linear, jnp.asarray(x), jnp.asarray(w))
    dx, dw = pullback(jnp.asarray(dy))
    tokens = list(range(len(x_shape) - 1))
    outputs = list(range(len(x_shape) - 1, dy.ndim))
    close = dict(rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(y, np.tensordot(x, w, 1), **close)
    np.testing.assert_allclose(dx, np.tensordot(dy, w, (outputs, list(range(1, w.ndim)))), **close)
    np.testing.assert_allclose(dw, np.tensordot(x, dy, (tokens, tokens)), **close)


def test_the_transposed_weight_gradient_is_kept_on_cpu_alone():
    """There is one where the weight is no wider than its input."""
    gradient = jax.jit(jax.grad(lambda w, x: linear(x, w).sum()))
    for platform, out, kept in (
        *(("cpu", 3, True), ("cpu", 6, True), ("cpu", 7, False)),
        *(("tpu", 3, False), ("cuda", 3, False)),
    ):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, out), (5, 6))]
        text = gradient.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        assert ("optimization_barrier" in text) is kept, (platform, out)


@pytest.mark.parametrize("out", [3, 20])
def test_linear_keeps_bfloat16(out):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 5, 8)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((8, out)), jnp.bfloat16)
    y, pullback = jax.vjp(linear, x, w)
    dx, dw = pullback(jnp.ones_like(y))
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(w, np.float64), 1)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=2**-8)


def test_a_wide_product_of_bfloat16():
    """It is accumulated and returned in float32; its gradients take products no wider than x."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 5, 64)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((64, 20)), jnp.bfloat16)

    def wide(x, w):
        return linear(x, w, jnp.dtype(jnp.float32))

    y, pullback = jax.vjp(wide, x, w)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(w, np.float64), 1)
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5)
    dx, dw = pullback(jnp.ones_like(y))
    assert y.dtype == jnp.float32 and dx.dtype == dw.dtype == jnp.bfloat16
    for text in (str(jax.make_jaxpr(wide)(x, w)), str(jax.make_jaxpr(pullback)(y))):
        assert "dot_general" in text
    operands = [
        v.aval.dtype
        for e in jax.make_jaxpr(pullback)(y).eqns
        if e.primitive.name == "dot_general"
        for v in e.invars
    ]
    assert operands == [jnp.bfloat16] * 4


def test_letters_that_mean_nothing_are_refused():
    """Or a weight of them would lie whole on every device, and be one matrix for Muon."""
    with pytest.raises(ValueError, match=r"axes 'D -> X H': 'X' is none of N .*J \(bases and"):
        Axes.parse("D -> X H")
    with pytest.raises(ValueError, match="axes 'N: N -> H': a letter is repeated"):
        Axes.parse("N: N -> H")


def test_per_head_of_storage():
    """`per_head` names the matrices that the stored array holds: query head 2 is w[:, 2]."""
    axes = Axes.parse("D -> N H").per_head()
    order = [Axes.parse("D -> N H").names.index(name) for name in axes.names]
    stored = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(stored.transpose(order)[2], stored[:, 2])
