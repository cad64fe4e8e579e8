"""Decode attention tile by tile against its definition, for every cache layout."""

import functools
import itertools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from kvjax.kernels.decode_attention import cache_layouts, reference, xla
from kvjax.kernels.decode_attention.api import decode_attention
from kvjax.kernels.decode_attention.cache_layouts.factored import FactoredSizes
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentSizes
from kvjax.kernels.decode_attention.cache_layouts.latent_residual import LatentResidualSizes
from kvjax.kernels.decode_attention.cache_layouts.rebuilt import RebuiltSizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes
from kvjax.kernels.decode_attention.cache_layouts.tensor_product import TensorProductSizes
from kvjax.kernels.decode_attention.cache_layouts.tied import TiedSizes
from kvjax.kernels.decode_attention.shapes import RIVALS, SHAPES, abstract, bytes_per_token
from kvjax.layers import rope
from tests import quick
from tests.mechanisms import MECHANISMS

B, S, H, HV, R, C, P = 3, 40, 8, 6, 3, 10, 4
BASE = 100.0

# Builders below and their arguments, heads and options.
VARIANTS = {
    "mha": ("grouped", dict(N=4, K=4)),
    "gqa": ("grouped", dict(N=6, K=2, bias=True)),
    "mqa": ("grouped", dict(N=4, K=1)),
    "lrkv": ("residual", dict(N=4, K=4, J=1, scaled=True)),
    "lrkv_gqa": ("residual", dict(N=8, K=4, J=2, scaled=True, bias=True)),
    "lrkv_one_base_each": ("residual", dict(N=4, K=4, J=4)),
    "lrkv_no_rope": ("residual", dict(N=8, K=4, J=2, rope_base=None, scaled=True)),
    "factored": ("factored", dict(N=4, K=4, J=2, scaled=True)),
    "factored_joint": ("factored", dict(N=8, K=4, J=1, Rv=2, bias=True)),
    "factored_no_rope": ("factored", dict(N=8, K=4, J=2, Rv=2, rope_base=None, scaled=True)),
    "factored_values": ("factored", dict(N=4, K=2, J=2, R=0, Rv=2, rope_base=None)),
    "kv_tied": ("tied", dict(N=4, K=2, norm=True, gain=True)),
    "kv_tied_one_each": ("tied", dict(N=4, K=4, norm=True)),
    "lrkv_kv_tied": ("tied", dict(N=8, K=4, J=2, rank=R, norm=True, gain=True)),
    "kv_tied_plain": ("tied", dict(N=4, K=4, rope_base=None, bias=True)),
    "mla": ("latent", dict(N=4)),
    "gla": ("latent", dict(N=4, latents=(2,))),
    "mlra": ("latent", dict(N=8, latents=(2, 2))),
    "gta": ("latent", dict(N=4, latents=(2,), key_channels=4, up=False)),
    "shared_kv": ("latent", dict(N=4, latents=(2,), up=False, rope=False)),
    "mla_lrkv": ("latent_residual", dict(N=4)),
    "tpa": ("tensor_product", dict(N=4)),
    "mla_paper": ("rebuilt", dict(N=4, norm=True, gain=True)),
    "mla_paper_plain": ("rebuilt", dict(N=4, rope_base=None)),
}


