"""The law: decoding over a cache equals softmax attention over expanded keys and values.

Lengths and splits are drawn; shapes are not, since a new shape is a new compilation: sequences
advance in chunks of CHUNK tokens, of which 0 to CHUNK are real, and in single steps.
"""

import dataclasses
import functools
import itertools

from flax import nnx
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.attention import Attention
from kvjax.attention import GroupedConfig
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention import api
from kvjax.kernels.decode_attention import xla
from kvjax.layers import rope
from tests import quick
from tests.conftest import MECHANISMS

B, D, BASE = 3, 16, 100.0
S, BLOCK = 128, 48  # tiles start in slots 0, 48 and 80: the last overlaps the one before
CHUNK = 8

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
)


def _grouped(row):
    """The config of a row of values of FACTORS, and its RoPE base; None if there is no such."""
    keys = dict(zip(FACTORS, row, strict=True))
    key_dim, value_dim = keys.pop("dims")
    positions = keys.pop("positions")
    keys |= dict(num_heads=4, key_dim=key_dim, value_dim=value_dim, norm_epsilon=1e-2)
    try:
        config = GroupedConfig(**keys, rope="shared" if positions == "shared" else "full")
    except UserError:
        return None
    return config, None if positions == "none" else BASE


def _pairs(row):
    return frozenset(itertools.combinations(enumerate(row), 2))


@functools.cache
def _covering_rows():
    """Rows such that every pair of values of two factors that can meet does, greedily few."""
    rows = {row: _pairs(row) for row in itertools.product(*FACTORS.values()) if _grouped(row)}
    left, chosen = frozenset().union(*rows.values()), []
    while left:
        row = max(rows, key=lambda row: len(rows[row] & left))
        chosen.append(row)
        left -= rows[row]
    return chosen


def _row_id(row):
    return "-".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in row)


LATENT_OPTIONS = [  # (qk_norm, RoPE, bias), every pair of values in one of them
    ("none", BASE, True),
    ("none", None, False),
    ("rms", BASE, False),
    ("rms", None, True),
    ("rms_gain", BASE, True),
    ("rms_gain", None, False),
]


# -- decoding --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Capacity 128 is several tiles, read by the implementation of this name."""
    attend = functools.partial(xla.decode_attention, block=BLOCK)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "small_tiles", attend)


class Run:
    """One attention module in one dtype: in full, and over a cache."""

    def __init__(self, config, base, graph, weights, dtype, implementation="small_tiles"):
        self.config, self.base, self.dtype = config, base, jnp.dtype(dtype)
        cast = lambda w: jnp.asarray(w, self.dtype)
        self.weights = jax.tree.map(cast, weights)

        @jax.jit
        def full(weights, x_BTD):
            index = np.arange(x_BTD.shape[1], dtype=np.int32)[None]
            positions = rope.positions(index, config.rope_dim, base)
            return nnx.merge(graph, weights)(x_BTD, positions, causal=True)

        @functools.partial(jax.jit, donate_argnums=2)
        def decode(weights, x_BTD, layer, first_B, counts_B):
            index = first_B[:, None] + jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
            positions = rope.positions(index, config.rope_dim, base)
            options = dict(rope_base=base, implementation=implementation)
            return nnx.merge(graph, weights).decode(x_BTD, positions, layer, counts_B, **options)

        self._full, self._decode = full, decode

    def full(self, x_BTD):
        """[B, T, D] of the whole sequences, float64."""
        return np.asarray(self._full(self.weights, jnp.asarray(x_BTD, self.dtype)), np.float64)

    def layer(self, batch=B):
        cache = cache_lib.allocate([self.config], batch=batch, capacity=S, dtype=self.dtype)
        return cache.layers[0]

    def decode(self, x_BTD, splits, layer=None):
        """Yields (b, first, outputs [count, D]) of every sequence that a split advances.

        Args:
          splits: (T, counts [B]) of each call; what stands behind a count is NaN.
        """
        layer = self.layer(len(x_BTD)) if layer is None else layer
        lengths = np.zeros(len(x_BTD), np.int32)
        for T, counts in splits:
            new = np.full((len(x_BTD), T, x_BTD.shape[-1]), np.nan)
            for b, count in enumerate(counts):
                new[b, :count] = x_BTD[b, lengths[b] : lengths[b] + count]
            counts = np.asarray(counts, np.int32)
            arguments = (jnp.asarray(new, self.dtype), layer, lengths, counts)
            y_BTD, layer = self._decode(self.weights, *arguments)
            y_BTD = np.asarray(y_BTD, np.float64)
            for b, count in enumerate(counts):
                if count:
                    yield b, int(lengths[b]), y_BTD[b, :count]
            lengths = lengths + counts

    def decoded(self, x_BTD, splits, layer=None):
        """[B, T, D] of all tokens; NaN for those that no split reached."""
        y_BTD = np.full(x_BTD.shape, np.nan)
        for b, first, y in self.decode(x_BTD, splits, layer):
            y_BTD[b, first : first + len(y)] = y
        return y_BTD


