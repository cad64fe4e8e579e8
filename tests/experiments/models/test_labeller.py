"""Classifiers of rows and positions: the layers around the blocks, against NumPy."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.labeller import Labeller
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute
from tests.mechanisms import random_values
from tests.reference import rms

B, T, F, D, V = 2, 5, 3, 8, 4
BLOCK = BlockConfig(num_layers=1, d_model=D, mlp_dim=8, causal=False, max_positions=T + 1)
# Blocks with zero outputs are the identity, except for a norm after their sums.
OPTIONS = {
    "row": (dict(positions="learned"), dict(hidden=True, whole=True)),
    "positions": (
        dict(positions="sinusoidal", norm_after=True, zero_outputs=True),
        dict(hidden=False, whole=False),
    ),
}


def _sinusoids(count):
    angles = np.arange(count)[:, None] / 10_000.0 ** (np.arange(0, D, 2) / D)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(count, D)


def _expected(weights, x_BTF, block, hidden, whole):
    x_BTD = x_BTF @ weights["input"] + weights["input_bias"]
    if whole:
        row_B1D = np.broadcast_to(weights["row"], (B, 1, D))
        x_BTD = np.concatenate([row_B1D, x_BTD], axis=1)
    count = x_BTD.shape[1]
    x_BTD = x_BTD + (weights["positions"][:count] if whole else _sinusoids(count))
    if whole:
        x_BTD = x_BTD[:, 0]
    x_BTD = rms(x_BTD, block.norm_epsilon)
    if block.norm_after:  # after attention, and after the MLP
        x_BTD = rms(x_BTD, block.norm_epsilon)
    if hidden:
        h_BTD = x_BTD @ weights["hidden"] + weights["hidden_bias"]
        h_BTD = (h_BTD - h_BTD.mean(-1, keepdims=True)) / np.sqrt(
            h_BTD.var(-1, keepdims=True) + 1e-5
        )
        norm = weights["hidden_norm"]
        x_BTD = np.maximum(h_BTD * norm["gain"] + norm["bias"], 0)
    return x_BTD @ weights["output"] + weights["output_bias"]


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_numpy(x64, make_mechanism, name):
    keys, how = OPTIONS[name]
    block = dataclasses.replace(BLOCK, **keys)
    config = TransformerConfig(block=block, mechanisms=(make_mechanism("mha"),), vocab_size=V)
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Labeller(config, jax.random.key(0), features=F, **how))
    )
    weights = random_values(state, 0, np.float64)
    for half in ("attention", "mlp"):
        w = weights["segments"][0][half]
        last = "out" if half == "attention" else "down"
        w[last] = np.zeros_like(w[last])
    x_BTF = np.random.default_rng(1).standard_normal((B, T, F))
    compute = Compute(dtype=jnp.dtype(jnp.float64))
    found = jax.jit(lambda w, x: nnx.merge(graph, w)(x, compute=compute))(weights, x_BTF)
    expected = _expected(weights, x_BTF, block, **how)
    assert found.shape == ((B, V) if how["whole"] else (B, T, V))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    assert np.ptp(expected) > 1


def test_temperature_and_dropout_reach_the_blocks(x64, make_mechanism, randomise):
    """A temperature divides queries; a key drops half of each block's outputs."""
    block = dataclasses.replace(BLOCK, num_layers=2, positions="none", dropout=0.5)
    mechanisms = (make_mechanism("mha", qk_norm="none"),) * 2
    config = TransformerConfig(block=block, mechanisms=mechanisms, vocab_size=V)
    model, weights = randomise(
        lambda: Labeller(config, jax.random.key(0), features=F, hidden=False)
    )
    graph, compute = nnx.split(model)[0], Compute(dtype=jnp.dtype(jnp.float64))
    x_BTF = np.random.default_rng(1).standard_normal((B, T, F))
    run = jax.jit(lambda w, **how: nnx.merge(graph, w)(x_BTF, compute=compute, **how))
    found, temperature = run(weights), np.float64(2.5)
    warm = run(weights, temperature=temperature)
    assert np.abs(warm - found).max() > 1e-3
    (segment,) = weights["segments"].values()
    segment["attention"]["mechanism"]["query"] /= temperature
    np.testing.assert_allclose(warm, run(weights), rtol=1e-12)
    keys = [run(weights, dropout=jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(keys[0], keys[1])
    assert np.abs(keys[0] - keys[2]).max() > 1e-3


def test_features_are_dropped_in_training(make_mechanism):
    """Drops a quarter of the features by a key and rescales the others."""
    block = dataclasses.replace(BLOCK, positions="none", max_positions=1, zero_outputs=True)
    config = TransformerConfig(block=block, mechanisms=(make_mechanism("mha"),), vocab_size=D)
    how = dict(features=D, hidden=False, input_dropout=0.25)
    made = nnx.eval_shape(lambda: Labeller(config, jax.random.key(0), **how))
    graph, state = nnx.split(made)
    weights = jax.tree.map(lambda w: np.zeros(w.shape, np.float32), nnx.to_pure_dict(state))
    weights |= dict(input=np.eye(D), input_bias=np.ones(D), output=np.eye(D))
    x_BTD = np.ones((64, 16, D), np.float32)
    run = jax.jit(lambda key: nnx.merge(graph, weights)(x_BTD, dropout=key))
    found = np.asarray(run(jax.random.key(1)))
    assert not np.array_equal(found, run(jax.random.key(2)))
    assert np.ptp(run(None)) < 1e-6
    ratios = found / found.max(axis=-1, keepdims=True)  # a norm has removed the scale
    dropped = ratios < 0.9
    np.testing.assert_allclose(ratios[dropped], 1 / (1 + 1 / 0.75), rtol=1e-5)
    np.testing.assert_allclose(ratios[~dropped], 1, rtol=1e-5)
    assert abs(dropped.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / dropped.size)
