"""The law, for any mechanism: decoding over a cache equals softmax attention over whole sequences.

Lengths and splits are random, shapes fixed, since a new shape is a new compilation: sequences
advance in chunks of CHUNK tokens, of which 0 to CHUNK are real, and in single steps.
"""

import functools
import itertools

from flax import nnx
from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as cache_lib
from kvjax.attention import Attention
from kvjax.kernels.decode_attention import reference
from kvjax.layers import rope

B, D, BASE = 3, 16, 100.0
S, TILE_KV = 128, 48  # tiles start in slots 0, 48 and 80: the last overlaps the one before
CHUNK = 8


def covering(factors, make):
    """Returns few rows of values that have every valid pair of two factors' values; a greedy cover.

    Args:
      factors: values by key.
      make: a function of a dict with one value per key; None or False if they are not valid.
    """

    def as_dict(row):
        return dict(zip(factors, row, strict=True))

    bits = {}  # by pair; a set of pairs is an integer
    rows, uncovered, chosen = {}, 0, []
    for row in filter(lambda row: make(as_dict(row)), itertools.product(*factors.values())):
        pairs = itertools.combinations(enumerate(row), 2)
        rows[row] = sum(bits.setdefault(pair, 1 << len(bits)) for pair in pairs)
        uncovered |= rows[row]
    while uncovered:
        row = max(rows, key=lambda row: (rows[row] & uncovered).bit_count())
        chosen.append(row)
        uncovered &= ~rows[row]
    return chosen


def row_id(row):
    return "-".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in row)


class Run:
    """One attention module in one dtype: on whole sequences, and over a cache."""

    def __init__(
        self,
        config,
        base,
        graph,
        weights,
        dtype,
        implementation="small_tiles",
        softcap=0.0,
        bits=None,
    ):
        self.config, self.base, self.dtype = config, base, jnp.dtype(dtype)
        self.softcap, self.bits = softcap, bits

        def cast(w):
            return jnp.asarray(w, self.dtype)

        self.weights = jax.tree.map(cast, weights)

        @jax.jit
        def full(weights, x_BTD):
            index = np.arange(x_BTD.shape[1], dtype=np.int32)[None]
            positions = rope.positions(index, config.rope_dim, base)
            return nnx.merge(graph, weights)(x_BTD, positions, causal=True, softcap=softcap)

        @functools.partial(jax.jit, donate_argnums=2)
        def decode(weights, x_BTD, layer, first_B, counts_B):
            index = first_B[:, None] + jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
            positions = rope.positions(index, config.rope_dim, base)
            options = dict(rope_base=base, implementation=implementation, softcap=softcap)
            return nnx.merge(graph, weights).decode(x_BTD, positions, layer, counts_B, **options)

        @jax.jit
        def definition(weights, x_BTD, entry, first_B):
            index = first_B[:, None] + jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
            positions = rope.positions(index, config.rope_dim, base)
            module = nnx.merge(graph, weights)
            q_BTNH, _ = module.mechanism.project(x_BTD, positions)
            inputs = module.mechanism.decode_inputs(q_BTNH, base)
            o_BTNH = reference.decode_attention(inputs, entry, first_B, softcap=softcap)
            return module.project_out(o_BTNH.astype(x_BTD.dtype), x_BTD, positions)

        @jax.jit
        def entry(weights, x_BTD):
            index = np.arange(x_BTD.shape[1], dtype=np.int32)[None]
            positions = rope.positions(index, config.rope_dim, base)
            mechanism = nnx.merge(graph, weights).mechanism
            return mechanism.encode(mechanism.project(x_BTD, positions)[1], positions)

        self._full, self._decode = full, decode
        self.definition = functools.partial(definition, self.weights)
        self.entry = functools.partial(entry, self.weights)

    def full(self, x_BTD):
        """Returns outputs [B, T, D] on whole sequences, float64."""
        return np.asarray(self._full(self.weights, jnp.asarray(x_BTD, self.dtype)), np.float64)

    def layer(self, batch=B):
        shape = dict(batch=batch, capacity=S, dtype=self.dtype, bits=self.bits)
        return cache_lib.allocate([self.config], **shape).layers[0]

    def calls(self, x_BTD, splits, layer=None):
        """Yields each call's inputs, lengths before it, counts, outputs, and its layer.

        The next call overwrites the layer.

        Args:
          splits: (T, counts [B]) of each call; inputs beyond a count are NaN.
        """
        layer = self.layer(len(x_BTD)) if layer is None else layer
        lengths = np.zeros(len(x_BTD), np.int32)
        for T, counts in splits:
            new = np.full((len(x_BTD), T, x_BTD.shape[-1]), np.nan)
            for b, count in enumerate(counts):
                new[b, :count] = x_BTD[b, lengths[b] : lengths[b] + count]
            counts = np.asarray(counts, np.int32)
            new = jnp.asarray(new, self.dtype)
            y_BTD, layer = self._decode(self.weights, new, layer, lengths, counts)
            yield new, lengths, counts, np.asarray(y_BTD, np.float64), layer
            lengths = lengths + counts

    def decode(self, x_BTD, splits, layer=None):
        """Yields (b, first, outputs [count, D]) of every sequence that a split advances."""
        for _, lengths, counts, y_BTD, _ in self.calls(x_BTD, splits, layer):
            for b, count in enumerate(counts):
                if count:
                    yield b, int(lengths[b]), y_BTD[b, :count]

    def decoded(self, x_BTD, splits, layer=None):
        """Returns outputs [B, T, D]; NaN for tokens that no split reached."""
        y_BTD = np.full(x_BTD.shape, np.nan)
        for b, first, y in self.decode(x_BTD, splits, layer):
            y_BTD[b, first : first + len(y)] = y
        return y_BTD


