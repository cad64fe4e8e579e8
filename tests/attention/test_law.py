"""The law: decoding over a cache equals softmax attention over expanded keys and values."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention
from kvjax.cache import quantized
from kvjax.foundation.errors import UserError
from tests import quick, reference
from tests.attention import law
from tests.mechanisms import ALL_KINDS, MECHANISMS

# -- pairs of options ------------------------------------------------------------------------------

COMMON = dict(
    positions=("none", "full"),  # RoPE
    qk_norm=("none", "rms", "rms_gain"),
    query_rank=(0, 5),
    latent_scale=(False, True),
    output_gate=(False, True),
    bias=(False, True),
    softcap=(0.0, 0.7),  # of logits; an option of the call
)
DIMS = ((8, 8), (8, 6))  # of keys and values
OF_LATENTS = dict(num_latents=(1, 2, 4), dims=DIMS)
# By kind of mechanism, or "mfa": values by key.
FACTORS = dict(
    grouped=dict(
        num_kv_heads=(1, 2, 4),
        num_bases=(1, 2, 4),
        rank=(0, 3),
        dims=(*DIMS, (4, 8)),
        positions=("none", "full", "shared"),
        qk_norm=("none", "rms", "rms_gain"),
        bias=(False, True),
        tie=("none", "kv", "qk", "qkv"),
        position_channels=(0, 6),
        alibi=(False, True),
        softcap=(0.0, 0.7),
    ),
    factored=COMMON | dict(dims=DIMS, num_latents=(1, 2), ranks=((3, 0), (0, 3), (5, 3))),
    mla=COMMON | dict(dims=DIMS, norm_latent=(False, True), qk_bias=(False, True)),
    mla_paper=COMMON | dict(dims=DIMS),
    mla_lrkv=COMMON
    | dict(dims=DIMS, rank=(0, 3), norm_latent=(False, True), qk_bias=(False, True)),
    gla=COMMON | OF_LATENTS | dict(norm_latent=(False, True), qk_bias=(False, True)),
    mlra=COMMON
    | OF_LATENTS
    | dict(num_branches=(1, 2, 4), norm_latent=(False, True), qk_bias=(False, True)),
    gta=COMMON | dict(num_kv_heads=(1, 2, 4), rope_key_dim=(0, 2, 4)),
    shared_kv=COMMON | dict(num_kv_heads=(1, 2, 4), rope_key_dim=(0, 4, 8)),
    mfa_kr=COMMON | dict(num_kv_heads=(1, 2, 4)),
    tpa=COMMON | dict(dims=DIMS, query_factors=(0, 3), ranks=((2, 2), (1, 1), (3, 2))),
    mfa=COMMON | dict(tie=("none", "kv"), rank=(0, 3)),
)
FIXED = dict(
    factored=dict(num_kv_heads=2),
    mla=dict(latent_dim=10, rope_key_dim=4),
    mla_paper=dict(latent_dim=10),
    mla_lrkv=dict(latent_dim=6, rope_key_dim=4),
    gla=dict(latent_dim=6, rope_key_dim=4),
    mlra=dict(latent_dim=6, rope_key_dim=4),
    mfa=dict(num_kv_heads=4, num_bases=1, value_dim=8),
)
LISTED = tuple(FACTORS)
# Kinds without a line vary the keys of every mechanism; others are as in their first small case.
for _cls, _keys in reversed(MECHANISMS.values()):
    (_kind,) = (kind for kind, cls in attention.MECHANISMS.items() if cls is _cls)
    if _kind not in LISTED:
        _sizes = {"key_dim", "value_dim"} & {field.name for field in dataclasses.fields(_cls)}
        FACTORS[_kind], FIXED[_kind] = COMMON, dict.fromkeys(_sizes, 8) | _keys


def _make(kind, keys):
    """Returns a config, its RoPE base and a soft cap; None if they exclude each other."""
    keys = dict(num_heads=4, norm_epsilon=1e-2) | FIXED.get(kind, {}) | keys
    positions, softcap = keys.pop("positions"), keys.pop("softcap")
    if softcap and (keys.get("alibi") or keys.get("position_channels")):
        return None  # in training they are channels of the logits
    if positions == "shared":
        keys["rope"] = "shared"
    if kind in LISTED:
        keys["key_dim"], *value_dim = keys.pop("dims", (8,))
        keys |= dict(value_dim=value_dim[0]) if value_dim else {}
    if "ranks" in keys:
        keys["key_rank"], keys["value_rank"] = keys.pop("ranks")
    try:
        config = attention.MECHANISMS["grouped" if kind == "mfa" else kind](**keys)
    except UserError:
        return None
    return config, None if positions == "none" else law.BASE, softcap


@functools.cache
def _rows(kind):
    return law.covering(FACTORS[kind], functools.partial(_make, kind))


def _case_config(kind, row):
    return _make(kind, dict(zip(FACTORS[kind], row, strict=True)))


CASES = [(kind, row) for kind in FACTORS for row in _rows(kind)]
# The first case with RoPE and the first without, of kinds without a line.
_ADDED = [
    next((kind, row) for row in _rows(kind) if row[0] == positions)
    for kind in FACTORS
    if kind not in LISTED
    for positions in COMMON["positions"]
]
QUICK = [*CASES[3::24], *_ADDED]


def _id(value):
    return value if isinstance(value, str) else law.row_id(value)


@pytest.mark.parametrize("kind, row", quick.only(QUICK, CASES), ids=_id)
def test_the_law_for_pairs_of_options(x64, randomise, kind, row):
    config, base, softcap = _case_config(kind, row)
    law.check(randomise, config, base, softcap=softcap)


SHORT = 6  # rows of ranks up to 5 share a scale, rows of heads and latents have their own


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("kind, row", quick.only(QUICK[1:3], CASES), ids=_id)
def test_the_law_of_quantised_caches(x64, monkeypatch, randomise, kind, row, bits):
    monkeypatch.setattr(quantized, "SHORTEST_ROW", SHORT)
    config, base, softcap = _case_config(kind, row)
    law.check_quantized(randomise, config, base, bits, SHORT, softcap=softcap)


def test_pairs_of_options_that_configs_refuse():
    """All other pairs are in a case; fails if configs refuse more."""
    refused = {}
    for kind in LISTED:
        factors = FACTORS[kind]
        covered = {
            pair for row in _rows(kind) for pair in itertools.combinations(enumerate(row), 2)
        }
        names = list(factors)
        for (i, values), (j, others) in itertools.combinations(enumerate(factors.values()), 2):
            for a, b in itertools.product(values, others):
                if ((i, a), (j, b)) not in covered:
                    refused.setdefault(kind, set()).add((names[i], a, names[j], b))
    del refused["grouped"]  # ties exclude much
    scaled = ("query_rank", 0, "latent_scale", True)  # no latent at all
    of_tpa = {("query_rank", 5, "query_factors", 3), ("latent_scale", True, "query_factors", 3)}
    assert refused == {
        **{kind: {scaled} for kind in ("factored", "mla_paper", "gta", "mfa", "mfa_kr")},
        "tpa": {scaled, *of_tpa},
    }


@pytest.mark.parametrize(
    "mechanism_name", quick.only([*quick.READERS[1:4], "qk_tied_plus"], MECHANISMS)
)
def test_the_law_for_mechanisms(x64, make_mechanism, randomise, mechanism_name):
    law.check(randomise, make_mechanism(mechanism_name, qk_norm="rms_gain"), law.BASE)


@pytest.mark.parametrize(
    "mechanism_name", quick.only(["lrkv_gqa"], [*quick.READERS, "lrkv_shared_rope"])
)
def test_the_law_with_a_soft_cap(x64, make_mechanism, randomise, mechanism_name):
    law.check(randomise, make_mechanism(mechanism_name), law.BASE, softcap=0.7)


# -- other implementations and dtypes --------------------------------------------------------------


@pytest.mark.parametrize("mechanism_name", quick.only(["lrkv_kv_tied"], MECHANISMS))
def test_the_definition_obeys_the_law(x64, make_mechanism, randomise, mechanism_name):
    config = make_mechanism(mechanism_name)
    run = law.make_run(randomise, config, law.BASE, jnp.float64, implementation="reference")
    x = law.sequences()
    y, expected = run.decoded(x, law.ONE_OF_ALL), run.full(x)
    decoded_ = ~np.isnan(y)
    assert decoded_[0].all()
    np.testing.assert_allclose(y[decoded_], expected[decoded_], rtol=1e-10, atol=1e-10)


def _float64_outputs(run, x_BTD):
    """Returns outputs [B, T, D] in float64 from the (narrower) weights of a run, on whole rows."""
    wide = jax.tree.map(lambda w: np.asarray(w, np.float64), run.weights)
    options = dict(base=run.base, causal=True, softcap=run.softcap)
    return reference.attention(run.config, wide, np.float64(x_BTD), **options)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism_name", MECHANISMS)
def test_float32_and_stale_entries(make_mechanism, randomise, mechanism_name):
    """To 1e-5 of the output's scale; entries beyond a sequence's end change no bit."""
    config = make_mechanism(mechanism_name)
    run = law.make_run(randomise, config, law.BASE, jnp.float32)
    x = law.sequences().astype(np.float32)
    y, expected = run.decoded(x, law.ONE_OF_ALL), _float64_outputs(run, x)
    decoded_ = ~np.isnan(y)
    assert decoded_[0].all()
    assert np.abs(y - expected)[decoded_].max() < 1e-5 * np.abs(expected).max()
    rng = np.random.default_rng(1)

    def stale(a):
        return jnp.asarray(1e4 * rng.standard_normal(a.shape), a.dtype)

    dirty = run.decoded(x, law.ONE_OF_ALL, jax.tree.map(stale, run.layer()))
    np.testing.assert_array_equal(dirty, y)


@pytest.mark.slow
@pytest.mark.parametrize("row", _rows("grouped"), ids=law.row_id)
def test_float32_for_pairs_of_options(randomise, row):
    config, base, softcap = _case_config("grouped", row)
    run = law.make_run(randomise, config, base, jnp.float32, softcap=softcap)
    x = law.sequences().astype(np.float32)
    y, expected = run.decoded(x, law.ONE_OF_ALL), _float64_outputs(run, x)
    decoded_ = ~np.isnan(y)
    assert np.abs(y - expected)[decoded_].max() < 1e-5 * np.abs(expected).max()


# -- bfloat16 --------------------------------------------------------------------------------------

WIDTHS = dict(key_dim=32, value_dim=32, rank=16, latent_dim=48, rope_key_dim=16)


def _wider(make_mechanism, name):
    """Returns the mechanism with head dims and ranks nearer to real models'."""
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
# The cache layout determines what is rounded: further mechanisms of a layout have two options only.
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
    exact = _float64_outputs(run, x)
    chunks = [(law.CHUNK, (law.CHUNK,) * batch)] * (64 // law.CHUNK)
    steps = chunks + [(1, (1,) * batch)] * (length - 64)

    def error(y):
        return np.sqrt(np.mean(np.square(y - exact)))

    expanded, decoded = error(run.full(x)), error(run.decoded(x, steps))
    assert 0 < expanded < 0.02 * np.sqrt(np.mean(np.square(exact)))
    assert decoded < 1.5 * expanded