class _Draw:
    """Draws the inputs and the cache of one call of decode attention, by kind."""

    def __init__(self, T, B=B, S=S, H=H, Hv=HV, R=R, dtype=np.float64):
        self.T, self.B, self.S, self.H, self.Hv, self.R = T, B, S, H, Hv, R
        self.dtype, self.rng = dtype, np.random.default_rng(0)

    def normal(self, *shape):
        return jnp.asarray(self.rng.standard_normal(shape), self.dtype)

    def positive(self, *shape):
        return jnp.asarray(self.rng.uniform(0.5, 1.5, shape), self.dtype)

    def query(self, N, H=None):
        return self.normal(self.B, self.T, N, H or self.H)

    def cached(self, *shape):
        return self.normal(self.B, *shape, self.S)

    def common(self, bias):
        weights = cache_layouts.PositionBias(weights=self.normal(5)) if bias else None
        return dict(bias=weights, scale=self.H**-0.5)

    def grouped(self, N, K, bias=False):
        cache = dict(base_key=self.cached(K, self.H), base_value=self.cached(K, self.Hv))
        return cache_layouts.GroupedInputs(query=self.query(N), **self.common(bias)), cache

    def residual(self, N, K, J, rope_base=BASE, scaled=False, bias=False):
        cache = dict(
            base_key=self.cached(J, self.H),
            base_value=self.cached(J, self.Hv),
            residual_key=self.cached(K, self.R),
            residual_value=self.cached(K, self.R),
        )
        if scaled:
            cache["key_scale"] = self.positive(self.B, K, 1, self.S)
        own = dict(query=self.query(N), rope_base=rope_base)
        own["residual_query"] = self.query(N) if rope_base is None else own["query"]
        own["expand_key"] = self.normal(K, self.R, self.H)
        own["expand_value"] = self.normal(K, self.R, self.Hv)
        return cache_layouts.ResidualInputs(**own, **self.common(bias)), cache

    def factored(self, N, K, J, R=R, Rv=0, rope_base=BASE, scaled=False, bias=False):
        cache = dict(
            key=self.cached(J, R) if R else self.cached(K, self.H),
            value=self.cached(J, Rv) if Rv else self.cached(K, self.Hv),
        )
        if scaled:
            cache["key_scale"] = self.positive(self.B, K, 1, self.S)
        own = dict(query=self.query(N), rope_base=rope_base)
        own["expand_key"] = self.normal(K, R, self.H) if R else None
        own["expand_value"] = self.normal(K, Rv, self.Hv) if Rv else None
        return cache_layouts.FactoredInputs(**own, **self.common(bias)), cache

    def tied(self, N, K, J=None, rank=0, norm=False, gain=False, rope_base=BASE, bias=False):
        cache = dict(base_key=self.cached(J or K, self.H))
        if rank:
            cache["residual_key"] = self.cached(K, rank)
        own = dict(query=self.query(N), rope_base=rope_base, norm_epsilon=1e-2 if norm else None)
        own["expand_key"] = self.normal(K, rank, self.H) if rank else None
        own["gain"] = self.positive(self.H) if gain else None
        return cache_layouts.TiedInputs(**own, **self.common(bias)), cache

    def latent(self, N, latents=(), key_channels=None, up=True, rope=True):
        J = math.prod(latents)
        cache = dict(latent=self.cached(*latents, C)) | (
            dict(rope_key=self.cached(P)) if rope else {}
        )
        own = dict(
            query=self.query(N, key_channels or C), rope_query=self.query(N, P) if rope else None
        )
        own["up_value"] = self.normal(J, C, N // J, self.Hv) if up else None
        return cache_layouts.LatentInputs(**own, scale=0.3), cache

    def latent_residual(self, N):
        own = dict(query=self.query(N, C), rope_query=self.query(N, P))
        own |= dict(residual_query=self.query(N, self.R), up_value=self.normal(C, N, self.Hv))
        own |= dict(expand_value=self.normal(N, self.R, self.Hv), scale=0.3)
        cache = dict(latent=self.cached(C), rope_key=self.cached(P))
        cache |= {f"residual_{kind}": self.cached(N, self.R) for kind in ("key", "value")}
        return cache_layouts.LatentResidualInputs(**own), cache

    def tensor_product(self, N, R=2, Rv=3):
        cache = dict(key_head=self.cached(N, R), value_head=self.cached(N, Rv))
        cache |= dict(key_factor=self.cached(R, self.H), value_factor=self.cached(Rv, self.Hv))
        query = self.query(N)
        return cache_layouts.TensorProductInputs(query=query, scale=self.H**-0.5), cache

    def rebuilt(self, N, norm=False, gain=False, rope_base=BASE):
        cache = dict(latent=self.cached(C))
        own = dict(query=self.query(N), up_key=self.normal(C, N, self.H), rope_base=rope_base)
        own |= dict(up_value=self.normal(C, N, self.Hv), norm_epsilon=1e-2 if norm else None)
        own["gain"] = self.positive(self.H) if gain else None
        return cache_layouts.RebuiltInputs(**own, scale=self.H**-0.5), cache


def _build(name, T, **sizes):
    kind, options = VARIANTS[name]
    return getattr(_Draw(T, **sizes), kind)(**options)


WAYS = {"tiled": xla.attend_in_tiles, "whole": xla.attend_at_once}


@functools.partial(jax.jit, static_argnames=("way", "tile_kv"))
def _attend(inputs, cache, first_B, way, tile_kv):
    return WAYS[way](inputs, cache, first_B, tile_kv)[0]


_definition = jax.jit(reference.decode_attention)


def test_flops_by_hand():
    """FLOPs per query and per token; 2 per multiply-add, 3 per rotated channel."""
    rotated = dict(rope_base=BASE)
    factored = functools.partial(FactoredSizes, J=1, Rv=7, H=8, Hv=4, scaled=True)
    P = rope.basis(8, BASE, 512, np.finfo(np.float32).eps / 8)[0].shape[1]
    per_head = 5 * 8 * (3 + 2 * P) / 512 + 2 * 5 * P + 2 * 5
    expected = [
        (GroupedSizes(N=6, K=3, H=8, Hv=4), 0, 144),
        (ResidualSizes(N=6, K=3, R=5, H=8, Hv=4, **rotated), 240, 546),
        (ResidualSizes(N=6, K=3, R=5, H=8, Hv=4, rope_base=None), 720, 270),
        (ResidualSizes(N=3, K=3, R=5, H=8, Hv=4, **rotated), 480, 105 + 3 * per_head),
        (factored(N=6, K=3, R=5, rope_base=None), 816, 150),
        (factored(N=6, K=3, R=5, **rotated), 336, 498),
        (factored(N=3, K=3, R=5, **rotated), 528, 45 + 3 * per_head),
        (factored(N=6, K=3, R=0, rope_base=None), 336, 186),
        (factored(N=6, K=3, R=0, Rv=0, rope_base=None, scaled=False), 0, 144),
        (TiedSizes(N=6, K=3, J=1, R=5, H=8, normed=True, gain=True, **rotated), 480, 660),
        (TiedSizes(N=2, K=9, J=4, R=0, H=8, normed=True, gain=False, **rotated), 0, 224),
        (TiedSizes(N=2, K=9, J=4, R=0, H=8, normed=False, gain=False, rope_base=None), 0, 64),
        (LatentSizes(N=6, C=10, P=3, Hv=4, key_channels=7, absorbed_channels=8), 1440, 240),
        (LatentResidualSizes(N=6, C=10, P=3, R=5, H=8, Hv=4), 2160, 396),
        (RebuiltSizes(N=6, C=10, H=8, Hv=4, normed=True, **rotated), 480, 1464),
        (TensorProductSizes(N=6, R=2, Rv=3, H=8, Hv=4), 0, 378),
    ]
    for sizes, per_query, per_key in expected:
        assert sizes.flops() == (per_query, pytest.approx(per_key)), sizes


def test_shapes_of_real_models():
    """Bytes of a token in bfloat16, FLOPs of a query; rivals' caches are of MLA's size."""
    shared = dict.fromkeys(RIVALS, 1664)
    large = dict(mha=9216, gqa=3072, mqa=512, thin_keys=5760, lrkv=5192, lrkv_no_norm=5120)
    large |= dict(lrkv_no_rope=5192, lrkv_gqa=2072, low_rank_keys=2328, mla=1664) | shared
    small = dict(mha=3072, gqa=1536, mqa=512, thin_keys=1920, lrkv=2072, lrkv_no_norm=2048)
    small |= dict(lrkv_no_rope=2072, lrkv_gqa=1292, low_rank_keys=1164, mla=640)
    small |= dict.fromkeys(RIVALS, 640)
    unquantized = {
        model: {name: shape for name, shape in shapes_.items() if "_int" not in name}
        for model, shapes_ in SHAPES.items()
    }
    dtype = jnp.dtype(jnp.bfloat16)
    sizes = {
        model: {name: bytes_per_token(shape, dtype) for name, shape in shapes_.items()}
        for model, shapes_ in unquantized.items()
    }
    assert sizes == dict(d12=small, d36=large)
    rivals = {name: (SHAPES["d36"][name].N, *SHAPES["d36"][name].flops()) for name in RIVALS}
    assert rivals == dict(
        gla=(18, 1_769_472, 29_952),
        mlra2=(36, 1_769_472, 32_256),
        mlra4=(72, 3_538_944, 64_512),
        gta=(18, 0, 9216),
        shared_kv=(10, 0, 16_640),
        mfa=(10, 0, 16_640),
    )
    assert (SHAPES["d12"]["mfa"].N, SHAPES["d12"]["gta"].J, SHAPES["d12"]["gqa"].K) == (8, 2, 3)
    for shape in (shape for shapes_ in unquantized.values() for shape in shapes_.values()):
        inputs, cache = abstract(shape, batch=2, length=16, dtype=jnp.float32)
        o = jax.eval_shape(reference.decode_attention, inputs, cache, jnp.zeros(2, jnp.int32))
        width = shape.Hv or shape.C
        assert o.shape == (2, 1, shape.N, width)
        channels = inputs.query.shape[-1] + getattr(shape, "P", 0)
        assert inputs.scale == channels**-0.5


@pytest.mark.parametrize("name, angles", [("lrkv", True), ("gqa", True), ("mqa", False)])
def test_a_capacity_beyond_the_angles_of_positions(name, angles):
    """lrkv rotates, gqa has a bias by position, mqa needs no angles."""

    def run(S):
        return jax.eval_shape(decode_attention, *_abstract(name, S), jnp.zeros(B, jnp.int32))

    run(2**20)
    if not angles:
        run(2**20 + 128)
        return
    with pytest.raises(ValueError, match="a capacity of 1048704: .* up to 1048576 tokens"):
        run(2**20 + 128)


def _abstract(name, S):
    """Returns abstract inputs with one query per sequence, and an abstract cache of S tokens."""
    inputs, cache = jax.eval_shape(lambda: _build(name, 1, dtype=np.float32))

    def with_capacity(x):
        return jax.ShapeDtypeStruct((*x.shape[:-1], S), x.dtype)

    return inputs, {field: with_capacity(array) for field, array in cache.items()}


def test_every_cache_layout_is_tested(x64, make_mechanism):
    """Each layout is in VARIANTS, or of a mechanism in tests/attention/test_law.py."""
    built = {type(_build(name, 1)[0]) for name in VARIANTS}
    for name in MECHANISMS:
        config = make_mechanism(name)

        def inputs(config=config):
            positions = rope.positions(np.zeros((1, 1), np.int32), config.rope_dim, BASE)
            module = config.build(16, rngs=nnx.Rngs(0))
            return module.decode_inputs(module.project(jnp.zeros((1, 1, 16)), positions)[0], BASE)

        built.add(type(jax.eval_shape(inputs)))
    assert built == {
        c for c in cache_layouts.DecodeInputs.__subclasses__() if c.__module__.startswith("kvjax.")
    }


# Kinds of inputs that quick.READERS does not have; mlra has several latents.
_OTHERS = (
    "lrkv_no_rope",
    "factored",
    "factored_no_rope",
    "factored_values",
    "kv_tied_plain",
    "gta",
    "mlra",
)
_OTHERS += ("tpa", "mla_paper_plain")


@pytest.mark.parametrize(
    "name, way, T",
    quick.only(
        [
            *((name, "tiled", 1) for name in (*quick.READERS, *_OTHERS)),
            *(("lrkv_gqa", "tiled", 3), ("lrkv_kv_tied", "whole", 1)),
        ],
        [(name, *way) for name in VARIANTS for way in (("tiled", 1), ("tiled", 3), ("whole", 1))],
    ),
)
def test_equals_the_definition(x64, name, way, T):
    """Tiles that do not divide the cache, a tile longer than the cache, ragged lengths."""
    inputs, cache = _build(name, T)
    ragged = [[17, 0, 36], [15, 16, 17], [37, 37, 37], [0, 0, 0]]  # 37 + 3 tokens fill the cache
    for tile_kv in (16, 64) if (way, T) == ("tiled", 1) and name in quick.READERS else (16,):
        for first in ragged if tile_kv == 16 else ragged[:1]:
            first_B = jnp.asarray(first, jnp.int32)
            o = _attend(inputs, cache, first_B, way, tile_kv)
            assert o.shape[:3] == inputs.query.shape[:3]
            assert o.dtype == jnp.float64
            expected = _definition(inputs, cache, first_B)
            np.testing.assert_allclose(o, expected, rtol=1e-11, atol=1e-11)
            assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize(
    "T, window", quick.only([(1, 20), (3, 5)], itertools.product((1, 3), (1, 5, 20, 40)))
)
@pytest.mark.parametrize("name", quick.only(["lrkv"], ["mha", "lrkv", "factored", "mla"]))
def test_a_window_of_the_last_tokens(x64, name, T, window):
    """Tiles before the window are not read: they hold NaN."""
    inputs, cache = _build(name, T)
    first_B = jnp.asarray([37, 16, 15], jnp.int32)
    definition = jax.jit(functools.partial(reference.decode_attention, window=window))
    expected = np.asarray(definition(inputs, cache, first_B))
    attend = jax.jit(functools.partial(xla.decode_attention, window=window, tile_kv=8))
    np.testing.assert_allclose(attend(inputs, cache, first_B), expected, rtol=1e-11, atol=1e-11)
    q, k, v = map(np.asarray, jax.jit(reference.expand)(inputs, cache))
    for b, first in enumerate(first_B.tolist()):
        for t in range(T):
            seen = slice(max(0, first + t + 1 - window), first + t + 1)
            z_NS = inputs.scale * np.einsum("NH,SNH->NS", q[b, t], k[b, seen])
            o_NV = np.einsum("NS,SNV->NV", special.softmax(z_NS, axis=-1), v[b, seen])
            np.testing.assert_allclose(expected[b, t], o_NV, rtol=1e-11, atol=1e-11)
    before = max(0, 15 + 1 - window) // 8 * 8
    unread = jax.tree.map(np.array, cache)
    for array in unread.values():
        array[..., :before] = np.nan
    np.testing.assert_array_equal(attend(inputs, unread, first_B), attend(inputs, cache, first_B))


@pytest.mark.parametrize("option", [dict(window=4), dict(softcap=0.5)], ids=str)
def test_kernels_have_no_window_and_no_soft_cap(x64, option):
    inputs, cache = _build("mha", 1)
    first_B = jnp.asarray([17, 0, 36], jnp.int32)
    (key,) = option
    for name in ("tpu", "gpu"):
        with pytest.raises(NotImplementedError, match=f"the {name.upper()} kernels have no {key}"):
            decode_attention(inputs, cache, first_B, **option, implementation=name)
    implementations = (decode_attention, reference.decode_attention)
    found, expected = (
        jax.jit(functools.partial(implementation, **option))(inputs, cache, first_B)
        for implementation in implementations
    )
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "name, T", quick.only([("lrkv", 1), ("mla", 3)], itertools.product(("lrkv", "mla"), (1, 3)))
)
def test_a_soft_cap(x64, name, T):
    """All at once, tile by tile, and with a window, against NumPy."""
    inputs, cache = _build(name, T)
    first_B = jnp.asarray([37, 16, 15], jnp.int32)
    q, k, v = map(np.asarray, jax.jit(reference.expand)(inputs, cache))
    for window, tile_kv in ((0, 128), (0, 8), (9, 8)):
        options = dict(window=window, softcap=0.5)
        attend = jax.jit(functools.partial(xla.decode_attention, **options, tile_kv=tile_kv))
        definition = jax.jit(functools.partial(reference.decode_attention, **options))
        found, expected = attend(inputs, cache, first_B), definition(inputs, cache, first_B)
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)
        for b, first in enumerate(first_B.tolist()):
            for t in range(T):
                seen = slice(max(0, first + t + 1 - (window or first + T)), first + t + 1)
                z_NS = 0.5 * np.tanh(
                    2 * inputs.scale * np.einsum("NH,SNH->NS", q[b, t], k[b, seen])
                )
                o_NV = np.einsum("NS,SNV->NV", special.softmax(z_NS, axis=-1), v[b, seen])
                np.testing.assert_allclose(expected[b, t], o_NV, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("first", [[3, 0, 20], [250, 3, 17]], ids=["short", "long"])
@pytest.mark.parametrize("name", quick.only(["lrkv"], ["mha", "lrkv", "kv_tied_one_each", "mla"]))
def test_a_cache_much_longer_than_a_tile(x64, name, first):
    """The CPU's path depends on the longest sequence; the result does not."""
    kind, options = VARIANTS[name]
    inputs, cache = getattr(_Draw(1, S=256), kind)(**options)
    first_B = jnp.asarray(first, jnp.int32)
    o = jax.jit(functools.partial(xla.decode_attention, tile_kv=32))(inputs, cache, first_B)
    expected = _definition(inputs, cache, first_B)
    np.testing.assert_allclose(o, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, way, T",
    [
        (name, *way)
        for name in ("lrkv", "kv_tied", "kv_tied_one_each", "mla_paper")
        for way in (("tiled", 1), ("tiled", 3), ("whole", 1))
    ],
)
def test_far_positions(x64, name, way, T):
    """Four tiles of 512, up to position 2,045; LRKV's absorbed query is rotated for each."""
    kind, options = VARIANTS[name]
    options = options | dict(rope_base=10_000.0)
    inputs, cache = getattr(_Draw(T, S=2048, H=16), kind)(**options)
    first_B = jnp.asarray([2045, 1500, 3], jnp.int32)
    expected = _definition(inputs, cache, first_B)
    o = _attend(inputs, cache, first_B, way, 512)
    np.testing.assert_allclose(o, expected, rtol=1e-10, atol=1e-10)
    narrow = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float32), (inputs, cache))
    o = _attend(*narrow, first_B, way, 512)
    assert o.dtype == jnp.float32
    assert np.abs(o - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lrkv", "mla", "kv_tied"])
def test_bfloat16_is_widened_first(name):
    """Products and sums of bfloat16 arrays are float32's, and so is the output."""
    inputs, cache = _build(name, 1, dtype=jnp.bfloat16)
    first_B = jnp.asarray([17, 0, 36], jnp.int32)
    o = _attend(inputs, cache, first_B, "tiled", 16)
    assert o.dtype == jnp.float32
    wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float32), (inputs, cache))
    np.testing.assert_allclose(o, _attend(*wide, first_B, "tiled", 16), rtol=1e-6, atol=1e-6)


