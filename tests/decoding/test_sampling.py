"""Sampling against definitions in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.decoding import sampling
from kvjax.decoding.sampling import Sampling
from kvjax.foundation.errors import UserError

V = 11


def mask_by_hand(logits_V: np.ndarray, k: int, p: float) -> np.ndarray:
    """Returns a mask of the ids that top-k and then top-p keep, computed one token at a time."""
    order = sorted(range(len(logits_V)), key=lambda i: (-logits_V[i], i))
    order = order[:k] if k else order
    weights = np.exp(logits_V[order].astype(np.float64) - logits_V.max())
    share, ids = 0.0, []
    for i, weight in zip(order, weights / weights.sum(), strict=True):
        ids.append(i)
        share += weight
        if share >= p and p < 1:
            break
    return np.isin(np.arange(len(logits_V)), ids)


@pytest.fixture(scope="module")
def candidates():
    return jax.jit(sampling.candidates)


@pytest.mark.parametrize("p", [1e-50, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4, V, 10**6])
def test_candidates_are_those_of_the_definition(candidates, k, p):
    logits_BV = np.random.default_rng(k).normal(size=(16, V)).astype(np.float32) * 3
    logits_BV[0] = 1.0  # all equal
    logits_BV[1, ::2] = 2.0  # ties at every cut
    logits_BV[2] = np.where(np.arange(V) == 7, 200.0, -200.0)  # one token has probability 1
    parameters = Sampling(top_k=k, top_p=p).parameters()
    got = np.asarray(candidates(logits_BV, parameters.top_k, parameters.top_p))
    want = np.stack([mask_by_hand(logits_V, k, p) for logits_V in logits_BV])
    np.testing.assert_array_equal(got, want)
    assert got.sum(axis=1).min() >= 1


@pytest.fixture(scope="module")
def draw():
    """Tokens [n] drawn for positions 0 .. n - 1 from one distribution."""
    n = 20_000

    @jax.jit
    def drawn(logits_V, parameters, seed):
        shape = (n, V)
        keys = sampling.keys(jax.random.key(seed), jnp.zeros(n, jnp.uint32), jnp.arange(n))
        return sampling.sample(jnp.broadcast_to(logits_V, shape), keys, parameters)

    return lambda logits_V, seed=0, **keys: np.asarray(
        drawn(jnp.asarray(logits_V, jnp.float32), Sampling(**keys).parameters(), seed)
    )


@pytest.mark.parametrize(
    "options",
    [dict(temperature=1.0), dict(temperature=0.5), dict(temperature=2.0, top_k=5, top_p=0.8)],
)
def test_tokens_are_drawn_with_their_probabilities(draw, options):
    logits_V = np.linspace(2.0, -1.0, V)[np.random.default_rng(1).permutation(V)]
    z = np.float32(logits_V) / options["temperature"]
    p = np.exp(z) * mask_by_hand(z, options.get("top_k", 0), options.get("top_p", 1.0))
    p /= p.sum()
    tokens = draw(logits_V, **options)
    got = np.bincount(tokens, minlength=V) / len(tokens)
    assert np.all(got[p == 0] == 0)
    error = np.abs(got - p) / np.sqrt(p * (1 - p) / len(tokens) + 1e-12)
    assert error.max() < 4.5  # standard deviations; the seed is fixed


@pytest.mark.parametrize("options", [dict(temperature=0.0), dict(top_k=1), dict(top_p=1e-9)])
def test_options_that_are_greedy(draw, options):
    logits_V = np.array([0.0, 3.0, 3.0, *[1.0] * (V - 3)])
    assert set(draw(logits_V, **options)) == {1}  # the first of two equal ones


def test_no_temperature_is_too_small(draw):
    logits_V = np.random.default_rng(0).normal(size=V) * 100
    assert set(draw(logits_V, temperature=1e-37)) == {int(np.argmax(logits_V))}


def test_filters_that_leave_all_change_nothing(draw):
    logits_V = np.random.default_rng(0).normal(size=V)
    plain = draw(logits_V, temperature=1.0)
    np.testing.assert_array_equal(draw(logits_V, temperature=1.0, top_k=V), plain)
    assert np.mean(draw(logits_V, seed=1, temperature=1.0) == plain) < 0.5


def test_a_key_belongs_to_its_sequence_and_position():
    def bits(streams, positions):
        keys = sampling.keys(
            jax.random.key(3), jnp.asarray(streams, jnp.uint32), jnp.asarray(positions)
        )
        return [tuple(row) for row in np.asarray(jax.random.key_data(keys))]

    batch = bits([5, 5, 9, 9], [0, 1, 0, 1])
    assert len(set(batch)) == 4
    assert bits([9], [1]) == batch[3:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-0.1), "temperature = -0.1: must be a number, 0"),
        (dict(temperature=float("nan")), "temperature = nan"),
        (dict(temperature=float("inf")), "temperature = inf"),
        (dict(top_k=-1), "top_k = -1: must be at least 0"),
        (dict(top_p=0.0), "top_p = 0.0: must be above 0 and at most 1"),
        (dict(top_p=1.01), "top_p = 1.01"),
        (dict(top_p=float("nan")), "top_p = nan"),
    ],
)
def test_values_that_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)
