"""A model of linear attention: from its states it is what it is in full, and they do not grow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention.linear import LinearConfig
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from kvjax.model.recurrent import RecurrentConfig
from kvjax.model.recurrent import RecurrentTransformer
from kvjax.model.recurrent import greedy
from tests import quick

V = 11


def _model(tie="qkv", positions="none", **attention) -> RecurrentTransformer:
    block = BlockConfig(
        num_layers=2, d_model=16, mlp_dim=32, positions=positions, zero_outputs=False
    )
    heads = dict(num_heads=2, key_dim=8, value_dim=8, tie=tie, **attention)
    config = RecurrentConfig(block=block, attention=LinearConfig(**heads), vocab_size=V)
    return RecurrentTransformer(config, jax.random.key(0))


def _tokens(count):
    return np.random.default_rng(0).integers(0, V, (2, count), np.int32)


@pytest.mark.parametrize("positions", quick.only(["sinusoidal"], ["none", "sinusoidal"]))
@pytest.mark.parametrize("tie", quick.only(["qkv"], ["none", "qkv"]))
def test_token_by_token_it_is_what_it_is_in_full(tie, positions):
    model, tokens = _model(tie, positions, decay=0.9), _tokens(13)
    whole, last = jax.jit(functools.partial(model, chunk=4))(tokens)
    step = jax.jit(lambda token, states, t: model(token, states, first=t, chunk=1))
    states, rows = model.start(2), []
    for t in range(13):
        z, states = step(tokens[:, t : t + 1], states, t)
        rows.append(z)
    np.testing.assert_allclose(jnp.concatenate(rows, axis=1), whole, rtol=2e-4, atol=2e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), states, last)


@pytest.mark.slow
def test_the_state_has_one_size_from_1k_to_64k_tokens():
    """Bytes of live arrays behind texts that are gone through in parts."""
    model = _model(decay=0.99)
    part = jax.jit(lambda tokens, states: model(tokens, states)[1])
    states, sizes, seen = model.start(2), {}, 0
    for end in (1024, 4096, 65_536):
        while seen < end:
            states = part(np.full((2, 1024), seen % V, np.int32), states)
            seen += 1024
        sizes[end] = sum(x.nbytes for x in jax.tree.leaves(states))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(states))
    assert set(sizes.values()) == {2 * 2 * 4 * 2 * (8 * 8 + 8)}  # layers, rows, bytes, heads


@pytest.mark.slow
def test_greedy_goes_on_as_the_whole_text_would():
    model, tokens = _model(positions="sinusoidal"), _tokens(6)
    made = np.asarray(greedy(model, tokens, 5))
    text = tokens
    for t in range(5):
        z, _ = model(text)
        np.testing.assert_array_equal(made[:, t], np.argmax(z[:, -1], axis=-1))
        text = np.concatenate([text, made[:, t : t + 1].astype(np.int32)], axis=1)


def test_what_cannot_be():
    block = BlockConfig(num_layers=1, d_model=8, mlp_dim=8)
    heads = LinearConfig(num_heads=1, key_dim=8, value_dim=8)
    with pytest.raises(UserError, match="config.model.positions = 'rope'"):
        RecurrentConfig(block=block, attention=heads, vocab_size=V)
    block = BlockConfig(num_layers=1, d_model=8, mlp_dim=8, positions="none", window=4)
    with pytest.raises(UserError, match="config.model.window = 4: must be 0 in a model of linear"):
        RecurrentConfig(block=block, attention=heads, vocab_size=V)
