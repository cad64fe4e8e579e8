"""Language models of linear attention: recurrence equals the full pass; the state is constant."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.linear import LinearConfig
from experiments.models.recurrent import RecurrentConfig, RecurrentTransformer
from kvjax.foundation.errors import UserError
from kvjax.layers import sinusoid
from kvjax.model.config import BlockConfig
from tests import quick
from tests.reference import rms

V, D, B = 11, 16, 2
BLOCK = BlockConfig(num_layers=2, d_model=D, mlp_dim=24, positions="none", zero_outputs=False)
PLAIN = dict(positions="none", tied_head=True, embedding_norm=False, logit_softcap=0.0)


def _config(tie="qkv", decay=0.9, **block) -> RecurrentConfig:
    heads = LinearConfig(num_heads=2, key_dim=8, value_dim=8, tie=tie, decay=decay)
    block = dataclasses.replace(BLOCK, **block)
    return RecurrentConfig(block=block, attention=heads, vocab_size=V)


def _tokens(count):
    return np.random.default_rng(0).integers(0, V, (B, count), np.int32)


def _by_hand(config, weights, tokens):
    """Returns logits in NumPy; attention by the paper's equations 5 to 7, over all token pairs."""
    c, decay = config.block, config.attention.decay

    def norm(x, w):
        return rms(x, c.norm_epsilon, w["gain"])

    def features(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    since_TS = np.subtract.outer(*[np.arange(tokens.shape[1])] * 2)
    fading_TS = np.where(since_TS >= 0, decay ** np.maximum(since_TS, 0), 0)

    def attention(x, w):
        k = np.einsum("BTD,DNH->BTNH", x, w["key"])
        q, v = (np.einsum("BTD,DNH->BTNH", x, w[n]) if n in w else k for n in ("query", "value"))
        pairs = np.einsum("BTNH,BSNH->BNTS", features(q), features(k)) * fading_TS
        read = np.einsum("BNTS,BSNH->BTNH", pairs / pairs.sum(-1, keepdims=True), v)
        return np.einsum("BTNH,NHD->BTD", read, w["out"])

    x = weights["embedding"][tokens]
    if c.positions == "sinusoidal":
        x = x + np.asarray(sinusoid.encoding(np.arange(tokens.shape[1])[None], D))
    x = norm(x, weights["embedding_norm"]) if c.embedding_norm else x
    for w in weights["blocks"].values():
        x = x + attention(norm(x, w["attention_norm"]), w["attention"])
        x = x + np.maximum(norm(x, w["mlp_norm"]) @ w["mlp"]["up"], 0) ** 2 @ w["mlp"]["down"]
    z = norm(x, weights["final_norm"]) @ (
        weights["embedding"].T if c.tied_head else weights["head"]
    )
    return c.logit_softcap * np.tanh(z / c.logit_softcap) if c.logit_softcap else z


@pytest.mark.parametrize(
    "tie, block",
    quick.only(
        [("qkv", dict(positions="sinusoidal", logit_softcap=2.0))],
        [
            ("qkv", dict(positions="sinusoidal", logit_softcap=2.0)),
            ("none", PLAIN),
            ("none", dict(positions="sinusoidal")),
            ("qkv", PLAIN),
        ],
    ),
)
def test_recurrence_equals_the_full_pass(x64, randomise, tie, block):
    """Chunks that continue from a state agree with NumPy."""
    config = _config(tie, norm_gain=True, norm_epsilon=1e-3, **block)
    model, weights = randomise(lambda: RecurrentTransformer(config, jax.random.key(0)))
    text = _tokens(12)
    whole = _by_hand(config, weights, text)
    run = jax.jit(lambda text, states, first: model(text, states, first=first, chunk=4))
    early, states = run(text[:, :6], model.start(B, jnp.float64), 0)
    late, _ = run(text[:, 6:12], states, 6)
    found = np.concatenate([early, late], axis=1)
    np.testing.assert_allclose(found, whole, rtol=1e-10, atol=1e-10)
    assert np.ptp(whole) > 1 and late.dtype == jnp.float64


def test_what_cannot_be():
    for key, value, needed in (
        ("positions", "rope", "one of 'none', 'sinusoidal'"),
        ("window", 4, "0 in"),
        ("causal", False, "True in"),
        ("norm_after", True, "False in"),
        ("dropout", 0.5, "0.0 in"),
    ):
        with pytest.raises(UserError, match=f"config.model.{key} = {value!r}: must be {needed}"):
            _config(**{key: value})