# LRKV at the width of the 2.5B model, batch 1, and other mechanisms like it.
LARGE = {
    "lrkv": ("residual", dict(N=18, K=18, J=1, scaled=True)),
    "lrkv_gqa": ("residual", dict(N=18, K=6, J=1, scaled=True)),
    "kv_tied": ("tied", dict(N=18, K=18, norm=True)),
    "gqa": ("grouped", dict(N=18, K=6)),
}


class _Abstract(_Draw):
    """Shapes only."""

    def normal(self, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    positive = normal


@pytest.mark.parametrize(
    "name, T", quick.only([("lrkv", 1)], [(name, T) for name in LARGE for T in (1, 4)])
)
def test_nothing_grows_with_expanded_keys(name, T):
    """Temporaries are a tile and the logits; the definition expands the cache."""
    kind, options = LARGE[name]

    def bytes_of(implementation, slots):
        inputs, cache = getattr(_Abstract(T, B=1, S=slots, H=128, Hv=128, R=64), kind)(**options)
        first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
        compiled = jax.jit(implementation).lower(inputs, cache, first_B).compile()
        cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        return compiled.memory_analysis().temp_size_in_bytes, cache_bytes

    small, large = (bytes_of(xla.decode_attention, slots) for slots in (4096, 32_768))
    assert large[1] == 8 * small[1]
    assert large[0] - small[0] < 0.05 * (large[1] - small[1])
    assert large[0] < 0.25 * large[1]
    if name != "gqa":  # the definition reads GQA's cache as it is
        small, large = (bytes_of(reference.decode_attention, slots) for slots in (4096, 32_768))
        assert large[0] - small[0] > 0.5 * (large[1] - small[1])


def test_implementations_have_names(x64):
    inputs, cache = _build("lrkv", 1)
    first_B = jnp.asarray([17, 0, 36], jnp.int32)
    attend = jax.jit(decode_attention, static_argnames="implementation")
    default, named = (attend(inputs, cache, first_B, implementation=i) for i in (None, "xla"))
    np.testing.assert_array_equal(default, named)
    expected = attend(inputs, cache, first_B, implementation="reference")
    np.testing.assert_allclose(default, expected, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="implementation = 'fast'.*xla, tpu, gpu, reference"):
        decode_attention(inputs, cache, first_B, implementation="fast")
