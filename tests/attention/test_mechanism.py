"""The interface of mechanisms: shapes, dtypes, costs, defaults and checks of their configs."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import MECHANISMS
from kvjax.attention.mechanism import QK_NORMS
from kvjax.cache.field import Field
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from tests import quick
from tests.compiled import compiled
from tests.mechanisms import MECHANISMS as TESTED

B, T, D, BASE = 2, 5, 16, 100.0
POSITIONS = np.array([[0, 1, 2, 3, 4], [9, 1000, 11, 12, 65_536]], np.int32)


def _positions(config, on):
    return rope.positions(POSITIONS, config.rope_dim, BASE if on else None)


@pytest.mark.parametrize("dtype", quick.only([jnp.bfloat16], [jnp.bfloat16, jnp.float32]))
def test_shapes_and_dtypes_are_as_promised(make_mechanism, mechanism_name, dtype):
    """Checks queries, expanded keys and values, and the cache entry."""
    for qk_norm in QK_NORMS:
        config = make_mechanism(mechanism_name, qk_norm=qk_norm)
        graph, weights = nnx.split(nnx.eval_shape(lambda c=config: c.build(D, rngs=nnx.Rngs(0))))
        weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), weights)

        def outputs(weights, x, config=config, graph=graph):
            module, positions = nnx.merge(graph, weights), _positions(config, True)
            q, raw = module.project(x, positions)
            return (q, *module.keys_values(raw, positions)), module.encode(raw, positions)

        x = jax.ShapeDtypeStruct((B, T, D), dtype)
        (q, k, v), entry = jax.eval_shape(outputs, weights, x)
        assert q.shape == (B, T, config.query_heads, config.query_dim)
        assert k.shape == (B, T, config.key_heads, config.query_dim)
        assert v.shape == (B, T, config.key_heads, config.value_dim)
        assert q.dtype == k.dtype == v.dtype == dtype
        promised = config.entry()
        assert set(entry) == set(promised)
        for name, field in promised.items():
            assert entry[name].shape == (B, T, *field.shape), name
            assert entry[name].dtype == field.dtype_in(dtype), name
    with pytest.raises(UserError, match="qk_norm = 'layer'.*'none', 'rms', 'rms_gain'"):
        make_mechanism(mechanism_name, qk_norm="layer")


def test_packed_weights_give_the_same_projections(x64, make_mechanism, randomise, mechanism_name):
    """`pack` leaves no other weight of the input, and as many elements."""
    config = make_mechanism(mechanism_name, qk_norm="none")
    module = randomise(lambda: config.build(D, rngs=nnx.Rngs(0)))[0]
    x_BTD, positions = np.random.default_rng(0).normal(size=(B, T, D)), _positions(config, True)

    def project(module):
        return compiled(lambda x_BTD: module.project(x_BTD, positions), x_BTD)

    def weights(module):
        return nnx.state(module, nnx.Param).flat_state().leaves

    expected, size = project(module), sum(w.size for w in weights(module))
    module.pack()
    assert sum(w.size for w in weights(module)) == size
    of_input = [w for w in weights(module) if w.get_metadata().get("axes", "").startswith("D ->")]
    assert not of_input and module.packed.shape[0] == D
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(close, project(module), expected)


RESIDUALS, LATENTS = ("expand_key", "expand_value"), ("up_key", "up_value")
# By mechanism: heads of queries and of keys; their channels, and the rotated channels; H in scale =
# 1/sqrt(H); absorbed weights; FLOPs of decode attention per query and per key, with RoPE and
# without; FLOPs of training beyond attention, and activations beyond attention's.
COSTS = {
    "mha": (4, 4, 8, 8, 8, (), (0, 128), (0, 128), 0, 0),
    "gqa": (4, 2, 8, 8, 8, (), (0, 128), (0, 128), 0, 0),
    "mqa": (4, 1, 8, 8, 8, (), (0, 128), (0, 128), 0, 0),
    "lrkv": (4, 4, 8, 8, 8, RESIDUALS, (768, 375.5625), (672, 180), 0, 0),
    "lrkv_gqa": (8, 4, 8, 8, 8, RESIDUALS, (672, 632), (1056, 360), 0, 0),
    "lrkv_latent_bias": (4, 4, 8, 8, 8, RESIDUALS, (768, 375.5625), (672, 180), 0, 0),
    "thin_keys": (4, 2, 4, 4, 4, (), (0, 96), (0, 96), 0, 0),
    "lrkv_wide_keys": (4, 4, 8, 8, 8, RESIDUALS, (720, 359.5625), (624, 164), 0, 0),
    "lrkv_shared_rope": (4, 4, 16, 8, 8, RESIDUALS, (624, 164), (624, 164), 0, 0),
    "kv_tied": (4, 4, 8, 8, 8, (), (0, 288), (0, 224), 0, 0),
    "kv_tied_gqa": (4, 2, 8, 8, 8, (), (0, 224), (0, 176), 0, 0),
    "lrkv_kv_tied": (4, 4, 8, 8, 8, RESIDUALS, (192, 536), (192, 472), 0, 0),
    "qk_tied": (4, 4, 8, 8, 8, (), (0, 112), (0, 112), 0, 0),
    "qkv_tied": (4, 4, 8, 8, 8, (), (0, 288), (0, 224), 0, 0),
    "qk_tied_plus": (4, 4, 11, 8, 8, (), (0, 134), (0, 134), 0, 0),
    "qkv_tied_plus": (4, 4, 11, 8, 8, (), (0, 294), (0, 230), 0, 0),
    "factored": (4, 4, 8, 8, 8, RESIDUALS[:1], (576, 287.5625), (480, 92), 0, 0),
    "factored_joint": (8, 4, 8, 8, 8, RESIDUALS, (704, 600), (1344, 136), 0, 0),
    "factored_values": (4, 2, 8, 8, 8, RESIDUALS[1:], (192, 88), (192, 88), 0, 0),
    "mla": (4, 4, 12, 4, 12, LATENTS, (1120, 192), (1120, 192), 0, 0),
    "mla_lrkv": (4, 4, 12, 4, 12, LATENTS + RESIDUALS, (1008, 176), (1008, 176), 0, 0),
    "mla_paper": (4, 4, 8, 8, 8, LATENTS, (640, 976), (640, 880), 0, 0),
    "mfa": (4, 1, 8, 8, 8, (), (0, 128), (0, 128), 0, 0),
    "gla": (4, 4, 12, 4, 12, LATENTS, (672, 128), (672, 128), 0, 0),
    "mlra": (8, 8, 12, 4, 12, LATENTS, (1536, 256), (1536, 256), 0, 0),
    "gta": (4, 2, 8, 4, 8, (), (0, 128), (0, 128), 0, 0),
    "shared_kv": (4, 2, 8, 4, 8, (), (0, 128), (0, 128), 0, 0),
    "mfa_kr": (4, 2, 8, 8, 8, (), (384, 224), (384, 176), 384, 24),
    "tpa": (4, 4, 8, 8, 8, (), (416, 300), (416, 300), 464, 0),
}


def test_sizes_and_costs_of_configs(make_mechanism):
    costs = {}
    for name in COSTS:
        c = make_mechanism(name)
        heads = c.query_heads, c.key_heads, c.query_dim, c.rope_dim, round(c.scale**-2, 9)
        decoding = c.absorbed, *(tuple(c.decode_flops(base)) for base in (10_000.0, None))
        costs[name] = (*heads, *decoding, c.extra_flops, c.extra_activations)
        assert c.needs_angles == (c.title[0] == "(") and not c.needs_whole_rows
        assert not c.output_bias
        assert make_mechanism(name, bias=True).output_bias == (name != "lrkv_latent_bias")
    assert costs == COSTS
    without, mla = (make_mechanism("mla_lrkv", rank=0), make_mechanism("mla", latent_dim=6))
    assert without.absorbed == LATENTS and without.decode_flops(None) == mla.decode_flops(None)


def test_configs_are_frozen_and_keyword_only():
    for cls in MECHANISMS.values():
        assert cls.__dataclass_params__.frozen and cls.__dataclass_params__.kw_only, cls


@pytest.mark.parametrize(
    "name, keys, elements",
    [  # the table of the design, with N = 4, H = 8, R = 3
        ("mha", {}, 2 * 4 * 8),
        ("gqa", {}, 2 * 2 * 8),
        ("mqa", {}, 2 * 8),
        ("lrkv", {}, 2 * (8 + 4 * 3)),
        ("lrkv_gqa", {}, 2 * (2 * 8 + 4 * 3)),
        ("thin_keys", {}, 2 * (4 + 8)),
        ("lrkv_shared_rope", {}, 8 + 6 + 2 * 4 * 3),
        ("kv_tied", {}, 4 * 8),
        ("kv_tied_gqa", {}, 2 * 8),
        ("kv_tied", dict(num_kv_heads=1, num_bases=1), 8),
        ("lrkv_kv_tied", {}, 8 + 4 * 3),
        ("qk_tied", dict(value_dim=8), 2 * 4 * 8),
        ("qk_tied_plus", {}, 2 * 4 * 8),
        ("qkv_tied", {}, 4 * 8),
        ("qkv_tied_plus", {}, 4 * 8),
        ("factored", {}, 4 * (3 + 8)),
        ("factored_joint", {}, 5 + 3),
        ("factored_values", {}, 2 * (8 + 3)),
        ("mla", {}, 10 + 4),
        ("mla_lrkv", {}, 6 + 4 + 2 * 4 * 3),
        ("mla_lrkv", dict(rank=0), 6 + 4),
        ("mla_paper", {}, 10),
        ("mfa", {}, 2 * 8),
        ("gla", {}, 2 * 6 + 4),
        ("mlra", {}, 4 * 6 + 4),
        ("mlra", dict(num_branches=4, num_latents=1), 4 * 6 + 4),
        ("gta", {}, 2 * 8 + 4),
        ("gta", dict(rope_key_dim=0), 2 * 8),
        ("shared_kv", {}, 2 * 8),
        ("mfa_kr", {}, 2 * 8),
        ("tpa", {}, (2 + 3) * 4 + 2 * 8 + 3 * 6),
    ],
)
def test_cached_elements(make_mechanism, name, keys, elements):
    entry = make_mechanism(name, **keys, qk_norm="none").entry()
    assert sum(int(np.prod(field.shape)) for field in entry.values()) == elements
    assert all(not field.wide for field in entry.values())


def test_fields_say_which_axis_counts_heads():
    """The axis is not always the first: in factors the first is the rank."""

    def heads(axes, *shape):
        return (Field(axes, shape).head_axis, Field(axes, shape).heads)

    assert heads("J H", 2, 8) == (0, 2) and heads("K 1", 4, 1) == (0, 4)
    assert heads("R N", 3, 4) == (1, 4)
    assert heads("G J C", 4, 2, 6) == (1, 2)  # every head reads all branches
    assert heads("C", 10) == heads("R H", 3, 8) == (None, None)
    with pytest.raises(ValueError, match=r"axes 'X H': 'X' is none of N \(query heads\), K"):
        Field("X H", (2, 8))
    with pytest.raises(ValueError, match=r"Field\('J H', \(8,\)\): one size for each axis"):
        Field("J H", (8,))


def test_key_scale_costs_one_float32_per_kv_head(make_mechanism):
    for name in ("lrkv", "lrkv_gqa", "factored", "factored_joint"):
        plain = make_mechanism(name, qk_norm="none").entry()
        normed = make_mechanism(name, qk_norm="rms").entry()
        assert set(normed) - set(plain) == {"key_scale"}
        assert normed["key_scale"].shape == (4, 1)
        assert normed["key_scale"].dtype_in(jnp.bfloat16) == jnp.float32
        assert normed["key_scale"].dtype_in(jnp.float64) == jnp.float64
    for name in (
        "kv_tied",
        "lrkv_kv_tied",
        "factored_values",
        "tpa",
        "gta",
    ):  # no factor of the key
        assert make_mechanism(name, qk_norm="none").entry() == make_mechanism(name).entry()


BAD = [
    ("mha", dict(num_heads=0), "num_heads = 0"),
    ("mha", dict(num_kv_heads=3, num_bases=3), "num_kv_heads = 3.*divide num_heads = 4"),
    ("mha", dict(num_kv_heads=0), "num_kv_heads = 0.*at least 1"),
    ("mha", dict(num_kv_heads=8, num_bases=8), "num_kv_heads = 8.*divide num_heads = 4"),
    ("lrkv", dict(num_bases=3), "num_bases = 3.*divide num_kv_heads = 4"),
    ("lrkv", dict(num_bases=0), "num_bases = 0.*at least 1"),
    ("lrkv", dict(rank=-1), r"rank = -1.*\[0, 8\]"),
    ("lrkv", dict(rank=9), r"rank = 9.*\[0, 8\]"),
    ("lrkv", dict(rank=7, value_dim=6), r"rank = 7.*\[0, 6\]"),
    ("mla_lrkv", dict(residual_init="ones"), "residual_init = 'ones'.*'linear', 'zeros'"),
    ("mla_lrkv", dict(rank=7), r"rank = 7.*\[0, 6\].*0 is MLA"),
    ("mla_lrkv", dict(rank=-1), r"rank = -1.*\[0, 6\]"),
    ("lrkv", dict(residual_init="ones"), "residual_init = 'ones'.*'linear', 'zeros', 'pca'"),
    (
        "mla_lrkv",
        dict(residual_init="pca"),
        "residual_init = 'pca': .* 'linear', 'zeros'$",
    ),
    ("mha", dict(tie="vk"), "tie = 'vk'.*'none', 'kv', 'qk', 'qkv'"),
    ("kv_tied", dict(value_dim=6), "tie = 'kv'.*value_dim = 6 equal to key_dim = 8"),
    ("qkv_tied", dict(key_dim=6), "tie = 'qkv'.*value_dim = 8 equal to key_dim = 6"),
    ("qk_tied", dict(num_kv_heads=2, num_bases=2), "tie = 'qk'.*num_kv_heads = 2.*num_heads = 4"),
    ("qk_tied", dict(num_bases=2), "tie = 'qk'.*num_bases = 2.*num_heads = 4"),
    ("qkv_tied", dict(rank=2), "tie = 'qkv'.*rank 0"),
    ("lrkv", dict(rope="half"), "rope = 'half'.*'full', 'shared'"),
    ("lrkv_kv_tied", dict(rope="shared"), "rope = 'shared'.*'full' if keys are tied"),
    ("qk_tied_plus", dict(position_channels=5), "position_channels = 5.*even"),
    ("qk_tied_plus", dict(position_channels=-2), "position_channels = -2.*at least 0"),
    ("qk_tied_plus", dict(alibi=True), "alibi = True: must be False if position_channels"),
    ("lrkv", dict(key_dim=0), "key_dim = 0.*at least 1"),
    ("lrkv", dict(value_dim=-2), "value_dim = -2.*at least 1"),
    ("factored", dict(num_kv_heads=3), "num_kv_heads = 3.*divide num_heads = 4"),
    ("factored", dict(num_latents=3), "num_latents = 3.*divide num_kv_heads = 4"),
    ("factored", dict(num_latents=0), "num_latents = 0.*at least 1"),
    ("factored", dict(key_rank=9), r"key_rank = 9.*\[0, 8\]"),
    ("factored", dict(value_rank=-1), r"value_rank = -1.*\[0, 8\]"),
    ("factored_joint", dict(value_rank=25), r"value_rank = 25.*\[0, 24\]"),
    ("mla", dict(latent_dim=0), "latent_dim = 0.*at least 1"),
    ("mla", dict(rope_key_dim=0), "rope_key_dim = 0.*at least 1"),
    ("mla", dict(num_heads=-1), "num_heads = -1.*at least 1"),
    ("mla_paper", dict(latent_dim=0), "latent_dim = 0.*at least 1"),
    ("mla_paper", dict(value_dim=0), "value_dim = 0.*at least 1"),
    ("mha", dict(query_rank=-1), "query_rank = -1.*at least 0"),
    ("qk_tied", dict(query_rank=4), "query_rank = 4.*0 if queries are the keys"),
    (
        "mha",
        dict(latent_scale=True),
        "latent_scale = True.*no normed latent to scale: set query_rank",
    ),
    ("mla_paper", dict(latent_scale=True), "latent_scale = True.*no normed latent"),
    ("gla", dict(num_latents=3), "num_latents = 3.*must divide num_heads = 4"),
    ("gla", dict(num_latents=0), "num_latents = 0.*at least 1"),
    ("mlra", dict(num_branches=0), "num_branches = 0.*at least 1"),
    ("mlra", dict(num_latents=8), "num_latents = 8.*must divide num_heads = 4"),
    ("gta", dict(num_kv_heads=3), "num_kv_heads = 3.*must divide num_heads = 4"),
    ("gta", dict(rope_key_dim=3), r"rope_key_dim = 3.*even and lie in \[0, 8\)"),
    ("gta", dict(rope_key_dim=8), r"rope_key_dim = 8.*even and lie in \[0, 8\)"),
    ("shared_kv", dict(rope_key_dim=10), r"rope_key_dim = 10.*even and lie in \[0, 8\]"),
    ("shared_kv", dict(num_kv_heads=8), "num_kv_heads = 8.*must divide num_heads = 4"),
    ("mfa_kr", dict(num_kv_heads=3), "num_kv_heads = 3.*must divide num_heads = 4"),
    ("tpa", dict(key_rank=0), "key_rank = 0.*at least 1"),
    ("tpa", dict(key_rank=9), r"key_rank = 9.*\[1, 8\], the larger of num_heads"),
    ("tpa", dict(value_rank=7), r"value_rank = 7.*\[1, 6\], the larger of num_heads"),
    ("tpa", dict(query_factors=9), r"query_factors = 9.*\[0, 8\] \(0: dense queries\)"),
    ("tpa", dict(query_factors=-1), r"query_factors = -1.*\(0: dense queries\)"),
    ("tpa", dict(query_rank=4), "query_rank = 4.*0 with query_factors"),
]


@pytest.mark.parametrize("name, keys, message", BAD)
def test_bad_values_name_key_value_and_allowed_values(make_mechanism, name, keys, message):
    with pytest.raises(UserError, match=r"config\.attention\." + message):
        make_mechanism(name, **keys)


def test_every_mechanism_is_tested(make_mechanism):
    tested = {type(make_mechanism(name)) for name in TESTED}
    assert set(MECHANISMS.values()) == tested


def test_absorbed_names_the_weights_in_decode_inputs(make_mechanism):
    """A weight missing in `absorbed` would be counted as a product per token."""
    for name in TESTED:
        config = make_mechanism(name)
        graph, weights = nnx.split(nnx.eval_shape(lambda c=config: c.build(D, rngs=nnx.Rngs(0))))
        query = jax.ShapeDtypeStruct((B, 1, config.query_heads, config.query_dim), jnp.float32)

        def inputs(weights, query, graph=graph):
            return nnx.merge(graph, weights).decode_inputs(query, BASE)

        weights = nnx.to_pure_dict(weights)
        jaxpr = jax.make_jaxpr(inputs)(weights, query).jaxpr
        read = [*jaxpr.outvars, *(variable for eqn in jaxpr.eqns for variable in eqn.invars)]
        paths, _ = jax.tree_util.tree_flatten_with_path(weights)
        used_directly = {
            path[0].key
            for (path, weight), variable in zip(paths, jaxpr.invars[:-1], strict=True)
            if weight.ndim > 1 and any(variable is other for other in read)
        }
        assert used_directly == {key for key in config.absorbed if key in weights}, name
