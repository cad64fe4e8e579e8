"""Scores through the cache are those of a model that sees the whole sequence at once."""

import functools

from flax import nnx
import jax
import numpy as np
import pytest
from scipy import special

from kvjax.decoding import scoring
from kvjax.decoding.generator import Generator
from kvjax.decoding.scoring import Scorer
from kvjax.foundation.errors import UserError
from tests import quick
from tests.decoding.prompts import V
from tests.mechanisms import ALL_KINDS


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, weights, tokens_BT):
    model = nnx.merge(graph, weights)
    return model.logits(model(tokens_BT))


def _expected(model, sequence):
    """Returns [T, V] log-probabilities of the next token, and logits."""
    padded = np.array([sequence + [0] * (20 - len(sequence))])  # one program for all
    logits_TV = np.asarray(_logits(*nnx.split(model), padded))[0, : len(sequence)]
    return special.log_softmax(logits_TV, axis=-1), logits_TV


@pytest.fixture
def narrow(monkeypatch):
    """Sets a chunk width of 4, so that sequences need several chunks."""
    monkeypatch.setattr(scoring, "WIDTH", 4)


@pytest.mark.parametrize("name", quick.only(["lrkv"], ALL_KINDS))
def test_scores_are_those_of_the_whole_sequence(make_model, narrow, name):
    model = make_model(name)
    rng = np.random.default_rng(0)

    def draw(n):
        return rng.integers(0, V, n).tolist()

    pairs = [(draw(n), draw(m)) for n, m in ((1, 1), (9, 3), (4, 1), (6, 0), (12, 8), (7, 1))]
    scorer = Scorer(Generator(model), batch=4)
    scores = scorer.continuations(pairs)
    letters = scorer.choices([c for c, _ in pairs], [[3, 1, 30]] * 3 + [[5, 2]] * 3)
    for (context, continuation), score, logits in zip(pairs, scores, letters, strict=True):
        log_p_TV, logits_TV = _expected(model, [*context, *continuation])
        positions = np.arange(len(continuation)) + len(context) - 1
        expected = log_p_TV[positions, continuation]
        np.testing.assert_allclose(-score.nats, expected, rtol=0, atol=2e-5)
        assert score.log_likelihood == pytest.approx(expected.sum(), abs=1e-4)
        greedy = log_p_TV[positions].argmax(axis=-1) == continuation
        assert score.greedy.tolist() == greedy.tolist() and score.is_greedy == greedy.all()
        ids = [3, 1, 30] if len(logits) == 3 else [5, 2]
        expected = logits_TV[len(context) - 1][ids]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


def test_invalid_sequences_are_refused(make_model):
    scorer = Scorer(Generator(make_model("lrkv")))
    broken = nnx.clone(make_model("lrkv"))  # models are shared between tests
    broken.embedding[...] = np.nan * broken.embedding[...]
    broken = Scorer(Generator(broken))
    for ask in (lambda: broken.continuations([([1], [2])]), lambda: broken.choices([[1]], [[2]])):
        with pytest.raises(UserError, match="logits are NaN or infinite"):
            ask()
    with pytest.raises(UserError, match="sequence 2 has an empty context"):
        scorer.continuations([([1], [2]), ([], [2])])
    with pytest.raises(UserError, match=f"sequence 1: the vocabulary has ids 0 to {V - 1}"):
        scorer.choices([[1]], [[V]])
    positions = Scorer(Generator(make_model("mha", positions="learned", max_positions=16)))
    with pytest.raises(
        UserError, match="sequence 1 has 17 input tokens, more than the model.s 16 positions"
    ):
        positions.continuations([([1] * 10, [2] * 8)])
    with pytest.raises(UserError, match="sequence 1 has 17 input tokens"):
        positions.choices([[1] * 17], [[2]])
    (logits,) = positions.choices([[1] * 16], [[2, 3, 4, 5]])  # candidates are no inputs
    assert logits.shape == (4,)