def _prefill(lengths):
    """Chunks until every sequence has its length."""
    left = np.array(lengths)
    while left.any():
        counts = np.minimum(left, CHUNK)
        yield CHUNK, tuple(counts.tolist())
        left -= counts


@st.composite
def _splits(draw):
    """Prefill in full chunks, then ragged chunks and steps, never beyond the capacity."""
    lengths = draw(st.tuples(*[st.integers(0, S)] * B))
    splits = list(_prefill(lengths))
    for T in draw(st.lists(st.sampled_from((1, CHUNK)), min_size=1, max_size=12)):
        room = [min(T, S - length) for length in lengths]
        counts = draw(st.tuples(*(st.integers(0, most) for most in room)))
        lengths = tuple(length + n for length, n in zip(lengths, counts, strict=True))
        splits.append((T, counts))
    return splits


# Prefill to three lengths, a ragged chunk, steps (one sequence pauses), and a chunk that ends the
# longest sequence in the cache's last slot.
ONE_OF_ALL = (
    *_prefill((113, 50, 0)),
    (CHUNK, (5, 8, 1)),
    *[(1, (1, 1, 1)), (1, (1, 0, 1)), (1, (0, 1, 1))],
    (CHUNK, (CHUNK, 3, 0)),
)
assert np.sum([counts[0] for _, counts in ONE_OF_ALL]) == S


def _input(width=D, batch=B, length=S):
    return np.random.default_rng(0).standard_normal((batch, length, width))


def _run(randomise, config, base, dtype, d_model=D, **keys):
    module, weights = randomise(lambda: Attention(config, d_model, rngs=nnx.Rngs(0)))
    return Run(config, base, nnx.split(module)[0], weights, dtype, **keys)


def _check_every_split(randomise, config, base):
    run, x = _run(randomise, config, base, jnp.float64), _input()
    expected = run.full(x)
    assert np.abs(expected).max() > 0.1

    @settings(max_examples=6, deadline=None)
    @given(splits=_splits())
    def check(splits):
        for b, first, y in run.decode(x, splits):
            wanted = expected[b, first : first + len(y)]
            np.testing.assert_allclose(y, wanted, rtol=1e-10, atol=1e-10)

    check()


@pytest.mark.parametrize(["row"], quick.every(9, [(row,) for row in _covering_rows()]), ids=_row_id)
def test_the_law_for_pairs_of_options(x64, randomise, row):
    _check_every_split(randomise, *_grouped(row))


@pytest.mark.parametrize("name", ["mla", "mla_paper"])
@pytest.mark.parametrize("qk_norm, base, bias", quick.only([("none", None, False)], LATENT_OPTIONS))
def test_the_law_for_latents(x64, make_mechanism, randomise, name, qk_norm, base, bias):
    config = make_mechanism(name, qk_norm=qk_norm, bias=bias, norm_epsilon=1e-2)
    _check_every_split(randomise, config, base)


@pytest.mark.parametrize("mechanism_name", quick.only(quick.KINDS, MECHANISMS))
def test_the_law_for_mechanisms(x64, make_mechanism, randomise, mechanism_name):
    _check_every_split(randomise, make_mechanism(mechanism_name, qk_norm="rms_gain"), BASE)


def test_pairs_of_options_are_covered():
    """Every value of every factor is in a row, and pairs that are not cannot be."""
    rows = _covering_rows()
    met = frozenset().union(*(_pairs(row) for row in rows))
    for (i, values), (j, others) in itertools.combinations(enumerate(FACTORS.values()), 2):
        for pair in itertools.product(values, others):
            if ((i, pair[0]), (j, pair[1])) in met:
                continue
            names = list(FACTORS)
            fixed = {names[i]: pair[:1], names[j]: pair[1:]}
            assert not any(map(_grouped, itertools.product(*(FACTORS | fixed).values()))), fixed
    assert len(rows) < 30
    assert {type(_grouped(row)[0]) for row in rows} == {GroupedConfig}