def prefill(lengths):
    """Yields chunks until every sequence has its length."""
    remaining = np.array(lengths)
    while remaining.any():
        counts = np.minimum(remaining, CHUNK)
        yield CHUNK, tuple(counts.tolist())
        remaining -= counts


@st.composite
def any_splits(draw):
    """Draws a prefill in full chunks, then ragged chunks and steps, within the capacity."""
    lengths = draw(st.tuples(*[st.integers(0, S)] * B))
    splits = list(prefill(lengths))
    for T in draw(st.lists(st.sampled_from((1, CHUNK)), min_size=1, max_size=12)):
        room = [min(T, S - length) for length in lengths]
        counts = draw(st.tuples(*(st.integers(0, limit) for limit in room)))
        lengths = tuple(length + n for length, n in zip(lengths, counts, strict=True))
        splits.append((T, counts))
    return splits


# Prefill to three lengths, a ragged chunk, steps (one sequence pauses), and a chunk that ends the
# longest sequence in the cache's last slot.
ONE_OF_ALL = (
    *prefill((113, 50, 0)),
    (CHUNK, (5, 8, 1)),
    *[(1, (1, 1, 1)), (1, (1, 0, 1)), (1, (0, 1, 1))],
    (CHUNK, (CHUNK, 3, 0)),
)
assert np.sum([counts[0] for _, counts in ONE_OF_ALL]) == S


def sequences(width=D, batch=B, length=S):
    """Returns random inputs x_BTD, float64."""
    return np.random.default_rng(0).standard_normal((batch, length, width))


def make_run(randomise, config, base, dtype, d_model=D, **keys) -> Run:
    """Returns the `Run` of an `Attention` with random weights, none zero."""
    module, weights = randomise(lambda: Attention(config, d_model, rngs=nnx.Rngs(0)))
    return Run(config, base, nnx.split(module)[0], weights, dtype, **keys)


def check(randomise, config, base, **keys):
    """Asserts that decoding is attention over the whole sequence, in float64, however it is split.

    Args:
      randomise: the fixture.
      base: RoPE's base, or None.
      keys: options of `Run`.
    """
    run, x = make_run(randomise, config, base, jnp.float64, **keys), sequences()
    expected = run.full(x)
    assert np.abs(expected).max() > 0.1

    @settings(max_examples=6, deadline=None)
    @given(splits=any_splits())
    def equal(splits):
        for b, first, y in run.decode(x, splits):
            wanted = expected[b, first : first + len(y)]
            np.testing.assert_allclose(y, wanted, rtol=1e-10, atol=1e-10)

    equal()


# -- quantised caches ------------------------------------------------------------------------------


def read_back(layer):
    """Returns the entry that a quantised layer stands for, and its scales: float64 by name."""
    arrays = {name: np.asarray(x) for name, x in layer.items()}
    scales = {name: x for name, x in arrays.items() if name.endswith(".scale")}
    entry = {}
    for name in arrays.keys() - scales:
        x = arrays[name]
        if x.dtype == np.uint8:  # channel i in the low half of a byte, i + W/2 in the high half
            x = np.concatenate([x % 16, x // 16], axis=-2) - 8.0
        entry[name] = x.astype(np.float64) * np.float64(scales.get(f"{name}.scale", 1))
    return entry, {name.removesuffix(".scale"): np.float64(x) for name, x in scales.items()}


def check_quantized(randomise, config, base, bits, short, **keys):
    """Asserts the laws of a quantised cache, in float64, however a sequence is split.

    A: decoding is `reference` over the entries read back. B: these are off by half a scale at most,
    which is the largest element of the row over 127 (of int4: 7); wide fields and RoPE keys are
    exact. Rows of fewer than `short` channels share their field's scale, and are int8.
    """
    run, x = make_run(randomise, config, base, jnp.float64, bits=bits, **keys), sequences()
    exact = {name: np.moveaxis(a, 1, -1) for name, a in jax.device_get(run.entry(x)).items()}
    kept = {name for name in exact if name in ("key_scale", "rope_key")}

    @settings(max_examples=3, deadline=None)
    @given(splits=any_splits())
    def laws(splits):
        for new, first_B, counts_B, y_BTD, layer in run.calls(x, splits):
            entry, scales = read_back(layer)
            wanted = run.definition(new, entry, first_B)
            for b, count in enumerate(counts_B):
                near = dict(rtol=1e-10, atol=1e-10)
                np.testing.assert_allclose(y_BTD[b, :count], wanted[b, :count], **near)
        assert entry.keys() == exact.keys() and scales.keys() == exact.keys() - kept
        for b, length in enumerate(first_B + counts_B):
            for name, a in exact.items():
                stored, true = entry[name][b, ..., :length], a[b, ..., :length]
                if name in kept:
                    np.testing.assert_allclose(stored, true, rtol=1e-12)
                    continue
                is_short = true.shape[-2] < short
                largest = 127 if bits == 8 or is_short else 7
                axes = tuple(range(true.ndim - 1)) if is_short else -2
                peaks = np.abs(true).max(axis=axes, keepdims=True) / largest
                np.testing.assert_allclose(scales[name][b, ..., :length], peaks, rtol=1e-6)
                assert np.all(np.abs(stored - true) <= peaks / 2 * (1 + 1e-6))

    laws()
