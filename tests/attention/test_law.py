"""The law: decoding over a cache equals softmax attention over expanded keys and values."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import GroupedConfig
from kvjax.foundation.errors import UserError
from tests import quick, reference
from tests.attention import law
from tests.mechanisms import ALL_KINDS, MECHANISMS

# -- what is covered -------------------------------------------------------------------------------

FACTORS = dict(
    num_kv_heads=(1, 2, 4),
    num_bases=(1, 2, 4),
    rank=(0, 3),
    dims=((8, 8), (4, 8), (8, 6)),
    positions=("none", "full", "shared"),  # RoPE
    qk_norm=("none", "rms", "rms_gain"),
    bias=(False, True),
    tie=("none", "kv", "qk", "qkv"),
    position_channels=(0, 6),
    alibi=(False, True),
)


def _grouped(keys):
    """The config of one value of each of FACTORS, and its RoPE base; None if there is no such."""
    keys = dict(keys)
    key_dim, value_dim = keys.pop("dims")
    positions = keys.pop("positions")
    keys |= dict(num_heads=4, key_dim=key_dim, value_dim=value_dim, norm_epsilon=1e-2)
    try:
        config = GroupedConfig(**keys, rope="shared" if positions == "shared" else "full")
    except UserError:
        return None
    return config, None if positions == "none" else law.BASE


@functools.cache
def _covering_rows():
    return law.covering(FACTORS, _grouped)


def _of(row):
    return _grouped(dict(zip(FACTORS, row, strict=True)))


LATENT_OPTIONS = [  # (qk_norm, RoPE, bias), every pair of values in one of them
    ("none", law.BASE, True),
    ("none", None, False),
    ("rms", law.BASE, False),
    ("rms", None, True),
    ("rms_gain", law.BASE, True),
    ("rms_gain", None, False),
]


# -- what it must obey -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ["row"], quick.every(20, [(row,) for row in _covering_rows()], first=3), ids=law.row_id
)
def test_the_law_for_pairs_of_options(x64, randomise, row):
    law.check(randomise, *_of(row))


FACTORED = ("factored", "factored_joint", "factored_values")


@pytest.mark.parametrize("name", quick.only(["factored_values"], FACTORED))
@pytest.mark.parametrize("qk_norm, base, bias", quick.only([("rms", None, True)], LATENT_OPTIONS))
def test_the_law_for_factors(x64, make_mechanism, randomise, name, qk_norm, base, bias):
    config = make_mechanism(name, qk_norm=qk_norm, bias=bias, norm_epsilon=1e-2)
    law.check(randomise, config, base)


@pytest.mark.parametrize("name", quick.only(["mla"], ["mla", "mla_paper"]))
@pytest.mark.parametrize("qk_norm, base, bias", quick.only([("none", None, False)], LATENT_OPTIONS))
def test_the_law_for_latents(x64, make_mechanism, randomise, name, qk_norm, base, bias):
    config = make_mechanism(name, qk_norm=qk_norm, bias=bias, norm_epsilon=1e-2)
    law.check(randomise, config, base)


@pytest.mark.parametrize(
    "mechanism_name",
    quick.only([*quick.READERS[1:4], "mla_paper", "mla_lrkv", "qk_tied_plus"], MECHANISMS),
)
def test_the_law_for_mechanisms(x64, make_mechanism, randomise, mechanism_name):
    law.check(randomise, make_mechanism(mechanism_name, qk_norm="rms_gain"), law.BASE)


def test_pairs_of_options_are_covered():
    """Every value of every factor is in a row, and pairs that are not cannot be."""
    rows = _covering_rows()
    met = {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
    for (i, values), (j, others) in itertools.combinations(enumerate(FACTORS.values()), 2):
        for pair in itertools.product(values, others):
            if ((i, pair[0]), (j, pair[1])) in met:
                continue
            names = list(FACTORS)
            fixed = {names[i]: pair[:1], names[j]: pair[1:]}
            assert not any(map(_of, itertools.product(*(FACTORS | fixed).values()))), fixed
    assert len(rows) < 30
    assert {type(_of(row)[0]) for row in rows} == {GroupedConfig}


@pytest.mark.parametrize("mechanism_name", quick.only(["lrkv_kv_tied"], MECHANISMS))
def test_the_definition_obeys_the_law(x64, make_mechanism, randomise, mechanism_name):
    config = make_mechanism(mechanism_name)
    run = law.make_run(randomise, config, law.BASE, jnp.float64, implementation="reference")
    x = law.sequences()
    y, expected = run.decoded(x, law.ONE_OF_ALL), run.full(x)
    held = ~np.isnan(y)
    assert held[0].all()
    np.testing.assert_allclose(y[held], expected[held], rtol=1e-10, atol=1e-10)


def _exactly(run, x_BTD):
    """[B, T, D] in full and in float64, from the weights of a run in a narrower dtype."""
    wide = jax.tree.map(lambda w: np.asarray(w, np.float64), run.weights)
    return reference.attention(run.config, wide, np.float64(x_BTD), base=run.base, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism_name", MECHANISMS)
def test_float32_and_stale_entries(make_mechanism, randomise, mechanism_name):
    """To 1e-5 of the output's scale; what lies behind a sequence's end changes no bit."""
    config = make_mechanism(mechanism_name)
    run = law.make_run(randomise, config, law.BASE, jnp.float32)
    x = law.sequences().astype(np.float32)
    y, expected = run.decoded(x, law.ONE_OF_ALL), _exactly(run, x)
    held = ~np.isnan(y)
    assert held[0].all()
    assert np.abs(y - expected)[held].max() < 1e-5 * np.abs(expected).max()
    rng = np.random.default_rng(1)

    def stale(a):
        return jnp.asarray(1e4 * rng.standard_normal(a.shape), a.dtype)

    dirty = run.decoded(x, law.ONE_OF_ALL, jax.tree.map(stale, run.layer()))
    np.testing.assert_array_equal(dirty, y)


@pytest.mark.slow
@pytest.mark.parametrize("row", _covering_rows(), ids=law.row_id)
def test_float32_for_pairs_of_options(randomise, row):
    config, base = _of(row)
    run, x = law.make_run(randomise, config, base, jnp.float32), law.sequences().astype(np.float32)
    y, expected = run.decoded(x, law.ONE_OF_ALL), _exactly(run, x)
    held = ~np.isnan(y)
    assert np.abs(y - expected)[held].max() < 1e-5 * np.abs(expected).max()


# -- bfloat16 --------------------------------------------------------------------------------------

WIDTHS = dict(key_dim=32, value_dim=32, rank=16, latent_dim=48, rope_key_dim=16)


def _wider(make_mechanism, name):
    """The mechanism with head dims and ranks nearer to those of models."""
    config = make_mechanism(name)
    keys = {field.name for field in dataclasses.fields(config)}
    own = {key: value for key, value in WIDTHS.items() if key in keys and getattr(config, key)}
    if config.key_dim < config.value_dim:
        own["key_dim"] = 16
    return make_mechanism(name, **own)


BFLOAT16_OPTIONS = [
    dict(qk_norm="rms", base=law.BASE),
    dict(qk_norm="none", base=law.BASE),
    dict(qk_norm="rms_gain", base=law.BASE),
    dict(qk_norm="rms", base=None),
    dict(qk_norm="none", base=None),
]
# The way of reading decides what is rounded: others of a way have the first of them and the last.
BFLOAT16_CASES = [
    (name, options)
    for name in MECHANISMS
    for options in BFLOAT16_OPTIONS
    if name in ALL_KINDS or options in (BFLOAT16_OPTIONS[0], BFLOAT16_OPTIONS[-1])
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism_name, options",
    BFLOAT16_CASES,
    ids=str,
)
def test_bfloat16(make_mechanism, randomise, mechanism_name, options):
    """The error is at most 1.5 times that of expanded attention in bfloat16.

    Error: root mean square over all outputs, against float64 from the same bfloat16 weights and
    inputs. Two thirds of the tokens come in chunks, the others one by one.
    """
    config, batch, length, width = _wider(make_mechanism, mechanism_name), 4, 96, 64
    config = dataclasses.replace(config, qk_norm=options["qk_norm"])
    run = law.make_run(randomise, config, options["base"], jnp.bfloat16, d_model=width)
    x = np.asarray(jnp.asarray(law.sequences(width, batch, length), jnp.bfloat16), np.float64)
    exact = _exactly(run, x)
    chunks = [(law.CHUNK, (law.CHUNK,) * batch)] * (64 // law.CHUNK)
    steps = chunks + [(1, (1,) * batch)] * (length - 64)

    def error(y):
        return np.sqrt(np.mean(np.square(y - exact)))

    expanded, decoded = error(run.full(x)), error(run.decoded(x, steps))
    assert 0 < expanded < 0.02 * np.sqrt(np.mean(np.square(exact)))
    assert decoded < 1.5 * expanded