@pytest.mark.parametrize(
    "mechanism_name", quick.only(["lrkv_gqa", "lrkv_kv_tied", "mla_paper"], MECHANISMS)
)
def test_the_definition_obeys_the_law(x64, make_mechanism, randomise, mechanism_name):
    config = make_mechanism(mechanism_name)
    run = _run(randomise, config, BASE, jnp.float64, implementation="reference")
    x = _input()
    y, expected = run.decoded(x, ONE_OF_ALL), run.full(x)
    held = ~np.isnan(y)
    assert held[0].all()
    np.testing.assert_allclose(y[held], expected[held], rtol=1e-10, atol=1e-10)


def _exactly(reference, run, x_BTD):
    """[B, T, D] in full and in float64, from the weights of a run in a narrower dtype."""
    wide = jax.tree.map(lambda w: np.asarray(w, np.float64), run.weights)
    return reference.attention(run.config, wide, np.float64(x_BTD), base=run.base, causal=True)


@pytest.mark.parametrize("mechanism_name", quick.only(["lrkv_gqa", "mla"], MECHANISMS))
def test_float32_and_stale_entries(make_mechanism, randomise, reference, mechanism_name):
    """To 1e-5 of the output's scale; what lies behind a sequence's end changes no bit."""
    config = make_mechanism(mechanism_name)
    run, x = _run(randomise, config, BASE, jnp.float32), _input().astype(np.float32)
    y, expected = run.decoded(x, ONE_OF_ALL), _exactly(reference, run, x)
    held = ~np.isnan(y)
    assert held[0].all()
    assert np.abs(y - expected)[held].max() < 1e-5 * np.abs(expected).max()
    rng = np.random.default_rng(1)
    stale = lambda a: jnp.asarray(1e4 * rng.standard_normal(a.shape), a.dtype)
    dirty = run.decoded(x, ONE_OF_ALL, jax.tree.map(stale, run.layer()))
    np.testing.assert_array_equal(dirty, y)


@pytest.mark.slow
@pytest.mark.parametrize("row", _covering_rows(), ids=_row_id)
def test_float32_for_pairs_of_options(randomise, reference, row):
    config, base = _grouped(row)
    run, x = _run(randomise, config, base, jnp.float32), _input().astype(np.float32)
    y, expected = run.decoded(x, ONE_OF_ALL), _exactly(reference, run, x)
    held = ~np.isnan(y)
    assert np.abs(y - expected)[held].max() < 1e-5 * np.abs(expected).max()


# -- bfloat16 --------------------------------------------------------------------------------------

WIDTHS = dict(key_dim=32, value_dim=32, rank=16, latent_dim=48, rope_key_dim=16)


def _wider(make_mechanism, name):
    """The mechanism with head dims and ranks nearer to those of models."""
    config = make_mechanism(name)
    own = {key: value for key, value in WIDTHS.items() if getattr(config, key, 0)}
    if config.key_dim < config.value_dim:
        own["key_dim"] = 16
    return make_mechanism(name, **own)


BFLOAT16_OPTIONS = [
    dict(qk_norm="rms", base=BASE),
    dict(qk_norm="none", base=BASE),
    dict(qk_norm="rms_gain", base=BASE),
    dict(qk_norm="rms", base=None),
    dict(qk_norm="none", base=None),
]


@pytest.mark.parametrize(
    "mechanism_name, options",
    quick.only(
        [("lrkv", BFLOAT16_OPTIONS[0]), ("mla", BFLOAT16_OPTIONS[0])],
        itertools.product(MECHANISMS, BFLOAT16_OPTIONS),
    ),
    ids=str,
)
def test_bfloat16(make_mechanism, randomise, reference, mechanism_name, options):
    """The error is at most 1.5 times that of expanded attention in bfloat16.

    Error: root mean square over all outputs, against float64 from the same bfloat16 weights and
    inputs. Two thirds of the tokens come in chunks, the others one by one.
    """
    config, batch, length, width = _wider(make_mechanism, mechanism_name), 4, 96, 64
    config = dataclasses.replace(config, qk_norm=options["qk_norm"])
    run = _run(randomise, config, options["base"], jnp.bfloat16, d_model=width)
    x = np.asarray(jnp.asarray(_input(width, batch, length), jnp.bfloat16), np.float64)
    exact = _exactly(reference, run, x)
    steps = [(CHUNK, (CHUNK,) * batch)] * (64 // CHUNK) + [(1, (1,) * batch)] * (length - 64)
    error = lambda y: np.sqrt(np.mean(np.square(y - exact)))
    expanded, decoded = error(run.full(x)), error(run.decoded(x, steps))
    assert 0 < expanded < 0.02 * np.sqrt(np.mean(np.square(exact)))
    assert decoded < 1.5 * expanded
