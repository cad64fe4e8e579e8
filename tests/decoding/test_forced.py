"""Forced tokens: tokens and cache are as if they had been sampled."""

import jax
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.decoding.generator import Generator
from kvjax.decoding.scoring import Scorer
from tests import quick
from tests.decoding.prompts import GREEDY, PROMPTS, V
from tests.mechanisms import ALL_KINDS

QUICK = ("lrkv",)
CASES = quick.only(QUICK, ALL_KINDS)
# Tokens forced on a sequence, by its index and its number of tokens so far.
FORCED = {
    (0, 1): [7, 7, 8],
    (0, 4): [9],  # directly after the others
    (1, 5): [30],
    (2, 3): [11, 12],
    (3, 11): [1, 2, 3],  # only the first fits into NUM_TOKENS
}
NUM_TOKENS = 12


def _run(generator, prompts, forced, **options):
    generation = generator.start(prompts, num_tokens=NUM_TOKENS, sampling=GREEDY, **options)
    for new in generation:
        for b, _ in new:
            generation.force(b, forced.get((b, len(generation.tokens[b])), []))
    return generation


def _forced_tokens(b, forced):
    """Returns a sequence's forced token by position, or None."""
    by_position = [None] * NUM_TOKENS
    for (sequence, start), ids in forced.items():
        if sequence == b:
            for i, token in enumerate(ids):
                if start + i < NUM_TOKENS:
                    by_position[start + i] = token
    return by_position


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_forced_tokens_are_as_if_they_had_been_sampled(make_model, name):
    generator = Generator(make_model(name), chunk=5)
    prompts = PROMPTS * 2  # eight, ragged
    generation = _run(generator, prompts, FORCED)
    contexts, continuations, sampled = [], [], []
    for b, prompt in enumerate(prompts):
        ids, forced_by_position = generation.tokens[b], _forced_tokens(b, FORCED)
        assert len(ids) == NUM_TOKENS
        assert all(
            place in (None, token) for place, token in zip(forced_by_position, ids, strict=True)
        )
        sampled.append([place is None for place in forced_by_position])
        contexts.append(prompt)
        continuations.append(ids)
    # A sampled token is the most likely one after all tokens before it, forced or not.
    for scored, free in zip(
        Scorer(generator).continuations(list(zip(contexts, continuations, strict=True))),
        sampled,
        strict=True,
    ):
        assert scored.greedy[free].all()
        assert not scored.greedy.all() or all(free)
    # The cache equals the cache of a prompt with the same tokens.
    sequences = [p + ids[:-1] for p, ids in zip(prompts, generation.tokens, strict=True)]
    assert generation.cache.lengths.tolist() == [len(s) for s in sequences]
    again = generator.start([[*s, 0] for s in sequences], num_tokens=1, sampling=GREEDY).cache
    for b, length in enumerate(map(len, sequences)):
        for layer, expected_layer in zip(generation.cache.layers, again.layers, strict=True):
            for field, array in layer.items():
                forced, expected = (
                    np.asarray(x)[b, ..., :length] for x in (array, expected_layer[field])
                )
                np.testing.assert_allclose(forced, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_batch_is_one_prompt_after_another(generator):
    batch = _run(generator, PROMPTS, FORCED).tokens
    for b, prompt in enumerate(PROMPTS):
        alone = {(0, start): ids for (sequence, start), ids in FORCED.items() if sequence == b}
        assert _run(generator, [prompt], alone).tokens == [batch[b]]


def test_a_forced_token_ends_no_sequence_and_replaces_a_stop_token(generator):
    """A stop token is replaced by a forced token, then the same stop token is forced."""
    free = _run(generator, PROMPTS, {}).tokens
    b, first = next(
        (b, i) for b, ids in enumerate(free) for i in range(1, 8) if ids[i] not in ids[:i]
    )
    stop = free[b][first]
    ended = _run(generator, PROMPTS, {}, stop_tokens=[stop])
    assert ended.tokens[b] == free[b][:first]
    other = (stop + 1) % V
    saved = _run(generator, PROMPTS, {(b, first): [other, stop, stop]}, stop_tokens=[stop])
    assert saved.tokens[b][: first + 3] == [*free[b][:first], other, stop, stop]


def test_an_ended_sequence_takes_no_forced_tokens(generator):
    generation = generator.start(PROMPTS, num_tokens=8, sampling=GREEDY)
    for n, _ in enumerate(generation):
        if n == 2:
            generation.finish(1)
            generation.force(1, [5, 5])
    assert [len(ids) for ids in generation.tokens] == [8, 3, 8, 8]
    # The others append all but their last token; one step of the second had been dispatched.
    assert generation.cache.lengths.tolist() == [1 + 7, 3 + 3, 8 + 7, 12 + 7]


def test_nothing_is_uploaded_without_forced_tokens(generator):
    generation = generator.start(PROMPTS, num_tokens=4, sampling=GREEDY)
    with jax.transfer_guard_host_to_device("disallow"):
        list(generation)
    assert cache_lib.live_bytes(generation.cache) > 0
